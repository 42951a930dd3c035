//! The EFI system partition: the boot program, and beside it the updates of firmware's keys.

use std::io::{Cursor, Read, Result, Seek, Write};

use update::disk::{esp, gpt::BlockSize};

use crate::program::Program;

/// Room beside the program for FAT tables, directories, keys, and what a customised image adds.
const OVERHEAD: u64 = 1 << 20;

/// A volume just large enough for the program, as bytes.
pub(crate) fn volume_for(program: &Program) -> Result<Vec<u8>> {
    let length = (program.bytes.len() as u64 + OVERHEAD).next_multiple_of(OVERHEAD);
    let length = usize::try_from(length).map_err(std::io::Error::other)?;
    let mut bytes = vec![0; length];
    fill(&mut Cursor::new(&mut bytes), program, &[esp::FALLBACK])?;
    Ok(bytes)
}

/// Formats a volume, and writes the program to `paths` and the keys to where the installed system looks
/// for them.
pub(crate) fn fill<V: Read + Write + Seek>(
    volume: &mut V,
    program: &Program,
    paths: &[&str],
) -> Result<()> {
    esp::write(&mut *volume, BlockSize::B512, &program.bytes, paths)?;
    for (path, update) in &program.updates {
        volume.rewind()?;
        esp::put(&mut *volume, path, update)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn program(bytes: Vec<u8>) -> Program {
        let updates = vec![("loader/keys/auto/db.auth".to_owned(), b"update".to_vec())];
        Program { bytes, updates, measurements: serde_json::Value::Null }
    }

    #[test]
    fn program_and_keys_are_read_back() {
        let program = program((0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect());
        let volume = volume_for(&program).unwrap();
        let read = |path| esp::read(Cursor::new(volume.clone()), path, 3_000_000).unwrap();
        assert_eq!(read(esp::FALLBACK), program.bytes);
        assert_eq!(read("loader/keys/auto/db.auth"), b"update");
    }

    #[test]
    fn two_volumes_are_identical() {
        let volume = || volume_for(&program(b"x".to_vec())).unwrap();
        assert_eq!(volume(), volume());
    }
}
