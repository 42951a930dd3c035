//! What a chain on a block queue asks for. Every number in it is the guest's.
//! Source: virtio §5.2.6 "Device Operation".
//!
//! | Bytes        | Part     | Field                                                     |
//! |--------------|----------|-----------------------------------------------------------|
//! | 0..4         | readable | type: 0 read, 1 write, 4 flush, 8 id, 11 discard, 13 zero |
//! | 4..8         | readable | reserved                                                  |
//! | 8..16        | readable | sector, in units of 512 bytes                             |
//! | 16..         | readable | data to write, or one discard segment                     |
//! | 0..last      | writable | data read, or the id                                      |
//! | last         | writable | status: 0 done, 1 error, 2 not supported                  |
//!
//! Descriptors may cut these anywhere (virtio §2.7.4): the parser looks at bytes, not descriptors.

use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, Permissions};

use crate::{
    devices::virtio::ring::{Chain, Segment},
    sys::memory::GuestRam,
};

/// Bytes of a sector, whatever the logical block size (virtio §5.2.4).
pub const SECTOR: u64 = 512;
/// Bytes of the id that GET_ID returns.
pub const ID_SIZE: usize = 20;
/// Most sectors of one discard or write-zeroes: 1 GiB, so that none holds the queue for long.
pub const MAX_RANGE_SECTORS: u32 = 1 << 21;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

/// Flag of a write-zeroes segment: the range may be given back.
const FLAG_UNMAP: u32 = 1;

const HEADER_SIZE: usize = 16;
const RANGE_SIZE: usize = 16;

/// The status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// VIRTIO_BLK_S_OK.
    Done,
    /// VIRTIO_BLK_S_IOERR.
    Failed,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
}

impl Status {
    /// Returns the byte.
    pub fn byte(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Unsupported => 2,
        }
    }
}

/// What the parser must know of the disk and of the features agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Sectors of the disk.
    pub sectors: u64,
    /// Whether the driver may change the disk.
    pub access: Access,
    /// Whether discard was agreed on.
    pub discard: Support,
    /// Whether write-zeroes was agreed on.
    pub zero: Support,
}

/// Whether a disk may be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    ReadOnly,
    /// Read and written.
    ReadWrite,
}

/// Whether a kind of request is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// It is answered with "not supported".
    No,
    /// It is carried out.
    Yes,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The chain to give back.
    pub head: u16,
    /// Where the status byte goes.
    pub status: GuestAddress,
    /// What to do.
    pub work: Work,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Read the file at a byte offset.
    Read {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Whole sectors, inside the disk.
        into: Vec<Segment>,
    },
    /// Write the file at a byte offset.
    Write {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Whole sectors, inside the disk.
        from: Vec<Segment>,
    },
    /// Make finished writes durable.
    Flush,
    /// Write the id.
    Identify {
        /// Where it goes.
        into: Vec<Segment>,
    },
    /// Give back a range.
    Discard {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Bytes, inside the disk.
        length: u64,
    },
    /// Zero a range.
    Zero {
        /// Byte offset, inside the disk.
        offset: u64,
        /// Bytes, inside the disk.
        length: u64,
        /// Whether the space may be given back.
        unmap: bool,
    },
    /// Nothing: answer with this status.
    Answer(Status),
}

impl Work {
    /// Returns the bytes that count against a limit, or `None` for what is free.
    pub fn bytes(&self) -> Option<u64> {
        let sum = |segments: &[Segment]| segments.iter().map(|part| u64::from(part.length)).sum();
        match self {
            Self::Read { into, .. } => Some(sum(into)),
            Self::Write { from, .. } => Some(sum(from)),
            // Bytes that move nowhere; the request itself counts, a flush above all: everybody waits who
            // uses the host's disk.
            Self::Discard { .. } | Self::Zero { .. } | Self::Flush => Some(0),
            Self::Identify { .. } | Self::Answer(_) => None,
        }
    }
}

/// The chain has no room for an answer; the device needs a reset.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RequestError {
    #[error("chain {head} has no writable byte for the status")]
    NoStatus { head: u16 },
    #[error("chain {head} wants its status at {address:#x}, which is not memory")]
    StatusOutside { head: u16, address: u64 },
}

/// Returns what `chain` asks for.
pub fn parse(chain: Chain, ram: &GuestRam, rules: &Rules) -> Result<Request, RequestError> {
    let Chain { head, readable, mut writable } = chain;
    let status = take_last_byte(&mut writable).ok_or(RequestError::NoStatus { head })?;
    if !ram.check_range(status, 1, Permissions::Write) {
        let address = status.raw_value();
        return Err(RequestError::StatusOutside { head, address });
    }
    let work = parse_work(readable, writable, ram, rules).unwrap_or(Work::Answer(Status::Failed));
    Ok(Request { head, status, work })
}

