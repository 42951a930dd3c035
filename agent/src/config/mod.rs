//! Where the configuration comes from: the kernel's command line, a volume labelled
//! `HOLDFAST` (FAT or ISO 9660), the disk that the node is installed on, a claim over the network, what was put into the
//! finished image, the image as it was built, and a URL that DHCP names, in this order. The first one that is there counts, also
//! when it is wrong: a typo must not silently bring back another document.
//!
//! The network comes last because anybody on it can answer for DHCP: a node that was told something by
//! other means asks nobody.

mod iso;
pub mod kept;
pub mod labels;
pub mod provision;
pub mod reference;
pub mod settings;

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read, Seek},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use fatfs::FsOptions;
use rustix::time::{ClockId, clock_gettime};
use types::config::{ConfigError, MAX_CONFIG, NodeSpec};
use update::disk::Bounded;

use self::{
    labels::FileSystem,
    provision::Origin,
    reference::{Reference, ReferenceFault},
};
use crate::{assign::lent, net::DocumentServer};

/// Parameter of the kernel's command line.
const PARAMETER: &str = "holdfast.config=";

/// Label of the volume and name of the document on it.
const LABEL: &str = "HOLDFAST";
const DOCUMENT: &str = "holdfast.toml";

/// Bytes that are read of a volume at most, whether it has the label or not: the longest top folder twice (65,536
/// entries of 32 bytes; Microsoft, "FAT32 File System Specification" 1.03), and more than the tables say of it. It
/// is looked at again every quarter of a second, by whoever does everything else.
const VOLUME_BYTES: u64 = 8 << 20;

/// Name of the document in STATE, where the installer puts the one that it was told by.
pub(crate) const INSTALLED: &str = "holdfast.toml";

/// Name of the document in STATE that came with a claim.
pub(crate) const CLAIMED: &str = "claimed.toml";

/// Document that was put into the image's initramfs, which is gone by now: init moved it here.
pub(crate) const CUSTOMISED: &str = "run/customised/holdfast.toml";

/// Document in the image.
const BAKED: &str = "etc/holdfast.toml";

/// How long after power-on a volume is waited for: USB hubs and sticks take a few seconds to be
/// found, and a document in the image must not win against one on a stick because it was faster.
const SETTLED: Duration = Duration::from_secs(8);

/// Time between two looks for a volume while the machine is coming up.
const COMING_UP: Duration = Duration::from_millis(250);

/// Time between two looks for a better document once nothing that can be used was found.
const LATER: Duration = Duration::from_secs(2);

/// Where a document was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The kernel's command line.
    CommandLine,
    /// What is behind this URL, which the kernel's command line holds.
    CommandLineUrl(String),
    /// A volume labelled `HOLDFAST` on this device.
    Volume(PathBuf),
    /// The disk that the node is installed on.
    Installed,
    /// Whoever claimed the node over the network.
    Claimed,
    /// What was put into the image after it was built.
    Customised,
    /// The image.
    Image,
    /// What is behind this URL, which this DHCP server named.
    Dhcp(DocumentServer, String),
    /// There is none.
    Nowhere,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommandLine => f.write_str("kernel command line"),
            Self::CommandLineUrl(text) => write!(f, "kernel command line: {}", named(text)),
            Self::Volume(device) => write!(f, "volume {}", device.display()),
            Self::Installed => f.write_str("the installed disk"),
            Self::Claimed => f.write_str("the claim over the network"),
            Self::Customised => f.write_str("the customised image"),
            Self::Image => f.write_str("the image"),
            Self::Dhcp(server, text) => {
                write!(f, "{server}: {}", named(text))
            }
            Self::Nowhere => f.write_str("nowhere"),
        }
    }
}

/// Tells a reference, and how much it can be trusted.
fn named(text: &str) -> String {
    Reference::parse(text.as_bytes()).map_or_else(|_| text.to_owned(), |named| named.to_string())
}

/// A document and where it was found.
#[derive(Debug)]
pub struct Found {
    /// Where.
    pub source: Source,
    /// Its bytes; empty when there is none.
    pub document: Vec<u8>,
    /// What it says.
    pub spec: Result<NodeSpec, LoadError>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum LoadError {
    #[error(
        "no configuration: give one with `holdfast node claim` and the code on the console, or {PARAMETER}BASE64 or {PARAMETER}URL on the kernel's command line, or {DOCUMENT} on a volume labelled {LABEL} (FAT32, or an ISO), or build an image with one, or name its URL by DHCP (option 224, in DHCPv6 65224)"
    )]
    Absent,
    #[error(
        "{PARAMETER} on the kernel's command line is neither a URL nor base64; write the document there as `base64 -w0` prints it"
    )]
    Base64 { source: base64::DecodeError },
    #[error("{PARAMETER} on the kernel's command line names no document")]
    Reference { source: ReferenceFault },
    #[error("the document that {PARAMETER} names was not fetched yet")]
    NotFetched,
    #[error(
        "cannot read {DOCUMENT} on the volume {volume}, which is labelled {LABEL}; it must be in the volume's top folder"
    )]
    Volume { volume: String, source: io::Error },
    #[error(
        "{volume} is labelled {LABEL} and is {found}, from which no configuration is read: format it as FAT32 (Windows: Format, FAT32, at most 32 GB; Linux: mkfs.vfat -F 32 -n {LABEL}) and put {DOCUMENT} into its top folder"
    )]
    Foreign { volume: String, found: FileSystem },
    #[error(
        "{volume} is labelled {LABEL}, too, and its {DOCUMENT} says something else: that on {counts} counts; unplug one of the two"
    )]
    Second { volume: String, counts: String },
    #[error("cannot read {path}")]
    File { path: String, source: io::Error },
    #[error(transparent)]
    Document(#[from] ConfigError),
}

