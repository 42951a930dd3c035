//! Measurements, each a program of its own that prints a table.

use anyhow::Result;

use crate::{run, stages};

/// Where the image's own build of the VMM is, in the cache: static, its relocations packed.
const SHIPPED_VMM: &str = "programs/x86_64-unknown-linux-gnu/release/holdfast-vmm";

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
    run::run(&mut run::cargo(&["build", "--package", "agent", "--example", "tap"]))?;
    run::run(&mut run::cargo(&["build", "--package", "qemu-tests", "--bins"]))?;
    let mut command =
        run::cargo(&["run", "--quiet", "--package", "qemu-tests", "--bin", "bench", "--", "--vmm"]);
    run::run(command.arg(run::cache().join(SHIPPED_VMM)).args(arguments))
}
