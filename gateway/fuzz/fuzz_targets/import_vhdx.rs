//! An image of the format vhdx: whatever it says, walking through its disk ends or fails, within
//! the bounds on pieces.

#![no_main]

use gateway::import::{Format, Input, MAX_DISK, MAX_PIECE, Piece, file::Nowhere, open};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Ok(mut disk) = open(Format::Vhdx, Input::Memory(data.to_vec()), &Nowhere) else { return };
    assert!(disk.size() <= MAX_DISK);
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
        assert!(length > 0 && buffer.len() as u64 <= MAX_PIECE);
        offset += length;
    }
});
