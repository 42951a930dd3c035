//! Writing the appliance to a disk. The table comes last: until it is there, the disk counts as empty
//! for firmware, for the kernel and, by a mark, for the next try.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
};

use rustix::fs::{Advice, fadvise};
use update::disk::{
    Slice, esp,
    gpt::{ALIGNMENT, BlockSize, GptError, TYPE_ESP, Table},
    layout::{self, Identities},
    template::{self, TemplateError},
};

use super::unfinished;
use crate::seal::keys::NewVolumes;

/// What a new disk gets.
#[derive(Debug, Clone, Copy)]
pub struct Content<'a> {
    /// The release: one unified kernel image.
    pub program: &'a [u8],
    /// The template of an empty STATE.
    pub state: &'a [u8],
    /// The template of an empty DATA.
    pub data: &'a [u8],
    /// How both are encrypted.
    pub volumes: &'a NewVolumes,
}

/// What the writer is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Clearing what an earlier owner left where somebody may look for it.
    Clearing,
    /// Writing a partition.
    Partition(&'static str),
    /// Reading the release back.
    ReadingBack,
    /// Writing the partition table.
    Table,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Clearing => f.write_str("clearing"),
            Self::Partition(name) => write!(f, "writing {name}"),
            Self::ReadingBack => f.write_str("reading the release back"),
            Self::Table => f.write_str("writing the partition table"),
        }
    }
}

