//! A byte stream through a relay: sealed chunks, each with its length in front.
//!
//! | Bytes      | Meaning                                                             |
//! |------------|---------------------------------------------------------------------|
//! | 0..2       | length of the sealed chunk, big endian, top bit set on the last one  |
//! | 2..2+n     | the chunk, sealed with its first two bytes as associated data        |
//!
//! The chunks of one direction open in order only, and a direction that ends without its last
//! chunk was cut off; so a relay can stop a stream, but not shorten or alter it unseen.

use crate::sealed::{Opener, SealedError, Sealer};

/// Plain bytes in one chunk at most: with tag it stays below the 15 bits of the length.
pub const CHUNK: usize = 16 * 1024;

const TAG: usize = 16;
const LAST: u16 = 1 << 15;
const _: () = assert!(CHUNK + TAG < LAST as usize);

/// Why a relayed stream is over before its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum TunnelError {
    #[error("a chunk of {length} bytes; expected {} to {} bytes", TAG, CHUNK + TAG)]
    PeerLength { length: usize },
    #[error("bytes after the last chunk")]
    PeerTrailing,
    #[error("the stream was cut off on the way, before its last chunk")]
    PeerCut,
    #[error("a chunk of the stream cannot be opened")]
    Sealed(#[from] SealedError),
}

/// The sending direction.
pub struct TunnelSender {
    sealer: Sealer,
}

impl TunnelSender {
    /// Frames what `sealer` seals.
    pub fn new(sealer: Sealer) -> Self {
        Self { sealer }
    }

    /// Returns `bytes` as it travels. Longer input than [`CHUNK`] becomes several chunks.
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<Vec<u8>, TunnelError> {
        let mut framed = Vec::with_capacity(bytes.len() + (bytes.len() / CHUNK + 1) * (2 + TAG));
        for chunk in bytes.chunks(CHUNK) {
            self.frame(chunk, 0, &mut framed)?;
        }
        Ok(framed)
    }

    /// Returns the last chunk.
    pub fn handle_end(mut self) -> Result<Vec<u8>, TunnelError> {
        let mut framed = Vec::new();
        self.frame(&[], LAST, &mut framed)?;
        Ok(framed)
    }

    fn frame(&mut self, chunk: &[u8], flag: u16, out: &mut Vec<u8>) -> Result<(), TunnelError> {
        let length = u16::try_from(chunk.len() + TAG)
            .map_err(|_| TunnelError::PeerLength { length: chunk.len() })?;
        let mark = (length | flag).to_be_bytes();
        out.extend_from_slice(&mark);
        out.extend(self.sealer.seal(chunk, &mark)?);
        Ok(())
    }
}

/// The receiving direction.
pub struct TunnelReceiver {
    opener: Opener,
    /// Bytes of at most one unfinished chunk.
    partial: Vec<u8>,
    ended: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    No,
    Yes,
}

impl TunnelReceiver {
    /// Reads what was sealed for `opener`.
    pub fn new(opener: Opener) -> Self {
        Self { opener, partial: Vec::new(), ended: End::No }
    }

    /// Takes bytes as they arrived and returns the plain bytes that are complete.
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<Vec<u8>, TunnelError> {
        self.partial.extend_from_slice(bytes);
        let mut plain = Vec::new();
        let mut at = 0;
        while let Some((mark, rest)) = self.partial[at..].split_first_chunk::<2>() {
            if self.ended == End::Yes {
                return Err(TunnelError::PeerTrailing);
            }
            let word = u16::from_be_bytes(*mark);
            let length = usize::from(word & !LAST);
            if !(TAG..=CHUNK + TAG).contains(&length) {
                return Err(TunnelError::PeerLength { length });
            }
            let Some(sealed) = rest.get(..length) else { break };
            plain.extend(self.opener.open(sealed, mark)?);
            at += 2 + length;
            if word & LAST != 0 {
                self.ended = End::Yes;
            }
        }
        self.partial.drain(..at);
        if self.ended == End::Yes && !self.partial.is_empty() {
            return Err(TunnelError::PeerTrailing);
        }
        Ok(plain)
    }

    /// Says that nothing more will arrive.
    pub fn handle_end(&self) -> Result<(), TunnelError> {
        match self.ended {
            End::No => Err(TunnelError::PeerCut),
            End::Yes => Ok(()),
        }
    }

    /// Says whether the last chunk was read.
    pub fn is_ended(&self) -> bool {
        self.ended == End::Yes
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;

    use super::*;
    use crate::{identity::Identity, sealed::Purpose};

    fn pair() -> (TunnelSender, TunnelReceiver) {
        let a = Identity::new(SigningKey::from_bytes(&[1; 32]));
        let b = Identity::new(SigningKey::from_bytes(&[2; 32]));
        let (key, sealer) = Sealer::new(&a, b.id(), Purpose::StreamForward).expect("sealer");
        let opener = Opener::new(&b, a.id(), Purpose::StreamForward, &key).expect("opener");
        (TunnelSender::new(sealer), TunnelReceiver::new(opener))
    }

    #[test]
    fn bytes_survive_any_fragmentation() {
        let (mut sender, mut receiver) = pair();
        let bytes: Vec<u8> = (0..=255u8).cycle().take(3 * CHUNK + 5).collect();
        let mut framed = sender.handle_bytes(&bytes).expect("framed");
        framed.extend(sender.handle_end().expect("last"));
        let mut plain = Vec::new();
        for piece in framed.chunks(977) {
            plain.extend(receiver.handle_bytes(piece).expect("piece"));
        }
        assert!(plain == bytes && receiver.is_ended());
        assert_eq!(receiver.handle_end(), Ok(()));
        assert_eq!(receiver.handle_bytes(b"x"), Err(TunnelError::PeerTrailing));
    }

    #[test]
    fn cuts_swaps_and_lengths_are_noticed() {
        let (mut sender, mut receiver) = pair();
        let first = sender.handle_bytes(b"first").expect("framed");
        let second = sender.handle_bytes(b"second").expect("framed");
        assert!(matches!(receiver.handle_bytes(&second), Err(TunnelError::Sealed(_))));
        let (_, mut receiver) = pair();
        assert_eq!(receiver.handle_bytes(&[0, 15]), Err(TunnelError::PeerLength { length: 15 }));
        assert_eq!(receiver.handle_end(), Err(TunnelError::PeerCut));
        let (mut sender, mut receiver) = pair();
        let last = TunnelSender::handle_end;
        let framed = sender.handle_bytes(&[]).expect("empty");
        assert!(framed.is_empty());
        let mut end = last(sender).expect("last");
        end[0] &= 0x7f;
        assert!(receiver.handle_bytes(&end).is_err(), "the flag is authenticated");
        drop(first);
    }
}
