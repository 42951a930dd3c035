//! Test programs, several at a time: much of what they do is wait.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs,
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};

use crate::{
    run,
    summary::{Counts, Reader},
};

/// File in the cache that holds how many seconds each test program took when it last ran.
const DURATIONS: &str = "test-durations";

/// A test program and how it is run.
pub(crate) struct Job {
    /// What it is called in the output, and from one run to the next.
    pub(crate) name: String,
    pub(crate) command: Command,
}

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
    fn order(&self, jobs: &mut [Job]) {
        jobs.sort_by_key(|job| Reverse(self.0.get(&job.name).copied().unwrap_or(u64::MAX)));
    }
}

/// Runs test programs, `at_once` at a time, and prints the output of each when it has ended. Returns
/// what they found together.
pub(crate) fn run(mut jobs: Vec<Job>, at_once: usize) -> Result<Counts> {
    let record = run::cache().join(DURATIONS);
    let durations = Durations::parse(&fs::read_to_string(&record).unwrap_or_default());
    durations.order(&mut jobs);
    let (jobs, all) = (Mutex::new(jobs.into_iter()), Mutex::new((durations, Counts::default())));
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    // A guard in the loop's head would be held while the program runs.
                    let next = locked(&jobs).next();
                    let Some(job) = next else { break };
                    let (name, start) = (job.name.clone(), Instant::now());
                    let counts = one(job);
                    let mut all = locked(&all);
                    all.0.0.insert(name, start.elapsed().as_secs());
                    all.1.add(counts);
                }
            });
        }
    });
    let (durations, counts) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    fs::write(&record, durations.text()).with_context(|| format!("{}", record.display()))?;
    Ok(counts)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one test program and returns what it found; one that cannot be run has failed.
fn one(Job { name, mut command }: Job) -> Counts {
    let start = Instant::now();
    // A failed check names its place; what is wanted beyond that is what the test printed.
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    let mut counts = match command.output() {
        Ok(output) => read(&name, start, &output),
        Err(error) => {
            let evidence = vec![format!("{name} cannot be started: {error}")];
            Counts { failed: 1, evidence, ..Counts::default() }
        }
    };
    if counts.failed > 0 {
        counts.evidence.insert(0, format!("in {name}:"));
    }
    counts
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
        counts.evidence.push(output.status.to_string());
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job { name: name.to_owned(), command }
    }

    #[test]
    fn the_longest_program_starts_first() {
        let durations = Durations::parse("12 --test short\nrubbish\n700 --test long\n");
        let mut jobs = ["--test short", "--test long", "--test new"].map(|name| job(name, ""));
        durations.order(&mut jobs);
        assert_eq!(jobs.map(|job| job.name), ["--test new", "--test long", "--test short"]);
        assert_eq!(Durations::parse(&durations.text()), durations);
    }

    #[test]
    fn what_cannot_be_run_or_ends_without_a_summary_has_failed() {
        let passed = one(job("a", "echo 'test result: ok. 3 passed; 0 failed'"));
        assert_eq!((passed.passed, passed.failed), (3, 0));
        let killed = one(job("b", "echo lost >&2; kill -9 $$"));
        assert_eq!((killed.passed, killed.failed), (0, 1));
        assert!(killed.evidence.concat().contains("lost") && killed.evidence[0].contains("in b"));
        let command = Command::new("/nonexistent/program");
        assert_eq!(one(Job { name: "c".to_owned(), command }).failed, 1);
    }
}
