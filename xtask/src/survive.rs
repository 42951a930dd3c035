//! `cargo xtask survive`: power cuts and failures, many more of them than every test run has time for.
//!
//! The writer of the EFI system partition is cut after each sector, with what was not yet synchronised
//! kept, lost, or kept in part; the whole way of an update, from fetch to commit, goes in random
//! sequences with lost variables and damaged journals; the nth system call of each kind fails, for every
//! n, in what writes leases, slots, the journal and crashes; bits of the EFI system partition and of the file
//! systems of STATE and DATA are flipped; and the disk of a real node, recorded in QEMU, is judged at cuts
//! all over its installation, an update, and a machine's life. Some of these are booted.

use std::time::{Instant, SystemTime};

use anyhow::Result;

use crate::{programs, run, stages};

/// Random sequences of updates, failures and cuts.
const SEQUENCES: u32 = 10_000;
/// Flipped bits of the EFI system partition.
const FLIPS: u32 = 4_000;
/// Altered places of the file systems of STATE and DATA; each takes a check, a mount, and a look.
const FILE_FLIPS: u32 = 1_000;
/// The tests that record the disk of a node, by test program.
const RECORDED: [&str; 3] = ["installs", "updates", "lifecycle"];

/// Checks `points` cuts of the writer and as many of real disks, boots `boots` of the latter, and says
/// how long that took. Random sequences and bits come from `seed`, or from one that is made up and said.
pub(crate) fn survive(points: usize, boots: usize, seed: Option<u64>) -> Result<()> {
    let begin = Instant::now();
    let seed = seed.unwrap_or_else(any_seed);
    println!("survive: seed {seed}");
    let mut command =
        run::cargo(&["test", "--package", "update", "--lib", "slots", "--", "--nocapture"]);
    command.env("HOLDFAST_CUT_POINTS", points.to_string());
    command.env("PROPTEST_CASES", SEQUENCES.to_string());
    command.env("PROPTEST_RNG_SEED", seed.to_string());
    run::run(&mut command)?;
    let mut command = run::cargo(&["test", "--package", "agent", "--lib", "updates::injected"]);
    command.args(["--", "--nocapture"]).env("HOLDFAST_INJECT_STEP", "1");
    run::run(&mut command)?;
    let mut command = run::cargo(&["test", "--package", "agent", "--lib", "flips"]);
    command.args(["--", "--nocapture"]).env("HOLDFAST_FLIPS", FLIPS.to_string());
    command.env("HOLDFAST_FILE_FLIPS", FILE_FLIPS.to_string());
    run::run(command.env("HOLDFAST_FLIP_SEED", seed.to_string()))?;
    let seconds = begin.elapsed().as_secs();
    println!(
        "survive: {points} cut points asked for, {SEQUENCES} sequences, {FLIPS} flipped bits and \
         {FILE_FLIPS} altered places of file systems, of seed {seed}: {seconds} s"
    );

    stages::image(&[])?;
    programs::build()?;
    let share = |all: usize| all.div_ceil(RECORDED.len()).to_string();
    for test in RECORDED {
        let mut command = run::cargo(&["test", "--workspace", "--test", test, "--"]);
        command.args(["--test-threads", "1", "--nocapture"]);
        command.env("HOLDFAST_CUT_POINTS", share(points)).env("HOLDFAST_CUT_BOOTS", share(boots));
        run::run(&mut command)?;
    }
    let seconds = begin.elapsed().as_secs();
    println!("survive: {points} cuts of real disks, {boots} of them booted: {seconds} s in all");
    Ok(())
}

/// A seed that was not used before.
fn any_seed() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_secs() << 20 | u64::from(since.subsec_micros())
}
