//! The bytes of the disk, and nothing else. A last sector that is not whole is filled with zeroes.

use super::{Disk, ImportError, Input, MAX_PIECE, Piece, SECTOR};

/// A raw image.
pub(super) struct Raw {
    input: Input,
    size: u64,
}

impl Raw {
    pub(super) fn new(input: Input) -> Self {
        let size = input.length().next_multiple_of(SECTOR);
        Self { input, size }
    }
}

impl Disk for Raw {
    fn size(&self) -> u64 {
        self.size
    }

    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError> {
        let hole = self.input.hole(offset);
        if hole > 0 {
            return Ok(Piece::Zeroes(hole));
        }
        self.input.append(offset, MAX_PIECE.min(self.size - offset), buffer)?;
        Ok(Piece::Bytes)
    }
}
