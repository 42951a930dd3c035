//! Where the running release is: on the medium that the node was started from, or on another device that has
//! it, too. Reads and changes nothing.
//!
//! Every function takes the root under which `sys` and `dev` are, so tests use directories.

use std::{
    fs::{self, File},
    path::Path,
};

use update::disk::{esp, layout, medium};

use crate::{assign::lent, init::partitions};

/// Returns the name of the first device that holds the running release, and the release. `release` is the text
/// of the system's `/etc/os-release`.
pub(crate) fn find_medium(root: &Path, release: &str) -> Option<(String, Vec<u8>)> {
    media(root, release).next()
}

/// Returns all devices that hold the running release, each with it: the one that the node was started from
/// first, then what is attached to be taken away again, as an installed disk may hold the same release. Each
/// is read when it is its turn.
pub(crate) fn media(root: &Path, release: &str) -> impl Iterator<Item = (String, Vec<u8>)> {
    devices(root).into_iter().filter_map(move |name| {
        let program = open(root, &name).and_then(|disk| medium::find_program(disk, release));
        // Firmware also starts from a FAT volume of another kind.
        let program = program.or_else(|| {
            let mut volumes = volumes(root, &name).into_iter();
            volumes.find_map(|volume| medium::find_on_volume(open(root, &volume)?, release))
        })?;
        Some((name, program))
    })
}

/// Returns the file at `path`, of at most `limit` bytes, on the first volume of a device that has one and that
/// firmware starts from.
pub(crate) fn beside(root: &Path, name: &str, path: &str, limit: u64) -> Option<Vec<u8>> {
    let on_esp = open(root, name).and_then(|disk| medium::read_beside(disk, path, limit));
    on_esp.or_else(|| {
        let mut volumes = volumes(root, name).into_iter();
        volumes.find_map(|volume| esp::read(open(root, &volume)?, path, limit).ok())
    })
}

fn open(root: &Path, name: &str) -> Option<File> {
    File::open(root.join("dev").join(name)).ok()
}

/// Returns what of a device may be a volume: its partitions, and the device itself, which may have none.
fn volumes(root: &Path, name: &str) -> Vec<String> {
    let folder = root.join("sys/class/block").join(name);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().join("partition").exists());
    let mut names: Vec<_> =
        parts.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names.push(name.to_owned());
    names
}

/// Whether a device is a disk that Holdfast is installed on.
pub(crate) fn is_installed(root: &Path, name: &str) -> bool {
    let folder = root.join("sys/class/block").join(name);
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = format!("PARTNAME={}", layout::STATE);
    entries.into_iter().any(|entry| {
        let uevent = fs::read_to_string(entry.path().join("uevent")).unwrap_or_default();
        uevent.lines().any(|line| line == named)
    })
}

