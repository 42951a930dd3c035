//! The QEMU tests, several test programs at a time: each host emulates one processor, and much of
//! what the tests do is wait.

use std::{
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

/// Runs all QEMU tests, as many at a time as there are processors, and prints the output of each
/// test program when it has ended.
pub(crate) fn tests() -> Result<Counts> {
    run::run(&mut run::cargo(&["build", "--package", "gateway", "--package", "vmm"]))?;
    run::run(&mut run::cargo(&["test", "--package", "qemu-tests", "--no-run"]))?;
    let jobs = jobs()?;
    let workers = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_AT_ONCE);
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Counts::default()));
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let counts = one(job);
                    all.lock().unwrap_or_else(PoisonError::into_inner).add(counts);
                }
            });
        }
    });
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
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
