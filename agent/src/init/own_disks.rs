//! Which disk is this server's own, where the system was started from none: the one that firmware remembers.
//!
//! Whoever rents a whole drive calls its partitions what he likes, and a node that starts from the network would
//! take them for its own after a power cut: they would say who it is and whom it obeys. So a disk becomes the
//! server's by being started from, by being installed, or by what only this server's TPM opens, and a variable
//! of firmware's remembers it. The identities of its partitions are no secret and can be copied; so what the
//! hardware is called is remembered beside.

use std::{fmt, fs, io, path::Path};

use super::{boot::chain, kmsg};
use crate::{efivars, events::Event};

/// The variable: a [`Disk`] as text.
const VARIABLE: &str = "Disk";
/// The same for as long as the server is on, in the root, should firmware not take it.
const FILE: &str = "run/holdfast/own-disk";

/// A disk as it is remembered. As text: the partition, and behind a space the hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Disk {
    /// The identity of its EFI system partition, in small letters.
    pub(crate) partition: String,
    /// What its hardware is called; `None` where that was not remembered.
    pub(crate) hardware: Option<String>,
}

impl Disk {
    /// Returns the disk that a text names; `None` where it names none.
    fn parse(text: &str) -> Option<Self> {
        let (partition, hardware) = text.split_once(' ').unwrap_or((text, ""));
        let hardware = Some(hardware.to_owned()).filter(|hardware| !hardware.is_empty());
        // A partition without an identity has an empty one.
        (!partition.is_empty())
            .then(|| Self { partition: partition.to_ascii_lowercase(), hardware })
    }

    /// Whether this hardware may be the disk's.
    pub(super) fn may_be(&self, hardware: &str) -> bool {
        self.hardware.as_ref().is_none_or(|own| own == hardware)
    }

    /// Returns what is to be said of a disk that is not there, where nothing is in its place.
    pub(crate) fn told_absent(&self) -> String {
        format!(
            "{}: meanwhile the server runs as another node. Connect that disk again, or, to make the server another \
             node for good, install it on a disk that [install.disk] names",
            self.absence()
        )
    }

    fn absence(&self) -> String {
        let hardware = self.hardware.as_deref().unwrap_or("unknown");
        let id = &self.partition;
        format!(
            "this server's own disk is not there (EFI system partition {id}, hardware {hardware})"
        )
    }
}

/// Returns what is to be said of disks that are not there, where the system was started from another one, which
/// is the server's from now on. A copy of a disk is the same node.
pub(super) fn replaced(absent: &[Disk], by: &Disk) -> impl Iterator<Item = String> {
    absent.iter().filter(|disk| disk.partition != by.partition).map(|disk| {
        format!(
            "{}: the server was started from another one, which is its own from now on and another node's. If \
             that is not what was meant, connect the first one and start the server from it once",
            disk.absence()
        )
    })
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.partition)?;
        self.hardware.as_ref().map_or(Ok(()), |hardware| write!(f, " {hardware}"))
    }
}

/// What is known of the server's own disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Own {
    /// Nothing: there is no UEFI firmware that could remember one. Every disk may be.
    Unknown,
    /// The first of these that is there.
    Remembered(Vec<Disk>),
}

impl Own {
    /// Returns the disks that are remembered.
    pub(super) fn disks(self) -> Vec<Disk> {
        match self {
            Self::Unknown => Vec::new(),
            Self::Remembered(disks) => disks,
        }
    }
}

/// Reads what is known below `root`. Each look calls the firmware.
pub(super) fn read(root: &Path) -> Own {
    let Some(folder) = efivars::folder(root) else { return Own::Unknown };
    let known = [fs::read(root.join(FILE)).ok(), efivars::read(&folder, VARIABLE)];
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok();
    let disks = known.into_iter().flatten().filter_map(text).filter_map(|text| Disk::parse(&text));
    let mut disks: Vec<Disk> = disks.collect();
    disks.dedup();
    Own::Remembered(disks)
}

/// Remembers a disk as the server's; when this returns, it outlasts a power cut. Firmware that does not take it
/// is told of: the system then has to be started from its disk itself.
pub(crate) fn remember(root: &Path, disk: &Disk) {
    if let Err(error) = write(root, disk) {
        let reason = format!(
            "firmware does not remember that this disk is the server's, so after a start from elsewhere it will \
             not be: {}",
            chain(&error)
        );
        kmsg::event(&Event::Trouble { place: "volumes", reason });
    }
}

fn write(root: &Path, disk: &Disk) -> io::Result<()> {
    let Some(folder) = efivars::folder(root) else { return Ok(()) };
    let text = disk.to_string();
    let file = root.join(FILE);
    fs::create_dir_all(file.parent().unwrap_or(root))?;
    fs::write(file, &text)?;
    efivars::keep(&folder, VARIABLE, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn disk(partition: &str, hardware: Option<&str>) -> Disk {
        Disk { partition: partition.to_owned(), hardware: hardware.map(str::to_owned) }
    }

    #[test]
    fn firmware_remembers_one_disk_and_its_hardware() {
        let root = testing::root(&[]);
        write(root.path(), &disk("aa-1", None)).expect("nothing to do");
        assert_eq!(read(root.path()), Own::Unknown);

        let root = testing::root(&[("sys/firmware/efi/efivars/BootOrder-1", b"123456")]);
        assert_eq!(read(root.path()), Own::Remembered(Vec::new()));
        for own in [disk("aa-1", Some("t10.ATA  DISK S1")), disk("bb-1", None)] {
            write(root.path(), &own).expect("remembered");
            assert_eq!(read(root.path()), Own::Remembered(vec![own.clone()]));
            // Power goes and comes.
            fs::remove_dir_all(root.path().join("run")).expect("removed");
            assert_eq!(read(root.path()), Own::Remembered(vec![own]));
        }
    }

    #[test]
    fn a_disk_that_another_one_took_the_place_of_is_told_but_no_copy_of_it() {
        let absent = [disk("aa-1", Some("S1"))];
        let told = |by: &Disk| replaced(&absent, by).collect::<Vec<_>>();
        assert!(told(&disk("aa-1", Some("S2"))).is_empty());
        let told = told(&disk("bb-1", Some("S2")));
        assert!(told.len() == 1 && told[0].contains("aa-1, hardware S1"), "{told:?}");
    }

    #[test]
    fn an_identity_alone_is_one_on_any_hardware_and_an_empty_one_is_none() {
        assert_eq!(Disk::parse("AA-1"), Some(disk("aa-1", None)));
        assert_eq!(Disk::parse("AA-1 S 1"), Some(disk("aa-1", Some("S 1"))));
        assert_eq!([Disk::parse(""), Disk::parse(" S1")], [None, None]);
        assert!(disk("aa-1", None).may_be("S1") && disk("aa-1", Some("S1")).may_be("S1"));
        assert!(!disk("aa-1", Some("S1")).may_be("S2"));
    }
}
