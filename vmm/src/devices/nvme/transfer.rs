//! Commands of the NVM command set: what they ask for, checked.
//! Source: NVMe 1.4 §6 "NVM Command Set": §6.7 Dataset Management, §6.8 Flush, §6.9 Read, §6.15
//! Write, §6.17 Write Zeroes.

use super::{
    command::{Command, Status},
    identify::{MAX_TRANSFER, NAMESPACE, Profile},
};
use crate::devices::virtio::blk::{
    Durability,
    request::{Access, Support},
};

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const WRITE_ZEROES: u8 = 0x08;
const DATASET_MANAGEMENT: u8 = 0x09;

/// All namespaces.
const BROADCAST: u32 = u32::MAX;
/// Dword 12 of Write and of Write Zeroes: force unit access.
const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Dword 12 of Write Zeroes: deallocate.
const DEALLOCATE_ZEROED: u32 = 1 << 25;
/// Dword 11 of Dataset Management: deallocate.
const DEALLOCATE: u32 = 1 << 2;

/// Bytes of one range of Dataset Management.
pub const RANGE_SIZE: usize = 16;

/// What a command asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Make all finished writes durable.
    Flush,
    /// Move bytes from the file to memory.
    Read {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Bytes, at most [`MAX_TRANSFER`].
        length: u64,
    },
    /// Move bytes from memory to the file.
    Write {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Bytes, at most [`MAX_TRANSFER`].
        length: u64,
        /// When it counts as done.
        durability: Durability,
    },
    /// Make a range read as zeroes.
    Zero {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Bytes, inside the disk.
        length: u64,
        /// Whether the space may be given back.
        deallocate: bool,
        /// When it counts as done.
        durability: Durability,
    },
    /// Give back ranges, which are in memory.
    Deallocate {
        /// How many, 1..=256.
        ranges: usize,
    },
    /// Nothing at all.
    Nothing,
}

impl Work {
    /// Returns how many operations count against a limit.
    pub fn operations(self) -> usize {
        if let Self::Deallocate { ranges } = self { ranges } else { 1 }
    }

    /// Returns the bytes that count against a limit, or `None` for what is free.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Read { length, .. } | Self::Write { length, .. } => Some(length),
            // Bytes that move nowhere; the request itself counts, a flush above all: everybody waits who
            // uses the host's disk.
            Self::Zero { .. } | Self::Deallocate { .. } | Self::Flush => Some(0),
            Self::Nothing => None,
        }
    }
}

