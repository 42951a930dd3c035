//! A finished image with a configuration of its provider's, made without building anything.
//!
//! The configuration goes into the boot program's initramfs, so that whatever signs the program signs
//! it too. Everything outside the EFI system partition stays as it is, byte by byte. What is not
//! understood in full is refused: a boot program with other sections, an EFI system partition with
//! other files, a disk that was installed and holds two releases.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use types::config::{ConfigError, Explained, NodeSpec};
use update::disk::{Slice, esp as volume, gpt::BlockSize, medium};
use update::secure_boot::Variable;

use crate::cpio::{self, CpioError, Entry, Kind};
use crate::esp;
use crate::keys::Keys;
use crate::program::{Parts, Program, ProgramFileError, Signatures};
use crate::release;

/// Folder and document in the initramfs; the node's init looks for them there.
const FOLDER: &str = "customised";
const DOCUMENT: &str = "customised/holdfast.toml";
/// Section of the configuration that can be replaced.
const AUTHORITY: &str = "authority";
/// Largest boot program that is read, in bytes.
const PROGRAM_LIMIT: u64 = medium::PROGRAM_LIMIT;
/// Most files on an EFI system partition of ours.
const FILES: usize = 16;

/// What to change.
#[derive(Debug)]
pub struct Changes {
    /// The configuration, in TOML.
    pub config: String,
    /// Keys of the lease authority in the place of those in the configuration, in hexadecimal.
    pub authority: Vec<String>,
    /// How many of them must have signed a lease; the configuration's number unless given.
    pub threshold: Option<u32>,
    /// The channel of releases in the place of the configuration's, which must say where they come from.
    pub channel: Option<String>,
    /// The publisher's keys, to sign again with.
    pub keys: Keys,
    /// What becomes of signatures for which there is no key.
    pub signatures: Lost,
}

/// What becomes of signatures that the change makes worthless and that no given key makes anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// The image is refused.
    Refused,
    /// They go, and the image is an unsigned one.
    Dropped,
}