/// Returns all devices but partitions and renters' drives, the likeliest first.
fn devices(root: &Path) -> Vec<String> {
    let class = root.join("sys/class/block");
    let entries = fs::read_dir(&class).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| !lent::is_foreign(root, &entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !class.join(name).join("partition").exists())
        .collect();
    let started_from = partitions::started_from_disk(root);
    let comes_off = |name: &str| {
        let folder = class.join(name);
        let removable = fs::read_to_string(folder.join("removable")).unwrap_or_default();
        let place = fs::canonicalize(&folder).unwrap_or_default();
        removable.trim() == "1" || place.to_string_lossy().contains("/usb")
    };
    names.sort_by_cached_key(|name| {
        let first = started_from.as_ref().is_some_and(|disk| disk.ends_with(name));
        (!first, !name.starts_with("sr"), !comes_off(name), name.clone())
    });
    names
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use crate::testing::root;

    /// A server with an installed SATA disk, an NVMe disk, a stick and a CD, as sysfs has them.
    fn server() -> tempfile::TempDir {
        let state = format!("DEVNAME=sda2\nPARTNAME={}\nPARTUUID=aa-2\n", layout::STATE);
        let root = root(&[
            ("sys/devices/ata1/block/sda/removable", b"0\n"),
            ("sys/devices/ata1/block/sda/sda2/uevent", state.as_bytes()),
            ("sys/devices/ata1/block/sda/sda2/partition", b"2\n"),
            ("sys/devices/nvme/nvme0n1/removable", b"0\n"),
            ("sys/devices/usb1/block/sdb/removable", b"0\n"),
            (
                "sys/devices/usb1/block/sdb/sdb1/uevent",
                b"DEVNAME=sdb1\nPARTNAME=EFI\nPARTUUID=bb-1\n",
            ),
            ("sys/devices/usb1/block/sdb/sdb1/partition", b"1\n"),
            ("sys/devices/ata2/block/sr0/removable", b"1\n"),
        ]);
        let class = root.path().join("sys/class/block");
        fs::create_dir_all(&class).unwrap();
        for place in [
            "ata1/block/sda",
            "ata1/block/sda/sda2",
            "nvme/nvme0n1",
            "usb1/block/sdb",
            "usb1/block/sdb/sdb1",
            "ata2/block/sr0",
        ] {
            let target = root.path().join("sys/devices").join(place);
            std::os::unix::fs::symlink(&target, class.join(target.file_name().unwrap())).unwrap();
        }
        root
    }

    #[test]
    fn a_stick_comes_before_an_installed_disk() {
        let root = server();
        assert_eq!(devices(root.path()), ["sr0", "sdb", "nvme0n1", "sda"]);
        assert!(is_installed(root.path(), "sda"));
        assert!(!is_installed(root.path(), "sdb") && !is_installed(root.path(), "sr0"));
    }

    /// A FAT volume with a program of this release, and a file beside it.
    fn volume(os_release: &str) -> Vec<u8> {
        let mut program = vec![0; 0x400];
        program[0x3c] = 0x80;
        program[0x80..0x84].copy_from_slice(b"PE\0\0");
        (program[0x86], program[0x94]) = (1, 0xf0);
        let section = 0x98 + 0xf0;
        program[section..section + 6].copy_from_slice(b".osrel");
        program[section + 8] = u8::try_from(os_release.len()).unwrap();
        program[section + 20..section + 24].copy_from_slice(&0x300_u32.to_le_bytes());
        program[0x300..0x300 + os_release.len()].copy_from_slice(os_release.as_bytes());
        let mut bytes = vec![0; 4 << 20];
        let mut volume = std::io::Cursor::new(&mut bytes);
        esp::write(&mut volume, update::disk::gpt::BlockSize::B512, &program, &[esp::FALLBACK])
            .unwrap();
        volume.set_position(0);
        esp::put(&mut volume, "loader/key", b"a key").unwrap();
        bytes
    }

    /// Sticks that people make by copying files: with the partition table that Windows and most tools write,
    /// a GPT with a partition for data, or none at all.
    #[test]
    fn a_release_is_found_on_any_fat_volume_that_firmware_starts() {
        let root = server();
        let dev = root.path().join("dev");
        fs::create_dir_all(&dev).unwrap();
        let found = || media(root.path(), "ID=ours\n").map(|(name, _)| name).collect::<Vec<_>>();
        let key = |name| beside(root.path(), name, "loader/key", 64);
        // The kernel finds the partitions of either table; what is in the table is nobody's business here.
        fs::write(dev.join("sdb"), vec![0; 1 << 20]).unwrap();
        fs::write(dev.join("sdb1"), volume("ID=ours\n")).unwrap();
        fs::write(dev.join("nvme0n1"), volume("ID=another\n")).unwrap();
        assert_eq!(found(), ["sdb"]);
        assert_eq!(key("sdb").as_deref(), Some(&b"a key"[..]));
        assert_eq!(key("sr0"), None);
        fs::remove_file(dev.join("sdb1")).unwrap();
        assert!(found().is_empty());
        // No table at all.
        fs::write(dev.join("sdb"), volume("ID=ours\n")).unwrap();
        assert_eq!(found(), ["sdb"]);
        assert_eq!(key("sdb").as_deref(), Some(&b"a key"[..]));
    }

    #[test]
    fn what_the_node_was_started_from_comes_first() {
        let root = server();
        let started_from = |id: &str| {
            let units = id.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
            let bytes: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
            let path = root.path().join(partitions::STARTED_FROM.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
            devices(root.path())
        };
        assert_eq!(started_from("BB-1")[0], "sdb");
        assert_eq!(started_from("AA-2"), ["sda", "sr0", "sdb", "nvme0n1"]);
        assert_eq!(started_from("CC-3")[0], "sr0");
    }
}
