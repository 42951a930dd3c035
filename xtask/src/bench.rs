//! Measurements, each a program of its own that prints a table.

use anyhow::Result;

use crate::{run, stages};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// The VMM on an emulated host.
    Vmm,
}

/// Builds what is measured as it is shipped, and measures it.
pub(crate) fn run(what: What, arguments: &[String]) -> Result<()> {
    let What::Vmm = what;
    stages::image(&[])?;
    run::run(&mut run::cargo(&[
        "build",
        "--release",
        "--package",
        "vmm",
        "--bin",
        "holdfast-vmm",
    ]))?;
    run::run(&mut run::cargo(&["build", "--package", "qemu-tests", "--bins"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| run::root().join("target"), Into::into);
    let mut command =
        run::cargo(&["run", "--quiet", "--package", "qemu-tests", "--bin", "bench", "--", "--vmm"]);
    command.arg(target.join("release/holdfast-vmm")).args(arguments);
    run::run(&mut command)
}
