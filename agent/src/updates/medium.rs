//! The medium that the node was started from, when that is beside an installed disk.

use std::{fs, io, path::Path};

use update::{
    channel::{Release, Sha256},
    slots::{
        Place, Program,
        fat::FatError,
        plan::{Offered, Urgency},
        release_of,
    },
};

use super::{OS_RELEASE, partition::Partition};
use crate::install::source;

/// What the medium has.
#[derive(Debug)]
pub(super) struct Medium {
    release: Release,
    sha256: Sha256,
    os_release: String,
}

impl Medium {
    /// Finds the running release on a medium of the server; `None` when none has it, as after a start
    /// from the network.
    pub(super) fn find(root: &Path) -> Option<Self> {
        let path = root.join(OS_RELEASE.trim_start_matches('/'));
        let os_release = fs::read_to_string(path).ok()?;
        let release = release_of(&os_release)?;
        let (_, program) = source::find_medium(root, &os_release)?;
        Some(Self { release, sha256: Program::of(&program).sha256, os_release })
    }

    /// Returns what is to be installed. Somebody started it by hand, so no window is waited for.
    pub(super) fn offer(&self) -> Offered {
        let Self { release, sha256, .. } = *self;
        Offered { release, sha256, urgency: Urgency::Now }
    }

    /// Writes its program to a place, verified; returns the length.
    pub(super) fn write(&self, partition: &Partition, to: Place) -> Result<u64, FatError> {
        let gone = || FatError::Disk { action: "read the medium for", source: missing() };
        let found = source::find_medium(Path::new("/"), &self.os_release).ok_or_else(gone)?;
        partition.write(to, &found.1, self.sha256)
    }
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the medium is not there any more")
}
