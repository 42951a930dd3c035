//! Clocks that run slower than ours, for what an emulator does not get done in time otherwise.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
    process::Command,
    time::Instant,
};

use anyhow::{Result, ensure};

/// How fast the clocks of a host, and of what stands beside it, run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As ours do.
    Real,
    /// At a part of that, of which a second has so many. Timers that are late at an emulator's speed
    /// are then nearly always in time: QEMU, 7.2 and 10.0 alike, ends itself when a nested guest
    /// writes CR8 while the next interrupt waits, as edk2 does at the end of each interrupt. Counting
    /// instructions (`-icount`) makes QEMU stand still for ever in one start of eight.
    Slow(u32),
}

/// Sets the clocks of a program; from Debian's package `libfaketime`.
const CLOCKS: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";
/// The paces at which a test is tried whose emulator ends itself, one after the other: the busier the
/// machine is, the later are timers.
const TRIES: [Pace; 3] = [Pace::SLOW, Pace::Slow(12), Pace::Slow(30)];
/// Where QEMU writes why it ends, in its host's folder; and what it writes.
pub(super) const QEMUS_LOG: &str = "qemu.log";
const QEMUS_END: &str = "tcg_handle_interrupt: assertion failed";

impl Pace {
    /// What does for a test machine that other tests keep busy, too.
    pub const SLOW: Self = Self::Slow(5);

    /// Has the program of `command` live at this pace from its start on.
    pub fn set(self, command: &mut Command) -> Result<()> {
        match self {
            Self::Real => Ok(()),
            Self::Slow(parts) => set(command, &format!("+0 x{}", 1.0 / f64::from(parts))),
        }
    }

    /// Has a program that ends soon start at the time that it is for those who live at this pace
    /// since `since`.
    pub fn visit(self, command: &mut Command, since: Instant) -> Result<()> {
        match self {
            Self::Real => Ok(()),
            Self::Slow(parts) => {
                let behind = since.elapsed().as_secs_f64() * (1.0 - 1.0 / f64::from(parts));
                set(command, &format!("-{behind:.3}s"))
            }
        }
    }
}

/// Runs a test whose hosts live in the folder and at the pace that it is given; once more, in another
/// folder and slower, when it failed because QEMU ended itself, and only then.
pub fn steadily(test: impl Fn(&Path, Pace)) {
    for (tried, pace) in (1..).zip(TRIES) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(folder.path(), pace))) else {
            return;
        };
        if tried == TRIES.len() || !qemu_ended_itself(folder.path()) {
            resume_unwind(panic);
        }
        println!("trying again, slower: QEMU ended itself: {QEMUS_END}");
    }
}

/// Returns whether any host that lives in `folder`, or in one inside, ended so.
fn qemu_ended_itself(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| {
        let path = entry.path();
        if path.is_dir() {
            return qemu_ended_itself(&path);
        }
        path.ends_with(QEMUS_LOG)
            && fs::read_to_string(&path).is_ok_and(|text| text.contains(QEMUS_END))
    })
}

fn set(command: &mut Command, clock: &str) -> Result<()> {
    ensure!(Path::new(CLOCKS).is_file(), "no {CLOCKS}: install libfaketime");
    command.env("LD_PRELOAD", CLOCKS).env("FAKETIME", clock);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn only_an_emulator_that_ended_itself_is_another_try() {
        let last = Cell::new(Pace::Real);
        steadily(|folder, pace| {
            if last.replace(pace) == Pace::Real {
                fs::create_dir(folder.join("host")).expect("made");
                let said = format!("ERROR:x.c:81:{QEMUS_END}: (locked())");
                fs::write(folder.join("host").join(QEMUS_LOG), said).expect("written");
                panic!("the host is gone");
            }
        });
        assert_eq!(last.get(), TRIES[1]);
        let failed = catch_unwind(|| steadily(|_, _| panic!("the guest is wrong")));
        assert!(failed.is_err());
    }
}
