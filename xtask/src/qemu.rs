//! The QEMU tests, several test programs at a time: each host emulates one processor, and much of
//! what the tests do is wait.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs,
    num::NonZero,
    process::{Command, Output, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use anyhow::{Context, Result};

use crate::{
    run,
    summary::{Counts, Reader},
};

/// Most test programs at a time. Nested guests on a machine with more than two emulated hosts for
/// each processor run into the tests' time limits.
const MOST_AT_ONCE: usize = 4;
/// File in the cache that holds how many seconds each test program took when it last ran.
const DURATIONS: &str = "qemu-durations";

/// How long each test program took, in seconds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Durations(BTreeMap<String, u64>);

impl Durations {
    /// Reads a file of lines that hold seconds and a name; others say nothing.
    fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        let known =
            lines.filter_map(|(seconds, name)| Some((name.to_owned(), seconds.parse().ok()?)));
        Self(known.collect())
    }

    fn text(&self) -> String {
        self.0.iter().map(|(name, seconds)| format!("{seconds} {name}\n")).collect()
    }

    /// Puts the longest first, so that none of them is left to run alone at the end. What has never
    /// run may be the longest of all.
    fn order(&self, jobs: &mut [Vec<String>]) {
        jobs.sort_by_key(|job| Reverse(self.0.get(&job.join(" ")).copied().unwrap_or(u64::MAX)));
    }
}

/// Runs all QEMU tests, as many at a time as there are processors, and prints the output of each
/// test program when it has ended.
pub(crate) fn tests() -> Result<Counts> {
    build()?;
    let mut jobs = jobs()?;
    let record = run::cache().join(DURATIONS);
    let durations = Durations::parse(&fs::read_to_string(&record).unwrap_or_default());
    durations.order(&mut jobs);
    let durations = Mutex::new(durations);
    let workers = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_AT_ONCE);
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Counts::default()));
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = Instant::now();
                    let counts = one(job);
                    let mut durations = durations.lock().unwrap_or_else(PoisonError::into_inner);
                    durations.0.insert(job.join(" "), start.elapsed().as_secs());
                    drop(durations);
                    all.lock().unwrap_or_else(PoisonError::into_inner).add(counts);
                }
            });
        }
    });
    let durations = durations.into_inner().unwrap_or_else(PoisonError::into_inner);
    fs::write(&record, durations.text()).with_context(|| format!("{}", record.display()))?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Builds the tests and the programs that they use.
pub(crate) fn build() -> Result<()> {
    run::run(&mut run::cargo(&[
        "build",
        "--package",
        "agent",
        "--package",
        "gateway",
        "--package",
        "update",
        "--package",
        "vmm",
    ]))?;
    run::run(&mut run::cargo(&["build", "--package", "agent", "--examples"]))?;
    run::run(&mut run::cargo(&["test", "--package", "qemu-tests", "--no-run"]))
}

/// Returns cargo's arguments for each test program.
fn jobs() -> Result<Vec<Vec<String>>> {
    let folder = run::root().join("qemu-tests/tests");
    let mut jobs = vec![vec!["--lib".to_owned(), "--bins".to_owned()]];
    for entry in fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            jobs.push(vec!["--test".to_owned(), name.to_owned()]);
        }
    }
    jobs.sort();
    Ok(jobs)
}

/// Runs one test program and returns what it found; one that cannot be run has failed.
fn one(job: &[String]) -> Counts {
    let start = Instant::now();
    let mut command = run::cargo(&["test", "--package", "qemu-tests"]);
    command.args(job).args(["--", "--show-output", "--test-threads", "1"]);
    // A failed check names its place; what is wanted beyond that is what the host said.
    command.env("RUST_BACKTRACE", "0");
    let name = job.join(" ");
    let mut counts = match output(&mut command) {
        Ok(output) => read(&name, start, &output),
        Err(error) => {
            let evidence = vec![format!("{name}: {error:#}")];
            Counts { failed: 1, evidence, ..Counts::default() }
        }
    };
    if counts.failed > 0 {
        counts.evidence.insert(0, format!("in {name}:"));
    }
    counts
}

fn output(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().context("cannot start cargo test")
}

/// Prints what a test program said, as far as it is worth showing, and counts.
fn read(name: &str, start: Instant, output: &Output) -> Counts {
    let mut reader = Reader::default();
    let text = String::from_utf8_lossy(&output.stdout);
    let mut shown = format!("\n{name}: {:.0} s\n", start.elapsed().as_secs_f64());
    for line in text.lines().filter(|line| reader.read(line)) {
        shown.push_str(line);
        shown.push('\n');
    }
    print!("{shown}");
    let mut counts = reader.counts;
    if !output.status.success() && counts.failed == 0 {
        counts.failed = 1;
        let errors = String::from_utf8_lossy(&output.stderr);
        counts.evidence.extend(errors.lines().map(str::to_owned));
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_program_starts_first() {
        let durations = Durations::parse("12 --test short\nrubbish\n700 --test long\n");
        let job = |name: &str| vec!["--test".to_owned(), name.to_owned()];
        let mut jobs = [job("short"), job("long"), job("new")];
        durations.order(&mut jobs);
        assert_eq!(jobs, [job("new"), job("long"), job("short")]);
        assert_eq!(Durations::parse(&durations.text()), durations);
    }
}
