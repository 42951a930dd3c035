//! Judges the disk of a node at every place where its power might have been cut.
//!
//! QEMU recorded each write to the disk of a real node (`blklogwrites`), and the test that steered the
//! node wrote down what was acknowledged when. This program makes the disk anew as it was after each
//! write, with the last one torn, and with some of those lost that no flush had made durable; it opens
//! each with the node's own code and e2fsprogs, and says which lost something.

mod cut;
mod disk;
mod judge;
mod log;
mod volume;

use std::{
    fs, io,
    num::NonZero,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use cut::{Cut, Replay};
use disk::Disk;
use judge::{Judge, Told};
use log::Log;
use tempfile::TempDir;

/// Most failures that are told one by one.
const SHOWN: usize = 40;

/// Judges the disk of a node at every place where its power might have been cut.
#[derive(Parser)]
struct Arguments {
    /// The log of the disk's writes.
    #[arg(long)]
    log: PathBuf,
    /// What the disk held before; nothing without it.
    #[arg(long)]
    base: Option<PathBuf>,
    /// Length of the disk in bytes.
    #[arg(long)]
    length: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Judges many cuts.
    Check {
        /// What was acknowledged: one JSON document a line.
        #[arg(long)]
        facts: PathBuf,
        /// How many cuts.
        #[arg(long)]
        points: usize,
        /// Only these.
        #[arg(long)]
        only: Vec<Cut>,
    },
    /// Prints cuts spread over the log, one a line.
    List {
        /// How many.
        #[arg(long)]
        points: usize,
    },
    /// Writes the disk as a cut leaves it.
    Write {
        /// Which cut.
        #[arg(long)]
        cut: Cut,
        /// Where to.
        #[arg(long)]
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cuts: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let log = Log::open(&arguments.log)?;
    let base = Disk::new(arguments.base.as_deref(), arguments.length)?;
    match &arguments.command {
        Command::List { points } => {
            for cut in cut::choose(&log.entries, *points) {
                println!("{cut}");
            }
            Ok(true)
        }
        Command::Write { cut, out } => {
            Replay::new(&log, base).disk(*cut)?.save(out)?;
            Ok(true)
        }
        Command::Check { facts, points, only } => {
            let cuts =
                if only.is_empty() { cut::choose(&log.entries, *points) } else { only.clone() };
            check(&log, &base, facts, &cuts)
        }
    }
}

/// Judges all `cuts`, which are in the order of the log: every processor takes a run of them.
fn check(log: &Log, base: &Disk, facts: &Path, cuts: &[Cut]) -> Result<bool> {
    let text = fs::read_to_string(facts).with_context(|| format!("{}", facts.display()))?;
    let told: Vec<Told> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    let failures = thread::scope(|scope| {
        let parts: Vec<_> = cuts
            .chunks(cuts.len().div_ceil(workers).max(1))
            .map(|cuts| scope.spawn(|| failures(log, base.clone(), told.clone(), cuts)))
            .collect();
        let parts = parts.into_iter().map(|part| part.join().expect("nothing in it panics"));
        parts.collect::<Result<Vec<_>>>()
    })?;
    let failures: Vec<String> = failures.concat();
    for failure in failures.iter().take(SHOWN) {
        println!("{failure}");
    }
    let (points, entries, failed) = (cuts.len(), log.entries.len(), failures.len());
    println!("{points} cuts in a log of {entries} entries, {failed} of them lost something");
    Ok(failed == 0)
}

/// Memory that looks like a folder, and the bytes of it that must be free: two workers with three
/// volumes each.
const MEMORY: (&str, u64) = ("/dev/shm", 2 << 30);

/// Makes a folder for what is judged, tens of megabytes of each cut: in memory where there is room, since
/// thousands of cuts keep a disk busy for an hour.
fn scratch() -> io::Result<TempDir> {
    let (memory, wanted) = MEMORY;
    let free = rustix::fs::statvfs(memory).map_or(0, |room| room.f_bavail * room.f_bsize);
    if free < wanted { tempfile::tempdir() } else { tempfile::tempdir_in(memory) }
}

/// Judges some cuts, and says what each of them lost.
fn failures(log: &Log, base: Disk, told: Vec<Told>, cuts: &[Cut]) -> Result<Vec<String>> {
    let folder = scratch()?;
    let mut judge = Judge::new(folder.path(), told);
    let mut replay = Replay::new(log, base);
    let mut failures = Vec::new();
    for cut in cuts {
        let disk = replay.disk(*cut)?;
        if let Err(error) = judge.judge(&disk, cut.after) {
            failures.push(format!("cut {cut}: {error:#}"));
        }
    }
    Ok(failures)
}
