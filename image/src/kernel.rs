//! The kernel: Debian's source, our configuration, and a cache outside the checkout.
//!
//! An entry of the cache is named by the hash of everything that went in: fragments, source
//! version, compiler, linker and this recipe. The build tree is kept for incremental builds.
//! Source: Linux `Documentation/kbuild/{kbuild,kconfig,reproducible-builds}.rst`.

mod user_mode;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

use sha2::{Digest, Sha256};

use crate::debian::{Archive, DebianError, Package};
use crate::kconfig::{self, FragmentError, Lost, Request};
use crate::progress::{Outcome, Progress, Step};
use crate::tools::{self, ToolError};

/// Raised when a change of this file changes what comes out for the same fragments and source.
const RECIPE: u32 = 1;
/// What a build makes of the source.
struct Target {
    /// `ARCH` of the kernel's makefiles.
    architecture: &'static str,
    /// The build tree, below the cache.
    out: &'static str,
    /// What `make` is asked for.
    goal: &'static str,
    /// Where errors and warnings go, below the cache.
    log: &'static str,
}

/// The kernel of the image.
const IMAGE: Target = Target {
    architecture: "x86",
    out: "kernel-build/out",
    goal: "bzImage",
    log: "kernel-build/build.log",
};
/// Lines that `make` prints for a whole build; only the progress bar depends on it.
const EXPECTED_LINES: u64 = 4400;
/// Variables that would change what the kernel's makefiles do.
const FOREIGN_VARIABLES: [&str; 12] = [
    "ARCH",
    "CC",
    "CFLAGS",
    "CROSS_COMPILE",
    "HOSTCC",
    "KBUILD_OUTPUT",
    "KCFLAGS",
    "KCONFIG_ALLCONFIG",
    "KCONFIG_CONFIG",
    "LLVM",
    "MAKEFLAGS",
    "MFLAGS",
];

