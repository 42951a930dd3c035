//! VHDX, fixed and dynamic.
//! Source: \[MS-VHDX\] 8.0: §2.2 "Header Section", §2.4 "BAT", §2.5 "BAT Entries", §2.6 "Metadata
//! Region".
//!
//! | Offset of the file | Bytes | What                                               |
//! |--------------------|-------|----------------------------------------------------|
//! | 0                  | 8     | "vhdxfile"                                         |
//! | 64 KiB, 128 KiB    | 4 KiB | headers; the sound one with the higher number counts |
//! | 192 KiB, 256 KiB   | 64 KiB | tables of regions; the first sound one counts     |
//!
//! A log that is not empty is changes that were not carried out: such a file is refused, as its own
//! program carries them out whenever it opens it.

use super::{
    Disk, Format, ImportError, Input, MAX_PIECE, MAX_TABLE, Piece, SECTOR, limited, number, sized,
};

/// First bytes.
pub(super) const MAGIC: &[u8] = b"vhdxfile";

const FORMAT: Format = Format::Vhdx;
const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
const HEADER_SIZE: usize = 4096;
const REGIONS: [u64; 2] = [192 << 10, 256 << 10];
const REGIONS_SIZE: usize = 64 << 10;
/// Most entries of either kind of table.
const MAX_ENTRIES: u64 = 2047;
const MEBIBYTE: u64 = 1 << 20;
const MAX_BLOCK: u64 = 256 << 20;
/// Sectors of one bitmap block.
const BITMAP_SECTORS: u64 = 1 << 23;

