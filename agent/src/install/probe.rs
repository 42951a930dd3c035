//! What a disk holds, by what its first and last MiB say. Pure.
//!
//! The node never guesses that bytes do not matter: a disk is empty when both are zero but for its own
//! unfinished work, and holds something otherwise. The signatures only serve to name it.

use std::fmt;

use update::{
    disk::{gpt::BlockSize, layout, medium, template},
    efi,
};

use super::unfinished;

/// What is on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Nothing: its first and last MiB are zero but for the traces of an installation that was cut
    /// short, and the kernel found no partition.
    Nothing,
    /// This system, installed.
    Holdfast,
    /// Something, and what it looks like.
    Something(String),
    /// It cannot be read.
    Unreadable(String),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("empty"),
            Self::Holdfast => f.write_str("an installation of Holdfast"),
            Self::Something(what) => f.write_str(what),
            Self::Unreadable(error) => write!(f, "unreadable: {error}"),
        }
    }
}

/// Signatures at fixed places of the first MiB: offset, bytes, and what they mean. Sources: the
/// kernel's headers of each file system, UEFI 2.10 §5.3.2, SNIA DDF 2.0, the LUKS2 On-Disk Format.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (512, b"EFI PART", "a partition table (GPT)"),
    (4096, b"EFI PART", "a partition table (GPT)"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (512, b"LABELONE", "a volume of LVM"),
    (0, b"XFSB", "a file system (XFS)"),
    (0x438, b"\x53\xef", "a file system (ext2, ext3 or ext4)"),
    (0x1_0040, b"_BHRfS_M", "a file system (btrfs)"),
    (0x1018, b"\xc6\x85\x73\xf6", "a file system (bcachefs)"),
    (0x400, b"\x10\x20\xf5\xf2", "a file system (F2FS)"),
    (3, b"NTFS    ", "a file system (NTFS)"),
    (3, b"EXFAT   ", "a file system (exFAT)"),
    (82, b"FAT32   ", "a file system (FAT)"),
    (54, b"FAT1", "a file system (FAT)"),
    (0x8001, b"CD001", "an image of a CD (ISO 9660)"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID (md)"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a RAID (md)"),
    (510, b"\x55\xaa", "a partition table (MBR)"),
];

/// Start of the names that our partitions have.
const OURS: &str = "holdfast-";
/// Most partitions that are named.
const NAMED: usize = 8;

/// Returns what a disk holds, by its first and last MiB and by the names of the partitions that the
/// kernel found on it.
pub fn content(first: &[u8], last: &[u8], partitions: &[String]) -> Content {
    if partitions.iter().any(|name| name.starts_with(OURS)) {
        return Content::Holdfast;
    }
    if partitions.is_empty() && unfinished::is(first, last) {
        return Content::Nothing;
    }
    if let Some(what) = known(first, last, partitions) {
        return Content::Something(what);
    }
    match (first.iter().all(|&byte| byte == 0), last.iter().all(|&byte| byte == 0)) {
        (true, true) => Content::Nothing,
        (false, _) => Content::Something("data of an unknown kind in its first MiB".to_owned()),
        (true, false) => Content::Something("data of an unknown kind in its last MiB".to_owned()),
    }
}

/// Returns what somebody made of a disk, as far as it is known by the kernel's partitions or by a
/// signature; `None` for everything else, which is not nothing.
pub fn known(first: &[u8], last: &[u8], partitions: &[String]) -> Option<String> {
    if !partitions.is_empty() {
        let named: Vec<_> = partitions.iter().take(NAMED).map(|name| printable(name)).collect();
        let count = partitions.len();
        return Some(format!("{count} partitions ({})", named.join(", ")));
    }
    let is_there =
        |(at, bytes, _): &&(usize, &[u8], &str)| first[(*at).min(first.len())..].starts_with(bytes);
    if let Some((_, _, what)) = SIGNATURES.iter().find(is_there) {
        return Some((*what).to_owned());
    }
    let backup = last.windows(8).step_by(512).any(|window| window == b"EFI PART");
    backup.then(|| "the backup of a partition table (GPT)".to_owned())
}

/// Reads `bytes` as everything that the installer reads of a disk it does not know; for the fuzz
/// target and for its corpus.
pub fn everything(bytes: &[u8]) {
    let disk = || std::io::Cursor::new(bytes.to_vec());
    content(bytes, bytes, &[]);
    let _ = medium::find_program(disk(), "");
    for block in [BlockSize::B512, BlockSize::B4096] {
        let _ = layout::grown(disk(), block, 1 << 40);
    }
    let _ = medium::os_release(bytes);
    let _ = template::apply(bytes, &mut std::io::Cursor::new(Vec::new()), 1 << 20);
    let _ = (efi::description(bytes), efi::order(bytes));
}

/// Whoever partitioned the disk chose these names; they go to the console.
fn printable(name: &str) -> String {
    name.chars().take(36).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn only_zeros_are_nothing() {
        let zeros = vec![0; MIB];
        assert_eq!(content(&zeros, &zeros, &[]), Content::Nothing);
        let mut written = zeros.clone();
        written[MIB - 1] = 1;
        assert!(matches!(content(&written, &zeros, &[]), Content::Something(_)));
        assert!(matches!(content(&zeros, &written, &[]), Content::Something(_)));
    }

    #[test]
    fn what_is_known_is_named() {
        for (at, bytes, what) in SIGNATURES {
            let mut first = vec![0; MIB];
            first[*at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(content(&first, &[], &[]), Content::Something((*what).to_owned()));
        }
        let names = ["holdfast-esp".to_owned()];
        assert_eq!(content(&[], &[], &names), Content::Holdfast);
        let evil = ["a\x1b[2J".to_owned(), String::new()];
        assert_eq!(content(&[], &[], &evil).to_string(), "2 partitions (a?[2J, )");
    }

    proptest! {
        #[test]
        fn no_disk_makes_it_panic(
            first in proptest::collection::vec(any::<u8>(), 0..5000),
            last in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            content(&first, &last, &[]);
        }
    }
}
