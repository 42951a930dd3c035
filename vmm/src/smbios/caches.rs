//! Type 7: the processor's caches, one structure for each level.
//! Source: DSP0134 3.6.0 §7.8.
//!
//! | Offset | Bytes | Field                                                              |
//! |--------|-------|--------------------------------------------------------------------|
//! | 0x04   | 1     | designation                                                        |
//! | 0x05   | 2     | configuration: 2:0 level less one, 7 on, 9:8 write back (1)        |
//! | 0x07   | 2, 2  | most and installed KiB, with bit 15 units of 64 KiB; 0xffff: below |
//! | 0x0b   | 2, 2  | kinds of SRAM, and which: unknown (bit 1)                          |
//! | 0x0f   | 1     | speed: unknown                                                     |
//! | 0x10   | 1     | error correction: unknown (2)                                      |
//! | 0x11   | 1     | 1 several caches, 3 instructions, 4 data, 5 unified                |
//! | 0x12   | 1     | associativity                                                      |
//! | 0x13   | 4, 4  | most and installed KiB, with bit 31 units of 64 KiB                |

use super::{NO_HANDLE, Structures};

/// Four handles for each processor, the first of which none has.
const HANDLE_CACHE: u16 = 0x7000;
/// Levels that a processor's structure can name.
const LEVELS: u8 = 3;

/// All caches of one level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// 1 is nearest to the processor.
    pub level: u8,
    /// Bytes of all of them together.
    pub bytes: u64,
    /// Ways of the largest; 0 for fully associative.
    pub ways: u16,
    /// What they hold.
    pub holds: Holds,
}

/// What a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Data.
    Data,
    /// Instructions.
    Instructions,
    /// Instructions in some, data in others.
    Either,
    /// Both.
    Unified,
}

/// Adds the structures of processor `number`. Returns the handles of levels 1, 2 and 3.
pub(super) fn add(number: u16, caches: &[Cache], all: &mut Structures) -> [u16; 3] {
    let mut handles = [NO_HANDLE; 3];
    for cache in caches.iter().filter(|cache| (1..=LEVELS).contains(&cache.level)) {
        let handle = HANDLE_CACHE + number * (1 + u16::from(LEVELS)) + u16::from(cache.level);
        let name = format!("L{} cache", cache.level);
        all.add(7, handle, &structure(cache), &[&name]);
        handles[usize::from(cache.level - 1)] = handle;
    }
    handles
}

fn structure(cache: &Cache) -> [u8; 23] {
    let mut body = [0; 23];
    let mut put =
        |at: usize, bytes: &[u8]| body[at - 4..at - 4 + bytes.len()].copy_from_slice(bytes);
    put(0x04, &[1]);
    put(0x05, &(u16::from(cache.level - 1) | 1 << 7 | 1 << 8).to_le_bytes());
    let kib = cache.bytes >> 10;
    for at in [0x07, 0x09] {
        put(at, &small(kib).to_le_bytes());
    }
    for at in [0x0b, 0x0d] {
        put(at, &(1u16 << 1).to_le_bytes());
    }
    let holds = match cache.holds {
        Holds::Either => 1,
        Holds::Instructions => 3,
        Holds::Data => 4,
        Holds::Unified => 5,
    };
    put(0x10, &[2, holds, associativity(cache.ways)]);
    for at in [0x13, 0x17] {
        put(at, &large(kib).to_le_bytes());
    }
    body
}

fn small(kib: u64) -> u16 {
    let plain = u16::try_from(kib).ok().filter(|kib| *kib < 0x8000);
    let units = u16::try_from(kib >> 6).ok().filter(|units| *units < 0x8000);
    plain.or(units.map(|units| units | 1 << 15)).unwrap_or(u16::MAX)
}

fn large(kib: u64) -> u32 {
    let plain = u32::try_from(kib).ok().filter(|kib| *kib < 1 << 31);
    plain.unwrap_or_else(|| u32::try_from(kib >> 6).unwrap_or(u32::MAX) | 1 << 31)
}

fn associativity(ways: u16) -> u8 {
    match ways {
        0 => 6,
        1 => 3,
        2 => 4,
        4 => 5,
        8 => 7,
        16 => 8,
        12 => 9,
        24 => 10,
        32 => 11,
        48 => 12,
        64 => 13,
        20 => 14,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_told_field_by_field() {
        let cache = Cache { level: 2, bytes: 1 << 20, ways: 16, holds: Holds::Unified };
        let body = structure(&cache);
        let expected = [1, 0x81, 1, 0, 4, 0, 4, 2, 0, 2, 0, 0, 2, 5, 8, 0, 4, 0, 0, 0, 4, 0, 0];
        assert_eq!(body, expected);
    }

    #[test]
    fn sizes_change_their_unit_as_they_grow() {
        assert_eq!([small(0x7fff), small(0x8000), small(1 << 22)], [0x7fff, 0x8200, 0xffff]);
        assert_eq!([large(0x7fff_ffff), large(1 << 31)], [0x7fff_ffff, 1 << 31 | 1 << 25]);
    }

    #[test]
    fn levels_have_handles_where_there_are_caches() {
        let cache = |level| Cache { level, bytes: 4096, ways: 1, holds: Holds::Data };
        let mut all = Structures::default();
        let handles = add(2, &[cache(1), cache(3), cache(4)], &mut all);
        assert_eq!(handles, [0x7009, NO_HANDLE, 0x700b]);
        assert_eq!(all.0.len(), 2 * (27 + "L1 cache".len() + 2));
    }
}