const BAT: Guid = Guid(*b"\x66\x77\xc2\x2d\x23\xf6\x00\x42\x9d\x64\x11\x5e\x9b\xfd\x4a\x08");
const METADATA: Guid = Guid(*b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e");
const PARAMETERS: Guid = Guid(*b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b");
const DISK_SIZE: Guid = Guid(*b"\x24\x42\xa5\x2f\x1b\xcd\x76\x48\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8");
const DISK_ID: Guid = Guid(*b"\xab\x12\xca\xbe\xe6\xb2\x23\x45\x93\xef\xc3\x09\xe0\x00\xc7\x46");
const LOGICAL: Guid = Guid(*b"\x1d\xbf\x41\x81\x6f\xa9\x09\x47\xba\x47\xf2\x33\xa8\xfa\xab\x5f");
const PHYSICAL: Guid = Guid(*b"\xc7\x48\xa3\xcd\x5d\x44\x71\x44\x9c\xc9\xe9\x88\x52\x51\xc5\x56");
const PARENTS: Guid = Guid(*b"\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c");

/// A GUID as it lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Guid([u8; 16]);

/// A part of the file.
#[derive(Debug, Clone, Copy)]
struct Region {
    offset: u64,
    length: u64,
}

/// A VHDX image.
pub(super) struct Vhdx {
    input: Input,
    size: u64,
    block: u64,
    /// Payload blocks before each entry of a bitmap.
    chunk: u64,
    table: Vec<u64>,
}

/// What the metadata says.
#[derive(Default)]
struct Metadata {
    block: u64,
    size: u64,
    logical: u64,
    parent: bool,
}

impl Vhdx {
    pub(super) fn open(input: Input) -> Result<Self, ImportError> {
        let mut magic = [0; 8];
        input.read_padded(0, &mut magic)?;
        if magic != MAGIC {
            return Err(damaged("it does not begin like one".to_owned()));
        }
        check_header(&input)?;
        let (bat, metadata) = regions(&input)?;
        let Metadata { block, size, logical, parent } = read_metadata(&input, metadata)?;
        if parent {
            let instead = "merge it with its parents first, or convert it to a dynamic disk";
            return Err(refused("has a parent".to_owned(), instead));
        }
        let sound = block.is_power_of_two() && (MEBIBYTE..=MAX_BLOCK).contains(&block);
        if !sound || !matches!(logical, 512 | 4096) || !size.is_multiple_of(logical) {
            let problem = format!("blocks of {block}, sectors of {logical}, {size} bytes in all");
            return Err(damaged(problem));
        }
        if logical != SECTOR {
            // Its partition table and file systems count in sectors of the other size.
            let instead =
                "machines' disks have sectors of 512 bytes: copy the system to such a disk";
            return Err(refused(format!("has sectors of {logical} bytes"), instead));
        }
        sized(FORMAT, size)?;
        let chunk = BITMAP_SECTORS * SECTOR / block;
        let payload = size.div_ceil(block);
        let entries = payload + payload.saturating_sub(1) / chunk;
        limited(FORMAT, "the table of blocks", (entries * 8, MAX_TABLE))?;
        if entries * 8 > bat.length {
            return Err(damaged(format!("{entries} blocks do not fit their table")));
        }
        let mut bytes = Vec::new();
        input.append(bat.offset, entries * 8, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        let table = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Ok(Self { input, size, block, chunk, table })
    }
}

impl Disk for Vhdx {
    fn size(&self) -> u64 {
        self.size
    }

    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        let inside = offset % self.block;
        let left = self.block - inside;
        let index = offset / self.block;
        let slot = usize::try_from(index + index / self.chunk).unwrap_or(usize::MAX);
        let entry = self.table.get(slot).copied().unwrap_or(0);
        match entry & 7 {
            // Not present, undefined, zero, unmapped; unmapped as Windows Server 2012 wrote it before its release,
            // version 0.95 of the format (QEMU block/vhdx.h, PAYLOAD_BLOCK_UNMAPPED_v095).
            0..=3 | 5 => Ok(Piece::Zeroes(left)),
            6 => {
                let at = (entry >> 20) * MEBIBYTE;
                let end = at.saturating_add(inside + left.min(self.size - offset));
                if at < MEBIBYTE || end > self.input.length() {
                    return Err(damaged(format!("a block at {at:#x}, outside of the file")));
                }
                self.input.append(at + inside, left.min(MAX_PIECE), buffer)?;
                Ok(Piece::Bytes)
            }
            state => Err(damaged(format!("block {index} has state {state}"))),
        }
    }
}

/// Finds the current header and checks that nothing waits in the log.
fn check_header(input: &Input) -> Result<(), ImportError> {
    let mut best: Option<(u64, [u8; HEADER_SIZE])> = None;
    for at in HEADERS {
        let mut header = [0; HEADER_SIZE];
        input.read_padded(at, &mut header)?;
        let order = u64::from_le_bytes(number(&header, 8));
        let newer = best.as_ref().is_none_or(|(other, _)| order > *other);
        if header.starts_with(b"head") && checksum_fits(&header) && newer {
            best = Some((order, header));
        }
    }
    let Some((_, header)) = best else {
        return Err(damaged("no header with a right checksum".to_owned()));
    };
    let version = u16::from_le_bytes(number(&header, 66));
    if version != 1 {
        return Err(refused(format!("has version {version}"), "convert it to version 1"));
    }
    if number::<16>(&header, 48) != [0; 16] {
        let instead = "open it once with the program that made it, or check it, as by `qemu-img check -r all`";
        return Err(refused("was not closed and has changes in its log".to_owned(), instead));
    }
    Ok(())
}

/// Returns where the table of blocks and the metadata are.
fn regions(input: &Input) -> Result<(Region, Region), ImportError> {
    let mut table = vec![0; REGIONS_SIZE];
    let mut found = false;
    for at in REGIONS {
        input.read_padded(at, &mut table)?;
        found = table.starts_with(b"regi") && checksum_fits(&table);
        if found {
            break;
        }
    }
    if !found {
        return Err(damaged("no table of regions with a right checksum".to_owned()));
    }
    let count = u64::from(u32::from_le_bytes(number(&table, 8)));
    limited(FORMAT, "the count of regions", (count, MAX_ENTRIES))?;
    let (mut bat, mut metadata) = (None, None);
    for entry in table[16..].as_chunks::<32>().0.iter().take(usize::try_from(count).unwrap_or(0)) {
        let place = Region {
            offset: u64::from_le_bytes(number(entry, 16)),
            length: u64::from(u32::from_le_bytes(number(entry, 24))),
        };
        let inside =
            place.offset.checked_add(place.length).is_some_and(|end| end <= input.length());
        match Guid(number(entry, 0)) {
            _ if !inside => return Err(damaged("a region outside of the file".to_owned())),
            BAT => bat = Some(place),
            METADATA => metadata = Some(place),
            other if entry[28] & 1 != 0 => return Err(unknown("region", other)),
            _ => {}
        }
    }
    match (bat, metadata) {
        (Some(bat), Some(metadata)) => Ok((bat, metadata)),
        _ => Err(damaged("the table of blocks or the metadata is missing".to_owned())),
    }
}

fn read_metadata(input: &Input, region: Region) -> Result<Metadata, ImportError> {
    let Region { offset, length } = region;
    let mut table = vec![0; REGIONS_SIZE];
    input.read_padded(offset, &mut table)?;
    if !table.starts_with(b"metadata") {
        return Err(damaged("the metadata does not begin like it".to_owned()));
    }
    let count = u64::from(u16::from_le_bytes(number(&table, 10)));
    limited(FORMAT, "the count of metadata items", (count, MAX_ENTRIES))?;
    let mut metadata = Metadata::default();
    for entry in table[32..].as_chunks::<32>().0.iter().take(usize::try_from(count).unwrap_or(0)) {
        let at = u64::from(u32::from_le_bytes(number(entry, 16)));
        if at + 8 > length {
            return Err(damaged("a metadata item outside of its region".to_owned()));
        }
        let mut item = [0; 8];
        input.read_padded(offset + at, &mut item)?;
        let first = u64::from(u32::from_le_bytes(number(&item, 0)));
        match Guid(number(entry, 0)) {
            PARAMETERS => {
                metadata.block = first;
                metadata.parent = item[4] & 2 != 0;
            }
            DISK_SIZE => metadata.size = u64::from_le_bytes(item),
            LOGICAL => metadata.logical = first,
            DISK_ID | PHYSICAL | PARENTS => {}
            other if entry[24] & 4 != 0 => return Err(unknown("metadata item", other)),
            _ => {}
        }
    }
    Ok(metadata)
}

/// Returns whether the CRC-32C at byte 4 fits the bytes, itself taken as zero.
fn checksum_fits(bytes: &[u8]) -> bool {
    let crc = crc::Crc::<u32, crc::Table<16>>::new(&crc::CRC_32_ISCSI);
    let mut digest = crc.digest();
    digest.update(&bytes[..4]);
    digest.update(&[0; 4]);
    digest.update(&bytes[8..]);
    digest.finalize() == u32::from_le_bytes(number(bytes, 4))
}

fn unknown(what: &str, guid: Guid) -> ImportError {
    let problem = format!("needs the unknown {what} {:02x?}", guid.0);
    refused(problem, "convert it with the program that made it")
}

fn damaged(problem: String) -> ImportError {
    ImportError::Damaged { format: FORMAT.name(), problem }
}

fn refused(problem: String, instead: &'static str) -> ImportError {
    ImportError::Unsupported { format: FORMAT.name(), problem, instead }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_without_data_read_as_zeroes_whatever_their_state() {
        let mut disk = Vhdx {
            input: Input::Memory(Vec::new()),
            size: 7 * MEBIBYTE,
            block: MEBIBYTE,
            chunk: 4096,
            table: vec![0, 1, 2, 3, 5, 4, 7],
        };
        let mut read = |block: u64| disk.piece(block * MEBIBYTE, &mut Vec::new()).ok();
        assert_eq!([0u64, 1, 2, 3, 4].map(&mut read), [Some(Piece::Zeroes(MEBIBYTE)); 5]);
        assert_eq!([5u64, 6].map(&mut read), [None; 2]);
    }
}
