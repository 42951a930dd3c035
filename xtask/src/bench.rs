//! Measurements, each a program of its own that prints a table.

use anyhow::Result;

use crate::{run, stages};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// The boot of the image, phase by phase, and the memory that it takes.
    Boot,
    /// The VMM on an emulated host.
    Vmm,
}

/// Builds what is measured as it is shipped, and measures it.
pub(crate) fn run(what: What, arguments: &[String]) -> Result<()> {
    stages::image(&[])?;
    match what {
        What::Boot => boot(arguments),
        What::Vmm => vmm(arguments),
    }
}

fn boot(arguments: &[String]) -> Result<()> {
    run::run(&mut run::cargo(&["build", "--package", "gateway"]))?;
    let mut command =
        run::cargo(&["run", "--quiet", "--package", "qemu-tests", "--bin", "bench-boot", "--"]);
    run::run(command.args(arguments))
}

fn vmm(arguments: &[String]) -> Result<()> {
    run::run(&mut run::cargo(&[
        "build",
        "--release",
        "--package",
        "vmm",
        "--bin",
        "holdfast-vmm",
    ]))?;
    run::run(&mut run::cargo(&["build", "--package", "agent", "--example", "tap"]))?;
    run::run(&mut run::cargo(&["build", "--package", "qemu-tests", "--bins"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| run::root().join("target"), Into::into);
    let mut command =
        run::cargo(&["run", "--quiet", "--package", "qemu-tests", "--bin", "bench", "--", "--vmm"]);
    command.arg(target.join("release/holdfast-vmm")).args(arguments);
    run::run(&mut command)
}
