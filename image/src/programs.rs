//! Our own programs, built as static position-independent executables.
//!
//! The build happens in a target folder of its own, in the cache by default, so that a fresh clone
//! is warm and so that flags of the image never rebuild a developer's own target folder. What is compiled is a
//! copy of the checkout beside it ([`mirror`]), which is as warm for all checkouts with the same content.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

use object::elf::{FileHeader64, PT_INTERP};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{LittleEndian, elf};

use crate::mirror::mirror;
use crate::progress::{Outcome, Progress, Step};
use crate::tools::{self, ToolError};

/// The target whose explicit naming keeps procedural macros dynamic while programs are static.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// What all programs are compiled with. Each of their starts begins with tens of thousands of relocations,
/// all of one kind: packed (SHT_RELR of the ELF gABI), they are three pages to read, not a mebibyte.
///
/// What is undefined (`-u`) is taken from libc.a whoever refers to it, and how. The standard library refers to
/// these weakly, and does without; optimised as a whole, others' references become weak ones too, and a call
/// of what nobody fetched is one of address 0.
const RUST_FLAGS: &str = "-C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs \
     -C link-arg=-Wl,-u,gettid,-u,statx,-u,copy_file_range";
/// Folder in the target folder with the copy of the checkout.
const CHECKOUT: &str = "sources";
/// Variables of a surrounding cargo that would leak into ours.
const FOREIGN_VARIABLES: [&str; 6] = [
    "CARGO_BUILD_TARGET",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "CFLAGS",
    "RUSTC_WRAPPER",
    "RUSTFLAGS",
];

/// Why a program did not come out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ProgramError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cargo could not build {packages}:\n{output}")]
    Cargo { packages: String, output: String },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot copy the checkout to where its programs are compiled: {path}")]
    Copy { path: PathBuf, source: io::Error },
    #[error("{path} is no 64-bit x86 ELF program")]
    NotElf { path: PathBuf },
    #[error(
        "{path} needs a dynamic loader, and the image has none; it was not linked with crt-static"
    )]
    Dynamic { path: PathBuf },
}

/// What is built, and where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Builder<'a> {
    /// The checkout.
    pub(crate) workspace: &'a Path,
    /// The target folder.
    pub(crate) target: &'a Path,
    /// Parallel jobs of cargo.
    pub(crate) jobs: usize,
}

