//! Marks of files that may hold a disk in a form that is not read here: archives, compressed files
//! and other programs' formats. Taken for raw, such a file would be a disk that nothing starts from.
//! Media that are raw disks themselves, as ISO 9660, have no mark here.
//! Source: RFC 1952 §2.3.1 (gzip), RFC 8878 §3.1.1 (zstd), "The .xz File Format" §2.1.1.1, bzip2's
//! manual, LZ4 Frame Format Description "Frame Descriptor", lzip manual "File format", PKWARE APPNOTE §4.3.7 (ZIP), 7-Zip `7zFormat.txt`, POSIX `pax` (ustar), QEMU
//! `block/{vdi,qed,parallels,vmdk,bochs,dmg}.c`, Android `sparse_format.h`, Microsoft "Windows Imaging File
//! Format" (WIM), libewf "Expert Witness Compression Format", RAR 5.0 archive format, UEFI 2.10 §5.3.2 (GPT).

use super::{ImportError, Input};

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

const PAGE: &str = "look into it for why, and download the disk itself";

const MARKS: [Mark; 25] = [
    mark(0, b"\x1f\x8b\x08", "compressed by gzip", UNPACK),
    mark(0, b"\xfd7zXZ\0", "compressed by xz", UNPACK),
    mark(0, b"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    mark(0, b"BZh", "compressed by bzip2", UNPACK),
    mark(0, b"\x04\x22\x4d\x18", "compressed by lz4", UNPACK),
    mark(0, b"LZIP", "compressed by lzip", UNPACK),
    mark(0, b"PK\x03\x04", "a ZIP archive", UNPACK),
    mark(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    mark(0, b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    mark(257, b"ustar", "a tar archive, as every OVA is", UNPACK),
    mark(0, b"<?xml", "a text that describes a machine or a disk", "import the disk that it names"),
    mark(0, b".encoding", "a text that describes a machine (VMX)", "import the disk that it names"),
    mark(0, b"<!DOCTYPE", "a web page", PAGE),
    mark(0, b"<!doctype", "a web page", PAGE),
    mark(0, b"<html", "a web page", PAGE),
    mark(64, b"\x7f\x10\xda\xbe", "a disk of VirtualBox (VDI)", CONVERT),
    mark(0, b"QED\0", "a disk of QEMU (QED)", CONVERT),
    mark(0, b"WithoutFreeSpace", "a disk of Parallels", CONVERT),
    mark(0, b"WithouFreSpacExt", "a disk of Parallels", CONVERT),
    mark(0, b"Bochs Virtual HD Image", "a disk of Bochs", CONVERT),
    mark(0, b"\x3a\xff\x26\xed", "a sparse image of Android", "convert it first, by `simg2img`"),
    mark(0, b"MSWIM\0\0\0", "an archive of Windows' files (WIM)", "install it to a disk first"),
    mark(
        0,
        b"EVF\x09\x0d\x0a\xff\0",
        "an image of EnCase (EWF)",
        "convert it first, by `ewfexport`",
    ),
    mark(0, b"COWD", "a disk of ESX (vmfsSparse)", CONVERT_WHOLE),
    mark(0, b"\xbe\xba\xfe\xca\0\0\0\0", "a disk of ESX (SEsparse)", CONVERT_WHOLE),
];

const fn mark(at: usize, bytes: &'static [u8], what: &'static str, instead: &'static str) -> Mark {
    Mark { at, bytes, what, instead }
}

/// First bytes of a partition table (GPT), in the disk's second sector.
const TABLE: &[u8] = b"EFI PART";
/// First bytes of the last 512 of a disk of macOS.
const TRAILER: &[u8] = b"koly";

/// Refuses a file that its first bytes `head`, or its last, tell to be no raw disk for a machine.
pub(super) fn check(input: &Input, head: &[u8]) -> Result<(), ImportError> {
    let is_at = |at: usize| head.get(at..).is_some_and(|rest| rest.starts_with(TABLE));
    if is_at(4096) && !is_at(512) {
        let what = "a disk with sectors of 4096 bytes";
        let instead = "machines' disks have sectors of 512 bytes: copy the system to such a disk";
        return Err(ImportError::Foreign { what, instead });
    }
    let mut trailer = [0; 4];
    input.read_padded(input.length().saturating_sub(512), &mut trailer)?;
    if trailer == TRAILER {
        let (what, instead) = ("a disk of macOS (DMG)", CONVERT);
        return Err(ImportError::Foreign { what, instead });
    }

    let is = |mark: &&Mark| head.get(mark.at..).is_some_and(|rest| rest.starts_with(mark.bytes));
    match MARKS.iter().find(is) {
        Some(Mark { what, instead, .. }) => Err(ImportError::Foreign { what, instead }),
        None => Ok(()),
    }
}