/// Why a disk was not written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum WriteError {
    #[error(transparent)]
    Layout(#[from] GptError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("failed while {step}")]
    Disk { step: Step, source: io::Error },
    #[error("{path} on the disk is not what was written to it: the disk does not keep its data")]
    Differs { path: &'static str },
}

/// Writes everything to `disk`, which has `bytes`, and returns the table that it has now. `told` is
/// called at the start of each step.
pub fn write(
    disk: &File,
    (block, bytes): (BlockSize, u64),
    identities: Identities,
    content: Content<'_>,
    told: &mut dyn FnMut(Step),
) -> Result<Table, WriteError> {
    let table = layout::filling(identities, block, bytes)?;
    told(Step::Clearing);
    clear(disk, 0, bytes).map_err(at(Step::Clearing))?;
    put(disk, unfinished::AT, &unfinished::mark()).map_err(at(Step::Clearing))?;
    for (start, partition) in &table.placed {
        let step = Step::Partition(partition.name);
        told(step);
        clear(disk, *start, partition.bytes).map_err(at(step))?;
        let mut volume = Slice::new(disk, *start, partition.bytes);
        if partition.kind == TYPE_ESP {
            esp::write(volume, block, content.program, &PATHS).map_err(at(step))?;
        } else {
            let (empty, new) = if partition.name == layout::STATE {
                (content.state, &content.volumes.state)
            } else {
                (content.data, &content.volumes.data)
            };
            new.write(&mut volume).map_err(at(step))?;
            let inside = partition.bytes.saturating_sub(layout::HEADER_BYTES);
            template::apply(empty, &mut new.inside(&mut volume), inside)?;
        }
        disk.sync_all().map_err(at(step))?;
    }
    told(Step::ReadingBack);
    read_back(disk, &table, content.program)?;
    told(Step::Table);
    write_table(disk, &table).map_err(at(Step::Table))?;
    put(disk, unfinished::AT, &[0; unfinished::BYTES]).map_err(at(Step::Table))?;
    Ok(table)
}

/// Where the release goes.
const PATHS: [&str; 2] = [esp::FALLBACK, esp::SLOT_A];

fn at(step: Step) -> impl FnOnce(io::Error) -> WriteError {
    move |source| WriteError::Disk { step, source }
}

/// Overwrites the first and the last MiB of a region: labels of file systems, volumes and tables.
fn clear(mut disk: &File, start: u64, bytes: u64) -> io::Result<()> {
    for from in [start, start + bytes - ALIGNMENT.min(bytes)] {
        disk.seek(SeekFrom::Start(from))?;
        template::zeros(&mut disk, ALIGNMENT.min(bytes))?;
    }
    disk.sync_all()
}

/// Reads the release from the disk itself, not from memory.
fn read_back(disk: &File, table: &Table, program: &[u8]) -> Result<(), WriteError> {
    fadvise(disk, 0, None, Advice::DontNeed)
        .map_err(|error| at(Step::ReadingBack)(error.into()))?;
    for (start, partition) in table.placed.iter().filter(|(_, p)| p.kind == TYPE_ESP) {
        for path in PATHS {
            let volume = Slice::new(disk, *start, partition.bytes);
            let found =
                esp::read(volume, path, program.len() as u64).map_err(at(Step::ReadingBack))?;
            if found != program {
                return Err(WriteError::Differs { path });
            }
        }
    }
    Ok(())
}

/// The backup first: a table whose first copy is whole has both.
pub(super) fn write_table(mut disk: &File, table: &Table) -> io::Result<()> {
    for (offset, bytes) in table.writes().into_iter().rev() {
        put(disk, offset, &bytes)?;
    }
    let mut first = [0; 512];
    disk.seek(SeekFrom::Start(0))?;
    disk.read_exact(&mut first)?;
    if first[510..] == [0x55, 0xaa] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Writes `bytes` at `offset`, durable when this returns.
fn put(mut disk: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    disk.seek(SeekFrom::Start(offset))?;
    disk.write_all(bytes)?;
    disk.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::{fs, process::Command};

    use std::os::unix::fs::FileExt;

    use types::disk_key::SectorCipher;
    use update::disk::template::{BLOCK, FILL};

    use super::*;
    use crate::{
        install::probe,
        seal::{keys::Sealer, tpm::TpmError},
    };

    fn volumes() -> NewVolumes {
        let tpm = Err(TpmError::Absent { path: "dev/tpmrm0".into() });
        NewVolumes::invent(&mut Sealer { tpm, release: None, additions: None }, &[]).unwrap()
    }

    /// Makes an empty file system as the image's builder does; `None` without Debian's e2fsprogs.
    fn empty(bytes: u64) -> Option<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        fs::write(&path, vec![FILL; usize::try_from(bytes).unwrap()]).unwrap();
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E", "nodiscard,lazy_journal_init=0"])
            .arg(&path)
            .status();
        if !made.is_ok_and(|status| status.success()) {
            println!("skipped: an installed disk's file systems: mke2fs cannot be started");
            return None;
        }
        Some(template::capture(&fs::read(&path).unwrap()))
    }

    /// A sparse disk with rubbish where an installer might forget to write.
    fn dirty(folder: &std::path::Path, bytes: u64) -> File {
        let path = folder.join("disk");
        let disk = File::options().create_new(true).read(true).write(true).open(path).unwrap();
        disk.set_len(bytes).unwrap();
        let mut writer = &disk;
        for offset in (0..bytes).step_by(64 << 20) {
            writer.seek(SeekFrom::Start(offset)).unwrap();
            writer
                .write_all(&vec![0x77; (4 << 20).min(usize::try_from(bytes - offset).unwrap())])
                .unwrap();
        }
        disk
    }

    #[test]
    fn what_is_written_is_whole() {
        let volumes = volumes();
        // The image's templates are longer; the installer does not care.
        let Some(empty) = empty(64 << 20) else { return };
        let folder = tempfile::tempdir().unwrap();
        let bytes = layout::SMALLEST_DISK + (300 << 20) + 4096;
        let disk = dirty(folder.path(), bytes);
        let program: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let content = Content { program: &program, state: &empty, data: &empty, volumes: &volumes };
        let mut steps = Vec::new();
        let place = (BlockSize::B512, bytes);
        let table =
            write(&disk, place, Identities::random(), content, &mut |step| steps.push(step))
                .unwrap();
        assert_eq!(steps.len(), 6);
        assert_eq!(steps[5], Step::Table);
        for ((start, partition), volume) in
            table.placed[1..].iter().zip([&volumes.state, &volumes.data])
        {
            let mut sealed = vec![0; 64 << 20];
            disk.read_exact_at(&mut sealed, start + layout::HEADER_BYTES).unwrap();
            // Four bytes of it would be found in noise of this length once in 64 times.
            const NAME: &[u8] = b"lost+found";
            assert!(!sealed.windows(NAME.len()).any(|part| part == NAME), "names are in clear");
            SectorCipher::new(&volume.key).in_large_units().decrypt(0, &mut sealed);
            let plain = folder.path().join(partition.name);
            fs::write(&plain, &sealed).unwrap();
            let checked = Command::new("e2fsck").arg("-fn").arg(plain).output().unwrap();
            let text = String::from_utf8_lossy(&checked.stdout);
            assert!(checked.status.success(), "{}: {text}", partition.name);
        }
        let esp = update::disk::medium::esp_partitions(&disk, BlockSize::B512);
        assert_eq!(esp, [(ALIGNMENT, layout::ESP_BYTES)]);
    }

    #[test]
    fn a_disk_without_its_table_counts_as_empty() {
        let template = template::capture(&vec![FILL; 4 * BLOCK]);
        let folder = tempfile::tempdir().unwrap();
        let bytes = layout::SMALLEST_DISK;
        let disk = dirty(folder.path(), bytes);
        let program = vec![1; 1000];
        let volumes = volumes();
        let data = b"no template";
        let content = Content { program: &program, state: &template, data, volumes: &volumes };
        let place = (BlockSize::B512, bytes);
        let failed = write(&disk, place, Identities::random(), content, &mut |_| ());
        assert!(matches!(failed, Err(WriteError::Template(_))), "{failed:?}");
        let ends = |offset| {
            let mut part = vec![0; 1 << 20];
            let mut reader = &disk;
            reader.seek(SeekFrom::Start(offset)).unwrap();
            reader.read_exact(&mut part).unwrap();
            part
        };
        let found = probe::content(&ends(0), &ends(bytes - (1 << 20)), &[]);
        assert_eq!(found, probe::Content::Nothing);
    }

    #[test]
    fn a_disk_that_is_too_small_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let disk = dirty(folder.path(), 8 << 20);
        let content = Content { program: b"x", state: b"", data: b"", volumes: &volumes() };
        let place = (BlockSize::B512, 8 << 20);
        assert!(write(&disk, place, Identities::random(), content, &mut |_| ()).is_err());
        let mut first = [0; 512];
        (&disk).seek(SeekFrom::Start(0)).unwrap();
        (&disk).read_exact(&mut first).unwrap();
        assert_eq!(first, [0x77; 512]);
    }
}
