//! Writes a disk as a raw file, with holes for zeroes, and names it by its SHA-256.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use sha2::{Digest, Sha256};
use types::ids::ContentId;

use crate::whole::Whole;

use super::{Disk, Format, ImportError, Input, Piece, file::Beside};

/// Zeroes are found in these: what file systems give back at once.
const BLOCK: usize = 4096;
/// Zeroes that are hashed at once.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// What was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imported {
    /// What the image was.
    pub format: Format,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that are not zeroes, by whole blocks.
    pub data: u64,
    /// SHA-256 of the disk.
    pub content: ContentId,
}

/// Imports the image at `from` as the new raw file `to`, which must not be there. Nothing is left
/// of an import that fails; one that is interrupted leaves `to` with `.partial` behind it.
pub fn import(from: &Path, format: Option<Format>, to: &Path) -> Result<Imported, ImportError> {
    // What is left of an earlier try goes, unless it is what is read now.
    let folder = Beside::new(from, Whole::partial(to));
    let input = folder.foreign(Input::open(from)?)?;
    let format = format.map_or_else(|| Format::of(&input), Ok)?;
    let mut disk = super::open(format, input, &folder)?;
    let fail =
        |operation| move |source| ImportError::File { operation, path: to.to_owned(), source };
    let made = Whole::begin_new(to, 0o666).map_err(fail("create"))?;
    let (data, content) = copy(&mut *disk, made.file(), to)?;
    made.finish().map_err(fail("write"))?;
    Ok(Imported { format, size: disk.size(), data, content })
}

fn copy(disk: &mut dyn Disk, file: &File, to: &Path) -> Result<(u64, ContentId), ImportError> {
    let fail = |source| ImportError::File { operation: "write", path: to.to_owned(), source };
    let size = disk.size();
    file.set_len(size).map_err(fail)?;
    let (mut offset, mut data) = (0, 0);
    let mut hash = Sha256::new();
    let mut buffer = Vec::new();
    while offset < size {
        buffer.clear();
        let left = size - offset;
        let length = match disk.piece(offset, &mut buffer)? {
            Piece::Zeroes(length) => {
                let length = length.min(left);
                hash_zeroes(&mut hash, length);
                length
            }
            Piece::Bytes => {
                buffer.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                hash.update(&buffer);
                data += write_blocks(&buffer, offset, file).map_err(fail)?;
                buffer.len() as u64
            }
        };
        assert!(length > 0, "a format returns at least one byte");
        offset += length;
    }
    Ok((data, ContentId::from_bytes(hash.finalize().into())))
}

/// Writes the blocks that are not all zeroes, neighbours together; returns their bytes.
fn write_blocks(bytes: &[u8], offset: u64, file: &File) -> std::io::Result<u64> {
    let mut written = 0;
    let mut run: Option<(usize, usize)> = None;
    let blocks = bytes.chunks(BLOCK).enumerate();
    for (start, length) in blocks
        .filter(|(_, block)| block.iter().any(|byte| *byte != 0))
        .map(|(index, block)| (index * BLOCK, block.len()))
    {
        run = match run {
            Some((from, to)) if to == start => Some((from, start + length)),
            Some((from, to)) => {
                file.write_all_at(&bytes[from..to], offset + from as u64)?;
                Some((start, start + length))
            }
            None => Some((start, start + length)),
        };
        written += length as u64;
    }
    if let Some((from, to)) = run {
        file.write_all_at(&bytes[from..to], offset + from as u64)?;
    }
    Ok(written)
}

fn hash_zeroes(hash: &mut Sha256, length: u64) {
    let mut left = length;
    while left > 0 {
        let now = left.min(ZEROES.len() as u64);
        hash.update(&ZEROES[..usize::try_from(now).unwrap_or(ZEROES.len())]);
        left -= now;
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn what_is_read_stays_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let [out, partial, link] =
            ["out", "out.partial", "link"].map(|name| folder.path().join(name));
        fs::write(&partial, [7; 512]).expect("written");
        symlink(&partial, &link).expect("linked");
        for from in [&partial, &link] {
            let refused = import(from, None, &out);
            assert!(matches!(refused, Err(ImportError::Own { .. })), "{refused:?}");
        }
        assert_eq!(fs::read(&partial).expect("it is there"), [7; 512]);
        // What another import left goes.
        let image = folder.path().join("image");
        fs::write(&image, [8; 512]).expect("written");
        import(&image, None, &out).expect("imported");
        assert!(!partial.exists());
    }

    #[test]
    fn an_extent_that_is_read_stays_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let [out, partial, image, extent] =
            ["out", "out.partial", "disk.vmdk", "disk-flat.vmdk"].map(|it| folder.path().join(it));
        fs::write(&extent, [9; 512]).expect("written");
        fs::hard_link(&extent, &partial).expect("linked");
        fs::write(&image, "# Disk DescriptorFile\nRW 1 FLAT \"disk-flat.vmdk\" 0\n")
            .expect("written");
        let refused = import(&image, None, &out);
        assert!(matches!(refused, Err(ImportError::Own { .. })), "{refused:?}");
        assert!(partial.exists());
    }
}
