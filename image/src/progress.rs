//! What a build tells whoever watches it.

use std::fmt;

/// The parts of a build, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Package lists, kernel source and boot stub from Debian.
    Packages,
    /// The kernel.
    Kernel,
    /// Our static programs.
    Programs,
    /// The EROFS root.
    Root,
    /// Initramfs and UKI.
    Uki,
    /// ISO, disk image and PXE files.
    Media,
    /// SBOM and check sums.
    Records,
}

impl Step {
    /// All steps in order.
    pub const ALL: [Self; 7] = [
        Self::Packages,
        Self::Kernel,
        Self::Programs,
        Self::Root,
        Self::Uki,
        Self::Media,
        Self::Records,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Packages => "packages",
            Self::Kernel => "kernel",
            Self::Programs => "programs",
            Self::Root => "root",
            Self::Uki => "uki",
            Self::Media => "media",
            Self::Records => "records",
        })
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The work was done.
    Built,
    /// An earlier result was good.
    Cached,
}

/// Watches a build. Calls come from one thread, in the order of `Step`.
pub trait Progress {
    /// A step begins.
    fn started(&self, step: Step);
    /// It moved on: `done` of about `total` units, if that is known, now at `what`.
    fn advanced(&self, step: Step, done: u64, total: Option<u64>, what: &str);
    /// Something that a person should read, and that stops nothing.
    fn note(&self, step: Step, text: &str);
    /// It ended.
    fn finished(&self, step: Step, outcome: Outcome);
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn started(&self, _step: Step) {}
    fn advanced(&self, _step: Step, _done: u64, _total: Option<u64>, _what: &str) {}
    fn note(&self, _step: Step, _text: &str) {}
    fn finished(&self, _step: Step, _outcome: Outcome) {}
}