/// Looks for a document below `root`, and goes on looking while the machine is coming up and a
/// volume may still appear. An installed node does not wait: see [`superseded`].
pub async fn settled(root: &Path) -> Found {
    loop {
        let found = load(root);
        let waits = match found.source {
            Source::CommandLine
            | Source::CommandLineUrl(_)
            | Source::Volume(_)
            | Source::Installed
            | Source::Claimed => false,
            // What these say may be to install, which cannot be taken back.
            Source::Customised | Source::Image | Source::Dhcp(..) | Source::Nowhere => true,
        };
        if !waits || since_power_on() >= SETTLED {
            return found;
        }
        tokio::time::sleep(COMING_UP).await;
    }
}

/// Waits until a volume was found after all, while the machine is coming up, on a node that started with
/// the document of its installation. Returns whether there is one.
pub async fn superseded(root: &Path, found: &Source) -> bool {
    matches!(found, Source::Installed | Source::Claimed)
        && volume_appears(root, SETTLED.saturating_sub(since_power_on())).await
}

/// Whether a volume with a document is found in this time.
async fn volume_appears(root: &Path, within: Duration) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < within {
        tokio::time::sleep(COMING_UP).await;
        if matches!(load(root).source, Source::Volume(_)) {
            return true;
        }
    }
    false
}

/// Waits until there is another document than `found`, which could not be used: somebody plugged in
/// a volume, or changed what is on it.
pub async fn changed(root: &Path, found: &Found) {
    let before = said(found);
    loop {
        tokio::time::sleep(LATER).await;
        let now = load(root);
        if now.spec.is_ok() || said(&now) != before {
            return;
        }
    }
}

fn said(found: &Found) -> String {
    let error = found.spec.as_ref().err().map(ToString::to_string).unwrap_or_default();
    format!("{}: {error}", found.source)
}

fn since_power_on() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or(Duration::MAX)
}

/// Looks for a document below `root` and parses it.
pub fn load(root: &Path) -> Found {
    let (source, read) = find(root);
    parsed(source, read)
}

/// Returns what each volume with our label says, the first one that counts and those that it hides.
pub fn volumes(root: &Path) -> impl Iterator<Item = Found> {
    on_volumes(root).map(|(source, read)| parsed(source, read))
}

fn parsed(source: Source, read: Result<Vec<u8>, LoadError>) -> Found {
    let (document, spec) = match read {
        Ok(bytes) => {
            let spec = NodeSpec::parse(&bytes).map_err(LoadError::from);
            (bytes, spec)
        }
        Err(error) => (Vec::new(), Err(error)),
    };
    Found { source, document, spec }
}

