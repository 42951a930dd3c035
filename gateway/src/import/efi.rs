//! Whether UEFI firmware finds on a raw disk where to look for something to start. What is in there is not read.
//! Source: UEFI 2.10 §5.2.2 (MBR), §5.3.2 and §5.3.3 (GPT), §13.3.2 (El Torito); "El Torito" Bootable CD-ROM
//! Format Specification 1.0 §2; Microsoft "FAT: General Overview of On-Disk Format" 1.03 (FAT without a table).

use super::{ImportError, Input, number};

/// The GPT's type of an EFI system partition, C12A7328-F81F-11D2-BA4B-00A0C93EC93B, as it is written.
const TYPE: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];
/// The MBR's, and El Torito's name of the platform.
const EF: u8 = 0xef;
/// Entries of a GPT that are looked at; tables have 128.
const MAX_ENTRIES: u64 = 1024;
/// Bytes of a medium's sector.
const MEDIUM_SECTOR: u64 = 2048;

/// Returns whether `disk` has an EFI system partition, an entry of El Torito for UEFI, or is a FAT by itself.
pub fn is_found(disk: &Input) -> Result<bool, ImportError> {
    let mut head = [0; 1024];
    disk.read_padded(0, &mut head)?;
    Ok(in_mbr(&head) || is_fat(&head) || in_gpt(disk, &head)? || in_catalog(disk)?)
}

fn in_mbr(head: &[u8]) -> bool {
    head[510..512] == [0x55, 0xaa] && (0..4).any(|slot| head[446 + 16 * slot + 4] == EF)
}

fn is_fat(head: &[u8]) -> bool {
    head[510..512] == [0x55, 0xaa]
        && (head[54..].starts_with(b"FAT1") || head[82..].starts_with(b"FAT32"))
}

fn in_gpt(disk: &Input, head: &[u8]) -> Result<bool, ImportError> {
    let header = &head[512..];
    let size = u64::from(u32::from_le_bytes(number(header, 84)));
    if !header.starts_with(b"EFI PART") || !(128..=4096).contains(&size) {
        return Ok(false);
    }
    let first = u64::from_le_bytes(number(header, 72)).saturating_mul(512);
    let count = u64::from(u32::from_le_bytes(number(header, 80))).min(MAX_ENTRIES);
    for entry in 0..count {
        let mut found = [0; 16];
        disk.read_padded(first.saturating_add(entry * size), &mut found)?;
        if found == TYPE {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Looks at the headers of a boot catalog: the first says a platform, and so does that of each section.
fn in_catalog(disk: &Input) -> Result<bool, ImportError> {
    let mut record = [0; 75];
    disk.read_padded(17 * MEDIUM_SECTOR, &mut record)?;
    if !record.starts_with(b"\0CD001\x01EL TORITO SPECIFICATION") {
        return Ok(false);
    }
    let mut catalog = [0; 2048];
    let at = u64::from(u32::from_le_bytes(number(&record, 71)));
    disk.read_padded(at * MEDIUM_SECTOR, &mut catalog)?;
    let (entries, _) = catalog.as_chunks::<32>();
    Ok(entries.iter().any(|entry| matches!(entry[0], 0x01 | 0x90 | 0x91) && entry[1] == EF))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(parts: &[(usize, &[u8])]) -> bool {
        let mut bytes = vec![0; 64 << 10];
        for (at, part) in parts {
            bytes[*at..*at + part.len()].copy_from_slice(part);
        }
        is_found(&Input::Memory(bytes)).expect("in memory")
    }

    #[test]
    fn partitions_are_found_in_both_tables() {
        let signed = (510, &b"\x55\xaa"[..]);
        assert!(!disk(&[]) && !disk(&[signed]));
        assert!(disk(&[signed, (446 + 48 + 4, b"\xef")]));
        assert!(!disk(&[(446 + 4, b"\xef")]), "no MBR");
        let header = [
            (512, &b"EFI PART"[..]),
            (512 + 72, b"\x02"),
            (512 + 80, b"\x80"),
            (512 + 84, b"\x80"),
        ];
        assert!(disk(&[&header[..], &[(1024 + 3 * 128, &TYPE)]].concat()));
        assert!(
            !disk(&[&header[..], &[(1024 + 3 * 128 + 16, &TYPE)]].concat()),
            "a name is no type"
        );
        assert!(
            !disk(&[(512, b"EFI PART"), (512 + 80, b"\xff\xff\xff\xff")]),
            "entries without a size"
        );
    }

    #[test]
    fn media_and_disks_without_a_table_are_found() {
        assert!(disk(&[(510, b"\x55\xaa"), (82, b"FAT32   ")]));
        let record =
            [(17 * 2048, &b"\0CD001\x01EL TORITO SPECIFICATION"[..]), (17 * 2048 + 71, b"\x14")];
        assert!(!disk(&[&record[..], &[(20 * 2048, b"\x01\0")]].concat()), "only for a BIOS");
        assert!(disk(
            &[&record[..], &[(20 * 2048, b"\x01\0"), (20 * 2048 + 64, b"\x91\xef\x01\0")]].concat()
        ));
        assert!(disk(&[&record[..], &[(20 * 2048, b"\x01\xef")]].concat()));
    }
}
