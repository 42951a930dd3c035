//! Packages from Debian through a private apt root: own lists, own cache, own sources, Debian's
//! signatures verified, the machine's apt configuration read for its mirror and proxy but never
//! touched.
//!
//! Source: apt.conf(5), sources.list(5).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{
    fs::{self, File},
    io,
};

use sha2::{Digest, Sha256};

use crate::tools::{self, KEYRING, ToolError};
use crate::version;

/// Used when the machine's own apt configuration names no Debian mirror.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
/// The suites that carry kernel sources (backports) and the boot stub (stable).
const SUITES: [&str; 3] = ["trixie", "trixie-backports", "bookworm-backports"];
/// Package lists older than this are fetched again: kernels with fixes appear about weekly.
const LISTS_STAY_FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// Why a package is not to be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum DebianError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("no suite of {mirror} carries a package {package}")]
    NotFound { mirror: String, package: String },
    #[error("apt-get download {package} left no package file in {folder}")]
    NoFile { package: String, folder: PathBuf },
}

/// A package that lies on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// The verified file.
    pub(crate) file: PathBuf,
}

/// What apt would install of some packages, and where from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidates {
    /// Names and versions.
    pub versions: String,
    /// The archive as `sources.list` names it.
    pub sources: String,
}

/// Looks up packages of `suite`, in a cache as [`unpacked`] has it.
pub fn candidates(cache: &Path, suite: &str, packages: &[&str]) -> Result<Candidates, DebianError> {
    let archive = Archive::open_suites(&cache.join(format!("apt-{suite}")), &[suite])?;
    archive.refresh(|_| ())?;
    let mut versions = String::new();
    for package in packages {
        let package = archive.real_name(package)?;
        let _ = writeln!(versions, "{package}={}", archive.candidate(&package)?);
    }
    Ok(Candidates { versions, sources: sources(&archive.mirror, &[suite]) })
}

/// Unpacks packages of `suite`, each with what its `Depends` names first when it is a metapackage
/// for a kernel, into a folder below `cache`, and returns the folder. The folder's name follows the
/// packages' versions, so it is made once and is complete when it is there.
pub fn unpacked(cache: &Path, suite: &str, packages: &[&str]) -> Result<PathBuf, DebianError> {
    let archive = Archive::open_suites(&cache.join(format!("apt-{suite}")), &[suite])?;
    archive.refresh(|_| ())?;
    let mut fetched = Vec::new();
    let mut name = String::new();
    for package in packages {
        let package = archive.real_name(package)?;
        let version = archive.candidate(&package)?;
        let _ = write!(name, "{package}={version} ");
        fetched.push(archive.fetch(&package, &version)?);
    }
    let digest = Sha256::digest(name.as_bytes());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let folder = cache.join(format!("unpacked/{suite}-{digest}"));
    if folder.is_dir() {
        return Ok(folder);
    }
    let partial = folder.with_extension("partial");
    let _ = fs::remove_dir_all(&partial);
    for package in &fetched {
        archive.unpack(package, &partial)?;
    }
    fs::rename(&partial, &folder).map_err(file("move", &partial))?;
    Ok(folder)
}

/// The private apt root.
#[derive(Debug)]
pub(crate) struct Archive {
    root: PathBuf,
    mirror: String,
    /// Held while this value lives: apt reads its files as it goes, and tests run side by side.
    _lock: File,
}

impl Archive {
    /// Writes the configuration below `root`, for the suites that the image needs.
    pub(crate) fn open(root: &Path) -> Result<Self, DebianError> {
        Self::open_suites(root, &SUITES)
    }

    /// Writes the configuration below `root`, for `suites`, once nobody else uses it.
    fn open_suites(root: &Path, suites: &[&str]) -> Result<Self, DebianError> {
        for folder in [
            "lists/partial",
            "cache/archives/partial",
            "etc/apt.conf.d",
            "etc/preferences.d",
            "etc/trusted.gpg.d",
            "debs",
        ] {
            let path = root.join(folder);
            fs::create_dir_all(&path).map_err(file("create", &path))?;
        }
        let in_use = root.join("in-use");
        let lock = File::create(&in_use).map_err(file("create", &in_use))?;
        lock.lock().map_err(file("lock", &in_use))?;
        let mirror = machine_mirror().unwrap_or_else(|| DEFAULT_MIRROR.to_owned());
        write_file(&root.join("status"), "")?;
        write_file(&root.join("etc/sources.list"), &sources(&mirror, suites))?;
        let dump = tools::output(tools::command("apt-config").arg("dump")).unwrap_or_default();
        write_file(&root.join("apt.conf"), &configuration(root, &dump))?;
        Ok(Self { root: root.to_owned(), mirror, _lock: lock })
    }

