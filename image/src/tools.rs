//! Programs of the building machine: which Debian package each comes from, and running them with
//! errors that say what to install.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// Something that the build needs from the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requirement {
    /// The Debian package that brings it.
    pub package: &'static str,
    /// A program on the path, or an absolute path of a file.
    pub probe: &'static str,
    /// What it is for.
    pub reason: &'static str,
}

/// Everything that a build of the image needs beyond rustup.
pub const REQUIREMENTS: &[Requirement] = &[
    need("apt", "apt-get", "fetches the kernel source and the boot stub"),
    need("apt", "apt-cache", "finds the newest kernel source"),
    need("dpkg", "dpkg", "unpacks packages"),
    need("debian-archive-keyring", KEYRING, "verifies Debian's signatures"),
    need("tar", "tar", "unpacks the kernel source"),
    need("xz-utils", "xz", "unpacks the kernel source"),
    need("make", "make", "builds the kernel"),
    need("gcc", "gcc", "builds the kernel and the C parts of our programs"),
    need("libc6-dev", "/usr/include/stdio.h", "our programs are linked statically against it"),
    need("binutils", "ld", "links the kernel"),
    need("flex", "flex", "builds the kernel's configuration program"),
    need("bison", "bison", "builds the kernel's configuration program"),
    need("bc", "bc", "computes the kernel's time constants"),
    need("libelf-dev", "/usr/include/gelf.h", "the kernel's objtool reads ELF files"),
    need("zstd", "zstd", "compresses the kernel"),
    need("perl", "perl", "runs some of the kernel's build scripts"),
    need("python3", "python3", "runs some of the kernel's build scripts"),
    need("erofs-utils", "mkfs.erofs", "makes the root file system"),
    need("erofs-utils", "fsck.erofs", "checks the root file system"),
    need("e2fsprogs", "mke2fs", "formats the state and data partitions of the disk image"),
    need("xorriso", "xorriso", "makes the ISO"),
];

/// Debian's public keys.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

const fn need(package: &'static str, probe: &'static str, reason: &'static str) -> Requirement {
    Requirement { package, probe, reason }
}

/// Why a program could not do its work.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ToolError {
    #[error("this machine lacks {0}; install with: apt-get install {1}")]
    Missing(String, String),
    #[error("cannot start {program}")]
    Start { program: String, source: io::Error },
    #[error("{program} failed ({status}):\n{output}")]
    Failed { program: String, status: ExitStatus, output: String },
    #[error("{program} printed something that is not UTF-8")]
    NotText { program: String },
}

/// The requirements that this machine does not meet.
pub fn missing() -> Vec<Requirement> {
    REQUIREMENTS.iter().copied().filter(|requirement| find(requirement.probe).is_none()).collect()
}

/// Refuses to begin when something is missing, naming all of it at once.
pub(crate) fn check() -> Result<(), ToolError> {
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    let probes: Vec<_> = missing.iter().map(|r| r.probe).collect();
    let mut packages: Vec<_> = missing.iter().map(|r| r.package).collect();
    packages.sort_unstable();
    packages.dedup();
    Err(ToolError::Missing(probes.join(", "), packages.join(" ")))
}

/// Where a program or file is; administrators' folders count although users often lack them.
fn find(probe: &str) -> Option<PathBuf> {
    let path = Path::new(probe);
    if path.is_absolute() {
        return path.exists().then(|| path.to_owned());
    }
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&inherited)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(probe))
        .find(|candidate| candidate.is_file())
}

/// A command with the environment that makes results repeat: C locale, UTC, no terminal.
pub(crate) fn command(program: &str) -> Command {
    let mut command = Command::new(find(program).unwrap_or_else(|| PathBuf::from(program)));
    command.env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null());
    command
}

/// Runs to the end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String, ToolError> {
    let program = name_of(command);
    let output = command.output().map_err(|source| start(&program, source))?;
    if !output.status.success() {
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        return Err(ToolError::Failed { program, status: output.status, output: tail(&text) });
    }
    String::from_utf8(output.stdout).map_err(|_| ToolError::NotText { program })
}

/// The error of a program that did not start.
pub(crate) fn start(program: &str, source: io::Error) -> ToolError {
    let package = REQUIREMENTS.iter().find(|r| program.ends_with(r.probe));
    match (source.kind(), package) {
        (io::ErrorKind::NotFound, Some(r)) => {
            ToolError::Missing(r.probe.to_owned(), r.package.to_owned())
        }
        _ => ToolError::Start { program: program.to_owned(), source },
    }
}

/// What a command is called in errors.
pub(crate) fn name_of(command: &Command) -> String {
    let mut name = command.get_program().to_string_lossy().into_owned();
    if let Some(first) = command.get_args().next().map(OsStr::to_string_lossy) {
        name.push(' ');
        name.push_str(&first);
    }
    name
}

/// The end of a long output, which holds the reason of a failure.
pub(crate) fn tail(text: &str) -> String {
    /// Lines worth showing.
    const LINES: usize = 40;
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_exist_names_its_package() {
        let error = start("/usr/bin/xorriso", io::ErrorKind::NotFound.into());
        assert!(matches!(error, ToolError::Missing(_, package) if package == "xorriso"));
    }

    #[test]
    fn every_requirement_has_a_reason() {
        assert!(REQUIREMENTS.iter().all(|r| !r.reason.is_empty() && !r.package.is_empty()));
    }

    #[test]
    fn a_failure_shows_the_end_of_the_output() {
        let text: String = (0..100).map(|n| format!("{n}\n")).collect();
        assert!(tail(&text).starts_with("60\n"));
    }
}
