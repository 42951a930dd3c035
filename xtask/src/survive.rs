//! `cargo xtask survive`: power cuts on the way of an update, many more of them than every test run
//! has time for. The partition's writer is cut after each sector, with what was not yet synchronised
//! kept, lost, or kept in part; and the whole way, from fetch to commit, in random sequences with lost
//! variables and damaged journals. Then the nth system call of each kind fails, for every n, in what writes
//! leases, slots, the journal and crashes.

use std::time::Instant;

use anyhow::Result;

use crate::run;

/// Random sequences of updates, failures and cuts.
const SEQUENCES: u32 = 10_000;

/// Runs the tests with `points` cuts of the writer, and says how long that took.
pub(crate) fn survive(points: u32) -> Result<()> {
    let begin = Instant::now();
    let mut command =
        run::cargo(&["test", "--package", "update", "--lib", "slots", "--", "--nocapture"]);
    command.env("HOLDFAST_CUT_POINTS", points.to_string());
    command.env("PROPTEST_CASES", SEQUENCES.to_string());
    run::run(&mut command)?;
    let mut command = run::cargo(&["test", "--package", "agent", "--lib", "updates::injected"]);
    command.args(["--", "--nocapture"]).env("HOLDFAST_INJECT_STEP", "1");
    run::run(&mut command)?;
    let seconds = begin.elapsed().as_secs();
    println!("survive: {points} cut points asked for, {SEQUENCES} sequences: {seconds} s");
    Ok(())
}
