//! Automation: `cargo xtask demo`, `test`, `image`, `bench`, `reproduce`, `survive`, `syscalls`, `tidy`, `fuzz`, `setup`.
//!
//! Every command says what it is about to do, does it, and ends with a table or a line that says
//! what happened. It links no other crate of the workspace: what it needs of them it runs.

#![forbid(unsafe_code)]

mod bench;
mod busy;
mod checkout;
mod deny;
mod fuzz;
mod packages;
mod pool;
mod programs;
mod reproduce;
mod run;
mod stages;
mod summary;
mod survive;
mod syscalls;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Automation for Holdfast.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what is missing, build everything, boot the image in QEMU, rent a machine on it.
    Demo {
        /// Only list the packages that would be installed.
        #[arg(long)]
        no_install: bool,
        /// Leave node, gateway and machine running and print how to use them.
        #[arg(long)]
        keep: bool,
    },
    /// Everything that CI runs.
    #[command(alias = "ci")]
    Test {
        /// Run only the stage with this name (fmt, tidy, clippy, deny, image, unit, qemu, reproduce).
        #[arg(long)]
        only: Option<String>,
        /// Do not install packages; fail naming what is missing.
        #[arg(long)]
        no_install: bool,
    },
    /// Build the image into target/image.
    Image {
        /// Further arguments for the image builder.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build the image twice, at different places, and compare byte for byte.
    Reproduce {
        /// Build the kernel a second time too, which takes about ten minutes.
        #[arg(long)]
        kernel: bool,
    },
    /// Check the rules that no compiler checks: crate edges, sizes, unsafe code, banned words.
    Tidy,
    /// Run the fuzz targets with libFuzzer; needs the nightly toolchain.
    Fuzz {
        /// Only this target or this crate's, as `kernel`, `vmm/kernel` or `vmm`.
        target: Option<String>,
        /// How long each runs.
        #[arg(long, default_value_t = 60)]
        seconds: u32,
    },
    /// Cut the power at every place of an update, many times.
    Survive {
        /// How many cuts of the writer are checked at least.
        #[arg(long, default_value_t = 20_000)]
        points: usize,
        /// How many cuts of a real node's disk are booted.
        #[arg(long, default_value_t = 300)]
        boots: usize,
        /// Where random sequences come from, as an earlier run said; another each time unless given.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Show what the VMM's filters allow and its tests do not use; needs strace, root and KVM.
    Syscalls,
    /// Measure, and print a table: a peer's column when a peer's program is given.
    Bench {
        /// What is measured.
        #[arg(value_enum)]
        what: bench::What,
        /// Further arguments, as `--runs 3 --peer /usr/bin/qemu-system-x86_64`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Install the Debian packages that building and testing need.
    Setup {
        /// Only list them.
        #[arg(long)]
        no_install: bool,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Demo { no_install, keep } => stages::demo(no_install.into(), keep.into()),
        Command::Test { only, no_install } => match checkout::run_in_copy() {
            Ok(Some(ended)) => return ended,
            Ok(None) => stages::test(only.as_deref(), no_install.into()),
            Err(error) => Err(error),
        },
        Command::Image { arguments } => stages::image(&arguments),
        Command::Reproduce { kernel } => reproduce::check(if kernel {
            reproduce::Kernel::Again
        } else {
            reproduce::Kernel::Shared
        }),
        Command::Tidy => tidy::check(&run::root()),
        Command::Fuzz { target, seconds } => fuzz::fuzz(target.as_deref(), seconds),
        Command::Survive { points, boots, seed } => survive::survive(points, boots, seed),
        Command::Syscalls => syscalls::measure(),
        Command::Bench { what, arguments } => bench::run(what, &arguments),
        Command::Setup { no_install } => packages::ensure(no_install.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