/// Returns the work, or `None` when its numbers make no sense.
fn parse_work(
    mut readable: Vec<Segment>,
    writable: Vec<Segment>,
    ram: &GuestRam,
    rules: &Rules,
) -> Option<Work> {
    let mut header = [0; HEADER_SIZE];
    take_front(&mut readable, ram, &mut header)?;
    let (kind, sector) = split_header(header);
    let work = match kind {
        TYPE_IN => {
            let (offset, _) = inside(rules, sector, sectors_of(&writable)?)?;
            Work::Read { offset, into: writable }
        }
        TYPE_OUT if rules.access == Access::ReadWrite => {
            let (offset, _) = inside(rules, sector, sectors_of(&readable)?)?;
            Work::Write { offset, from: readable }
        }
        TYPE_FLUSH => Work::Flush,
        TYPE_GET_ID => Work::Identify { into: writable },
        TYPE_DISCARD if rules.discard == Support::Yes => {
            return parse_range(kind, readable, ram, rules);
        }
        TYPE_WRITE_ZEROES if rules.zero == Support::Yes => {
            return parse_range(kind, readable, ram, rules);
        }
        TYPE_OUT => Work::Answer(Status::Failed),
        _ => Work::Answer(Status::Unsupported),
    };
    Some(work)
}

/// Parses the one segment of a discard or write-zeroes (virtio §5.2.6; `max_discard_seg` is 1).
fn parse_range(
    kind: u32,
    mut readable: Vec<Segment>,
    ram: &GuestRam,
    rules: &Rules,
) -> Option<Work> {
    let mut bytes = [0; RANGE_SIZE];
    take_front(&mut readable, ram, &mut bytes)?;
    if !readable.is_empty() || rules.access == Access::ReadOnly {
        return None;
    }
    let (sector, count, flags) = split_range(bytes);
    let known = if kind == TYPE_DISCARD { 0 } else { FLAG_UNMAP };
    if flags & !known != 0 {
        return Some(Work::Answer(Status::Unsupported));
    }
    if count > MAX_RANGE_SECTORS {
        return None;
    }
    let (offset, length) = inside(rules, sector, count.into())?;
    Some(if length == 0 {
        Work::Answer(Status::Done)
    } else if kind == TYPE_DISCARD {
        Work::Discard { offset, length }
    } else {
        Work::Zero { offset, length, unmap: flags & FLAG_UNMAP != 0 }
    })
}

fn split_header(bytes: [u8; HEADER_SIZE]) -> (u32, u64) {
    let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = bytes;
    (u32::from_le_bytes([t0, t1, t2, t3]), u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]))
}

fn split_range(bytes: [u8; RANGE_SIZE]) -> (u64, u32, u32) {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = bytes;
    (
        u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        u32::from_le_bytes([n0, n1, n2, n3]),
        u32::from_le_bytes([f0, f1, f2, f3]),
    )
}

/// Returns byte offset and length of `count` sectors at `sector` if the disk holds them.
fn inside(rules: &Rules, sector: u64, count: u64) -> Option<(u64, u64)> {
    let end = sector.checked_add(count)?;
    if end > rules.sectors {
        return None;
    }
    Some((sector.checked_mul(SECTOR)?, count.checked_mul(SECTOR)?))
}

/// Returns the sectors that `segments` hold if they are whole and at least one.
fn sectors_of(segments: &[Segment]) -> Option<u64> {
    let bytes: u64 = segments.iter().map(|segment| u64::from(segment.length)).sum();
    (bytes > 0 && bytes.is_multiple_of(SECTOR)).then_some(bytes / SECTOR)
}

/// Takes the last byte off, and returns its address.
fn take_last_byte(segments: &mut Vec<Segment>) -> Option<GuestAddress> {
    let last = segments.last_mut()?;
    last.length = last.length.checked_sub(1)?;
    let address = last.address.checked_add(u64::from(last.length))?;
    if last.length == 0 {
        segments.pop();
    }
    Some(address)
}

/// Takes as many bytes off the front as `bytes` holds.
fn take_front(segments: &mut Vec<Segment>, ram: &GuestRam, bytes: &mut [u8]) -> Option<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let first = segments.first_mut()?;
        let length = rest.len().min(usize::try_from(first.length).ok()?);
        let (part, behind) = rest.split_at_mut(length);
        ram.read_slice(part, first.address).ok()?;
        rest = behind;
        let taken = u32::try_from(length).ok()?;
        first.length = first.length.checked_sub(taken)?;
        first.address = first.address.checked_add(u64::from(taken))?;
        if first.length == 0 {
            segments.remove(0);
        }
    }
    Some(())
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
