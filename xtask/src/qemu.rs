//! The QEMU tests, several test programs at a time: each host emulates one processor, and much of
//! what the tests do is wait.

use std::{fs, num::NonZero, thread};

use anyhow::{Context, Result};

use crate::{
    pool::{self, Job},
    run,
    summary::Counts,
};

/// Most test programs at a time. Nested guests on a machine with more than two emulated hosts for
/// each processor run into the tests' time limits.
const MOST_AT_ONCE: usize = 4;
/// Runs all QEMU tests, as many at a time as there are processors.
pub(crate) fn tests() -> Result<Counts> {
    build()?;
    let workers = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_AT_ONCE);
    pool::run(jobs()?, workers)
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

/// Returns a job for each test program.
fn jobs() -> Result<Vec<Job>> {
    let folder = run::root().join("qemu-tests/tests");
    let mut jobs = vec![job(&["--lib", "--bins"])];
    for entry in fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            jobs.push(job(&["--test", name]));
        }
    }
    jobs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(jobs)
}

/// Tests of one program run one after the other: each boots a host of its own.
fn job(which: &[&str]) -> Job {
    let mut command = run::cargo(&["test", "--package", "qemu-tests"]);
    command.args(which).args(["--", "--show-output", "--test-threads", "1"]);
    Job { name: which.join(" "), command }
}
