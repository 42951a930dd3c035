//! Builds the appliance: kernel, root file system, UKI, ISO, disk image and PXE set.
//!
//! `build` does all of it; `assemble` is its last part, without network and clock. Formats and
//! checks are pure modules (`kconfig`, `manifest`, `cpio`, `uki`, `sbom`, and `disk`, which
//! is shared with the installer), everything that
//! touches the machine is in `debian`, `kernel`, `programs`, `root`, `media`. Signing releases and
//! updating nodes are left to `update`.
#![forbid(unsafe_code)]

pub use update::disk;

mod annotated;
pub mod assemble;
pub mod authenticode;
pub mod cpio;
pub mod customise;
mod debian;
mod der;
pub mod enrolment;
mod esp;
pub mod hardening;
pub mod kconfig;
pub mod kernel;
pub mod keys;
pub mod manifest;
pub mod media;
mod mirror;
pub mod pcr;
pub mod program;
mod programs;
pub mod progress;
pub mod release;
pub mod root;
pub mod sbom;
pub mod signer;
pub mod tools;
pub mod uki;
mod version;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

pub use annotated::AnnotationError;
pub use assemble::{Artifacts, AssembleError};
pub use debian::{Candidates, DebianError, candidates, unpacked};
pub use kernel::{Kernel, KernelError};
pub use programs::ProgramError;
pub use progress::{Outcome, Progress, Silent, Step};
pub use tools::{REQUIREMENTS, Requirement, ToolError};

use crate::debian::Archive;
use crate::keys::KeyFiles;
use crate::manifest::{Manifest, ManifestError};
use crate::release::Release;
use crate::sbom::{Materials, Origin, Package, SbomError};

/// The Debian package with systemd-stub.
const STUB_PACKAGE: &str = "systemd-boot-efi";
/// Where it keeps the stub.
const STUB_PATH: &str = "usr/lib/systemd/boot/efi/linuxx64.efi.stub";

/// What to build, from what, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOptions {
    /// The checkout.
    pub workspace: PathBuf,
    /// Where the image goes; replaced as a whole when everything is done.
    pub output: PathBuf,
    /// Kernels, packages and compiled programs, kept between checkouts.
    pub cache: PathBuf,
    /// A node configuration to bake in.
    pub config: Option<PathBuf>,
    /// The publisher's keys.
    pub keys: KeyFiles,
    /// A folder with programs that are already built; they are built here unless given.
    pub programs: Option<PathBuf>,
    /// Parallel jobs of the compilers.
    pub jobs: usize,
}

impl BuildOptions {
    /// The usual options for a checkout: `target/image`, the user's cache, all processors.
    pub fn new(workspace: &Path) -> Self {
        let workspace = workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned());
        Self {
            output: workspace.join("target/image"),
            workspace,
            cache: default_cache(),
            config: None,
            keys: KeyFiles::default(),
            programs: None,
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// `$HOLDFAST_CACHE`, or `holdfast` in the user's cache folder.
pub fn default_cache() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    variable("HOLDFAST_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("holdfast")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/holdfast")))
        .unwrap_or_else(|| std::env::temp_dir().join("holdfast-cache"))
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ImageError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    Debian(#[from] DebianError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Sbom(#[from] SbomError),
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.to_owned();
    move |source| ImageError::File { action, path, source }
}

/// Builds everything and leaves it in `options.output`.
pub fn build(options: &BuildOptions, progress: &dyn Progress) -> Result<Artifacts, ImageError> {
    tools::check()?;
    let _lock = lock(&options.cache, progress)?;
    let inputs = gather(options, progress)?;
    publish(&inputs, &options.output, progress)
}

/// Builds the kernel only.
pub fn build_kernel(options: &BuildOptions, progress: &dyn Progress) -> Result<Kernel, ImageError> {
    tools::check()?;
    let _lock = lock(&options.cache, progress)?;
    let archive = packages(options, progress)?;
    progress.finished(Step::Packages, Outcome::Built);
    Ok(kernel_of(options, &archive, progress)?)
}

