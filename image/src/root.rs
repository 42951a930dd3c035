//! The root file system: staged from the manifest, packed by `mkfs.erofs`, unpacked again and
//! compared with the manifest.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use crate::manifest::{Baked, Content, Generated, Manifest, Node};
use crate::tools::{self, ToolError};

/// Identity of the file system: a constant, because images of one content must not differ.
const UUID: &str = "686f6c64-6661-4374-8000-726f6f746673";
/// Compression: lz4hc unpacks fastest; 12 is its best level.
const COMPRESSION: &str = "-zlz4hc,12";
/// Compressed units of 64 KiB: a sixth smaller than the default 4 KiB, and files are read whole.
const CLUSTER: &str = "-C65536";

/// Why there is no root.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum RootError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the manifest makes {path} from `{what}`, which only the initramfs can hold")]
    Misplaced { path: String, what: &'static str },
    #[error("the root differs from rootfs/manifest.toml:\n{}", list(.0))]
    Deviates(Vec<Deviation>),
}

/// A difference between an unpacked image and the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deviation {
    /// The image holds something that the manifest does not name.
    Unlisted(String),
    /// The manifest names something that the image lacks.
    Missing(String),
    /// Permissions differ: found and listed.
    Mode(String, u32, u32),
    /// A setuid or setgid program.
    Privileged(String),
    /// An executable that is no program of the manifest.
    ForeignProgram(String),
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlisted(path) => write!(f, "{path} is not listed"),
            Self::Missing(path) => write!(f, "{path} is listed but not there"),
            Self::Mode(path, found, listed) => {
                write!(f, "{path} has mode {found:o} instead of {listed:o}")
            }
            Self::Privileged(path) => write!(f, "{path} has a setuid or setgid bit"),
            Self::ForeignProgram(path) => {
                write!(f, "{path} is an ELF program, but no program of the manifest")
            }
        }
    }
}

fn list(deviations: &[Deviation]) -> String {
    let lines: Vec<_> = deviations.iter().map(|d| format!("  {d}")).collect();
    lines.join("\n")
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RootError {
    let path = path.to_owned();
    move |source| RootError::File { action, path, source }
}

/// Where the bytes of the root come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The checkout, for files of the repository.
    pub(crate) workspace: &'a Path,
    /// The folder with our programs.
    pub(crate) programs: &'a Path,
    /// The text of `/etc/os-release`.
    pub(crate) os_release: &'a str,
    /// The configuration to bake in.
    pub(crate) config: Option<&'a Path>,
    /// Where Debian packages are unpacked, by name.
    pub(crate) packages: &'a BTreeMap<String, PathBuf>,
    /// The template of an empty STATE.
    pub(crate) empty_state: &'a [u8],
    /// The template of an empty DATA.
    pub(crate) empty_data: &'a [u8],
}

/// The bytes of one file; `None` when it is not baked in this time.
fn content_of(
    path: &str,
    node: &Node,
    sources: &Sources<'_>,
) -> Result<Option<Vec<u8>>, RootError> {
    let from = match &node.content {
        Content::Program { bin, .. } => sources.programs.join(bin),
        Content::Source { path } => sources.workspace.join(path),
        Content::Debian { package, path: inside } => match sources.packages.get(package) {
            Some(folder) => folder.join(inside),
            None => PathBuf::from(package).join(inside),
        },
        Content::Baked(Baked::Config) => match sources.config {
            Some(config) => config.to_owned(),
            None => return Ok(None),
        },
        Content::Generated(Generated::OsRelease) => {
            return Ok(Some(sources.os_release.as_bytes().to_vec()));
        }
        Content::Generated(Generated::EmptyState) => {
            return Ok(Some(sources.empty_state.to_vec()));
        }
        Content::Generated(Generated::EmptyData) => return Ok(Some(sources.empty_data.to_vec())),
        Content::Generated(Generated::Root) => {
            return Err(RootError::Misplaced { path: path.to_owned(), what: "root" });
        }
        Content::Directory | Content::Link { .. } => return Ok(None),
    };
    fs::read(&from).map(Some).map_err(file("read", &from))
}

