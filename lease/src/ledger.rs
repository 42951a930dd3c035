//! An append-only log in which nothing can be altered unnoticed: each entry names the hash of
//! the one before it. Bytes in, bytes out; whoever owns the file writes what [`Ledger::append`]
//! returns and syncs before it acknowledges.
//!
//! | Offset | Length | Entry                                            |
//! |--------|--------|--------------------------------------------------|
//! | 0      | 8      | index, big-endian, from 0                        |
//! | 8      | 32     | hash of the entry before; zeros for the first    |
//! | 40     | 4      | length of the payload, big-endian                |
//! | 44     | n      | payload                                          |
//! | 44 + n | 32     | SHA-256 of everything above                      |

use sha2::{Digest, Sha256};

/// Largest payload, in bytes.
pub const MAX_PAYLOAD: usize = 1 << 20;

const HEAD: usize = 44;
const HASH: usize = 32;

/// Why bytes are no ledger, or a payload cannot be appended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum LedgerError {
    #[error("entry {index} at byte {offset} was altered: {what}")]
    Altered { index: u64, offset: usize, what: &'static str },
    #[error("the payload has {found} bytes; at most {MAX_PAYLOAD} are kept in one entry")]
    TooLarge { found: usize },
}

/// The end of a ledger, which is all that appending needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    next: u64,
    head: [u8; HASH],
}

/// What was read of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened<'a> {
    /// Where to go on.
    pub ledger: Ledger,
    /// The payloads, oldest first.
    pub payloads: Vec<&'a [u8]>,
    /// Bytes of whole entries. What follows is an entry that a power cut broke off: it was never
    /// acknowledged and is cut away before the next is appended.
    pub whole: usize,
}

impl Ledger {
    /// Verifies the whole chain.
    pub fn open(bytes: &[u8]) -> Result<Opened<'_>, LedgerError> {
        let mut opened = Opened { ledger: Self::default(), payloads: Vec::new(), whole: 0 };
        while let Some((payload, length)) =
            opened.ledger.step(&bytes[opened.whole..], opened.whole)?
        {
            opened.payloads.push(payload);
            opened.whole += length;
        }
        Ok(opened)
    }

    /// Returns the bytes of the next entry.
    pub fn append(&mut self, payload: &[u8]) -> Result<Vec<u8>, LedgerError> {
        let too_large = LedgerError::TooLarge { found: payload.len() };
        let length = match u32::try_from(payload.len()) {
            Ok(length) if payload.len() <= MAX_PAYLOAD => length,
            _ => return Err(too_large),
        };
        let mut bytes = self.next.to_be_bytes().to_vec();
        bytes.extend_from_slice(&self.head);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(payload);
        self.head = Sha256::digest(&bytes).into();
        self.next += 1;
        bytes.extend_from_slice(&self.head);
        Ok(bytes)
    }

    /// Returns the hash of the last entry: a checkpoint of everything before.
    pub fn head(&self) -> &[u8; HASH] {
        &self.head
    }

    /// Reads one entry; `None` when there is no whole one.
    fn step<'a>(
        &mut self,
        bytes: &'a [u8],
        offset: usize,
    ) -> Result<Option<(&'a [u8], usize)>, LedgerError> {
        let index = self.next;
        let altered = |what| Err(LedgerError::Altered { index, offset, what });
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
        let (number, head) = head.split_at(8);
        let (previous, length) = head.split_at(HASH);
        if number != index.to_be_bytes() {
            return altered("the index is another");
        }
        if previous != self.head {
            return altered("it does not follow the entry before");
        }
        let length = length.iter().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
        if length > MAX_PAYLOAD {
            return altered("the length is more than an entry holds");
        }
        let Some((payload, rest)) = rest.split_at_checked(length) else { return Ok(None) };
        let Some((hash, _)) = rest.split_first_chunk::<HASH>() else { return Ok(None) };
        let expected: [u8; HASH] = Sha256::digest(&bytes[..HEAD + length]).into();
        if *hash != expected {
            return altered("the hash is another");
        }
        (self.next, self.head) = (index + 1, expected);
        Ok(Some((payload, HEAD + length + HASH)))
    }
}
