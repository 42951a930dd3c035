//! The log of a disk's writes as QEMU's `blklogwrites` driver leaves it. Source: the kernel's
//! Documentation/admin-guide/device-mapper/log-writes.rst and drivers/md/dm-log-writes.c.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use anyhow::{Context, Result, bail};

/// Start of a log (`WRITE_LOG_MAGIC`).
const MAGIC: u64 = 0x006a_7366_7773_6872;
/// The one version there is.
const VERSION: u64 = 1;
/// Flags of an entry.
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// Bytes of an entry's header that say something.
const HEADER: usize = 32;

/// What happened to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Bytes at this place of the log were written to the disk.
    Write {
        /// Where in the log.
        from: u64,
        /// Whether they were durable at once.
        durable: bool,
    },
    /// Bytes were given up; they read as zeros from then on.
    Discard,
    /// All earlier writes became durable.
    Flush,
}

/// An entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// First byte on the disk.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) length: u64,
    /// What happened to them.
    pub(crate) what: What,
}

/// A log.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    /// Everything that happened, in order.
    pub(crate) entries: Vec<Entry>,
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = bytes.get(index * 8..index * 8 + 8) {
        word.copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

impl Log {
    /// Reads the log at `path`. The count in its first sector is not believed: it is behind when QEMU
    /// was ended.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("{}", path.display()))?;
        let end = file.metadata()?.len();
        let mut head = [0; HEADER];
        file.read_exact_at(&mut head, 0)?;
        if word(&head, 0) != MAGIC || word(&head, 1) != VERSION {
            bail!("{} is no log of writes", path.display());
        }
        let sector = word(&head, 3) & u64::from(u32::MAX);
        if !sector.is_power_of_two() || !(512..=4096).contains(&sector) {
            bail!("{}: sectors of {sector} bytes", path.display());
        }
        let mut entries = Vec::new();
        let mut at = sector;
        while at + sector <= end {
            file.read_exact_at(&mut head, at)?;
            let [first, count, flags] = [0, 1, 2].map(|index| word(&head, index));
            if (first, count, flags) == (0, 0, 0) {
                break;
            }
            let (from, length) = (at + sector, count * sector);
            let offset = first * sector;
            let mut push = |what| entries.push(Entry { offset, length, what });
            at = from;
            if flags & MARK != 0 {
                continue;
            }
            if flags & FLUSH != 0 {
                push(What::Flush);
            }
            if flags & DISCARD != 0 {
                push(What::Discard);
            } else if count > 0 {
                if from + length > end {
                    break;
                }
                push(What::Write { from, durable: flags & FUA != 0 });
                at = from + length;
            }
        }
        Ok(Self { file, entries })
    }

    /// Returns what an entry wrote.
    pub(crate) fn bytes(&self, entry: &Entry) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(entry.length)?];
        if let What::Write { from, .. } = entry.what {
            self.file.read_exact_at(&mut bytes, from)?;
        }
        Ok(bytes)
    }
}