/// Lays out the root below `folder` and returns the paths that are really there.
pub(crate) fn stage(
    manifest: &Manifest,
    sources: &Sources<'_>,
    folder: &Path,
) -> Result<BTreeMap<String, Node>, RootError> {
    let mut staged = BTreeMap::new();
    for (path, node) in &manifest.root {
        let target = folder.join(path.trim_start_matches('/'));
        match (&node.content, content_of(path, node, sources)?) {
            (Content::Directory, _) => {
                fs::create_dir(&target).map_err(file("create", &target))?;
            }
            (Content::Link { target: to }, _) => {
                symlink(to, &target).map_err(file("link", &target))?;
            }
            (_, Some(bytes)) => fs::write(&target, bytes).map_err(file("write", &target))?,
            (_, None) => continue,
        }
        staged.insert(path.clone(), node.clone());
    }
    // Modes come last: a folder without write permission could not be filled.
    for (path, node) in &staged {
        if !matches!(node.content, Content::Link { .. }) {
            let target = folder.join(path.trim_start_matches('/'));
            set_mode(&target, node.mode)?;
        }
    }
    set_mode(folder, 0o755)?;
    Ok(staged)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), RootError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(file("set the mode of", path))
}

/// Packs `folder` into `image`.
pub fn pack(folder: &Path, image: &Path) -> Result<(), RootError> {
    let mut mkfs = tools::command("mkfs.erofs");
    mkfs.args([COMPRESSION, CLUSTER, "-T0", "--all-root", "-x-1", "-U", UUID])
        .arg(image)
        .arg(folder);
    tools::output(&mut mkfs)?;
    Ok(())
}

/// Unpacks `image` into `folder`, which must not exist.
pub fn unpack(image: &Path, folder: &Path) -> Result<(), RootError> {
    let mut extract = std::ffi::OsString::from("--extract=");
    extract.push(folder);
    let mut fsck = tools::command("fsck.erofs");
    fsck.arg(extract).arg("--preserve-perms").arg(image);
    tools::output(&mut fsck)?;
    Ok(())
}

/// Something found in an unpacked image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Permission bits with setuid, setgid and sticky bit.
    pub mode: u32,
    /// Whether it is an ELF file.
    pub elf: bool,
    /// Whether it is a symbolic link, whose mode means nothing.
    pub link: bool,
}

/// Everything below `folder`, by absolute path inside it.
pub fn observe(folder: &Path) -> Result<BTreeMap<String, Found>, RootError> {
    let mut found = BTreeMap::new();
    for entry in walkdir::WalkDir::new(folder).min_depth(1) {
        let entry = entry.map_err(|error| RootError::File {
            action: "list",
            path: folder.to_owned(),
            source: error.into(),
        })?;
        let path = entry.path();
        let metadata = path.symlink_metadata().map_err(file("inspect", path))?;
        let relative = path.strip_prefix(folder).unwrap_or(path);
        let elf = metadata.is_file()
            && fs::read(path).map_err(file("read", path))?.starts_with(b"\x7fELF");
        found.insert(
            format!("/{}", relative.display()),
            Found {
                mode: metadata.permissions().mode() & 0o7777,
                elf,
                link: metadata.is_symlink(),
            },
        );
    }
    Ok(found)
}