/// A built kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The `bzImage`, an EFI program.
    pub image: PathBuf,
    /// Its full configuration.
    pub config: PathBuf,
    /// What `uname -r` says.
    pub release: String,
    /// The Debian package of the source.
    pub package: String,
    /// Its version.
    pub version: String,
    /// Name of the cache entry.
    pub key: String,
}

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum KernelError {
    #[error(transparent)]
    Debian(#[from] DebianError),
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{package} {version} does not build what kernel-config/ asks for:\n{}", list(.lost))]
    Lost { package: String, version: String, lost: Vec<Lost> },
    #[error("{package} {version} knows mitigations that kernel-config/ leaves off; name them in hardening.config: {}", .symbols.join(", "))]
    Mitigations { package: String, version: String, symbols: Vec<String> },
    #[error("building the kernel failed; the whole output is in {log}:\n{output}")]
    Make { log: PathBuf, output: String },
}

fn list(lost: &[Lost]) -> String {
    lost.iter().map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n")
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KernelError {
    let path = path.to_owned();
    move |source| KernelError::File { action, path, source }
}

/// All fragments of `folder`, by name.
pub fn read_fragments(folder: &Path) -> Result<Vec<(String, String)>, KernelError> {
    let mut fragments = Vec::new();
    for entry in fs::read_dir(folder).map_err(file("list", folder))? {
        let path = entry.map_err(file("list", folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".config") {
            let text = fs::read_to_string(&path).map_err(file("read", &path))?;
            fragments.push((name, text));
        }
    }
    fragments.sort();
    Ok(fragments)
}

/// Every option that the fragments ask for, each once.
pub fn requests(fragments: &[(String, String)]) -> Result<Vec<Request>, FragmentError> {
    let mut requests = Vec::new();
    for (name, text) in fragments {
        requests.extend(kconfig::parse_fragment(name, text)?);
    }
    kconfig::check_unique(&requests)?;
    Ok(requests)
}

/// Name of the cache entry for these inputs.
fn key(fragments: &[(String, String)], package: &str, version: &str, tools: &str) -> String {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(&RECIPE.to_le_bytes());
    field(package.as_bytes());
    field(version.as_bytes());
    field(tools.as_bytes());
    for (name, text) in fragments {
        field(name.as_bytes());
        field(text.as_bytes());
    }
    crate::hex(&hash.finalize())
}

/// Where the builder works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Builder<'a> {
    /// The whole cache.
    pub(crate) cache: &'a Path,
    /// `kernel-config/`.
    pub(crate) fragments: &'a Path,
    /// Parallel jobs of make.
    pub(crate) jobs: usize,
}

impl Builder<'_> {
    /// The kernel for today's newest source, from the cache when it is there.
    pub(crate) fn build(
        &self,
        archive: &Archive,
        progress: &dyn Progress,
    ) -> Result<Kernel, KernelError> {
        progress.started(Step::Kernel);
        let fragments = read_fragments(self.fragments)?;
        let requests = requests(&fragments)?;
        let (package, version) = archive.newest_kernel_source()?;
        let key = key(&fragments, &package, &version, &toolchain()?);
        let entry = self.cache.join("kernel").join(&key);
        let outcome = if entry.join("bzImage").is_file() {
            Outcome::Cached
        } else {
            let source = archive.fetch(&package, &version)?;
            self.compile(archive, &source, &requests, &entry, progress)?;
            Outcome::Built
        };
        let release = read(&entry.join("release"))?;
        progress.finished(Step::Kernel, outcome);
        Ok(Kernel {
            image: entry.join("bzImage"),
            config: entry.join("config"),
            release: release.trim().to_owned(),
            package,
            version,
            key,
        })
    }

    fn compile(
        &self,
        archive: &Archive,
        source: &Package,
        requests: &[Request],
        entry: &Path,
        progress: &dyn Progress,
    ) -> Result<(), KernelError> {
        let tree = self.source_tree(archive, source, progress)?;
        let out = self.cache.join(IMAGE.out);
        fs::create_dir_all(&out).map_err(file("create", &out))?;
        let wanted = out.join("wanted.config");
        write(&wanted, &kconfig::merged(requests))?;
        let mut configure = self.make(&IMAGE, &tree, &out);
        tools::output(configure.arg("allnoconfig").env("KCONFIG_ALLCONFIG", &wanted))?;
        tools::output(self.make(&IMAGE, &tree, &out).arg("olddefconfig"))?;
        check(source, requests, &read(&out.join(".config"))?, &known_symbols(&tree)?)?;
        self.run_make(&IMAGE, &tree, &out, progress)?;
        store(&out, entry)
    }

    /// The unpacked source. A tree of another version is thrown away with what was built from it.
    fn source_tree(
        &self,
        archive: &Archive,
        source: &Package,
        progress: &dyn Progress,
    ) -> Result<PathBuf, KernelError> {
        let work = self.cache.join("kernel-build");
        let tree = work.join(&source.name);
        let stamp = work.join("source-version");
        let wanted = format!("{} {}\n", source.name, source.version);
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(tree);
        }
        progress.advanced(Step::Kernel, 0, None, "unpacking the source");
        if work.exists() {
            fs::remove_dir_all(&work).map_err(file("remove", &work))?;
        }
        let unpacked = work.join("package");
        archive.unpack(source, &unpacked)?;
        let tarball = unpacked.join(format!("usr/src/{}.tar.xz", source.name));
        let mut tar = tools::command("tar");
        tar.arg("-xJf").arg(&tarball).arg("-C").arg(&work);
        tools::output(&mut tar)?;
        fs::remove_dir_all(&unpacked).map_err(file("remove", &unpacked))?;
        write(&stamp, &wanted)?;
        Ok(tree)
    }

    fn make(&self, target: &Target, tree: &Path, out: &Path) -> Command {
        let mut make = tools::command("make");
        for name in FOREIGN_VARIABLES {
            make.env_remove(name);
        }
        make.arg("-C")
            .arg(tree)
            .arg(format!("ARCH={}", target.architecture))
            .arg(format!("O={}", out.display()))
            .arg(format!("-j{}", self.jobs))
            .env("KBUILD_BUILD_TIMESTAMP", "Sat Nov  1 00:00:00 UTC 2025")
            .env("KBUILD_BUILD_USER", "holdfast")
            .env("KBUILD_BUILD_HOST", "holdfast")
            .env("KBUILD_BUILD_VERSION", "1");
        make
    }

    fn run_make(
        &self,
        target: &Target,
        tree: &Path,
        out: &Path,
        progress: &dyn Progress,
    ) -> Result<(), KernelError> {
        let log = self.cache.join(target.log);
        let errors = fs::File::create(&log).map_err(file("create", &log))?;
        let mut make = self.make(target, tree, out);
        make.arg(target.goal).stdout(Stdio::piped()).stderr(errors);
        let mut child = make.spawn().map_err(|source| tools::start("make", source))?;
        if let Some(stdout) = child.stdout.take() {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            for (done, line) in (1..).zip(lines) {
                let what = line.split_whitespace().last().unwrap_or("");
                let total = EXPECTED_LINES.max(done);
                progress.advanced(Step::Kernel, done, Some(total), what);
            }
        }
        let status = child.wait().map_err(|source| tools::start("make", source))?;
        if status.success() {
            return Ok(());
        }
        let output = tools::tail(&fs::read_to_string(&log).unwrap_or_default());
        Err(KernelError::Make { log, output })
    }
}

