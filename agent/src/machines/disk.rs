//! A machine's disk: a sparse file, filled from an image once and the machine's own from then on.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use types::{ids::MachineId, units::Mebibytes};

/// Bytes copied at a time; pieces that hold only zeroes stay holes.
const PIECE: usize = 64 << 10;

/// Why a machine has no disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DiskError {
    #[error("the image has {image} bytes and the lease's disk {disk}; it does not fit")]
    Small { image: u64, disk: u64 },
    #[error("cannot make {path}")]
    Host { path: String, source: io::Error },
}

/// Returns the folder of a machine below `data`.
pub fn folder(data: &Path, machine: MachineId) -> PathBuf {
    data.join("machines").join(machine.to_string())
}

/// Opens a machine's disk, and makes it the first time. Blocks while an image is copied.
pub fn open(
    data: &Path,
    machine: MachineId,
    size: Mebibytes,
    image: Option<&Path>,
) -> Result<File, DiskError> {
    open_named(&folder(data, machine), "disk", size, image)
}

/// Opens a disk that is attached to a machine, and makes it the first time. `name` is checked before.
pub fn open_extra(
    data: &Path,
    machine: MachineId,
    name: &str,
    size: Mebibytes,
    image: Option<&Path>,
) -> Result<File, DiskError> {
    open_named(&folder(data, machine), &extra(name), size, image)
}

/// Destroys a disk that was attached to a machine. Nothing happens when there is none.
pub fn destroy_extra(data: &Path, machine: MachineId, name: &str) -> io::Result<()> {
    match fs::remove_file(folder(data, machine).join(format!("{}.raw", extra(name)))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// File name, without its end, of an attached disk: no name of its makes it the machine's own.
fn extra(name: &str) -> String {
    format!("extra-{name}")
}

fn open_named(
    folder: &Path,
    name: &str,
    size: Mebibytes,
    image: Option<&Path>,
) -> Result<File, DiskError> {
    let path = folder.join(format!("{name}.raw"));
    let host = |source| DiskError::Host { path: path.display().to_string(), source };
    fs::create_dir_all(folder).map_err(host)?;
    if !path.exists() {
        let size = size.to_bytes().unwrap_or(u64::MAX);
        let partial = folder.join(format!("{name}.partial"));
        make(&partial, size, image).map_err(|error| match error {
            MakeError::Small { image } => DiskError::Small { image, disk: size },
            MakeError::Io(source) => host(source),
        })?;
        fs::rename(&partial, &path).map_err(host)?;
    }
    File::options().read(true).write(true).open(&path).map_err(host)
}

/// Returns how much of a machine's disks is on `data` already, in MiB; the rest is holes.
pub fn allocated_mib(data: &Path, machine: MachineId) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(files) = fs::read_dir(folder(data, machine)) else { return 0 };
    let disks = files.flatten().filter(|file| file.path().extension().is_some_and(|e| e == "raw"));
    // stat(2): blocks of 512 bytes, whatever the file system's are.
    disks.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks()).sum::<u64>()
        >> 11
}

/// Destroys everything of a machine. Nothing happens when there is nothing.
pub fn destroy(data: &Path, machine: MachineId) -> io::Result<()> {
    match fs::remove_dir_all(folder(data, machine)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

enum MakeError {
    Small { image: u64 },
    Io(io::Error),
}

impl From<io::Error> for MakeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn make(path: &Path, size: u64, image: Option<&Path>) -> Result<(), MakeError> {
    let mut disk = File::create(path)?;
    if let Some(image) = image {
        let mut image = File::open(image)?;
        let length = image.metadata()?.len();
        if length > size {
            return Err(MakeError::Small { image: length });
        }
        copy_sparse(&mut image, &mut disk)?;
    }
    disk.set_len(size)?;
    disk.sync_all()?;
    Ok(())
}

fn copy_sparse(from: &mut File, to: &mut File) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(());
        }
        if piece[..count].iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(i64::try_from(count).unwrap_or(i64::MAX)))?;
        } else {
            to.write_all(&piece[..count])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const MACHINE: MachineId = MachineId::from_bytes([5; 16]);

    #[test]
    fn a_disk_begins_as_its_image_and_keeps_what_was_written() {
        let data = tempfile::tempdir().expect("a directory");
        let image = data.path().join("image");
        let mut bytes = vec![0; 3 * PIECE];
        bytes[2 * PIECE] = 7;
        fs::write(&image, &bytes).expect("written");
        let size = Mebibytes(4);
        let mut disk = open(data.path(), MACHINE, size, Some(&image)).expect("made");
        let metadata = disk.metadata().expect("a file");
        assert_eq!(metadata.len(), 4 << 20);
        assert!(metadata.blocks() * 512 < 1 << 20, "not sparse");
        disk.write_all(b"mine").expect("written");
        drop(disk);
        let mut again = open(data.path(), MACHINE, size, Some(&image)).expect("opened");
        let mut start = [0; 4];
        again.read_exact(&mut start).expect("read");
        assert_eq!(&start, b"mine");
        destroy(data.path(), MACHINE).expect("destroyed");
        assert!(!folder(data.path(), MACHINE).exists());
    }

    #[test]
    fn attached_disks_are_files_of_their_own() {
        let data = tempfile::tempdir().expect("a directory");
        let size = Mebibytes(1);
        let open = |name| open_extra(data.path(), MACHINE, name, size, None).expect("made");
        open("disk").write_all(&[7; PIECE]).expect("written");
        assert_eq!(open("a").metadata().expect("a file").len(), 1 << 20);
        let own = super::open(data.path(), MACHINE, Mebibytes(2), None).expect("made");
        assert_eq!(own.metadata().expect("a file").len(), 2 << 20);
        let mut first = [0];
        open("disk").read_exact(&mut first).expect("read");
        assert_eq!(first, [7]);
        open("disk").write_all(&[7; 1 << 20]).expect("written");
        assert_eq!(allocated_mib(data.path(), MACHINE), 1);
        destroy_extra(data.path(), MACHINE, "disk").expect("destroyed");
        destroy_extra(data.path(), MACHINE, "disk").expect("nothing to do");
        open("disk").read_exact(&mut first).expect("read");
        assert_eq!(first, [0]);
    }

    #[test]
    fn an_image_that_does_not_fit_is_refused() {
        let data = tempfile::tempdir().expect("a directory");
        let image = data.path().join("image");
        fs::write(&image, vec![1; 2 << 20]).expect("written");
        let refusal = open(data.path(), MACHINE, Mebibytes(1), Some(&image)).expect_err("small");
        assert!(matches!(refusal, DiskError::Small { .. }), "{refusal}");
    }
}
