//! Which program a node starts, and how it gets from one to the next without ever being without one
//! that is known to come up.
//!
//! What is good lies on the fallback path, which firmware finds without any variable, and firmware's
//! order leads to it. The release before it is spare, in one of the two slots; the other slot is free,
//! and takes what is to be tried. A release that passes changes places by names: the spare becomes what
//! the fallback path was, the fallback path what was tried, and the slot is free again. So each release
//! is written once.
//!
//! [`plan`] decides, one action at a time, from [`plan::Facts`]: what the EFI system partition holds,
//! what firmware's variables say, what was written down in the [`journal`], which release is to run,
//! who is in the way. [`fat`] replaces a file on the partition with one sector's write, [`firmware`]
//! says which variables an action changes, [`gate`] judges a new release. Nothing here opens a file,
//! reads a clock or writes a variable.
//!
//! # Why a power cut does no harm
//!
//! | action | what a cut leaves |
//! |---|---|
//! | a program is written | the old file, and clusters that the next writer takes |
//! | `BootOrder` ends in the tried slot | as before: what is good comes first, and the spare |
//! | `BootNext` is set | the program is tried one boot earlier than planned |
//! | the journal says "armed" | as above; without `BootNext` firmware starts what runs now |
//! | `BootOrder` is changed | the new program, which passed its gate, is judged once more |
//! | the journal says "good" | the new program starts; without variables the fallback path, which is old |
//! | the spare takes the old program | two names for it; the new one starts, and the next step is made again |
//! | the fallback path takes the new one | two names for it, of which the slot's goes |
//! | `BootOrder` leads to the fallback path | as before; a name that leads nowhere is passed over |
//!
//! What runs is never written over, and the fallback path only gets programs that passed.

mod beside;
pub mod fat;
pub mod firmware;
pub mod gate;
pub mod journal;
pub mod plan;
pub mod window;

#[cfg(test)]
mod world;

use crate::{
    channel::{Release, Sha256},
    disk::{esp, medium},
};

/// One of the two places for releases that are not, or no longer, what firmware starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Slot {
    /// The first, which the installer fills with a second copy.
    A,
    /// The second.
    B,
}

impl Slot {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// Returns the other one.
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// Returns its letter.
    pub const fn name(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
        }
    }
}

/// A file on the EFI system partition that firmware can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A slot, by a boot entry.
    Slot(Slot),
    /// The path that firmware tries when it has no entry, where the good release is.
    Fallback,
}

impl Place {
    /// Every place.
    pub const ALL: [Self; 3] = [Self::Slot(Slot::A), Self::Slot(Slot::B), Self::Fallback];

    /// Returns its name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slot(slot) => slot.name(),
            Self::Fallback => "default",
        }
    }

    /// Returns its path on the partition.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Slot(Slot::A) => esp::SLOT_A,
            Self::Slot(Slot::B) => esp::SLOT_B,
            Self::Fallback => esp::FALLBACK,
        }
    }

    /// Finds the place of a path as firmware writes it, with backslashes and in any case.
    pub fn of_path(path: &str) -> Option<Self> {
        let path = path.trim_matches('\0').replace('\\', "/");
        let path = path.trim_start_matches('/');
        Self::ALL.into_iter().find(|place| place.path().eq_ignore_ascii_case(path))
    }
}

/// What the places hold; `None` where there is no file, or none that can be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// The first slot.
    pub a: Option<Program>,
    /// The second slot.
    pub b: Option<Program>,
    /// The fallback path.
    pub fallback: Option<Program>,
    /// A slot that is one file with the fallback path: a cut came between two names.
    pub shared: Option<Slot>,
}

/// A program: one whole release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// SHA-256 of its bytes.
    pub sha256: Sha256,
    /// Text of its `.osrel`; empty if it has none.
    pub os_release: String,
}

impl Program {
    /// Looks at a program.
    pub fn of(bytes: &[u8]) -> Self {
        let mut sha256 = [0; 32];
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
        sha256.copy_from_slice(digest.as_ref());
        let os_release = medium::os_release(bytes).unwrap_or_default();
        Self { sha256: Sha256(sha256), os_release }
    }
}

impl Program {
    /// Returns the program's mark, by which it says that it was started; see [`mark_of`].
    pub fn mark(&self) -> Sha256 {
        mark_of(&self.os_release)
    }

    /// Returns the release that it says it is.
    pub fn release(&self) -> Option<Release> {
        release_of(&self.os_release)
    }
}

/// Returns the mark that a program with this os-release(5) leaves when it is started from a slot: the SHA-256
/// of the text, which names release and build.
pub fn mark_of(os_release: &str) -> Sha256 {
    let mut sha256 = [0; 32];
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, os_release.as_bytes());
    sha256.copy_from_slice(digest.as_ref());
    Sha256(sha256)
}

/// Returns the release that a text in the form of os-release(5) names.
pub fn release_of(os_release: &str) -> Option<Release> {
    let line = os_release.lines().find_map(|line| line.strip_prefix("VERSION_ID="))?;
    line.trim_matches('"').parse().ok()
}

impl Contents {
    /// Returns what a place holds.
    pub fn at(&self, place: Place) -> Option<&Program> {
        match place {
            Place::Slot(Slot::A) => self.a.as_ref(),
            Place::Slot(Slot::B) => self.b.as_ref(),
            Place::Fallback => self.fallback.as_ref(),
        }
    }

    /// Sets what a place holds.
    pub fn set(&mut self, place: Place, program: Option<Program>) {
        *match place {
            Place::Slot(Slot::A) => &mut self.a,
            Place::Slot(Slot::B) => &mut self.b,
            Place::Fallback => &mut self.fallback,
        } = program;
    }

    /// Lets the fallback path be what a slot is, and the other slot what that was.
    pub fn promote(&mut self, slot: Slot) {
        if let Some(before) = self.fallback.take() {
            self.set(Place::Slot(slot.other()), Some(before));
        }
        self.fallback = self.at(Place::Slot(slot)).cloned();
        self.set(Place::Slot(slot), None);
        self.shared = None;
    }

    /// Whether a place holds this program.
    pub fn holds(&self, place: Place, sha256: Sha256) -> bool {
        self.at(place).is_some_and(|program| program.sha256 == sha256)
    }

    /// Returns the slot that holds this program.
    pub fn slot_with(&self, sha256: Sha256) -> Option<Slot> {
        Slot::ALL.into_iter().find(|slot| self.holds(Place::Slot(*slot), sha256))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_as_firmware_writes_them() {
        let found = Place::of_path("\\EFI\\HOLDFAST\\b.efi\0");
        assert_eq!(found, Some(Place::Slot(Slot::B)));
        assert_eq!(Place::of_path("\\EFI\\BOOT\\BOOTX64.EFI"), Some(Place::Fallback));
        assert_eq!(Place::of_path("\\EFI\\Linux\\x.efi"), None);
    }

    #[test]
    fn a_release_is_read_from_its_text() {
        let text = "ID=holdfast\nVERSION_ID=1.4.0\n";
        assert_eq!(release_of(text).map(|r| r.to_string()).as_deref(), Some("1.4.0"));
        assert_eq!(release_of("VERSION_ID=soon\n"), None);
        assert_eq!(release_of(""), None);
    }
}
