//! The commands that are made of stages: `test`, `demo`, `image`.

use std::{
    env,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::{deny, packages, packages::Install, programs, reproduce, run, summary::Counts, tidy};

/// In CI, which ends a run after 90 minutes whatever it has found, no test that boots the image begins later than
/// this. The longest begin first; what is left then takes some minutes on the slowest machine that was seen.
const LAST_BOOTS: Duration = Duration::from_secs(65 * 60);

/// Whether the demo's machines stay.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Left running until interrupted.
    Running,
    /// Taken down at the end.
    Nothing,
}

impl From<bool> for Keep {
    fn from(keep: bool) -> Self {
        if keep { Self::Running } else { Self::Nothing }
    }
}

struct Stage {
    name: &'static str,
    run: fn(&mut Beside) -> Result<Counts>,
}

/// What one stage leaves to a later one.
#[derive(Default)]
struct Beside {
    /// Whether the image is built of this checkout.
    built: bool,
    /// Its second build, which goes on beside the tests that boot the first one.
    second: Option<JoinHandle<Result<()>>>,
    /// When the last test that boots it may begin.
    until: Option<Instant>,
}

/// Everything that CI runs, in order; what is quick to fail comes first.
const STAGES: &[Stage] = &[
    Stage { name: "fmt", run: |_| check(&["fmt", "--all", "--check"]) },
    Stage { name: "tidy", run: |_| tidy::check(&run::root()).map(|()| one()) },
    Stage { name: "clippy", run: |_| clippy() },
    Stage { name: "deny", run: |_| deny::check().map(|()| one()) },
    Stage { name: "image", run: build },
    Stage { name: "unit", run: |_| programs::unit() },
    Stage { name: "qemu", run: boot },
    Stage { name: "reproduce", run: reproduce },
];

/// Runs all stages, or the one named `only`, and prints a table of what they found.
pub(crate) fn test(only: Option<&str>, install: Install) -> Result<()> {
    packages::ensure(install)?;
    let stages: Vec<&Stage> = STAGES.iter().filter(|s| only.is_none_or(|o| o == s.name)).collect();
    if stages.is_empty() {
        let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
        bail!(
            "there is no stage {:?}; the stages are {}",
            only.unwrap_or_default(),
            names.join(", ")
        );
    }
    let until = env::var_os("CI").map(|_| Instant::now() + LAST_BOOTS);
    let (mut results, mut beside) = (Vec::new(), Beside { until, ..Beside::default() });
    for stage in stages {
        println!("\n== {} ==", stage.name);
        let start = Instant::now();
        let counts = (stage.run)(&mut beside).unwrap_or_else(|error| {
            eprintln!("{}: {error:#}", stage.name);
            Counts { failed: 1, ..Counts::default() }
        });
        results.push((stage.name, start.elapsed(), counts));
    }
    report(&results)
}

/// Builds the image.
pub(crate) fn image(arguments: &[String]) -> Result<()> {
    let mut command = run::cargo(&["run", "--quiet", "--package", "image", "--"]);
    run::run(command.args(arguments))
}

/// Installs, builds, and hands over to the demo program.
pub(crate) fn demo(install: Install, keep: Keep) -> Result<()> {
    packages::ensure(install)?;
    println!("demo: building gateway and command line");
    run::run(&mut run::cargo(&["build", "--package", "gateway"]))?;
    println!("demo: building the image");
    image(&[])?;
    let mut command =
        run::cargo(&["run", "--quiet", "--package", "qemu-tests", "--bin", "demo", "--"]);
    if keep == Keep::Running {
        command.arg("--keep");
    }
    run::run(&mut command)
}

fn build(beside: &mut Beside) -> Result<Counts> {
    let counts = check(&["run", "--quiet", "--package", "image"])?;
    beside.built = true;
    Ok(counts)
}

fn boot(beside: &mut Beside) -> Result<Counts> {
    if beside.built {
        beside.second = Some(thread::spawn(reproduce::compare_beside));
    }
    programs::qemu(beside.until)
}

fn reproduce(beside: &mut Beside) -> Result<Counts> {
    match beside.second.take() {
        Some(second) => second.join().unwrap_or_else(|_| bail!("the comparison panicked")),
        None => reproduce::check(reproduce::Kernel::Shared),
    }?;
    Ok(one())
}

fn one() -> Counts {
    Counts { passed: 1, ..Counts::default() }
}

fn check(arguments: &[&str]) -> Result<Counts> {
    run::run(&mut run::cargo(arguments)).map(|()| one())
}

fn clippy() -> Result<Counts> {
    check(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"])
}

fn report(results: &[(&str, Duration, Counts)]) -> Result<()> {
    println!("\nstage     seconds  passed  failed  skipped");
    for (name, time, counts) in results {
        let (passed, failed) = (counts.passed, counts.failed);
        let skipped = counts.skipped.len() + counts.left_out.len();
        println!("{name:8} {:8.1} {passed:7} {failed:7} {skipped:8}", time.as_secs_f64());
    }
    let told = results.iter().flat_map(|(_, _, c)| &c.skipped).count();
    let skipped = results.iter().flat_map(|(_, _, c)| c.skipped.iter().chain(&c.left_out));
    let skipped: Vec<&String> = skipped.collect();
    if !skipped.is_empty() {
        println!("\nskipped here:");
        for reason in &skipped {
            println!("  {reason}");
        }
    }
    let evidence: Vec<&String> = results.iter().flat_map(|(_, _, c)| &c.evidence).collect();
    if !evidence.is_empty() {
        println!("\nwhat failed:");
        for line in &evidence {
            println!("  {line}");
        }
    }
    let failed: u64 = results.iter().map(|(_, _, counts)| counts.failed).sum();
    let passed: u64 = results.iter().map(|(_, _, counts)| counts.passed).sum();
    let passed = passed.saturating_sub(told as u64);
    println!("\n{passed} passed, {failed} failed, {} skipped", skipped.len());
    if failed > 0 {
        bail!("{failed} failed");
    }
    Ok(())
}