impl Builder<'_> {
    /// Builds `programs` (package, binary) and returns the folder that holds them.
    pub(crate) fn build(
        &self,
        programs: &[(String, String)],
        progress: &dyn Progress,
    ) -> Result<PathBuf, ProgramError> {
        progress.started(Step::Programs);
        let outcome = self.run_cargo(programs, progress)?;
        let folder = self.target.join(TARGET).join("release");
        for (_, bin) in programs {
            check_static(&folder.join(bin))?;
        }
        progress.finished(Step::Programs, outcome);
        Ok(folder)
    }

    fn run_cargo(
        &self,
        programs: &[(String, String)],
        progress: &dyn Progress,
    ) -> Result<Outcome, ProgramError> {
        mirror(self.workspace, &self.target.join(CHECKOUT))
            .map_err(|(path, source)| ProgramError::Copy { path, source })?;
        let mut cargo = self.command(programs);
        let log = tempfile::NamedTempFile::new().map_err(|source| tools::start("cargo", source))?;
        let errors = log.reopen().map_err(|source| tools::start("cargo", source))?;
        cargo.stdout(Stdio::piped()).stderr(errors);
        let mut child = cargo.spawn().map_err(|source| tools::start("cargo", source))?;
        let mut outcome = Outcome::Cached;
        if let Some(stdout) = child.stdout.take() {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            for (done, line) in (1..).zip(lines) {
                let Some(unit) = Unit::parse(&line) else {
                    continue;
                };
                if !unit.fresh {
                    outcome = Outcome::Built;
                }
                progress.advanced(Step::Programs, done, None, &unit.name);
            }
        }
        let status = child.wait().map_err(|source| tools::start("cargo", source))?;
        if status.success() {
            return Ok(outcome);
        }
        let text = fs::read_to_string(log.path()).unwrap_or_default();
        Err(ProgramError::Cargo {
            packages: packages(programs).into_iter().collect::<Vec<_>>().join(", "),
            output: tools::tail(&text),
        })
    }

    fn cargo(&self) -> Command {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let mut command = tools::command(&cargo);
        for name in FOREIGN_VARIABLES {
            command.env_remove(name);
        }
        command.current_dir(self.target.join(CHECKOUT));
        command
    }

    fn command(&self, programs: &[(String, String)]) -> Command {
        let mut command = self.cargo();
        command
            .args(["build", "--release", "--locked", "--target", TARGET])
            .arg(format!("--jobs={}", self.jobs))
            .arg("--message-format=json-render-diagnostics")
            .arg("--target-dir")
            .arg(self.target);
        for package in packages(programs) {
            command.args(["--package", package]);
        }
        for (_, bin) in programs {
            command.args(["--bin", bin]);
        }
        let prefixes = self.prefixes();
        let rust: Vec<_> = prefixes
            .iter()
            .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
            .collect();
        let c: Vec<_> = prefixes
            .iter()
            .map(|(from, to)| format!("-ffile-prefix-map={}={to}", from.display()))
            .collect();
        command
            .env(
                "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
                format!("{RUST_FLAGS} {}", rust.join(" ")),
            )
            .env("CFLAGS_x86_64_unknown_linux_gnu", c.join(" "))
            .env("CARGO_TERM_COLOR", "never");
        command
    }

    /// Paths of this machine that must not show in a program, and what stands there instead. The
    /// checkout is not among them: cargo compiles its files by relative paths, and naming it here
    /// would make every clone compile all dependencies anew.
    fn prefixes(&self) -> Vec<(PathBuf, &'static str)> {
        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let folder = |variable: &str, default: &str| {
            std::env::var_os(variable).map_or_else(|| home.join(default), PathBuf::from)
        };
        vec![
            (self.target.to_owned(), "/target"),
            (folder("RUSTUP_HOME", ".rustup"), "/rustup"),
            (folder("CARGO_HOME", ".cargo"), "/cargo"),
        ]
    }
}

fn packages(programs: &[(String, String)]) -> BTreeSet<&str> {
    programs.iter().map(|(package, _)| package.as_str()).collect()
}

/// A finished unit in cargo's messages.
struct Unit {
    name: String,
    fresh: bool,
}

impl Unit {
    fn parse(line: &str) -> Option<Self> {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        if message.get("reason")?.as_str()? != "compiler-artifact" {
            return None;
        }
        Some(Self {
            name: message.get("target")?.get("name")?.as_str()?.to_owned(),
            fresh: message.get("fresh")?.as_bool()?,
        })
    }
}

/// Refuses a program that the image could not start.
pub(crate) fn check_static(path: &Path) -> Result<(), ProgramError> {
    let bytes =
        fs::read(path).map_err(|source| ProgramError::Read { path: path.to_owned(), source })?;
    match needs_loader(&bytes) {
        Some(false) => Ok(()),
        Some(true) => Err(ProgramError::Dynamic { path: path.to_owned() }),
        None => Err(ProgramError::NotElf { path: path.to_owned() }),
    }
}

/// Whether an ELF program asks for a dynamic loader; `None` when it is no x86-64 program.
fn needs_loader(bytes: &[u8]) -> Option<bool> {
    let header = FileHeader64::<LittleEndian>::parse(bytes).ok()?;
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != elf::EM_X86_64 {
        return None;
    }
    let segments = header.program_headers(endian, bytes).ok()?;
    Some(segments.iter().any(|s| s.p_type(endian) == PT_INTERP))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn this_very_test_needs_a_loader() {
        let own = std::env::current_exe().unwrap();
        assert!(matches!(check_static(&own), Err(ProgramError::Dynamic { .. })));
    }

    #[test]
    fn a_text_is_no_program() {
        assert_eq!(needs_loader(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn finished_units_are_recognised() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"agent"},"fresh":false}"#;
        let unit = Unit::parse(line).unwrap();
        assert_eq!((unit.name.as_str(), unit.fresh), ("agent", false));
        assert!(Unit::parse(r#"{"reason":"build-finished"}"#).is_none());
    }
}