/// Returns the first document in the stated order, or why it cannot be read.
fn find(root: &Path) -> (Source, Result<Vec<u8>, LoadError>) {
    let cmdline = fs::read_to_string(root.join("proc/cmdline")).unwrap_or_default();
    if let Some(text) = parameter(&cmdline).filter(|text| Reference::is_meant(text)) {
        return (Source::CommandLineUrl(text.to_owned()), by_command_line(root, text));
    }
    if let Some(text) = parameter(&cmdline) {
        let bytes = STANDARD.decode(text).map_err(|source| LoadError::Base64 { source });
        return (Source::CommandLine, bytes);
    }
    if let Some(found) = on_volumes(root).next() {
        return found;
    }
    let installed = root.join("state").join(INSTALLED);
    let places = [
        (Source::Installed, installed),
        (Source::Claimed, root.join("state").join(CLAIMED)),
        (Source::Customised, root.join(CUSTOMISED)),
        (Source::Image, root.join(BAKED)),
    ];
    for (source, path) in places {
        match fs::read(&path) {
            Ok(bytes) => return (source, Ok(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let path = path.display().to_string();
                return (source, Err(LoadError::File { path, source: error }));
            }
        }
    }
    match provision::kept(root) {
        Some((Origin::Dhcp { server, url }, document)) => {
            (Source::Dhcp(server, url), Ok(document.into_bytes()))
        }
        Some((Origin::CommandLine { .. }, _)) | None => {
            let meant = unreadable(root).next();
            (Source::Nowhere, Err(meant.unwrap_or(LoadError::Absent)))
        }
    }
}

/// Returns what was fetched because the command line says so, if it was.
fn by_command_line(root: &Path, text: &str) -> Result<Vec<u8>, LoadError> {
    Reference::parse(text.as_bytes()).map_err(|source| LoadError::Reference { source })?;
    match provision::kept(root) {
        Some((Origin::CommandLine { url }, document)) if url == text => Ok(document.into_bytes()),
        Some(_) | None => Err(LoadError::NotFetched),
    }
}

fn parameter(cmdline: &str) -> Option<&str> {
    cmdline.split_whitespace().find_map(|word| word.strip_prefix(PARAMETER))
}

/// Reads the volumes with our label, each when it is its turn.
fn on_volumes(root: &Path) -> impl Iterator<Item = (Source, Result<Vec<u8>, LoadError>)> {
    volumes_of(root).into_iter().filter_map(|device| {
        let read = read_volume(&device).transpose()?.map_err(|source| {
            let volume = device.display().to_string();
            LoadError::Volume { volume, source }
        });
        Some((Source::Volume(device), read))
    })
}

/// Returns which volumes have our label and are not what the configuration is read from. They count for nothing, but
/// somebody meant them.
pub fn unreadable(root: &Path) -> impl Iterator<Item = LoadError> {
    foreign(root).chain(hidden(root))
}

/// Volumes with a file system that no document is read from.
fn foreign(root: &Path) -> impl Iterator<Item = LoadError> {
    volumes_of(root).into_iter().filter_map(|device| {
        let file = File::open(&device).ok()?;
        let (found, label) = labels::read(file).ok().flatten()?;
        let is_ours = is_label(&label) && matches!(read_volume(&device), Ok(None));
        is_ours.then(|| LoadError::Foreign { volume: device.display().to_string(), found })
    })
}

/// Volumes whose document is another one than that which counts. Partitions may show the same as their disk.
fn hidden(root: &Path) -> impl Iterator<Item = LoadError> {
    let mut volumes = on_volumes(root).filter_map(|(source, read)| {
        let Source::Volume(device) = source else { return None };
        Some((device.display().to_string(), read.ok()?))
    });
    let first = volumes.next();
    volumes.filter_map(move |(volume, document)| {
        let (counts, _) = first.as_ref().filter(|(_, said)| *said != document)?;
        Some(LoadError::Second { volume, counts: counts.clone() })
    })
}

/// Windows writes labels in capital letters, other systems as somebody typed them.
fn is_label(found: &str) -> bool {
    found.trim_end().eq_ignore_ascii_case(LABEL)
}

/// Returns the block devices, partitions too, but for renters' drives.
fn volumes_of(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join("sys/class/block")).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| !lent::is_foreign(root, &entry.path()));
    let mut names: Vec<_> = ours.map(|entry| entry.file_name()).collect();
    names.sort();
    names.into_iter().map(|name| root.join("dev").join(name)).collect()
}

/// Returns the document on a device; `None` when it is no volume of ours that can be read.
fn read_volume(device: &Path) -> io::Result<Option<Vec<u8>>> {
    match File::open(device) {
        Ok(file) => read_document(file),
        Err(_) => Ok(None),
    }
}

/// Returns the document on the volume in `storage`, FAT or ISO 9660; `None` when it is none, or not ours.
///
/// Whoever can put a volume into the server chose these bytes.
pub fn read_document(mut storage: impl Read + Seek) -> io::Result<Option<Vec<u8>>> {
    let limit = u64::try_from(MAX_CONFIG).unwrap_or(u64::MAX) + 1;
    if let iso::Found::File(document) = iso::read(&mut storage, LABEL, DOCUMENT, limit)? {
        return Ok(Some(document));
    }
    storage.rewind()?;
    let Ok(volume) = fatfs::FileSystem::new(Bounded::new(storage, VOLUME_BYTES), FsOptions::new())
    else {
        return Ok(None);
    };
    let in_root = volume.read_volume_label_from_root_dir().ok().flatten();
    let label = in_root.unwrap_or_else(|| volume.volume_label());
    if !is_label(&label) {
        return Ok(None);
    }
    let top = volume.root_dir();
    let file = top.open_file(DOCUMENT).map_err(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            return error;
        }
        let names = top.iter().flatten().map(|entry| entry.file_name());
        io::Error::new(io::ErrorKind::NotFound, absent(names))
    })?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Most names of a volume that are told, and how long they may be.
const MAX_NAMES: usize = 8;
const MAX_NAME: usize = 40;

/// Says what is in the volume's top folder in the place of the document.
fn absent(names: impl Iterator<Item = String>) -> String {
    let told = |name: &String| name.chars().take(MAX_NAME).collect::<String>();
    let names: Vec<String> = names.take(MAX_NAMES).collect();
    // What Windows' editors make of it, and what browsers call a second one.
    let meant = names.iter().find(|name| name.to_ascii_lowercase().starts_with("holdfast"));
    match meant {
        Some(name) => format!(
            "there is {:?}, which must be called {DOCUMENT} (Windows hides the end of names; Explorer, View, File name extensions shows it)",
            told(name)
        ),
        None if names.is_empty() => "the folder is empty".to_owned(),
        None => format!("there is {:?}", names.iter().map(told).collect::<Vec<_>>()),
    }
}

#[cfg(test)]
mod tests;
