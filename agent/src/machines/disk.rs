//! A machine's disk: a sparse file, filled from an image once and the machine's own from then on.
//! It is encrypted with a key of its own (`disk_keys`); the VMM encrypts what the guest writes.
//!
//! Disks that an earlier release made, whose files end in `.raw`, stay plain.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use types::{
    disk_key::{DiskKey, SectorCipher},
    ids::MachineId,
    units::Mebibytes,
    vm::MAX_DISK_QUEUES,
};

use super::{
    disk_copy::{self, CopyError, Image},
    disk_keys,
};

/// Largest disk: a file on ext4 has at most 2^32 - 1 blocks of 4 KiB, and disks are whole MiB.
/// Source: Documentation/filesystems/ext4/blocks.rst of the kernel.
pub const LARGEST: Mebibytes = Mebibytes((16 << 20) - 1);
/// End of the names of encrypted disks' files, and of plain ones.
const SEALED: &str = "sealed";
const PLAIN: &str = "raw";
/// The same while one is made.
const PARTIAL: &str = "partial";
/// What the names of attached disks' files begin with.
const EXTRA: &str = "extra-";

/// Why a machine has no disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DiskError {
    #[error("the image has {image} bytes and {disk} {size}; it does not fit")]
    Small { image: u64, disk: String, size: u64 },
    #[error("cannot make {path}")]
    Host { path: String, source: io::Error },
    #[error(
        "{path} is encrypted, and its key cannot be read: what the disk holds is lost without it"
    )]
    Key { path: String, source: io::Error },
    #[error(
        "{path} was made and is gone, or DATA is not the volume that it was; nothing is put in its place. The \
         machine starts when the disk is back, and its renter can delete it"
    )]
    Lost { path: String },
    #[error("the image that it begins as was damaged on DATA: {reason}")]
    Image { reason: String },
}

/// Where machines' disks are.
#[derive(Debug, Clone)]
pub struct Places {
    /// The folder below which machines' files are: DATA.
    pub data: PathBuf,
    /// The folder of their disks' keys, on STATE.
    pub keys: PathBuf,
}

/// A disk, ready for its machine.
#[derive(Debug)]
pub struct Opened {
    /// The file.
    pub file: File,
    /// The same, opened again for each further queue.
    pub again: Vec<File>,
    /// What it is encrypted with; a disk of an earlier release has none.
    pub key: Option<DiskKey>,
}

impl Opened {
    fn at(path: &Path, key: Option<DiskKey>) -> io::Result<Self> {
        let open = || File::options().read(true).write(true).open(path);
        let again = (1..MAX_DISK_QUEUES).map(|_| open()).collect::<io::Result<_>>()?;
        Ok(Self { file: open()?, again, key })
    }
}

/// Returns the folder of a machine below `data`.
pub fn folder(data: &Path, machine: MachineId) -> PathBuf {
    data.join("machines").join(machine.to_string())
}

/// Opens a machine's disk, and makes it the first time. Blocks while an image is copied.
pub fn open(
    places: &Places,
    machine: MachineId,
    size: Mebibytes,
    image: Option<Image<'_>>,
) -> Result<Opened, DiskError> {
    open_named(places, machine, "disk", size, image)
}

/// Opens a disk that is attached to a machine, and makes it the first time. `name` is checked before.
pub fn open_extra(
    places: &Places,
    machine: MachineId,
    name: &str,
    size: Mebibytes,
    image: Option<Image<'_>>,
) -> Result<Opened, DiskError> {
    open_named(places, machine, &extra(name), size, image)
}

/// Whether a machine's disk was made already, whatever became of it, and needs its image no more.
pub fn is_made(places: &Places, machine: MachineId) -> bool {
    is_named(places, machine, "disk")
}

/// Whether a disk that is attached to a machine was made already.
pub fn is_extra_made(places: &Places, machine: MachineId, name: &str) -> bool {
    is_named(places, machine, &extra(name))
}

fn is_named(places: &Places, machine: MachineId, name: &str) -> bool {
    let folder = folder(&places.data, machine);
    disk_keys::is_marked(&places.keys, machine, name)
        || [SEALED, PLAIN].iter().any(|end| folder.join(format!("{name}.{end}")).exists())
}

