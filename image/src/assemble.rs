//! From kernel, stub and programs to the files that are published. No network, no clock: the same
//! inputs give the same bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use update::disk::layout;

use crate::annotated::{self, AnnotationError};
use crate::cpio::{self, CpioError};
use crate::keys::KeyFiles;
use crate::manifest::{Content, Generated, Manifest, Node};
use crate::media::{self, MediaError};
use crate::program::{Parts, Program, ProgramFileError};
use crate::progress::{Outcome, Progress, Step};
use crate::release::Release;
use crate::root::{self, RootError, Sources};
use crate::sbom::{File, Materials};
use crate::signer::SignerError;

/// Everything that goes into an image.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The kernel's `bzImage`.
    pub kernel: Vec<u8>,
    /// Its configuration.
    pub kernel_config: String,
    /// What `uname -r` will say.
    pub kernel_release: String,
    /// systemd-stub.
    pub stub: Vec<u8>,
    /// What goes into root and initramfs.
    pub manifest: Manifest,
    /// The kernel's command line.
    pub cmdline: String,
    /// The checkout, for files that the manifest takes from it.
    pub workspace: PathBuf,
    /// The folder with our programs.
    pub programs: PathBuf,
    /// A configuration to bake in.
    pub config: Option<PathBuf>,
    /// The publisher's keys.
    pub keys: KeyFiles,
    /// Which release this is.
    pub release: Release,
    /// Where the Debian packages of the manifest are unpacked, by name.
    pub packages: BTreeMap<String, PathBuf>,
    /// Packages for the bill of materials; the files are added here.
    pub materials: Materials,
}

/// The files of an image, below one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifacts {
    /// The folder.
    pub folder: PathBuf,
    /// The unified kernel image.
    pub uki: PathBuf,
    /// The hybrid ISO.
    pub iso: PathBuf,
    /// The raw disk image.
    pub disk: PathBuf,
    /// What a boot server hands out: UKI, kernel, initrd, command line, script.
    pub pxe: PathBuf,
    /// The kernel's configuration.
    pub kernel_config: PathBuf,
    /// The kernel's command line.
    pub cmdline: PathBuf,
    /// The bill of materials.
    pub sbom: PathBuf,
    /// What firmware and TPM will see of the boot program.
    pub measurements: PathBuf,
    /// Hashes of all files above.
    pub sums: PathBuf,
}

impl Artifacts {
    /// Where the files of an image in `folder` are.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            uki: folder.join("holdfast.efi"),
            iso: folder.join("holdfast.iso"),
            disk: folder.join("holdfast.img"),
            pxe: folder.join("pxe"),
            kernel_config: folder.join("kernel.config"),
            cmdline: folder.join("cmdline"),
            sbom: folder.join("sbom.spdx.json"),
            measurements: folder.join("measurements.json"),
            sums: folder.join("SHA256SUMS"),
        }
    }
}

