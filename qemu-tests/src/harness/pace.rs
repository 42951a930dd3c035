//! Clocks that run slower than ours, for what an emulator does not get done in time otherwise.

use std::{path::Path, process::Command, time::Instant};

use anyhow::{Result, ensure};

/// How fast the clocks of a host, and of what stands beside it, run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As ours do.
    Real,
    /// At a fifth of that. Timers that are late at an emulator's speed are then in time: QEMU, 7.2 and
    /// 10.0 alike, ends itself when a nested guest writes CR8 while the next interrupt waits, as edk2
    /// does at the end of each interrupt. Counting instructions (`-icount`) makes QEMU stand still for
    /// ever in one start of eight.
    Slow,
}

/// Sets the clocks of a program; from Debian's package `libfaketime`.
const CLOCKS: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";
/// What [`Pace::Slow`] leaves of a second.
const SLOW: f64 = 0.2;

impl Pace {
    /// Has the program of `command` live at this pace from its start on.
    pub fn set(self, command: &mut Command) -> Result<()> {
        match self {
            Self::Real => Ok(()),
            Self::Slow => set(command, &format!("+0 x{SLOW}")),
        }
    }

    /// Has a program that ends soon start at the time that it is for those who live at this pace
    /// since `since`.
    pub fn visit(self, command: &mut Command, since: Instant) -> Result<()> {
        let behind = since.elapsed().as_secs_f64() * (1.0 - SLOW);
        match self {
            Self::Real => Ok(()),
            Self::Slow => set(command, &format!("-{behind:.3}s")),
        }
    }
}

fn set(command: &mut Command, clock: &str) -> Result<()> {
    ensure!(Path::new(CLOCKS).is_file(), "no {CLOCKS}: install libfaketime");
    command.env("LD_PRELOAD", CLOCKS).env("FAKETIME", clock);
    Ok(())
}
