//! Which disk is this server's own, where the system was started from none: the one that firmware remembers.
//!
//! Whoever rents a whole drive calls its partitions what he likes, and a node that starts from the network would
//! take them for its own after a power cut: they would say who it is and whom it obeys. So a disk becomes the
//! server's by being started from, by being installed, or by what only this server's TPM opens, and a variable
//! of firmware's remembers it.

use std::{fs, io, path::Path};

use super::{boot::chain, kmsg};
use crate::{efivars, events::Event};

/// The variable: the identity of the disk's EFI system partition, as text.
const VARIABLE: &str = "Disk";
/// The same for as long as the server is on, in the root, should firmware not take it.
const FILE: &str = "run/holdfast/own-disk";

/// What is known of the server's own disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Own {
    /// Nothing: there is no UEFI firmware that could remember one. Every disk may be.
    Unknown,
    /// The disk with one of these partitions, in small letters.
    With(Vec<String>),
}

impl Own {
    /// Whether a disk with these partitions may be the server's.
    pub(super) fn may_have<'a>(&self, mut partitions: impl Iterator<Item = &'a str>) -> bool {
        match self {
            Self::Unknown => true,
            Self::With(ids) => partitions.any(|id| ids.iter().any(|own| own == id)),
        }
    }
}

/// Reads what is known below `root`. Each look calls the firmware.
pub(super) fn read(root: &Path) -> Own {
    let Some(folder) = efivars::folder(root) else { return Own::Unknown };
    let known = [efivars::read(&folder, VARIABLE), fs::read(root.join(FILE)).ok()];
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok();
    // A partition without an identity has an empty one.
    let ids = known.into_iter().flatten().filter_map(text).filter(|id| !id.is_empty());
    Own::With(ids.map(|id| id.to_ascii_lowercase()).collect())
}

/// Remembers the disk with this partition as the server's. Firmware that does not take it is told of: the
/// system then has to be started from its disk itself.
pub(crate) fn remember(root: &Path, partition: &str) {
    if let Err(error) = write(root, partition) {
        let reason = format!(
            "firmware does not remember that this disk is the server's, so after a start from elsewhere it will \
             not be: {}",
            chain(&error)
        );
        kmsg::event(&Event::Trouble { place: "volumes", reason });
    }
}

fn write(root: &Path, partition: &str) -> io::Result<()> {
    let Some(folder) = efivars::folder(root) else { return Ok(()) };
    let file = root.join(FILE);
    fs::create_dir_all(file.parent().unwrap_or(root))?;
    fs::write(file, partition)?;
    efivars::keep(&folder, VARIABLE, partition.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn firmware_remembers_one_disk_and_without_firmware_any_may_be() {
        let root = testing::root(&[]);
        write(root.path(), "aa-1").expect("nothing to do");
        assert_eq!(read(root.path()), Own::Unknown);
        assert!(Own::Unknown.may_have(["bb-1"].into_iter()));

        let root = testing::root(&[("sys/firmware/efi/efivars/BootOrder-1", b"123456")]);
        let ids = |ids: &[&str]| Own::With(ids.iter().map(|id| (*id).to_owned()).collect());
        assert_eq!(read(root.path()), ids(&[]));
        assert!(!ids(&[]).may_have([""].into_iter()), "a renter may have made it");
        for id in ["AA-1", "bb-1"] {
            write(root.path(), id).expect("remembered");
            // Power goes and comes.
            fs::remove_dir_all(root.path().join("run")).expect("removed");
            let own = read(root.path());
            assert_eq!(own, ids(&[&id.to_ascii_lowercase()]));
            assert!(own.may_have(["xx-2", &id.to_ascii_lowercase()].into_iter()));
            assert!(!own.may_have(["xx-2", ""].into_iter()));
        }
    }
}