    /// Fetches the package lists unless they are fresh. Old lists are good enough when there is
    /// no network; the note says so.
    pub(crate) fn refresh(&self, note: impl FnOnce(&str)) -> Result<(), DebianError> {
        let stamp = self.root.join("refreshed");
        let mirrored = fs::read_to_string(&stamp).is_ok_and(|mirror| mirror == self.mirror);
        if mirrored && age(&stamp).is_some_and(|age| age < LISTS_STAY_FRESH) {
            return Ok(());
        }
        match tools::output(self.apt("apt-get").args(["update", "--error-on=any"])) {
            Ok(_) => write_file(&stamp, &self.mirror),
            Err(error) if mirrored => {
                note(&format!("the package lists stay as they were: {error}"));
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Name and version of the newest `linux-source` that any suite carries.
    pub(crate) fn newest_kernel_source(&self) -> Result<(String, String), DebianError> {
        let text = tools::output(self.apt("apt-cache").args(["show", "-a", "linux-source"]))?;
        newest_dependency(&text).ok_or_else(|| self.not_found("linux-source"))
    }

    /// The package that a kernel's metapackage stands for; any other is itself.
    fn real_name(&self, package: &str) -> Result<String, DebianError> {
        if !package.starts_with("linux-image-") {
            return Ok(package.to_owned());
        }
        let text = tools::output(self.apt("apt-cache").args(["depends", package]))?;
        let depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let mut images = depends.filter(|name| name.starts_with("linux-image-"));
        Ok(images.next().unwrap_or(package).to_owned())
    }

    /// The version of `package` that apt itself would install.
    pub(crate) fn candidate(&self, package: &str) -> Result<String, DebianError> {
        let text = tools::output(self.apt("apt-cache").args(["policy", package]))?;
        text.lines()
            .find_map(|line| line.trim().strip_prefix("Candidate: "))
            .filter(|version| *version != "(none)")
            .map(str::to_owned)
            .ok_or_else(|| self.not_found(package))
    }

    /// The package file, fetched and verified unless an earlier build did.
    pub(crate) fn fetch(&self, name: &str, version: &str) -> Result<Package, DebianError> {
        let file_path = self.root.join("debs").join(format!("{name}_{version}.deb"));
        if !file_path.is_file() {
            self.download(name, version, &file_path)?;
        }
        Ok(Package { name: name.to_owned(), version: version.to_owned(), file: file_path })
    }

    fn download(&self, name: &str, version: &str, to: &Path) -> Result<(), DebianError> {
        let folder = self.root.join("debs/partial");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(file("create", &folder))?;
        let mut command = self.apt("apt-get");
        command.arg("download").arg(format!("{name}={version}")).current_dir(&folder);
        tools::output(&mut command)?;
        let found = fs::read_dir(&folder)
            .map_err(file("list", &folder))?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|e| e == "deb"))
            .ok_or_else(|| DebianError::NoFile {
                package: name.to_owned(),
                folder: folder.clone(),
            })?;
        fs::rename(&found, to).map_err(file("move", &found))
    }

    /// Unpacks a package into `folder`, which it creates.
    pub(crate) fn unpack(&self, package: &Package, folder: &Path) -> Result<(), DebianError> {
        fs::create_dir_all(folder).map_err(file("create", folder))?;
        let mut command = tools::command("dpkg");
        command.arg("-x").arg(&package.file).arg(folder);
        tools::output(&mut command)?;
        Ok(())
    }

    fn apt(&self, program: &str) -> std::process::Command {
        let mut command = tools::command(program);
        command.env("APT_CONFIG", self.root.join("apt.conf"));
        command
    }

    fn not_found(&self, package: &str) -> DebianError {
        DebianError::NotFound { mirror: self.mirror.clone(), package: package.to_owned() }
    }
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DebianError {
    let path = path.to_owned();
    move |source| DebianError::File { action, path, source }
}

fn write_file(path: &Path, text: &str) -> Result<(), DebianError> {
    fs::write(path, text).map_err(file("write", path))
}

fn age(path: &Path) -> Option<Duration> {
    let modified = fs::metadata(path).ok()?.modified().ok()?;
    SystemTime::now().duration_since(modified).ok()
}

fn sources(mirror: &str, suites: &[&str]) -> String {
    let mut text = String::new();
    for suite in suites {
        let _ = writeln!(text, "deb [signed-by={KEYRING}] {mirror} {suite} main");
    }
    text
}

/// The private configuration; proxies come from `machine`, the output of `apt-config dump`.
fn configuration(root: &Path, machine: &str) -> String {
    let root = root.display();
    let mut text = format!(
        "Dir::State \"{root}\";\n\
         Dir::State::Lists \"{root}/lists\";\n\
         Dir::State::status \"{root}/status\";\n\
         Dir::Cache \"{root}/cache\";\n\
         Dir::Etc \"{root}/etc\";\n\
         Dir::Etc::Parts \"{root}/etc/apt.conf.d\";\n\
         APT::Architecture \"amd64\";\n\
         APT::Sandbox::User \"root\";\n\
         Acquire::Languages \"none\";\n"
    );
    for line in machine.lines() {
        let is_proxy = ["Acquire::http::Proxy", "Acquire::https::Proxy"]
            .iter()
            .any(|key| line.starts_with(key));
        if is_proxy {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// The newest version of a metapackage in the output of `apt-cache show`, and what it stands for.
fn newest_dependency(show: &str) -> Option<(String, String)> {
    show.split("\n\n")
        .filter_map(|stanza| {
            let field = |key: &str| stanza.lines().find_map(|line| line.strip_prefix(key));
            let package = field("Depends: ")?
                .split([',', ' ', '('])
                .map(str::trim)
                .find(|name| name.starts_with("linux-source-"))?;
            Some((package.to_owned(), field("Version: ")?.trim().to_owned()))
        })
        .max_by(|(_, a), (_, b)| version::compare(a, b))
}

/// The Debian mirror that the machine's own apt configuration names.
fn machine_mirror() -> Option<String> {
    let folder = Path::new("/etc/apt");
    let mut files: Vec<PathBuf> = fs::read_dir(folder.join("sources.list.d"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files.insert(0, folder.join("sources.list"));
    files.iter().find_map(|path| {
        let text = fs::read_to_string(path).ok()?;
        mirror_in(&text, |list| fs::read_to_string(list).ok())
    })
}

/// The first Debian archive that a sources file names; `read` opens lists of mirrors.
fn mirror_in(text: &str, read: impl Fn(&str) -> Option<String>) -> Option<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| line.starts_with("deb ") || line.starts_with("URIs:"))
        .flat_map(str::split_whitespace)
        .find_map(|word| match word.strip_prefix("mirror+file:") {
            Some(list) => read(list)?.lines().find_map(as_mirror),
            None => as_mirror(word),
        })
}

fn as_mirror(word: &str) -> Option<String> {
    let uri = word.split_whitespace().next()?.trim_end_matches('/');
    let reachable = uri.starts_with("http://") || uri.starts_with("https://");
    (reachable && uri.ends_with("/debian")).then(|| uri.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mirror(text: &str) -> Option<String> {
        mirror_in(text, |path| {
            (path == "/etc/apt/mirrors/debian.list")
                .then(|| "https://m.example/debian\n".to_owned())
        })
    }

    #[test]
    fn a_one_line_source_is_read() {
        let text = "# deb http://no.example/debian x main\ndeb [arch=amd64] http://a.example/debian/ bookworm main\n";
        assert_eq!(mirror(text).as_deref(), Some("http://a.example/debian"));
    }

    #[test]
    fn a_deb822_source_is_read() {
        let text = "Types: deb\nURIs: https://b.example/debian\nSuites: trixie\n";
        assert_eq!(mirror(text).as_deref(), Some("https://b.example/debian"));
    }

    #[test]
    fn a_mirror_list_is_followed() {
        let text = "URIs: mirror+file:/etc/apt/mirrors/debian.list\n";
        assert_eq!(mirror(text).as_deref(), Some("https://m.example/debian"));
    }

    #[test]
    fn other_archives_are_not_taken_for_debian() {
        let text = "deb http://a.example/ubuntu noble main\ndeb https://x.example/node_20.x nodistro main\ndeb cdrom:/debian x main\n";
        assert_eq!(mirror(text), None);
    }

    #[test]
    fn the_newest_kernel_source_wins_over_suites() {
        let show = "Package: linux-source\nVersion: 6.12.95-1~bpo12+1\nDepends: linux-source-6.12\n\n\
                    Package: linux-source\nVersion: 7.3.4-1~bpo13+1\nDepends: linux-source-7.3\n\n\
                    Package: linux-source\nVersion: 7.2.12-1~bpo13+1\nDepends: linux-source-7.2\n";
        assert_eq!(
            newest_dependency(show),
            Some(("linux-source-7.3".to_owned(), "7.3.4-1~bpo13+1".to_owned()))
        );
    }

    #[test]
    fn only_proxies_are_taken_over() {
        let text = configuration(
            Path::new("/c"),
            "Acquire::http::Proxy \"http://p:1\";\nAcquire::Check-Valid-Until \"false\";\n",
        );
        assert!(text.contains("http://p:1"));
        assert!(!text.contains("Check-Valid-Until"));
    }
}
