//! A part of a disk as a volume of its own.

use std::io::{Read, Seek, SeekFrom, Write};

/// A part of a file as a volume of its own.
pub struct Slice<F> {
    file: F,
    start: u64,
    length: u64,
    position: u64,
}

impl<F: Seek> Slice<F> {
    /// The `length` bytes of `file` from `start` on.
    pub fn new(file: F, start: u64, length: u64) -> Self {
        Self { file, start, length, position: 0 }
    }

    /// Moves the file to our position and returns how much of `wanted` lies inside.
    fn prepare(&mut self, wanted: usize) -> std::io::Result<usize> {
        self.file.seek(SeekFrom::Start(self.start.saturating_add(self.position)))?;
        let left = self.length.saturating_sub(self.position);
        Ok(usize::try_from(left).map_or(wanted, |left| left.min(wanted)))
    }
}

impl<F: Read + Seek> Read for Slice<F> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let inside = self.prepare(buffer.len())?;
        let count = self.file.read(&mut buffer[..inside])?;
        self.position += count as u64;
        Ok(count)
    }
}

impl<F: Write + Seek> Write for Slice<F> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        let inside = self.prepare(buffer.len())?;
        let count = self.file.write(&buffer[..inside])?;
        self.position += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl<F: Seek> Seek for Slice<F> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let target = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
        };
        self.position = target.ok_or_else(|| {
            std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "a seek to before the start of the partition",
            )
        })?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use std::io::Cursor;

    #[test]
    fn a_slice_stays_inside_its_bounds() {
        let mut disk = vec![7_u8; 100];
        let mut slice = Slice::new(Cursor::new(&mut disk), 10, 20);
        slice.seek(SeekFrom::End(-5)).unwrap();
        assert_eq!(slice.write(&[1; 50]).unwrap(), 5);
        assert_eq!(slice.write(&[1; 50]).unwrap(), 0);
        assert_eq!(&disk[24..31], [7, 1, 1, 1, 1, 1, 7]);
    }
}
