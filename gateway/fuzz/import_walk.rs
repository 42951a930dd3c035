//! Walks through a disk image of a foreign format, whatever its bytes are.

use gateway::import::{self, Format, Input, Piece, file::Nowhere};

/// Walks through whatever disk `bytes` hold: that ends or fails, within the bounds on sizes and pieces.
pub(crate) fn walk(format: Format, bytes: &[u8]) {
    let Ok(mut disk) = import::open(format, Input::Memory(bytes.to_vec()), &Nowhere) else {
        return;
    };
    assert!(disk.size() <= import::MAX_DISK);
    let (mut offset, mut buffer) = (0, Vec::new());
    for _ in 0..2000 {
        if offset >= disk.size() {
            return;
        }
        buffer.clear();
        let length = match disk.piece(offset, &mut buffer) {
            Ok(Piece::Zeroes(length)) => length,
            Ok(Piece::Bytes) => buffer.len() as u64,
            Err(_) => return,
        };
        assert!(length > 0 && buffer.len() as u64 <= import::MAX_PIECE);
        offset += length;
    }
}
