//! Encrypted volumes on a disk: writing new ones, opening and changing those that are there, and
//! having the kernel map them.
//!
//! A change is a new slot first, then both copies of the header, then the destruction of what was
//! removed: the volume can be opened at any instant in between.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
};

use types::disk_key::{DiskKey, LARGEST_UNIT, SectorCipher};
use zeroize::Zeroizing;

use super::luks::{DATA_OFFSET, Header, HeaderError, SlotBytes, random};
use crate::sys::dm::{self, Crypt};

/// The kernel's device mapper.
const CONTROL: &str = "/dev/mapper/control";

/// A volume that is there.
#[derive(Debug)]
pub struct Volume {
    file: File,
    /// Its header.
    pub header: Header,
    /// Which copy of the header is not as the other, and what is wrong with it.
    damage: Option<(usize, String)>,
}

impl Volume {
    /// Opens the volume on a device; `None` when it is none of LUKS.
    pub fn open(device: &Path) -> io::Result<Option<Self>> {
        let file = File::options().read(true).write(true).open(device)?;
        let mut start = vec![0; Header::bytes()];
        let count = (&file).take(Header::bytes() as u64).read(&mut start)?;
        start.truncate(count);
        if !Header::is_at(&start) {
            return Ok(None);
        }
        let header = Header::read(&start)?;
        Ok(Some(Self { file, header, damage: Header::damage(&start) }))
    }

    /// Writes the copy of the header anew that is damaged or was left behind by a cut, and says what was wrong
    /// with it; `None` when nothing was. The other copy is not touched.
    pub fn mend(&self) -> io::Result<Option<&str>> {
        let Some((index, what)) = &self.damage else { return Ok(None) };
        let copies = self.header.copies()?;
        let offset = index * (Header::bytes() / copies.len());
        self.file.write_all_at(&copies[*index], offset as u64)?;
        self.file.sync_all()?;
        Ok(Some(what))
    }

    /// Opens a slot.
    pub fn unlock(&self, slot: u32, secret: &[u8]) -> io::Result<DiskKey> {
        let (offset, length) = self.header.area_of(slot)?;
        let mut area = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut area, offset)?;
        Ok(self.header.open(slot, &area, secret)?)
    }

    /// Adds a slot that `secret` opens, with what its token says beside its slot's number.
    pub fn add(
        &mut self,
        key: &DiskKey,
        secret: &[u8],
        token: serde_json::Value,
    ) -> io::Result<u32> {
        let slot = self.header.add_slot(key, secret)?;
        self.header.add_token(with_slot(token, slot.slot));
        self.file.write_all_at(&slot.bytes, slot.offset)?;
        self.file.sync_all()?;
        self.write_header()?;
        Ok(slot.slot)
    }

    /// Removes a slot and overwrites it.
    pub fn remove(&mut self, slot: u32) -> io::Result<()> {
        let (offset, length) = self.header.remove_slot(slot)?;
        self.write_header()?;
        let mut noise = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        getrandom::fill(&mut noise).map_err(io::Error::other)?;
        self.file.write_all_at(&noise, offset)?;
        self.file.sync_all()
    }

    /// Has the kernel show what is encrypted as a device, and returns its path.
    pub fn map(&self, name: &str, key: &DiskKey) -> io::Result<PathBuf> {
        let number = self.file.metadata()?;
        let number = std::os::unix::fs::MetadataExt::rdev(&number);
        let below = (rustix::fs::major(number), rustix::fs::minor(number));
        let end = (&self.file).seek(SeekFrom::End(0))?;
        let bytes = end.saturating_sub(DATA_OFFSET);
        let sectors = bytes / LARGEST_UNIT as u64 * (LARGEST_UNIT as u64 / 512);
        let crypt = Crypt { name, below, start: DATA_OFFSET / 512, sectors, key: key.as_bytes() };
        let control = File::options().read(true).write(true).open(CONTROL)?;
        dm::create(control.as_fd(), &crypt)?;
        mapped(Path::new("/"), name).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write_header(&self) -> io::Result<()> {
        let copies = self.header.copies()?;
        for (copy, offset) in copies.iter().zip([0, Header::bytes() as u64 / 2]).rev() {
            self.file.write_all_at(copy, offset)?;
            self.file.sync_all()?;
        }
        Ok(())
    }
}

/// Takes a mapping away.
pub fn unmap(name: &str) -> io::Result<()> {
    let control = File::options().read(true).write(true).open(CONTROL)?;
    dm::remove(control.as_fd(), name)
}

/// Returns the device file of a mapping; `None` when there is none.
pub fn mapped(root: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(root.join("sys/class/block")).ok()?.flatten();
    let mut ours = entries.filter(|entry| {
        fs::read_to_string(entry.path().join("dm/name")).is_ok_and(|found| found.trim() == name)
    });
    ours.next().map(|entry| root.join("dev").join(entry.file_name()))
}

/// A volume that is about to be made.
#[derive(Debug)]
pub struct NewVolume {
    /// Its key.
    pub key: DiskKey,
    /// Its header.
    header: Header,
    slots: Vec<SlotBytes>,
}

impl NewVolume {
    /// Invents one.
    pub fn invent(uuid: String) -> Result<Self, HeaderError> {
        let bytes = Zeroizing::new(random()?);
        let key = DiskKey::from_bytes(*bytes);
        Ok(Self { header: Header::new(uuid, &key)?, key, slots: Vec::new() })
    }

    /// Adds a slot, as [`Volume::add`] does.
    pub fn add(&mut self, secret: &[u8], token: serde_json::Value) -> Result<(), HeaderError> {
        let slot = self.header.add_slot(&self.key, secret)?;
        self.header.add_token(with_slot(token, slot.slot));
        self.slots.push(slot);
        Ok(())
    }

    /// Writes header and slots to the start of `volume`.
    pub fn write(&self, volume: &mut (impl Write + Seek)) -> io::Result<()> {
        for slot in &self.slots {
            volume.seek(SeekFrom::Start(slot.offset))?;
            volume.write_all(&slot.bytes)?;
        }
        volume.seek(SeekFrom::Start(0))?;
        for copy in self.header.copies()? {
            volume.write_all(&copy)?;
        }
        Ok(())
    }

    /// Returns `volume` as what is encrypted in it, to be written to.
    pub fn inside<'a, V: Write + Seek>(&self, volume: &'a mut V) -> Inside<'a, V> {
        let cipher = SectorCipher::new(&self.key).in_large_units();
        Inside { volume, cipher, position: 0 }
    }
}

fn with_slot(mut token: serde_json::Value, slot: u32) -> serde_json::Value {
    token["keyslots"] = serde_json::json!([slot.to_string()]);
    token
}

/// Encrypts what is written, in whole units at places that are whole units.
#[derive(Debug)]
pub struct Inside<'a, V> {
    volume: &'a mut V,
    cipher: SectorCipher,
    position: u64,
}

impl<V: Write + Seek> Write for Inside<'_, V> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let unit = LARGEST_UNIT as u64;
        if !self.position.is_multiple_of(unit) || !bytes.len().is_multiple_of(LARGEST_UNIT) {
            return Err(io::Error::other("a write that is not of whole units of 4096 bytes"));
        }
        let mut sealed = bytes.to_vec();
        self.cipher.encrypt(self.position / 512, &mut sealed);
        self.volume.seek(SeekFrom::Start(DATA_OFFSET + self.position))?;
        self.volume.write_all(&sealed)?;
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.volume.flush()
    }
}

impl<V: Write + Seek> Seek for Inside<'_, V> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(_) => None,
        }
        .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
