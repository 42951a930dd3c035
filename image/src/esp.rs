//! The EFI system partition of the ISO: just large enough for the one program in it.

use std::io::Cursor;

use update::disk::{esp, gpt::BlockSize};

/// Room beside the program for FAT tables and directories.
const OVERHEAD: u64 = 1 << 20;

/// A volume just large enough for `program`, as bytes.
pub(crate) fn volume_for(program: &[u8]) -> std::io::Result<Vec<u8>> {
    let length = (program.len() as u64 + OVERHEAD).next_multiple_of(OVERHEAD);
    let length = usize::try_from(length).map_err(std::io::Error::other)?;
    let mut bytes = vec![0; length];
    esp::write(Cursor::new(&mut bytes), BlockSize::B512, program, &[esp::FALLBACK])?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn the_program_is_read_back() {
        let program: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let volume = volume_for(&program).unwrap();
        let found = esp::read(Cursor::new(volume), esp::FALLBACK, program.len() as u64).unwrap();
        assert_eq!(found, program);
    }

    #[test]
    fn two_volumes_are_identical() {
        assert_eq!(volume_for(b"x").unwrap(), volume_for(b"x").unwrap());
    }
}