/// Destroys a disk that was attached to a machine. Nothing happens when there is none.
pub fn destroy_extra(places: &Places, machine: MachineId, name: &str) -> io::Result<()> {
    let name = extra(name);
    disk_keys::destroy(&places.keys, machine, &name)?;
    for end in [SEALED, PLAIN, PARTIAL] {
        match fs::remove_file(folder(&places.data, machine).join(format!("{name}.{end}"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

/// File name, without its end, of an attached disk: no name of its makes it the machine's own.
fn extra(name: &str) -> String {
    format!("{EXTRA}{name}")
}

/// What a disk is called to its renter, by its file's name.
fn told(name: &str) -> String {
    let extra = name.strip_prefix(EXTRA).map(|name| format!("disk {name}"));
    extra.unwrap_or_else(|| "the machine's own disk".to_owned())
}

fn open_named(
    places: &Places,
    machine: MachineId,
    name: &str,
    size: Mebibytes,
    image: Option<Image<'_>>,
) -> Result<Opened, DiskError> {
    let folder = folder(&places.data, machine);
    let path = folder.join(format!("{name}.{SEALED}"));
    let host = |source| DiskError::Host { path: path.display().to_string(), source };
    let plain = folder.join(format!("{name}.{PLAIN}"));
    // A name that a damaged volume cannot look up is neither there nor free.
    if plain.try_exists().map_err(host)? {
        return Opened::at(&plain, None).map_err(host);
    }
    let there = path.try_exists().map_err(host)?;
    let marked = disk_keys::is_marked(&places.keys, machine, name);
    let key = match (there, marked) {
        (false, true) => return Err(DiskError::Lost { path: path.display().to_string() }),
        (true, _) => {
            let lost = |source| DiskError::Key { path: path.display().to_string(), source };
            disk_keys::read(&places.keys, machine, name).map_err(lost)?
        }
        (false, false) => make_named(places, machine, (name, &path), size, image)?,
    };
    if !marked {
        let kept = disk_keys::mark(&places.keys, machine, name);
        // A machine that ran before does not wait for room on STATE.
        kept.or_else(|error| if there { Ok(()) } else { Err(host(error)) })?;
    }
    Opened::at(&path, Some(key)).map_err(host)
}

/// Makes a disk and its key. What was begun before has another name, and is made anew.
fn make_named(
    places: &Places,
    machine: MachineId,
    (name, path): (&str, &Path),
    size: Mebibytes,
    image: Option<Image<'_>>,
) -> Result<DiskKey, DiskError> {
    let host = |source| DiskError::Host { path: path.display().to_string(), source };
    let folder = folder(&places.data, machine);
    fs::create_dir_all(&folder).map_err(host)?;
    let size = size.to_bytes().unwrap_or(u64::MAX);
    let key = disk_keys::make(&places.keys, machine, name).map_err(host)?;
    let partial = folder.join(format!("{name}.{PARTIAL}"));
    make(&partial, size, image, &key).map_err(|error| {
        // Nobody counts what it takes.
        let _ = fs::remove_file(&partial);
        match error {
            MakeError::Small { image } => DiskError::Small { image, disk: told(name), size },
            MakeError::Image { reason } => DiskError::Image { reason },
            MakeError::Io(source) => host(source),
        }
    })?;
    fs::rename(&partial, path).map_err(host)?;
    File::open(&folder).and_then(|folder| folder.sync_all()).map_err(host)?;
    Ok(key)
}

/// Returns how much of a machine's disks is on `data` already, in MiB; the rest is holes.
pub fn allocated_mib(data: &Path, machine: MachineId) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(files) = fs::read_dir(folder(data, machine)) else { return 0 };
    let is_disk = |path: PathBuf| path.extension().is_some_and(|end| end == SEALED || end == PLAIN);
    let disks = files.flatten().filter(|file| is_disk(file.path()));
    // stat(2): blocks of 512 bytes, whatever the file system's are.
    disks.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks()).sum::<u64>()
        >> 11
}

/// Destroys everything of a machine, the keys first. Nothing happens when there is nothing.
pub fn destroy(places: &Places, machine: MachineId) -> io::Result<()> {
    disk_keys::destroy_all(&places.keys, machine)?;
    match fs::remove_dir_all(folder(&places.data, machine)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

enum MakeError {
    Small { image: u64 },
    Image { reason: String },
    Io(io::Error),
}

impl From<CopyError> for MakeError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Image(error) => Self::Image { reason: error.to_string() },
            CopyError::Altered(found) => Self::Image { reason: format!("it has digest {found}") },
            CopyError::Disk(error) => Self::Io(error),
        }
    }
}

impl From<io::Error> for MakeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn make(path: &Path, size: u64, image: Option<Image<'_>>, key: &DiskKey) -> Result<(), MakeError> {
    let disk = File::create(path)?;
    if let Some(image) = image {
        let file = File::open(image.path).map_err(CopyError::Image)?;
        let length = file.metadata().map_err(CopyError::Image)?.len();
        if length > size {
            // One that is damaged may have been shorter.
            disk_copy::check(&image, &file)?;
            return Err(MakeError::Small { image: length });
        }
        disk_copy::copy(&image, &file, &disk, &SectorCipher::new(key))?;
    }
    disk.set_len(size)?;
    disk.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use types::disk_key::SECTOR;

    use super::*;
    use crate::machines::disk_copy::PIECE;

    const MACHINE: MachineId = MachineId::from_bytes([5; 16]);

    fn places(folder: &tempfile::TempDir) -> Places {
        Places { data: folder.path().join("data"), keys: folder.path().join("keys") }
    }

    fn begin_as(path: &Path) -> Image<'_> {
        Image { path, cpus: &[0, 1], unchecked: None }
    }

    /// Returns a part of a disk as its machine reads it.
    fn plain(disk: &Opened, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        disk.file.read_exact_at(&mut bytes, at).expect("read");
        let cipher = SectorCipher::new(disk.key.as_ref().expect("a key"));
        cipher.decrypt_sparse(at / SECTOR as u64, &mut bytes);
        bytes
    }

    fn write(disk: &Opened, at: u64, mut bytes: Vec<u8>) {
        let cipher = SectorCipher::new(disk.key.as_ref().expect("a key"));
        cipher.encrypt(at / SECTOR as u64, &mut bytes);
        disk.file.write_all_at(&bytes, at).expect("written");
    }

    #[test]
    fn a_disk_begins_as_its_image_and_keeps_what_was_written() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = places(&folder);
        let image = folder.path().join("image");
        let mut bytes = vec![0; 3 * PIECE + 100];
        bytes[2 * PIECE] = 7;
        bytes[3 * PIECE + 99] = 8;
        fs::write(&image, &bytes).expect("written");
        let size = Mebibytes(4);
        assert!(!is_made(&places, MACHINE));
        let disk = open(&places, MACHINE, size, Some(begin_as(&image))).expect("made");
        assert!(is_made(&places, MACHINE) && !is_extra_made(&places, MACHINE, "more"));
        let metadata = disk.file.metadata().expect("a file");
        assert_eq!(metadata.len(), 4 << 20);
        assert!(metadata.blocks() * 512 < 1 << 20, "not sparse");
        assert_eq!(plain(&disk, 0, bytes.len().next_multiple_of(SECTOR))[..bytes.len()], bytes);
        write(&disk, 0, vec![9; SECTOR]);
        drop(disk);
        let again = open(&places, MACHINE, size, Some(begin_as(&image))).expect("opened");
        assert_eq!(plain(&again, 0, SECTOR), [9; SECTOR]);
        destroy(&places, MACHINE).expect("destroyed");
        assert!(!super::folder(&places.data, MACHINE).exists());
    }

    #[test]
    fn nothing_on_the_disk_is_in_clear_and_nothing_opens_it_without_its_key() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = places(&folder);
        let image = folder.path().join("image");
        fs::write(&image, b"a renter's secret".repeat(100)).expect("written");
        open(&places, MACHINE, Mebibytes(1), Some(begin_as(&image))).expect("made");
        let path = super::folder(&places.data, MACHINE).join("disk.sealed");
        let raw = fs::read(&path).expect("read");
        assert!(!raw.windows(17).any(|window| window == b"a renter's secret"));
        disk_keys::destroy_all(&places.keys, MACHINE).expect("destroyed");
        let lost =
            open(&places, MACHINE, Mebibytes(1), Some(begin_as(&image))).expect_err("no key");
        assert!(matches!(lost, DiskError::Key { .. }), "{lost}");
        assert_eq!(fs::read(&path).expect("read"), raw, "it was not made anew");
    }

    #[test]
    fn a_disk_that_is_gone_is_told_and_not_made_anew() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = places(&folder);
        let open = || super::open(&places, MACHINE, Mebibytes(1), None);
        write(&open().expect("made"), 0, vec![9; SECTOR]);
        let machines = places.data.join("machines");
        let away = folder.path().join("away");
        fs::rename(&machines, &away).expect("moved");
        let lost = open().expect_err("gone");
        assert!(matches!(lost, DiskError::Lost { .. }), "{lost}");
        assert!(is_made(&places, MACHINE), "its image is not fetched again");
        assert!(!machines.exists(), "nothing took its place");
        fs::rename(&away, &machines).expect("moved");
        assert_eq!(plain(&open().expect("back"), 0, SECTOR), [9; SECTOR]);
        // One that an earlier release made is remembered from its first use on.
        let mark = places.keys.join(MACHINE.to_string()).join("disk.made");
        fs::remove_file(&mark).expect("removed");
        open().expect("opened");
        assert!(mark.exists());
        destroy(&places, MACHINE).expect("destroyed");
        assert_eq!(plain(&open().expect("made anew"), 0, SECTOR), [0; SECTOR]);
    }

    #[test]
    fn a_disk_of_an_earlier_release_stays_as_it_is() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = places(&folder);
        let machine = super::folder(&places.data, MACHINE);
        fs::create_dir_all(&machine).expect("made");
        fs::write(machine.join("disk.raw"), [7; 4096]).expect("written");
        let disk = open(&places, MACHINE, Mebibytes(1), None).expect("opened");
        assert_eq!((disk.key, disk.file.metadata().expect("a file").len()), (None, 4096));
        destroy(&places, MACHINE).expect("destroyed");
        assert!(!machine.exists());
    }

    #[test]
    fn attached_disks_are_files_of_their_own() {
        let folder = tempfile::tempdir().expect("a directory");
        let places = places(&folder);
        let size = Mebibytes(1);
        let open = |name| open_extra(&places, MACHINE, name, size, None).expect("made");
        write(&open("disk"), 0, vec![7; PIECE]);
        assert_eq!(open("a").file.metadata().expect("a file").len(), 1 << 20);
        let own = super::open(&places, MACHINE, Mebibytes(2), None).expect("made");
        assert_eq!(own.file.metadata().expect("a file").len(), 2 << 20);
        assert_ne!(own.key, open("disk").key);
        assert_eq!(plain(&open("disk"), 0, SECTOR), [7; SECTOR]);
        write(&open("disk"), 0, vec![7; 1 << 20]);
        assert_eq!(allocated_mib(&places.data, MACHINE), 1);
        destroy_extra(&places, MACHINE, "disk").expect("destroyed");
        destroy_extra(&places, MACHINE, "disk").expect("nothing to do");
        assert_eq!(plain(&open("disk"), 0, SECTOR), [0; SECTOR]);
    }

    #[test]
    fn an_image_that_is_damaged_makes_no_disk() {
        let folder = tempfile::tempdir().expect("a directory");
        let (places, image) = (places(&folder), folder.path().join("image"));
        fs::write(&image, b"a system").expect("written");
        let wanted = disk_copy::digest_of(&File::open(&image).expect("opened")).expect("read");
        let whole = Image { unchecked: Some(wanted), ..begin_as(&image) };
        for damaged in [&b"a sistem"[..], b"a system and more", b""] {
            fs::write(&image, damaged).expect("written");
            let size = Mebibytes(u64::try_from(damaged.len() % 2).expect("a size"));
            let refusal = open(&places, MACHINE, size, Some(whole)).expect_err("damaged");
            assert!(matches!(refusal, DiskError::Image { .. }), "{refusal}");
            assert!(!is_made(&places, MACHINE), "it begins as its image the next time");
        }
        let gone = Image { path: &folder.path().join("gone"), ..whole };
        let refusal = open(&places, MACHINE, Mebibytes(1), Some(gone)).expect_err("gone");
        assert!(matches!(refusal, DiskError::Image { .. }), "{refusal}");
        fs::write(&image, b"a system").expect("written");
        let disk = open(&places, MACHINE, Mebibytes(1), Some(whole)).expect("made");
        assert_eq!(plain(&disk, 0, SECTOR)[..8], *b"a system");
    }

    #[test]
    fn an_image_that_does_not_fit_is_refused() {
        let folder = tempfile::tempdir().expect("a directory");
        let image = folder.path().join("image");
        fs::write(&image, vec![1; 2 << 20]).expect("written");
        let (places, size) = (places(&folder), Mebibytes(1));
        let own = open(&places, MACHINE, size, Some(begin_as(&image))).expect_err("small");
        let extra = open_extra(&places, MACHINE, "data", size, Some(begin_as(&image)));
        for (refusal, called) in
            [(own, "the machine's own disk"), (extra.expect_err("small"), "disk data")]
        {
            let DiskError::Small { image, disk, size } = refusal else { panic!("{refusal}") };
            assert_eq!((image, &*disk, size), (2 << 20, called, 1 << 20));
        }
        assert!(!is_extra_made(&places, MACHINE, "data"));
    }
}