/// Refuses a configuration that lost something on the way.
fn check(
    source: &Package,
    requests: &[Request],
    config: &str,
    known: &BTreeSet<String>,
) -> Result<(), KernelError> {
    let (package, version) = (source.name.clone(), source.version.clone());
    let lost = kconfig::lost(requests, config, known);
    if !lost.is_empty() {
        return Err(KernelError::Lost { package, version, lost });
    }
    let symbols = kconfig::missing_mitigations(config, known);
    if !symbols.is_empty() {
        return Err(KernelError::Mitigations { package, version, symbols });
    }
    Ok(())
}

/// Compiler and linker, by the first line of what they say about themselves.
fn toolchain() -> Result<String, ToolError> {
    let mut text = String::new();
    for program in ["gcc", "ld"] {
        let version = tools::output(tools::command(program).arg("--version"))?;
        text.push_str(version.lines().next().unwrap_or(""));
        text.push('\n');
    }
    Ok(text)
}

/// Every symbol that the kernel's Kconfig files define.
fn known_symbols(tree: &Path) -> Result<BTreeSet<String>, KernelError> {
    let mut known = BTreeSet::new();
    for entry in walkdir::WalkDir::new(tree) {
        let entry = entry.map_err(|error| KernelError::File {
            action: "list",
            path: tree.to_owned(),
            source: error.into(),
        })?;
        if entry.file_name().to_string_lossy().starts_with("Kconfig") && entry.file_type().is_file()
        {
            let bytes = fs::read(entry.path()).map_err(file("read", entry.path()))?;
            let text = String::from_utf8_lossy(&bytes);
            known.extend(kconfig::defined_symbols(&text).map(str::to_owned));
        }
    }
    Ok(known)
}

/// Puts what was built into the cache.
fn store(out: &Path, entry: &Path) -> Result<(), KernelError> {
    let files = [
        ("arch/x86/boot/bzImage", "bzImage"),
        (".config", "config"),
        ("include/config/kernel.release", "release"),
    ];
    store_files(out, entry, &files)
}

/// Copies files of the build tree into an entry of the cache, each under its second name, in one
/// step, so that no entry is ever half there.
fn store_files(out: &Path, entry: &Path, files: &[(&str, &str)]) -> Result<(), KernelError> {
    let partial = entry.with_extension("partial");
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).map_err(file("create", &partial))?;
    for (from, to) in files {
        let from = out.join(from);
        fs::copy(&from, partial.join(to)).map_err(file("copy", &from))?;
    }
    fs::rename(&partial, entry).map_err(file("create", entry))
}

fn read(path: &Path) -> Result<String, KernelError> {
    fs::read_to_string(path).map_err(file("read", path))
}

fn write(path: &Path, text: &str) -> Result<(), KernelError> {
    fs::write(path, text).map_err(file("write", path))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn fragments(text: &str) -> Vec<(String, String)> {
        vec![("a.config".to_owned(), text.to_owned())]
    }

    #[test]
    fn every_input_changes_the_key() {
        let base = key(&fragments("x"), "p", "1", "gcc");
        assert_ne!(base, key(&fragments("y"), "p", "1", "gcc"));
        assert_ne!(base, key(&fragments("x"), "q", "1", "gcc"));
        assert_ne!(base, key(&fragments("x"), "p", "2", "gcc"));
        assert_ne!(base, key(&fragments("x"), "p", "1", "clang"));
        assert_eq!(base, key(&fragments("x"), "p", "1", "gcc"));
    }

    #[test]
    fn the_shipped_fragments_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel-config");
        let requests = requests(&read_fragments(&folder).unwrap()).unwrap();
        let value = |symbol: &str| {
            let found = requests.iter().find(|request| request.symbol == symbol);
            found.map(|request| request.value.as_str())
        };
        assert_eq!(value("MODULES"), Some("n"));
        assert_eq!(value("EROFS_FS_BACKED_BY_FILE"), Some("y"));
        assert_eq!(value("SYSFB_SIMPLEFB"), Some("n"));
    }

    #[test]
    fn a_lost_option_is_named_with_its_place() {
        let package = Package {
            name: "linux-source-7.3".to_owned(),
            version: "7.3.4-1".to_owned(),
            file: PathBuf::new(),
        };
        let requests = kconfig::parse_fragment("a.config", "CONFIG_KVM=y # r").unwrap();
        let known = BTreeSet::from(["KVM".to_owned()]);
        let error = check(&package, &requests, "", &known).unwrap_err();
        assert!(error.to_string().contains("a.config:1: CONFIG_KVM=y did not take"));
    }
}
