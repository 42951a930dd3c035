//! `rootfs/manifest.toml`: every directory and file of the appliance's root, with its reason.
//!
//! Pure: text in, a checked list out. Where the bytes come from is decided here, fetching them is
//! left to `root`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Version of the document that this program reads.
const VERSION: u32 = 1;

/// The checked manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Everything in the root, by path; parents come before children.
    pub root: BTreeMap<String, Node>,
    /// Everything in the initramfs, by path.
    pub initramfs: BTreeMap<String, Node>,
}

/// One file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Permission bits, at most 0o777.
    pub mode: u32,
    /// What it is and where it comes from.
    pub content: Content,
    /// Why it is in the image.
    pub reason: String,
}

/// Where a node's bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A directory.
    Directory,
    /// A program of this workspace.
    Program {
        /// Cargo package.
        package: String,
        /// Binary of that package.
        bin: String,
    },
    /// A file of this repository.
    Source {
        /// Path from the repository's root.
        path: String,
    },
    /// Text that the build makes.
    Generated(Generated),
    /// A file that whoever builds may bake in; absent otherwise.
    Baked(Baked),
    /// A file of a Debian package, as packaged.
    Debian {
        /// The package.
        package: String,
        /// Path in the package, without the leading slash.
        path: String,
    },
    /// A symbolic link.
    Link {
        /// Where it points.
        target: String,
    },
}

/// Files that the build makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Generated {
    /// `/etc/os-release`: name, version and build.
    OsRelease,
    /// The root file system, for the initramfs.
    Root,
    /// An empty file system for STATE, as a template for the installer.
    EmptyState,
    /// An empty file system for DATA, as a template for the installer.
    EmptyData,
}

/// Files that whoever builds may bake in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Baked {
    /// The node's configuration.
    Config,
}

