//! The EFI system partition: a FAT volume with our one program in it.
//!
//! Works on anything that reads, writes and seeks; the disk image and the ISO hand it theirs.
//! Deterministic: no clock is read, so every date is the FAT epoch.

use std::io::{Cursor, Read, Seek, SeekFrom, Write};

/// Where firmware looks on removable media, and on disks without a boot entry (UEFI 2.10 §3.5.1.1).
pub const BOOT_PATH: [&str; 3] = ["EFI", "BOOT", "BOOTX64.EFI"];
/// Volume serial number: any constant.
const VOLUME_ID: u32 = 0x484f_4c44;
/// The volume's label; not `HOLDFAST`, which names the volume with the configuration.
const LABEL: [u8; 11] = *b"ESP        ";
/// Room beside the program for FAT tables and directories.
const OVERHEAD: u64 = 1 << 20;

/// Formats `volume` and writes `program` as the boot program.
pub(crate) fn write<V: Read + Write + Seek>(volume: V, program: &[u8]) -> std::io::Result<()> {
    let mut volume = volume;
    let options = fatfs::FormatVolumeOptions::new().volume_id(VOLUME_ID).volume_label(LABEL);
    fatfs::format_volume(&mut volume, options)?;
    let fs = fatfs::FileSystem::new(&mut volume, fatfs::FsOptions::new())?;
    {
        let [efi, boot, name] = BOOT_PATH;
        let directory = fs.root_dir().create_dir(efi)?.create_dir(boot)?;
        let mut file = directory.create_file(name)?;
        file.write_all(program)?;
        file.flush()?;
    }
    fs.unmount()
}

/// Reads the boot program back.
pub fn read<V: Read + Write + Seek>(volume: V) -> std::io::Result<Vec<u8>> {
    let fs = fatfs::FileSystem::new(volume, fatfs::FsOptions::new().update_accessed_date(false))?;
    let mut program = Vec::new();
    fs.root_dir().open_file(&BOOT_PATH.join("/"))?.read_to_end(&mut program)?;
    Ok(program)
}

/// A volume just large enough for `program`, as bytes.
pub(crate) fn volume_for(program: &[u8]) -> std::io::Result<Vec<u8>> {
    let length = (program.len() as u64 + OVERHEAD).next_multiple_of(OVERHEAD);
    let length = usize::try_from(length).map_err(std::io::Error::other)?;
    let mut bytes = vec![0; length];
    write(Cursor::new(&mut bytes), program)?;
    Ok(bytes)
}

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
        self.file.seek(SeekFrom::Start(self.start + self.position))?;
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

    #[test]
    fn the_program_is_read_back() {
        let program: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let volume = volume_for(&program).unwrap();
        assert_eq!(read(Cursor::new(volume)).unwrap(), program);
    }

    #[test]
    fn two_volumes_are_identical() {
        assert_eq!(volume_for(b"x").unwrap(), volume_for(b"x").unwrap());
    }

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