/// Compares what an image holds with what it should.
pub fn compare(listed: &BTreeMap<String, Node>, found: &BTreeMap<String, Found>) -> Vec<Deviation> {
    let mut deviations = Vec::new();
    for (path, file) in found {
        let Some(node) = listed.get(path) else {
            deviations.push(Deviation::Unlisted(path.clone()));
            continue;
        };
        if file.mode & 0o6000 != 0 && !file.link {
            deviations.push(Deviation::Privileged(path.clone()));
        } else if file.mode != node.mode && !file.link {
            deviations.push(Deviation::Mode(path.clone(), file.mode, node.mode));
        }
        let program = match node.content {
            Content::Program { .. } => true,
            // One of Debian's is listed as what may be executed.
            Content::Debian { .. } => node.mode & 0o111 != 0,
            Content::Directory
            | Content::Source { .. }
            | Content::Generated(_)
            | Content::Baked(_)
            | Content::Link { .. } => false,
        };
        if file.elf && !program {
            deviations.push(Deviation::ForeignProgram(path.clone()));
        }
    }
    let missing = listed.keys().filter(|path| !found.contains_key(*path));
    deviations.extend(missing.cloned().map(Deviation::Missing));
    deviations
}

/// Builds the root image at `image`, using `work` for its folders, and checks it.
pub(crate) fn build(
    manifest: &Manifest,
    sources: &Sources<'_>,
    work: &Path,
    image: &Path,
) -> Result<BTreeMap<String, Node>, RootError> {
    let staging = work.join("root");
    fs::create_dir(&staging).map_err(file("create", &staging))?;
    let staged = stage(manifest, sources, &staging)?;
    pack(&staging, image)?;
    let unpacked = work.join("unpacked");
    unpack(image, &unpacked)?;
    let deviations = compare(&staged, &observe(&unpacked)?);
    if deviations.is_empty() { Ok(staged) } else { Err(RootError::Deviates(deviations)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn node(mode: u32, content: Content) -> Node {
        Node { mode, content, reason: "r".to_owned() }
    }

    fn found(mode: u32, elf: bool) -> Found {
        Found { mode, elf, link: false }
    }

    fn listed() -> BTreeMap<String, Node> {
        let program = Content::Program { package: "agent".to_owned(), bin: "agent".to_owned() };
        let source = Content::Source { path: "x".to_owned() };
        BTreeMap::from([
            ("/agent".to_owned(), node(0o555, program)),
            ("/text".to_owned(), node(0o444, source)),
        ])
    }

    #[test]
    fn a_program_of_debians_is_fine_where_it_may_be_executed() {
        let debian = || Content::Debian { package: "p".to_owned(), path: "usr/bin/p".to_owned() };
        let listed =
            [("/a".to_owned(), node(0o555, debian())), ("/b".to_owned(), node(0o444, debian()))];
        let seen = [("/a".to_owned(), found(0o555, true)), ("/b".to_owned(), found(0o444, true))];
        let deviations = compare(&listed.into(), &seen.into());
        assert_eq!(deviations, [Deviation::ForeignProgram("/b".to_owned())]);
    }

    fn deviations(extra: &[(&str, Found)]) -> Vec<Deviation> {
        let mut seen = BTreeMap::from([
            ("/agent".to_owned(), found(0o555, true)),
            ("/text".to_owned(), found(0o444, false)),
        ]);
        for (path, file) in extra {
            seen.insert((*path).to_owned(), file.clone());
        }
        compare(&listed(), &seen)
    }

    #[test]
    fn the_listed_files_are_fine() {
        assert_eq!(deviations(&[]), []);
    }

    #[test]
    fn an_unlisted_file_is_found() {
        let extra = [("/bin", found(0o755, false))];
        assert_eq!(deviations(&extra), [Deviation::Unlisted("/bin".to_owned())]);
    }

    #[test]
    fn a_setuid_bit_is_found() {
        let extra = [("/agent", found(0o4555, true))];
        assert_eq!(deviations(&extra), [Deviation::Privileged("/agent".to_owned())]);
    }

    #[test]
    fn a_program_in_the_place_of_a_text_is_found() {
        let extra = [("/text", found(0o444, true))];
        assert_eq!(deviations(&extra), [Deviation::ForeignProgram("/text".to_owned())]);
    }

    #[test]
    fn a_missing_file_is_found() {
        let seen = BTreeMap::from([("/agent".to_owned(), found(0o555, true))]);
        assert_eq!(compare(&listed(), &seen), [Deviation::Missing("/text".to_owned())]);
    }
}