/// Why an image was not assembled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum AssembleError {
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    #[error("rootfs/cmdline.txt:{line}: `{value}` holds a space; one word per line")]
    Word { line: usize, value: String },
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(transparent)]
    Cpio(#[from] CpioError),
    #[error(transparent)]
    Program(#[from] ProgramFileError),
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error(transparent)]
    Media(#[from] MediaError),
    #[error("the initramfs can hold programs and the root only, and {0} is neither")]
    Initramfs(String),
    #[error("cannot {action} {path}")]
    File { action: &'static str, path: PathBuf, source: io::Error },
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AssembleError {
    let path = path.to_owned();
    move |source| AssembleError::File { action, path, source }
}

/// Joins the words of `rootfs/cmdline.txt`.
pub fn command_line(text: &str) -> Result<String, AssembleError> {
    let mut words = Vec::new();
    for entry in annotated::parse("rootfs/cmdline.txt", text)? {
        if entry.value.contains(char::is_whitespace) {
            return Err(AssembleError::Word { line: entry.line, value: entry.value.to_owned() });
        }
        words.push(entry.value);
    }
    Ok(words.join(" "))
}

/// Makes every file of the image in `folder`, which must be empty.
pub fn assemble(
    inputs: &Inputs,
    folder: &Path,
    progress: &dyn Progress,
) -> Result<Artifacts, AssembleError> {
    let work = tempfile::tempdir().map_err(file("create a folder beside", folder))?;
    let artifacts = Artifacts::in_folder(folder);

    progress.started(Step::Root);
    let os_release = inputs.release.os_release();
    let [empty_state, empty_data] = empty_volumes(inputs, work.path())?;
    let sources = Sources {
        empty_state: &empty_state,
        empty_data: &empty_data,
        workspace: &inputs.workspace,
        programs: &inputs.programs,
        os_release: &os_release,
        config: inputs.config.as_deref(),
        packages: &inputs.packages,
    };
    let root_image = work.path().join("root.erofs");
    let staged = root::build(&inputs.manifest, &sources, work.path(), &root_image)?;
    let root_bytes = fs::read(&root_image).map_err(file("read", &root_image))?;
    progress.finished(Step::Root, Outcome::Built);

    progress.started(Step::Uki);
    let initrd = cpio::write(&initramfs(inputs, &root_bytes)?)?;
    let program = boot_program(inputs, &os_release, &initrd, progress)?;
    let measurements = format!("{:#}\n", program.measurements);
    write(&artifacts.uki, &program.bytes)?;
    write(&artifacts.measurements, measurements.as_bytes())?;
    write(&artifacts.cmdline, inputs.cmdline.as_bytes())?;
    write(&artifacts.kernel_config, inputs.kernel_config.as_bytes())?;
    progress.finished(Step::Uki, Outcome::Built);

    progress.started(Step::Media);
    let sbom = bill_of_materials(inputs, &staged, work.path(), &root_bytes)?;
    let extra = [
        ("os-release", os_release.as_bytes()),
        ("sbom.spdx.json", sbom.as_bytes()),
        ("measurements.json", measurements.as_bytes()),
    ];
    media::iso(&program, &extra, work.path(), inputs.release.time, &artifacts.iso)?;
    if media::read_iso(&artifacts.iso)? != program.bytes {
        return Err(MediaError::ReadBack { path: artifacts.iso }.into());
    }
    media::disk(&program, inputs.release.time, &artifacts.disk)?;
    media::pxe(&program.bytes, &inputs.kernel, &initrd, &inputs.cmdline, &artifacts.pxe)?;
    progress.finished(Step::Media, Outcome::Built);

    progress.started(Step::Records);
    write(&artifacts.sbom, sbom.as_bytes())?;
    write(&artifacts.sums, sums(folder)?.as_bytes())?;
    progress.finished(Step::Records, Outcome::Built);
    Ok(artifacts)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), AssembleError> {
    fs::write(path, bytes).map_err(file("write", path))
}

/// The templates of the file systems that the installer makes.
fn empty_volumes(inputs: &Inputs, work: &Path) -> Result<[Vec<u8>; 2], MediaError> {
    let empty = |name| media::empty_ext4(name, inputs.release.time, work);
    Ok([empty(layout::STATE)?, empty(layout::DATA)?])
}

fn initramfs(inputs: &Inputs, root: &[u8]) -> Result<Vec<cpio::Entry>, AssembleError> {
    let mut entries = Vec::new();
    for (path, node) in &inputs.manifest.initramfs {
        let data = match &node.content {
            Content::Program { bin, .. } => {
                let program = inputs.programs.join(bin);
                fs::read(&program).map_err(file("read", &program))?
            }
            Content::Generated(Generated::Root) => root.to_vec(),
            Content::Generated(
                Generated::OsRelease | Generated::EmptyState | Generated::EmptyData,
            )
            | Content::Directory
            | Content::Source { .. }
            | Content::Baked(_)
            | Content::Debian { .. }
            | Content::Link { .. } => return Err(AssembleError::Initramfs(path.clone())),
        };
        entries.push(cpio::Entry {
            name: path.trim_start_matches('/').to_owned(),
            mode: node.mode,
            kind: cpio::Kind::File(data),
        });
    }
    Ok(entries)
}

fn boot_program(
    inputs: &Inputs,
    os_release: &str,
    initrd: &[u8],
    progress: &dyn Progress,
) -> Result<Program, AssembleError> {
    let parts = Parts {
        stub: inputs.stub.clone(),
        os_release: os_release.as_bytes().to_vec(),
        cmdline: inputs.cmdline.as_bytes().to_vec(),
        kernel_release: inputs.kernel_release.as_bytes().to_vec(),
        initrd: initrd.to_vec(),
        kernel: inputs.kernel.clone(),
    };
    let keys = inputs.keys.read()?;
    for lack in keys.lacks() {
        progress.note(Step::Uki, lack);
    }
    Ok(parts.finish(&keys, inputs.release.time)?)
}

/// Lists every file of root and initramfs, and the kernel, with what they are built from.
fn bill_of_materials(
    inputs: &Inputs,
    staged: &BTreeMap<String, Node>,
    work: &Path,
    root: &[u8],
) -> Result<String, AssembleError> {
    let mut materials = inputs.materials.clone();
    for (path, node) in staged {
        let from = work.join("root").join(path.trim_start_matches('/'));
        if matches!(node.content, Content::Directory | Content::Link { .. }) {
            continue;
        }
        let content = fs::read(&from).map_err(file("read", &from))?;
        materials.files.push(listed(path, node, content));
    }
    for (entry, (path, node)) in
        initramfs(inputs, root)?.into_iter().zip(&inputs.manifest.initramfs)
    {
        if let cpio::Kind::File(content) = entry.kind {
            materials.files.push(listed(path, node, content));
        }
    }
    let release = &inputs.release;
    let document = materials.document(&release.version, &release.timestamp());
    Ok(format!("{document:#}\n"))
}

fn listed(path: &str, node: &Node, content: Vec<u8>) -> File {
    let package = match &node.content {
        Content::Program { package, .. } | Content::Debian { package, .. } => package.as_str(),
        Content::Directory
        | Content::Source { .. }
        | Content::Generated(_)
        | Content::Baked(_)
        | Content::Link { .. } => "image",
    };
    File {
        path: path.to_owned(),
        content,
        reason: node.reason.clone(),
        package: package.to_owned(),
    }
}

/// Hashes of every file below `folder`, in the form that `sha256sum --check` reads.
fn sums(folder: &Path) -> Result<String, AssembleError> {
    let mut lines = BTreeMap::new();
    for entry in walkdir::WalkDir::new(folder) {
        let entry = entry.map_err(|error| AssembleError::File {
            action: "list",
            path: folder.to_owned(),
            source: error.into(),
        })?;
        if entry.file_type().is_file() {
            let path = entry.path();
            let relative = path.strip_prefix(folder).unwrap_or(path);
            let hash = crate::sha256_of_file(path).map_err(file("read", path))?;
            lines.insert(relative.to_owned(), hash);
        }
    }
    let mut text = String::new();
    for (path, hash) in lines {
        let _ = writeln!(text, "{hash}  {}", path.display());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn words_are_joined_in_order() {
        let text = "# free text\nrootfstype=ramfs # a\nconsole=tty0 # b\n";
        assert_eq!(command_line(text).unwrap(), "rootfstype=ramfs console=tty0");
    }

    #[test]
    fn two_words_on_a_line_are_refused() {
        assert!(matches!(
            command_line("quiet splash # r"),
            Err(AssembleError::Word { line: 1, .. })
        ));
    }

    #[test]
    fn the_shipped_command_line_keeps_the_serial_console_last() {
        let text = include_str!("../../rootfs/cmdline.txt");
        let line = command_line(text).unwrap();
        let last = line.split(' ').rfind(|word| word.starts_with("console=")).unwrap();
        assert_eq!(last, "console=ttyS0,115200");
        assert!(line.contains("rootfstype=ramfs"));
    }

    /// By default KVM holds whoever splits a lock up for 10 ms, then for their turn at one semaphore of the
    /// whole system; the VMM counts and paces each virtual CPU instead.
    #[test]
    fn the_shipped_command_line_leaves_split_locks_to_the_vmm() {
        let line = command_line(include_str!("../../rootfs/cmdline.txt")).unwrap();
        assert!(line.split(' ').any(|word| word == "split_lock_detect=off"), "{line}");
    }

    /// By default vfio-pci puts a device that nobody has opened to sleep, and the port above it takes its power.
    #[test]
    fn the_shipped_command_line_keeps_devices_that_nobody_has_awake() {
        let line = command_line(include_str!("../../rootfs/cmdline.txt")).unwrap();
        assert!(line.split(' ').any(|word| word == "vfio_pci.disable_idle_d3=1"), "{line}");
    }

    #[test]
    fn the_shipped_manifest_is_good() {
        let manifest = Manifest::parse(include_str!("../../rootfs/manifest.toml")).unwrap();
        assert!(manifest.initramfs.contains_key("/init"));
        assert!(manifest.root.contains_key("/usr/bin/agent"));
    }
}