/// Builds the kernel as a program of this machine, User-Mode Linux, and returns where it is. No image
/// contains it; measurements run it.
pub fn build_user_mode_kernel(
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<PathBuf, ImageError> {
    tools::check()?;
    let _lock = lock(&options.cache, progress)?;
    let archive = packages(options, progress)?;
    progress.finished(Step::Packages, Outcome::Built);
    Ok(builder(options, &options.workspace.join("kernel-config"))
        .build_program(&archive, progress)?)
}

/// Makes or finds everything that `assemble` needs.
fn gather(options: &BuildOptions, progress: &dyn Progress) -> Result<assemble::Inputs, ImageError> {
    let read = |name: &str| {
        let path = options.workspace.join(name);
        fs::read_to_string(&path).map_err(file("read", &path))
    };
    let manifest = Manifest::parse(&read("rootfs/manifest.toml")?)?;
    let cmdline = assemble::command_line(&read("rootfs/cmdline.txt")?)?;
    let archive = packages(options, progress)?;
    let stub_version = archive.candidate(STUB_PACKAGE)?;
    let stub = stub(options, &archive, &stub_version)?;
    progress.finished(Step::Packages, Outcome::Built);
    let kernel = kernel_of(options, &archive, progress)?;
    let programs = programs_of(options, &manifest, progress)?;
    let mut materials = materials(options, &manifest, &kernel, &stub_version)?;
    let packages = unpacked_packages(options, &archive, &manifest, &mut materials)?;
    let read_text = |path: &Path| fs::read_to_string(path).map_err(file("read", path));
    Ok(assemble::Inputs {
        kernel: fs::read(&kernel.image).map_err(file("read", &kernel.image))?,
        kernel_config: read_text(&kernel.config)?,
        kernel_release: kernel.release.clone(),
        stub,
        materials,
        packages,
        manifest,
        cmdline,
        workspace: options.workspace.clone(),
        programs,
        config: options.config.clone(),
        keys: options.keys.clone(),
        release: Release::of(&options.workspace),
    })
}

/// One build at a time uses a cache.
fn lock(cache: &Path, progress: &dyn Progress) -> Result<File, ImageError> {
    fs::create_dir_all(cache).map_err(file("create", cache))?;
    let path = cache.join("lock");
    let lock = File::create(&path).map_err(file("create", &path))?;
    if lock.try_lock().is_err() {
        progress.note(Step::Packages, "waiting for another build that uses the same cache");
        lock.lock().map_err(file("lock", &path))?;
    }
    Ok(lock)
}

fn packages(options: &BuildOptions, progress: &dyn Progress) -> Result<Archive, ImageError> {
    progress.started(Step::Packages);
    let archive = Archive::open(&options.cache.join("apt"))?;
    archive.refresh(|text| progress.note(Step::Packages, text))?;
    Ok(archive)
}

fn kernel_of(
    options: &BuildOptions,
    archive: &Archive,
    progress: &dyn Progress,
) -> Result<Kernel, KernelError> {
    builder(options, &options.workspace.join("kernel-config")).build(archive, progress)
}

fn builder<'a>(options: &'a BuildOptions, fragments: &'a Path) -> kernel::Builder<'a> {
    kernel::Builder { cache: &options.cache, fragments, jobs: options.jobs }
}

/// The folder with our programs, built or given.
fn programs_of(
    options: &BuildOptions,
    manifest: &Manifest,
    progress: &dyn Progress,
) -> Result<PathBuf, ProgramError> {
    let wanted = manifest.programs();
    if let Some(folder) = &options.programs {
        for (_, bin) in &wanted {
            programs::check_static(&folder.join(bin))?;
        }
        return Ok(folder.clone());
    }
    let target = options.cache.join("programs");
    let builder =
        programs::Builder { workspace: &options.workspace, target: &target, jobs: options.jobs };
    builder.build(&wanted, progress)
}

fn stub(options: &BuildOptions, archive: &Archive, version: &str) -> Result<Vec<u8>, ImageError> {
    let folder = options.cache.join("stub").join(version);
    let path = folder.join(STUB_PATH);
    if !path.is_file() {
        let package = archive.fetch(STUB_PACKAGE, version)?;
        archive.unpack(&package, &folder)?;
    }
    fs::read(&path).map_err(file("read", &path))
}

/// Unpacks the Debian packages that the manifest takes files from, and lists them.
fn unpacked_packages(
    options: &BuildOptions,
    archive: &Archive,
    manifest: &Manifest,
    materials: &mut Materials,
) -> Result<BTreeMap<String, PathBuf>, ImageError> {
    let mut folders = BTreeMap::new();
    for name in manifest.packages() {
        let version = archive.candidate(&name)?;
        let folder = options.cache.join("packages").join(format!("{name}-{version}"));
        if !folder.is_dir() {
            let partial = folder.with_extension("partial");
            match fs::remove_dir_all(&partial) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file("remove", &partial)(error));
                }
                Err(_) | Ok(()) => {}
            }
            let package = archive.fetch(&name, &version)?;
            archive.unpack(&package, &partial)?;
            fs::rename(&partial, &folder).map_err(file("move", &partial))?;
        }
        let licence = licence(&name).to_owned();
        let package = Package { name: name.clone(), version, origin: Origin::Debian, licence };
        materials.add_input(package, &["image"]);
        folders.insert(name, folder);
    }
    Ok(folders)
}

