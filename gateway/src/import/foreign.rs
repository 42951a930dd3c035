//! Marks of files that may hold a disk in a form that is not read here: archives, compressed files
//! and other programs' formats. Taken for raw, such a file would be a disk that nothing starts from.
//! Media that are raw disks themselves, as ISO 9660, have no mark here.
//! Source: RFC 1952 §2.3.1 (gzip), RFC 8878 §3.1.1 (zstd), "The .xz File Format" §2.1.1.1, bzip2's
//! manual, PKWARE APPNOTE §4.3.7 (ZIP), 7-Zip `7zFormat.txt`, POSIX `pax` (ustar), QEMU
//! `block/{vdi,qed,parallels,vmdk}.c`.

use super::ImportError;

/// Bytes at a fixed place that tell what a file is.
struct Mark {
    at: usize,
    bytes: &'static [u8],
    what: &'static str,
    instead: &'static str,
}

const UNPACK: &str = "unpack it, and import the disk inside";
const CONVERT: &str = "convert it first, as by `qemu-img convert -O qcow2`";
const CONVERT_WHOLE: &str =
    "convert the .vmdk that names it first, as by `qemu-img convert -O qcow2`";

const MARKS: [Mark; 14] = [
    mark(0, b"\x1f\x8b\x08", "compressed by gzip", UNPACK),
    mark(0, b"\xfd7zXZ\0", "compressed by xz", UNPACK),
    mark(0, b"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    mark(0, b"BZh", "compressed by bzip2", UNPACK),
    mark(0, b"PK\x03\x04", "a ZIP archive", UNPACK),
    mark(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    mark(257, b"ustar", "a tar archive, as every OVA is", UNPACK),
    mark(0, b"<?xml", "a text that describes a machine or a disk", "import the disk that it names"),
    mark(64, b"\x7f\x10\xda\xbe", "a disk of VirtualBox (VDI)", CONVERT),
    mark(0, b"QED\0", "a disk of QEMU (QED)", CONVERT),
    mark(0, b"WithoutFreeSpace", "a disk of Parallels", CONVERT),
    mark(0, b"WithouFreSpacExt", "a disk of Parallels", CONVERT),
    mark(0, b"COWD", "a disk of ESX (vmfsSparse)", CONVERT_WHOLE),
    mark(0, b"\xbe\xba\xfe\xca\0\0\0\0", "a disk of ESX (SEsparse)", CONVERT_WHOLE),
];

const fn mark(at: usize, bytes: &'static [u8], what: &'static str, instead: &'static str) -> Mark {
    Mark { at, bytes, what, instead }
}

/// Refuses a file whose first bytes `head` tell that it is no raw disk.
pub(super) fn check(head: &[u8; 512]) -> Result<(), ImportError> {
    let is = |mark: &&Mark| head.get(mark.at..).is_some_and(|rest| rest.starts_with(mark.bytes));
    match MARKS.iter().find(is) {
        Some(Mark { what, instead, .. }) => Err(ImportError::Foreign { what, instead }),
        None => Ok(()),
    }
}