/// Why an image was not customised.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum CustomiseError {
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is no image: {reason}")]
    NotImage { path: PathBuf, reason: String },
    #[error("{path} holds {file}, which this builder does not know; it customises images as built")]
    Foreign { path: PathBuf, file: String },
    #[error("the boot program of {path} cannot be customised")]
    Program { path: PathBuf, source: ProgramFileError },
    #[error("the initramfs of {path} cannot be read")]
    Initramfs { path: PathBuf, source: CpioError },
    #[error("the configuration cannot be used: {0}")]
    Config(String),
    #[error(
        "{path} is signed for Secure Boot, which a change undoes: give --secure-boot-key and --secure-boot-cert, or --drop-signatures"
    )]
    NeedsKey { path: PathBuf },
    #[error(
        "{path} says in a signature what the TPM measures, which a change undoes: give --pcr-key, or --drop-signatures"
    )]
    NeedsPcrKey { path: PathBuf },
    #[error("{path}: what was written is not what is read back, {what}")]
    ReadBack { path: PathBuf, what: &'static str },
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CustomiseError {
    let path = path.to_owned();
    move |source| CustomiseError::File { action, path, source }
}

/// Where a boot program lies in an image.
enum Place {
    /// The image is the boot program.
    Alone,
    /// In a volume from this byte on, of this length, at these paths.
    Volume { start: u64, length: u64, paths: Vec<&'static str> },
}

/// Writes a customised copy of `from`, an ISO, a disk image or a boot program, to `to`. Returns what
/// there is to say of its boot program (`measurements.json`).
pub fn customise(
    from: &Path,
    to: &Path,
    changes: &Changes,
) -> Result<serde_json::Value, CustomiseError> {
    let document = document(changes)?;
    let (place, old) = find(from)?;
    let program = program(from, &old, &document, changes)?;
    let partial = partial(to)?;
    let made = write(from, &partial, &place, &program)
        .and_then(|()| check(from, &partial, &place, &program))
        .and_then(|()| fs::rename(&partial, to).map_err(file("create", to)));
    // What is there is no image, and is in the way of the next one on a disk that is full.
    made.inspect_err(|_| drop(fs::remove_file(&partial)))?;
    Ok(program.measurements)
}

/// Where the copy is made; it gets its name when it is whole.
fn partial(to: &Path) -> Result<PathBuf, CustomiseError> {
    // A rename would put a file into a device's place.
    if fs::metadata(to).is_ok_and(|found| !found.is_file()) {
        let what = "it is there and no file; name a file, and write that to a disk with dd";
        return Err(file("create", to)(io::Error::other(what)));
    }
    let mut partial = to.as_os_str().to_owned();
    partial.push(".partial");
    Ok(partial.into())
}

/// The configuration with what replaces parts of it; refused as a node would refuse it.
fn document(changes: &Changes) -> Result<Vec<u8>, CustomiseError> {
    let unchanged =
        changes.authority.is_empty() && changes.threshold.is_none() && changes.channel.is_none();
    let text = if unchanged { changes.config.clone() } else { changed(changes)? };
    match NodeSpec::parse(text.as_bytes()) {
        Ok(_) => Ok(text.into_bytes()),
        Err(error) if unchanged => Err(CustomiseError::Config(error.to_string())),
        Err(error) => Err(CustomiseError::Config(as_written(&text, &changes.config, error))),
    }
}

fn changed(changes: &Changes) -> Result<String, CustomiseError> {
    let wrong = |reason: String| CustomiseError::Config(reason);
    let mut table: toml::Table =
        changes.config.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    if let Some(channel) = &changes.channel {
        let updates = table.get_mut("updates").and_then(toml::Value::as_table_mut);
        let missing = "--channel needs a section [updates], which says where releases come from";
        let updates = updates.ok_or(wrong(missing.to_owned()))?;
        updates.insert("channel".to_owned(), channel.clone().into());
    }
    let empty = || toml::Value::Table(toml::Table::new());
    let authority = table.entry(AUTHORITY).or_insert_with(empty);
    let authority = authority.as_table_mut().ok_or(wrong("`authority` is no table".to_owned()))?;
    if !changes.authority.is_empty() {
        authority.insert("keys".to_owned(), changes.authority.clone().into());
    }
    if let Some(threshold) = changes.threshold {
        authority.insert("threshold".to_owned(), i64::from(threshold).into());
    }
    Ok(table.to_string())
}

/// What is wrong with `changed`, told with the line of what the provider wrote where that has the same fault.
fn as_written(changed: &str, written: &str, error: ConfigError) -> String {
    let authority = |text: &str| Some(text.parse::<toml::Table>().ok()?.remove(AUTHORITY));
    let mut text = written.to_owned();
    if authority(written) == Some(None)
        && let Some(Some(given)) = authority(changed)
    {
        // Behind all that is written, so that no line is another one.
        text = format!("{text}\n{}", toml::Table::from_iter([(AUTHORITY.to_owned(), given)]));
    }
    match NodeSpec::parse(text.as_bytes()) {
        Err(told) if is_same(&told, &error) => told.to_string(),
        // The flags brought it, and no line has it.
        Ok(_) | Err(_) => {
            let words = words(&error).join(": ");
            format!("with --authority, --threshold and --channel as given, {words}")
        }
    }
}

/// Whether two documents have the same fault, wherever it is.
fn is_same(one: &ConfigError, other: &ConfigError) -> bool {
    words(one) == words(other)
}

/// What is wrong, without where.
fn words(error: &ConfigError) -> Vec<String> {
    match error {
        ConfigError::Document(Explained { message, .. }) => vec![message.clone()],
        ConfigError::Value { said, right, .. } => vec![said.clone(), right.clone()],
        ConfigError::TooLarge { .. } | ConfigError::Encoding { .. } => vec![error.to_string()],
    }
}

/// Finds the boot program of an image.
fn find(path: &Path) -> Result<(Place, Vec<u8>), CustomiseError> {
    let not_image = |reason: &str| CustomiseError::NotImage {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    let mut image = File::open(path).map_err(file("open", path))?;
    let mut magic = [0; 2];
    let begins = image.read_exact(&mut magic);
    begins.map_err(|error| {
        let is_empty = error.kind() == io::ErrorKind::UnexpectedEof;
        if is_empty { not_image("it is empty") } else { file("read", path)(error) }
    })?;
    image.seek(SeekFrom::Start(0)).map_err(file("read", path))?;
    if &magic == b"MZ" {
        let mut program = Vec::new();
        image.take(PROGRAM_LIMIT + 1).read_to_end(&mut program).map_err(file("read", path))?;
        if program.len() as u64 > PROGRAM_LIMIT {
            return Err(not_image("it is too long for a boot program"));
        }
        return Ok((Place::Alone, program));
    }
    let partitions = medium::esp_partitions(ReadOnly(&image), BlockSize::B512);
    let [(start, length)] = partitions[..] else {
        return Err(not_image("it has no EFI system partition, or several"));
    };
    let slice = || Slice::new(ReadOnly(&image), start, length);
    let names = volume::files(slice(), FILES).map_err(file("list the EFI partition of", path))?;
    let known = [volume::FALLBACK, volume::SLOT_A];
    let paths: Vec<&str> =
        known.into_iter().filter(|known| names.iter().any(|name| name == known)).collect();
    let updates = Variable::ALL.map(Variable::path);
    let foreign =
        names.iter().find(|name| !paths.contains(&name.as_str()) && !updates.contains(name));
    if let Some(name) = foreign {
        return Err(CustomiseError::Foreign { path: path.to_owned(), file: name.clone() });
    }
    let read = |name: &&str| {
        volume::read(slice(), name, PROGRAM_LIMIT).map_err(file("read the boot program of", path))
    };
    let programs = paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    match programs.split_first() {
        Some((first, rest)) if rest.iter().all(|other| other == first) => {
            Ok((Place::Volume { start, length, paths }, first.clone()))
        }
        Some(_) => Err(not_image("its slots hold different releases")),
        None => Err(not_image("its EFI system partition holds no boot program")),
    }
}

/// The boot program with the configuration in it, signed again.
fn program(
    path: &Path,
    old: &[u8],
    document: &[u8],
    changes: &Changes,
) -> Result<Program, CustomiseError> {
    let path = path.to_owned();
    let failed = |source| CustomiseError::Program { path: path.clone(), source };
    let signatures = Signatures::of(old).map_err(failed)?;
    if changes.signatures == Lost::Refused {
        if signatures.secure_boot && changes.keys.programs.is_none() {
            return Err(CustomiseError::NeedsKey { path });
        }
        if signatures.measurements && changes.keys.pcr.is_none() {
            return Err(CustomiseError::NeedsPcrKey { path });
        }
    }
    let mut parts = Parts::of(old).map_err(failed)?;
    let unreadable = |source| CustomiseError::Initramfs { path: path.clone(), source };
    let mut entries = cpio::read(&parts.initrd).map_err(unreadable)?;
    entries.retain(|entry| entry.name != FOLDER && entry.name != DOCUMENT);
    let entry = |name: &str, mode, kind| Entry { name: name.to_owned(), mode, kind };
    entries.push(entry(FOLDER, 0o700, Kind::Directory));
    entries.push(entry(DOCUMENT, 0o600, Kind::File(document.to_vec())));
    parts.initrd = cpio::write(&entries).map_err(unreadable)?;
    let time = release::time_of(&String::from_utf8_lossy(&parts.os_release));
    parts.finish(&changes.keys, time).map_err(failed)
}

fn write(from: &Path, to: &Path, place: &Place, program: &Program) -> Result<(), CustomiseError> {
    match place {
        Place::Alone => {
            let mut copy = File::create(to).map_err(file("create", to))?;
            copy.write_all(&program.bytes).and_then(|()| copy.sync_all()).map_err(file("write", to))
        }
        Place::Volume { start, length, paths } => {
            fs::copy(from, to).map_err(file("copy the image to", to))?;
            let image = OpenOptions::new().read(true).write(true).open(to);
            let image = image.map_err(file("open", to))?;
            let mut slice = Slice::new(&image, *start, *length);
            esp::fill(&mut slice, program, paths)
                .map_err(file("write the EFI partition of", to))?;
            image.sync_all().map_err(file("write", to))
        }
    }
}

/// Reads back what was written, and compares what must be as it was.
fn check(from: &Path, to: &Path, place: &Place, program: &Program) -> Result<(), CustomiseError> {
    let differs = |what| CustomiseError::ReadBack { path: to.to_owned(), what };
    let Place::Volume { start, length, .. } = place else {
        let same = fs::read(to).map_err(file("read", to))? == program.bytes;
        return if same { Ok(()) } else { Err(differs("the boot program")) };
    };
    if find(to)?.1 != program.bytes {
        return Err(differs("the boot program"));
    }
    let open = |path: &Path| File::open(path).map_err(file("open", path));
    let (mut old, mut new) = (open(from)?, open(to)?);
    let (mut before, mut after) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for (skipped, limit) in [(0, *start), (start + length, u64::MAX)] {
        let mut left = limit;
        old.seek(SeekFrom::Start(skipped)).map_err(file("read", from))?;
        new.seek(SeekFrom::Start(skipped)).map_err(file("read", to))?;
        while left > 0 {
            let size = usize::try_from(left).unwrap_or(usize::MAX).min(before.len());
            let count = fill(&mut old, &mut before[..size]).map_err(file("read", from))?;
            if count != fill(&mut new, &mut after[..size]).map_err(file("read", to))?
                || before[..count] != after[..count]
            {
                return Err(differs("something beside the EFI system partition"));
            }
            left = if count < size { 0 } else { left - count as u64 };
        }
    }
    Ok(())
}

/// Reads until `buffer` is full or the file ends.
fn fill(input: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// What reads partitions and volumes wants a file that can be written; this one refuses.
#[derive(Debug)]
struct ReadOnly<'a>(&'a File);

impl Read for ReadOnly<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Seek for ReadOnly<'_> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.0.seek(position)
    }
}

impl Write for ReadOnly<'_> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

    /// What is told of a configuration whose authority is replaced.
    fn told(config: &str) -> String {
        let changes = Changes {
            config: config.to_owned(),
            authority: vec![KEY.to_owned()],
            threshold: Some(1),
            channel: None,
            keys: Keys::default(),
            signatures: Lost::Refused,
        };
        document(&changes).expect_err("refused").to_string()
    }

    #[test]
    fn a_folder_is_no_empty_image_and_no_place_for_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = find(folder.path()).map(drop).expect_err("a folder");
        assert!(matches!(refused, CustomiseError::File { action: "read", .. }), "{refused}");
        let refused = partial(folder.path()).expect_err("a folder");
        assert!(matches!(refused, CustomiseError::File { action: "create", .. }));
        let named = partial(&folder.path().join("rack7.iso")).expect("a name");
        assert!(named.ends_with("rack7.iso.partial"));
    }

    #[test]
    fn what_a_flag_brought_is_told_without_a_line() {
        let changes = Changes {
            config: format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\"{KEY}\"]\n"),
            authority: Vec::new(),
            threshold: Some(4),
            channel: None,
            keys: Keys::default(),
            signatures: Lost::Refused,
        };
        let told = document(&changes).expect_err("refused").to_string();
        assert!(told.contains("--threshold") && !told.contains("line"), "{told}");
        assert!(told.contains("authority.threshold = 4: it must be 1 to 1"), "{told}");
    }

    #[test]
    fn mistakes_are_told_with_the_line_of_what_the_provider_wrote() {
        let typo = told("# a rack\nversion = 1\n\n# its name\nnmae = \"n\"\n");
        assert!(typo.contains("line 5"), "{typo}");
        let number = told("version = 1\n\n\n[machines]\n# much\nnet_mbit = 0\n");
        assert!(number.contains("line 6: machines.net_mbit = 0"), "{number}");
        let authority = format!("[authority]\nthreshold = 1\nkeys = [\"{KEY}\"]\n");
        let both = told(&format!("version = 1\n{authority}\n# slow\n[network]\ntrial_s = 1\n"));
        assert!(both.contains("line 8: network.trial_s = 1"), "{both}");
    }
}