/// Licence of a Debian package that files are taken from; its copyright file names the parts.
fn licence(package: &str) -> &'static str {
    match package {
        "e2fsck-static" => "GPL-2.0-only",
        "ovmf" => "BSD-2-Clause-Patent",
        _ => "NOASSERTION",
    }
}

fn materials(
    options: &BuildOptions,
    manifest: &Manifest,
    kernel: &Kernel,
    stub_version: &str,
) -> Result<Materials, ImageError> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let metadata = tools::output(
        tools::command(&cargo)
            .current_dir(&options.workspace)
            .args(["metadata", "--format-version=1", "--locked"])
            .arg("--filter-platform=x86_64-unknown-linux-gnu"),
    )?;
    let mut roots: Vec<_> = manifest.programs().into_iter().map(|(package, _)| package).collect();
    roots.dedup();
    let roots: Vec<&str> = roots.iter().map(String::as_str).collect();
    let mut materials = Materials::default();
    materials.add_crates(&metadata, &roots)?;
    let input = |name: &str, version: &str, origin, licence: &str| Package {
        name: name.to_owned(),
        version: version.to_owned(),
        origin,
        licence: licence.to_owned(),
    };
    let own = env!("CARGO_PKG_VERSION");
    materials.packages.insert(input("image", own, Origin::Own, "Apache-2.0"));
    for (package, users) in [
        (input(&kernel.package, &kernel.version, Origin::Debian, "GPL-2.0-only"), &["image"][..]),
        (input(STUB_PACKAGE, stub_version, Origin::Debian, "LGPL-2.1-or-later"), &["image"]),
        (input("libc6-dev", &installed("libc6-dev"), Origin::Debian, "LGPL-2.1-or-later"), &roots),
        (input("rust-std", &rust_version(), Origin::Toolchain, "MIT OR Apache-2.0"), &roots),
    ] {
        materials.add_input(package, users);
    }
    Ok(materials)
}

/// Version of a package of this machine, whose files are linked into our programs.
fn installed(package: &str) -> String {
    let mut query = tools::command("dpkg-query");
    query.args(["--show", "--showformat=${Version}", package]);
    tools::output(&mut query).unwrap_or_else(|_| "NOASSERTION".to_owned())
}

fn rust_version() -> String {
    let text = tools::output(tools::command("rustc").arg("--version")).unwrap_or_default();
    let version = text.split_whitespace().nth(1);
    version.unwrap_or("NOASSERTION").to_owned()
}

/// Assembles beside the final place and swaps, so that a failed build leaves the old image.
fn publish(
    inputs: &assemble::Inputs,
    output: &Path,
    progress: &dyn Progress,
) -> Result<Artifacts, ImageError> {
    let partial = output.with_extension("partial");
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).map_err(file("create", &partial))?;
    assemble::assemble(inputs, &partial, progress)?;
    if output.exists() {
        fs::remove_dir_all(output).map_err(file("remove", output))?;
    }
    fs::rename(&partial, output).map_err(file("create", output))?;
    Ok(Artifacts::in_folder(output))
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file that may be larger than memory.
pub(crate) fn sha256_of_file(path: &Path) -> io::Result<String> {
    let mut input = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = input.read(&mut buffer)?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..count]);
    }
}
