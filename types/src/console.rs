//! The form of the file that keeps a guest's newest console output.
//!
//! | Offset | Bytes  | Meaning                                                             |
//! |--------|--------|---------------------------------------------------------------------|
//! | 0      | 8      | [`MAGIC`]                                                           |
//! | 8      | 8      | bytes of output since the guest started, little-endian              |
//! | 16     | 65,536 | byte `n` of the output at `n` modulo 65,536; the newest are there   |
//!
//! A VMM writes it through a mapping while it runs, so that any end of the process leaves it whole:
//! first the bytes, then their number.

/// What such a file begins with.
pub const MAGIC: [u8; 8] = *b"HFCONSL1";

/// Bytes of output that are kept.
pub const KEPT: usize = 64 << 10;

/// Bytes before the output.
pub const HEAD: usize = 16;

/// Bytes of the file.
pub const FILE_SIZE: usize = HEAD + KEPT;

/// Returns the offset in the file of byte `number` of the output.
pub fn place(number: u64) -> usize {
    let within = number % KEPT as u64;
    HEAD + usize::try_from(within).unwrap_or(0)
}

/// The newest output in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// Number of its first byte since the guest started.
    pub from: u64,
    /// The bytes, at most [`KEPT`].
    pub bytes: Vec<u8>,
}

/// Reads such a file. Returns `None` when it is none.
pub fn parse(file: &[u8]) -> Option<Tail> {
    let (head, output) = (file.get(..HEAD)?, file.get(HEAD..FILE_SIZE)?);
    let (magic, end) = head.split_at(8);
    if magic != MAGIC {
        return None;
    }
    let end = u64::from_le_bytes(end.try_into().ok()?);
    let from = end.saturating_sub(KEPT as u64);
    let start = place(from) - HEAD;
    let length = usize::try_from(end - from).ok()?;
    let bytes = output.iter().cycle().skip(start).take(length).copied().collect();
    Some(Tail { from, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file after `count` bytes of output, of which byte `n` is `n` modulo 251.
    fn file(count: u64) -> Vec<u8> {
        let mut file = vec![0; FILE_SIZE];
        file[..8].copy_from_slice(&MAGIC);
        file[8..16].copy_from_slice(&count.to_le_bytes());
        for number in count.saturating_sub(KEPT as u64)..count {
            file[place(number)] = byte(number);
        }
        file
    }

    fn byte(number: u64) -> u8 {
        u8::try_from(number % 251).expect("less than 251")
    }

    #[test]
    fn little_output_is_kept_whole() {
        assert_eq!(parse(&file(0)), Some(Tail { from: 0, bytes: Vec::new() }));
        assert_eq!(parse(&file(3)), Some(Tail { from: 0, bytes: vec![0, 1, 2] }));
    }

    #[test]
    fn the_newest_of_much_output_is_kept() {
        let count = 3 * KEPT as u64 + 7;
        let tail = parse(&file(count)).expect("a file");
        assert_eq!((tail.from, tail.bytes.len()), (count - KEPT as u64, KEPT));
        assert_eq!(tail.bytes.first(), Some(&byte(tail.from)));
        assert_eq!(tail.bytes.last(), Some(&byte(count - 1)));
    }

    #[test]
    fn other_files_are_none() {
        assert_eq!(parse(&[]), None);
        assert_eq!(parse(&file(9)[..FILE_SIZE - 1]), None);
        assert_eq!(parse(&vec![0; FILE_SIZE]), None);
    }
}
