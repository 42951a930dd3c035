//! STATE and DATA of a disk: opened by the node's own code where they are encrypted, recovered by
//! e2fsck as the kernel recovers them at a mount, and checked by it.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use agent::seal::{
    keys::{self, Sealer},
    superblock::{self, Found},
    tpm::Tpm,
    volume::Volume,
};
use anyhow::{Context, Result, anyhow, bail};
use types::disk_key::{DiskKey, SectorCipher};
use update::disk::layout;

use crate::disk::{BLOCK, Content, Disk};

/// Where a partition is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// First byte.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) length: u64,
}

/// Opens volumes, and remembers what was decrypted before.
#[derive(Debug)]
pub(crate) struct Opener {
    folder: PathBuf,
    /// Decrypted blocks by the id of what they were decrypted from.
    plain: HashMap<u64, [u8; BLOCK]>,
}

impl Opener {
    /// Works in `folder`.
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), plain: HashMap::new() }
    }

    /// Writes STATE's file system to a file, recovers and checks it; returns the file and what opens
    /// DATA.
    pub(crate) fn state(&mut self, disk: &Disk, at: Region) -> Result<(PathBuf, Option<DiskKey>)> {
        let key = match self.header(disk, at)? {
            None => None,
            Some(mut volume) => {
                let no_tpm = Tpm::open(Path::new("/nonexistent"));
                let mut sealer = Sealer { tpm: no_tpm, release: None, additions: None };
                let opened = keys::open_state(&mut volume, &mut sealer);
                Some(opened.map_err(|reason| anyhow!("STATE is locked: {reason}"))?.0)
            }
        };
        Ok((self.checked(disk, at, ("STATE", key.as_ref()))?, key))
    }

    /// The same for DATA, which STATE's key opens.
    pub(crate) fn data(&mut self, disk: &Disk, at: Region, state: Option<&DiskKey>) -> Result<()> {
        let key = match (self.header(disk, at)?, state) {
            (None, _) => None,
            (Some(_), None) => bail!("DATA is encrypted and STATE is not"),
            (Some(volume), Some(state)) => {
                let opened = keys::open_data(&volume, state);
                Some(opened.map_err(|reason| anyhow!("DATA is locked: {reason}"))?)
            }
        };
        let file = self.checked(disk, at, ("DATA", key.as_ref()))?;
        Ok(fs::remove_file(file)?)
    }

    /// Opens the header, in a file of its own.
    fn header(&self, disk: &Disk, at: Region) -> Result<Option<Volume>> {
        let path = self.folder.join("header");
        let bytes = usize::try_from(layout::HEADER_BYTES.min(at.length))?;
        fs::write(&path, disk.get(at.start, bytes)?)?;
        Volume::open(&path).context("a volume's header")
    }

    fn checked(
        &mut self,
        disk: &Disk,
        at: Region,
        (name, key): (&str, Option<&DiskKey>),
    ) -> Result<PathBuf> {
        let path = self.folder.join(name);
        self.write(&path, disk, at, key)?;
        // What the node does before a mount.
        let file = File::options().read(true).write(true).open(&path)?;
        match superblock::mend(&file)? {
            Found::Whole | Found::Mended | Found::AheadOfGroups => {}
            Found::Restored { at } => bail!("{name}: its superblock was altered at byte {at}"),
            Found::JournalAltered => bail!("{name}: its journal was altered"),
            Found::Damaged => bail!("{name}: its superblock is damaged"),
            Found::GroupRestored { group } => bail!("{name}: block group {group} was altered"),
            Found::GroupDamaged { group } => bail!("{name}: block group {group} is damaged"),
        }
        // What the kernel does at a mount: it replays the journal, and nothing else.
        let journal = e2fsck(&["-y", "-E", "journal_only"], &path)?;
        if !matches!(journal.0, 0 | 1) {
            bail!("{name}: the journal cannot be replayed: {}", journal.1);
        }
        let found = e2fsck(&["-f", "-n"], &path)?;
        if found.0 != 0 {
            let first = found.1.lines().find(|line| !line.starts_with("Pass")).unwrap_or_default();
            bail!("{name} is damaged: {first}");
        }
        Ok(path)
    }

    /// Writes what is in a volume to a file.
    fn write(&mut self, path: &Path, disk: &Disk, at: Region, key: Option<&DiskKey>) -> Result<()> {
        let cipher = key.map(|key| SectorCipher::new(key).in_large_units());
        let skipped = if cipher.is_some() { layout::HEADER_BYTES } else { 0 };
        let (start, length) = (at.start + skipped, at.length - skipped);
        let file = File::create(path)?;
        file.set_len(length)?;
        for number in disk.numbers(start, length) {
            let Some(block) = disk.block(number) else { continue };
            let offset = number * BLOCK as u64 - start;
            let plain = match &cipher {
                Some(cipher) => self.decrypt(cipher, offset, &block),
                None => &block.bytes,
            };
            file.write_all_at(plain, offset)?;
        }
        Ok(())
    }

    fn decrypt(&mut self, cipher: &SectorCipher, offset: u64, block: &Content) -> &[u8; BLOCK] {
        self.plain.entry(block.id).or_insert_with(|| {
            let mut plain = block.bytes;
            cipher.decrypt(offset / 512, &mut plain);
            plain
        })
    }
}

/// Runs e2fsck; returns its exit status (e2fsck(8)) and what it said.
fn e2fsck(arguments: &[&str], path: &Path) -> Result<(i32, String)> {
    let output = Command::new("e2fsck").args(arguments).arg(path).output().context("e2fsck")?;
    let said = [output.stdout, output.stderr].concat();
    let status = output.status.code().unwrap_or(-1);
    Ok((status, String::from_utf8_lossy(&said).trim().to_owned()))
}

/// Copies all files of the file system in `volume` to `folder`.
pub(crate) fn unpack(volume: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let request = format!("rdump / {}", folder.display());
    let output = Command::new("debugfs").arg("-R").arg(request).arg(volume).output();
    let output = output.context("debugfs (package e2fsprogs)")?;
    if !output.status.success() {
        bail!("debugfs: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