/// Returns what `command` asks for.
pub fn parse(command: &Command, profile: &Profile) -> Result<Work, Status> {
    if !command.is_plain() {
        return Err(Status::INVALID_FIELD);
    }
    let flushes_all = command.opcode == FLUSH && command.namespace == BROADCAST;
    if command.namespace != NAMESPACE && !flushes_all {
        return Err(
            known(command.opcode).map_or(Status::INVALID_OPCODE, |()| Status::INVALID_NAMESPACE)
        );
    }
    match command.opcode {
        FLUSH => Ok(Work::Flush),
        READ => {
            let (offset, length) = transfer(command, profile)?;
            Ok(Work::Read { offset, length })
        }
        WRITE => {
            writable(profile)?;
            let (offset, length) = transfer(command, profile)?;
            Ok(Work::Write { offset, length, durability: durability(command) })
        }
        WRITE_ZEROES if profile.zeroes() == Support::Yes => {
            writable(profile)?;
            let (offset, length) = range(command, profile)?;
            let asked = command.dwords[2] & DEALLOCATE_ZEROED != 0;
            let possible = profile.deallocate == Support::Yes;
            let deallocate = possible && (asked || profile.zero == Support::No);
            Ok(Work::Zero { offset, length, deallocate, durability: durability(command) })
        }
        DATASET_MANAGEMENT if profile.deallocate == Support::Yes => {
            writable(profile)?;
            let ranges = usize::from(command.dwords[0].to_le_bytes()[0]) + 1;
            let asked = command.dwords[1] & DEALLOCATE != 0;
            Ok(if asked { Work::Deallocate { ranges } } else { Work::Nothing })
        }
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Returns the byte ranges that Dataset Management lists, each inside the disk (figure 366:
/// attributes, length in blocks, first block).
pub fn ranges(list: &[u8], profile: &Profile) -> Result<Vec<(u64, u64)>, Status> {
    let (entries, _) = list.as_chunks::<RANGE_SIZE>();
    let parsed = entries.iter().map(|entry| {
        let [_, _, _, _, n0, n1, n2, n3, b0, b1, b2, b3, b4, b5, b6, b7] = *entry;
        let blocks = u32::from_le_bytes([n0, n1, n2, n3]);
        let first = u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]);
        inside(first, blocks.into(), profile)
    });
    // A range without blocks asks for nothing.
    parsed.filter(|range| !matches!(range, Ok((_, 0)))).collect()
}

/// Returns when a command that changes the disk counts as done, as far as it says so itself.
fn durability(command: &Command) -> Durability {
    let forced = command.dwords[2] & FORCE_UNIT_ACCESS != 0;
    if forced { Durability::Durable } else { Durability::Cached }
}

fn known(opcode: u8) -> Option<()> {
    matches!(opcode, FLUSH | WRITE | READ | WRITE_ZEROES | DATASET_MANAGEMENT).then_some(())
}

fn writable(profile: &Profile) -> Result<(), Status> {
    match profile.access {
        Access::ReadWrite => Ok(()),
        Access::ReadOnly => Err(Status::WRITE_PROTECTED),
    }
}

fn transfer(command: &Command, profile: &Profile) -> Result<(u64, u64), Status> {
    let (offset, length) = range(command, profile)?;
    if length > MAX_TRANSFER { Err(Status::INVALID_FIELD) } else { Ok((offset, length)) }
}

/// Returns offset and length that dwords 10 to 12 name. Protection information (dword 12, PRINFO)
/// is for namespaces that are formatted with it (figure 353); none here is.
fn range(command: &Command, profile: &Profile) -> Result<(u64, u64), Status> {
    let blocks = u64::from(command.dwords[2] & 0xffff) + 1;
    inside(command.starting_block(), blocks, profile)
}

fn inside(first: u64, blocks: u64, profile: &Profile) -> Result<(u64, u64), Status> {
    match first.checked_add(blocks) {
        Some(end) if end <= profile.blocks => {
            Ok((first << profile.block_log2, blocks << profile.block_log2))
        }
        Some(_) | None => Err(Status::OUT_OF_RANGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile {
            serial: [b' '; 20],
            pairs: 1,
            blocks: 4096,
            block_log2: 9,
            blocks_at_once: 8,
            access: Access::ReadWrite,
            deallocate: Support::Yes,
            zero: Support::Yes,
        }
    }

    fn command(opcode: u8, first: u64, dword12: u32) -> Command {
        let low = u32::try_from(first & 0xffff_ffff).expect("32 bits");
        let high = u32::try_from(first >> 32).expect("32 bits");
        let dwords = [low, high, dword12, 0, 0, 0];
        Command { opcode, flags: 0, id: 0, namespace: 1, prp1: 0, prp2: 0, dwords }
    }

    fn parsed(opcode: u8, first: u64, dword12: u32) -> Result<Work, Status> {
        parse(&command(opcode, first, dword12), &profile())
    }

    #[test]
    fn transfers_name_bytes_of_the_file() {
        assert_eq!(parsed(2, 8, 7), Ok(Work::Read { offset: 4096, length: 4096 }));
        let write = |durability| Ok(Work::Write { offset: 0, length: 512, durability });
        assert_eq!(parsed(1, 0, 0), write(Durability::Cached));
        assert_eq!(parsed(1, 0, 1 << 30), write(Durability::Durable));
    }

    #[test]
    fn transfers_past_the_end_or_too_long_fail() {
        let table = [(4096, 0), (4095, 1), (u64::MAX, 0), (u64::MAX, 1), (1 << 55, 0)];
        for opcode in [1, 2, 8] {
            let found = table.map(|(first, blocks)| parsed(opcode, first, blocks));
            assert_eq!(found, [Err(Status::OUT_OF_RANGE); 5]);
        }
        assert_eq!(parsed(2, 0, 2047), Ok(Work::Read { offset: 0, length: 1 << 20 }));
        assert_eq!(parsed(2, 0, 2048), Err(Status::INVALID_FIELD));
        assert_eq!(parsed(2, 0, 0xf << 26), parsed(2, 0, 0), "PRINFO is not looked at");
    }

    #[test]
    fn zeroing_may_be_longer_than_a_transfer() {
        let zero = |deallocate, durability| {
            Ok(Work::Zero { offset: 0, length: 2 << 20, deallocate, durability })
        };
        assert_eq!(parsed(8, 0, 4095), zero(false, Durability::Cached));
        assert_eq!(parsed(8, 0, 4095 | 1 << 25), zero(true, Durability::Cached));
        assert_eq!(parsed(8, 0, 4095 | 1 << 30), zero(false, Durability::Durable));
    }

    #[test]
    fn a_write_protected_namespace_takes_no_change() {
        let profile = Profile { access: Access::ReadOnly, ..profile() };
        let status = [1, 8, 9].map(|opcode| parse(&command(opcode, 0, 0), &profile));
        assert_eq!(status, [Err(Status::WRITE_PROTECTED); 3]);
        assert_eq!(parse(&command(0, 0, 0), &profile), Ok(Work::Flush));
    }

    #[test]
    fn what_is_not_offered_is_an_invalid_opcode() {
        let poor = Profile { deallocate: Support::No, zero: Support::No, ..profile() };
        assert_eq!(parse(&command(8, 0, 0), &poor), Err(Status::INVALID_OPCODE));
        assert_eq!(parse(&command(9, 0, 0), &poor), Err(Status::INVALID_OPCODE));
        let unknown = [0x04, 0x05, 0x0c, 0x7f, 0xff].map(|opcode| parsed(opcode, 0, 0));
        assert_eq!(unknown, [Err(Status::INVALID_OPCODE); 5]);
    }

    #[test]
    fn only_flush_may_name_all_namespaces() {
        let other =
            |opcode, namespace| parse(&Command { namespace, ..command(opcode, 0, 0) }, &profile());
        assert_eq!(other(0, u32::MAX), Ok(Work::Flush));
        assert_eq!(other(2, u32::MAX), Err(Status::INVALID_NAMESPACE));
        assert_eq!([0, 2].map(|n| other(0, n)), [Err(Status::INVALID_NAMESPACE); 2]);
        assert_eq!(other(0x7f, 2), Err(Status::INVALID_OPCODE));
    }

    #[test]
    fn fused_commands_and_lists_of_segments_are_refused() {
        let command = Command { flags: 0x40, ..command(2, 0, 0) };
        assert_eq!(parse(&command, &profile()), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn ranges_are_checked_one_by_one() {
        let entry = |blocks: u32, first: u64| {
            [&[0; 4][..], &blocks.to_le_bytes(), &first.to_le_bytes()].concat()
        };
        let list = [entry(1, 2), entry(0, 5), entry(4096, 0)].concat();
        assert_eq!(ranges(&list, &profile()), Ok(vec![(1024, 512), (0, 2 << 20)]));
        let bad = [entry(1, 2), entry(2, 4095)].concat();
        assert_eq!(ranges(&bad, &profile()), Err(Status::OUT_OF_RANGE));
        assert_eq!(ranges(&entry(1, u64::MAX), &profile()), Err(Status::OUT_OF_RANGE));
    }
}
