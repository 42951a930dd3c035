//! The bytes of the disk, and nothing else. A last sector that is not whole is filled with zeroes.

use super::{Disk, Format, ImportError, Input, MAX_PIECE, Piece, SECTOR, sized};

/// A raw image.
pub(super) struct Raw {
    input: Input,
    size: u64,
}

impl Raw {
    pub(super) fn open(input: Input) -> Result<Self, ImportError> {
        let size = sized(Format::Raw, input.length().next_multiple_of(SECTOR))?;
        Ok(Self { input, size })
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