/// Why a manifest is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ManifestError {
    #[error("rootfs/manifest.toml: {0}")]
    Syntax(String),
    #[error("rootfs/manifest.toml has version {0}; this program reads version {VERSION}")]
    Version(u32),
    #[error(
        "rootfs/manifest.toml: `{0}` must be an absolute path without `.`, `..`, doubled or trailing slashes"
    )]
    BadPath(String),
    #[error("rootfs/manifest.toml: {path} is listed twice")]
    Duplicate { path: String },
    #[error(
        "rootfs/manifest.toml: {path} has mode `{mode}`; write it in octal as \"0755\", without setuid, setgid, sticky bit or write permission for others (a directory may be \"1777\")"
    )]
    BadMode { path: String, mode: String },
    #[error("rootfs/manifest.toml: {path} has no reason")]
    NoReason { path: String },
    #[error(
        "rootfs/manifest.toml: {path} must name exactly one of program, source, generated, baked, debian and link"
    )]
    OneSource { path: String },
    #[error("rootfs/manifest.toml: {path} lies in {parent}, which is not listed as a directory")]
    NoParent { path: String, parent: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    #[serde(default, rename = "directory")]
    directories: Vec<DirectoryEntry>,
    #[serde(default, rename = "file")]
    files: Vec<FileEntry>,
    #[serde(default)]
    initramfs: Vec<FileEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DirectoryEntry {
    path: String,
    mode: String,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    path: String,
    #[serde(default = "link_mode")]
    mode: String,
    reason: String,
    program: Option<ProgramEntry>,
    source: Option<String>,
    generated: Option<Generated>,
    baked: Option<Baked>,
    debian: Option<DebianEntry>,
    link: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DebianEntry {
    package: String,
    path: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProgramEntry {
    package: String,
    bin: String,
}

/// A link has no mode of its own.
fn link_mode() -> String {
    "0444".to_owned()
}

impl Manifest {
    /// Reads and checks a manifest.
    pub fn parse(text: &str) -> Result<Self, ManifestError> {
        let document: Document =
            toml::from_str(text).map_err(|error| ManifestError::Syntax(error.to_string()))?;
        if document.version != VERSION {
            return Err(ManifestError::Version(document.version));
        }
        let mut root = BTreeMap::new();
        for entry in document.directories {
            let mode = parse_mode(&entry.path, &entry.mode, DIRECTORY_MODES)?;
            add(&mut root, entry.path, mode, Content::Directory, entry.reason)?;
        }
        add_files(&mut root, document.files)?;
        check_parents(&root)?;
        let mut initramfs = BTreeMap::new();
        add_files(&mut initramfs, document.initramfs)?;
        check_parents(&initramfs)?;
        Ok(Self { root, initramfs })
    }

    /// The Debian packages that files come from, each once, in order.
    pub fn packages(&self) -> Vec<String> {
        let nodes = self.root.values().chain(self.initramfs.values());
        let mut packages: Vec<_> = nodes
            .filter_map(|node| match &node.content {
                Content::Debian { package, .. } => Some(package.clone()),
                Content::Directory
                | Content::Program { .. }
                | Content::Source { .. }
                | Content::Generated(_)
                | Content::Baked(_)
                | Content::Link { .. } => None,
            })
            .collect();
        packages.sort();
        packages.dedup();
        packages
    }

    /// The programs that must be built, each once, in order.
    pub fn programs(&self) -> Vec<(String, String)> {
        let mut programs: Vec<_> = self
            .root
            .values()
            .chain(self.initramfs.values())
            .filter_map(|node| match &node.content {
                Content::Program { package, bin } => Some((package.clone(), bin.clone())),
                Content::Directory
                | Content::Source { .. }
                | Content::Generated(_)
                | Content::Baked(_)
                | Content::Debian { .. }
                | Content::Link { .. } => None,
            })
            .collect();
        programs.sort();
        programs.dedup();
        programs
    }
}

fn add_files(
    nodes: &mut BTreeMap<String, Node>,
    entries: Vec<FileEntry>,
) -> Result<(), ManifestError> {
    for entry in entries {
        let mode = parse_mode(&entry.path, &entry.mode, FILE_MODES)?;
        let (path, reason) = (entry.path.clone(), entry.reason.clone());
        add(nodes, path, mode, entry.content()?, reason)?;
    }
    Ok(())
}

fn add(
    nodes: &mut BTreeMap<String, Node>,
    path: String,
    mode: u32,
    content: Content,
    reason: String,
) -> Result<(), ManifestError> {
    let clean = path.strip_prefix('/').is_some_and(|rest| {
        rest.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
    });
    if !clean || path.contains('\0') {
        return Err(ManifestError::BadPath(path));
    }
    if reason.trim().is_empty() {
        return Err(ManifestError::NoReason { path });
    }
    let node = Node { mode, content, reason };
    match nodes.insert(path.clone(), node) {
        Some(_) => Err(ManifestError::Duplicate { path }),
        None => Ok(()),
    }
}

fn check_parents(nodes: &BTreeMap<String, Node>) -> Result<(), ManifestError> {
    for path in nodes.keys() {
        let Some((parent, _)) = path.rsplit_once('/') else {
            continue;
        };
        let listed = nodes.get(parent).map(|node| &node.content);
        if !parent.is_empty() && listed != Some(&Content::Directory) {
            return Err(ManifestError::NoParent { path: path.clone(), parent: parent.to_owned() });
        }
    }
    Ok(())
}

impl FileEntry {
    fn content(self) -> Result<Content, ManifestError> {
        let Self { path, program, source, generated, baked, debian, link, .. } = self;
        if let Some(DebianEntry { package, path: inside }) = debian {
            let alone = program.is_none() && source.is_none() && generated.is_none();
            return if alone && baked.is_none() && link.is_none() {
                Ok(Content::Debian { package, path: inside })
            } else {
                Err(ManifestError::OneSource { path })
            };
        }
        match (program, source, generated, baked, link) {
            (Some(ProgramEntry { package, bin }), None, None, None, None) => {
                Ok(Content::Program { package, bin })
            }
            (None, Some(source), None, None, None) => Ok(Content::Source { path: source }),
            (None, None, Some(generated), None, None) => Ok(Content::Generated(generated)),
            (None, None, None, Some(baked), None) => Ok(Content::Baked(baked)),
            (None, None, None, None, Some(target)) => Ok(Content::Link { target }),
            _ => Err(ManifestError::OneSource { path }),
        }
    }
}

/// Bits that a file's mode may have: no setuid, no setgid, no writing by others.
const FILE_MODES: u32 = 0o775;
/// A directory may also be a shared, sticky one.
const DIRECTORY_MODES: u32 = 0o1777;

fn parse_mode(path: &str, text: &str, allowed: u32) -> Result<u32, ManifestError> {
    let mode = text
        .strip_prefix('0')
        .or_else(|| text.strip_prefix('1').map(|_| text))
        .filter(|_| text.len() == 4)
        .and_then(|digits| u32::from_str_radix(digits, 8).ok())
        .filter(|mode| mode & !allowed == 0)
        // Writable by all only together with the sticky bit.
        .filter(|mode| mode & 0o002 == 0 || mode & 0o1000 != 0);
    mode.ok_or_else(|| ManifestError::BadMode { path: path.to_owned(), mode: text.to_owned() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn with_file(lines: &str) -> Result<Manifest, ManifestError> {
        Manifest::parse(&format!(
            "version = 1\n[[directory]]\npath = \"/usr\"\nmode = \"0755\"\nreason = \"r\"\n[[file]]\n{lines}"
        ))
    }

    #[test]
    fn a_program_is_read() {
        let manifest = with_file(
            "path = \"/usr/agent\"\nmode = \"0755\"\nreason = \"r\"\nprogram = { package = \"agent\", bin = \"agent\" }\n",
        )
        .unwrap();
        assert_eq!(manifest.programs(), [("agent".to_owned(), "agent".to_owned())]);
        assert_eq!(manifest.root["/usr/agent"].mode, 0o755);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error =
            with_file("path = \"/usr/a\"\nmode = \"0755\"\nreason = \"r\"\nsorce = \"x\"\n");
        let Err(ManifestError::Syntax(text)) = error else { panic!("expected a syntax error") };
        assert!(text.contains("sorce") && text.contains("line 10"), "{text}");
    }

    fn refused(path: &str, mode: &str, reason: &str, source: &str) -> ManifestError {
        with_file(&format!(
            "path = \"{path}\"\nmode = \"{mode}\"\nreason = \"{reason}\"\n{source}\n"
        ))
        .unwrap_err()
    }

    #[test]
    fn paths_are_absolute_and_plain() {
        for path in ["usr/a", "/usr/../a", "/usr//a", "/usr/a/", "/"] {
            let error = refused(path, "0644", "r", "source = \"x\"");
            assert!(matches!(error, ManifestError::BadPath(_)), "{path}: {error}");
        }
    }

    #[test]
    fn modes_without_privilege_only() {
        for mode in ["4755", "2755", "1755", "0646", "644", "0x44", "+644"] {
            let error = refused("/usr/a", mode, "r", "source = \"x\"");
            assert!(matches!(error, ManifestError::BadMode { .. }), "{mode}: {error}");
        }
    }

    #[test]
    fn every_file_has_a_reason_and_one_source() {
        let error = refused("/usr/a", "0644", " ", "source = \"x\"");
        assert!(matches!(error, ManifestError::NoReason { .. }));
        let error = refused("/usr/a", "0644", "r", "");
        assert!(matches!(error, ManifestError::OneSource { .. }));
        let error = refused("/usr/a", "0644", "r", "source = \"x\"\nlink = \"y\"");
        assert!(matches!(error, ManifestError::OneSource { .. }));
    }

    #[test]
    fn a_path_is_listed_once_and_below_a_listed_directory() {
        let error = refused("/usr", "0644", "r", "source = \"x\"");
        assert!(matches!(error, ManifestError::Duplicate { .. }));
        let error = refused("/opt/a", "0644", "r", "source = \"x\"");
        assert!(matches!(error, ManifestError::NoParent { .. }));
    }

    #[test]
    fn a_future_version_is_refused() {
        assert_eq!(Manifest::parse("version = 2\n"), Err(ManifestError::Version(2)));
    }
}
