//! How hardened the kernel is: what the kernel-hardening-checker of Debian's backports says of its
//! configuration, its command line and its settings.
//!
//! Source: github.com/a13xp0p0v/kernel-hardening-checker, 0.6.17.1. What is not met and why is in
//! `kernel-config/hardening.waived`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    annotated::{self, AnnotationError},
    debian::{self, DebianError},
    tools::{self, ToolError},
};

/// The suite that carries the checker.
const SUITE: &str = "trixie-backports";
const PACKAGE: &str = "kernel-hardening-checker";
/// What the package's own program does, with the package's folder wherever `PYTHONPATH` says.
const PROGRAM: &str = "import sys, kernel_hardening_checker as c; sys.exit(c.main())";

/// What is checked.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The kernel's `.config`.
    pub kconfig: &'a str,
    /// Its command line.
    pub cmdline: &'a str,
    /// The settings: `rootfs/sysctl.txt`.
    pub sysctl: &'a str,
}

/// The three kinds of check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Of the kernel's configuration.
    Kconfig,
    /// Of its command line.
    Cmdline,
    /// Of its settings.
    Sysctl,
}

/// One check and what the checker found.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Verdict {
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: Kind,
    /// The option, the word of the command line, or the setting.
    #[serde(rename = "option_name")]
    pub name: String,
    /// The value that is asked for.
    #[serde(rename = "desired_val")]
    pub wanted: String,
    /// What was found, in the checker's words.
    #[serde(rename = "check_result")]
    pub found: String,
    /// Whether it is met.
    #[serde(rename = "check_result_bool")]
    pub met: bool,
}

impl Verdict {
    /// Returns the check as `hardening.waived` names it: `CONFIG_VT: is not set`.
    pub fn check(&self) -> String {
        format!("{}: {}", self.name, self.wanted)
    }
}

/// A check that is not met, and why that is so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiver {
    /// The check, as [`Verdict::check`] has it.
    pub check: String,
    /// Why it is not met.
    pub reason: String,
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum HardeningError {
    #[error("cannot have the kernel-hardening-checker")]
    Checker(#[from] DebianError),
    #[error("the kernel-hardening-checker does not check")]
    Tool(#[from] ToolError),
    #[error("cannot write {path} for the kernel-hardening-checker")]
    File { path: PathBuf, source: io::Error },
    #[error("this is no list of verdicts: {text}")]
    Answer { text: String, source: serde_json::Error },
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
}

/// Has the checker, fetched into `cache`, check `subject`, which it reads from files in `work`.
pub fn check(
    cache: &Path,
    work: &Path,
    subject: Subject<'_>,
) -> Result<Vec<Verdict>, HardeningError> {
    let checker = debian::unpacked(cache, SUITE, &[PACKAGE])?;
    let mut command = tools::command("python3");
    command.env("PYTHONPATH", checker.join("usr/lib/python3/dist-packages"));
    command.args(["-B", "-c", PROGRAM, "-m", "json"]);
    let settings = as_shown(subject.sysctl)?;
    let files = [("-c", subject.kconfig), ("-l", subject.cmdline), ("-s", &settings)];
    for (option, text) in files {
        let path = work.join(format!("checked{option}"));
        fs::write(&path, text)
            .map_err(|source| HardeningError::File { path: path.clone(), source })?;
        command.arg(option).arg(path);
    }
    read(&tools::output(&mut command)?)
}

/// Reads what the checker prints with `-m json`.
fn read(text: &str) -> Result<Vec<Verdict>, HardeningError> {
    serde_json::from_str(text)
        .map_err(|source| HardeningError::Answer { text: text.to_owned(), source })
}

/// The table of settings as `sysctl -a` would show them.
fn as_shown(table: &str) -> Result<String, AnnotationError> {
    let lines = annotated::parse("rootfs/sysctl.txt", table)?;
    let shown = lines.iter().filter_map(|line| {
        let (path, value) = line.value.split_once('=')?;
        Some(format!("{} = {value}\n", path.replace('/', ".")))
    });
    Ok(shown.collect())
}

/// Reads the checks that are not met, with their reasons.
pub fn waivers(text: &str) -> Result<Vec<Waiver>, AnnotationError> {
    let lines = annotated::parse("kernel-config/hardening.waived", text)?;
    let waiver = |line: annotated::Annotated<'_>| Waiver {
        check: line.value.to_owned(),
        reason: line.reason.to_owned(),
    };
    Ok(lines.into_iter().map(waiver).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn settings_are_told_as_sysctl_tells_them() {
        let table = "# all\nkernel/printk=6 5 1 6   # why\nnet/ipv4/conf/all/rp_filter=1 # why\n";
        let shown = "kernel.printk = 6 5 1 6\nnet.ipv4.conf.all.rp_filter = 1\n";
        assert_eq!(as_shown(table).unwrap(), shown);
    }

    #[test]
    fn an_answer_is_verdicts_or_refused_with_its_text() {
        let text = r#"[{"option_name": "CONFIG_VT", "type": "kconfig", "desired_val": "is not set",
            "decision": "x", "reason": "y", "check_result": "FAIL: \"y\"", "check_result_bool": false}]"#;
        let verdicts = read(text).unwrap();
        assert_eq!(verdicts[0].check(), "CONFIG_VT: is not set");
        assert!(verdicts[0].kind == Kind::Kconfig && !verdicts[0].met);
        let refused = read("[!] ERROR").unwrap_err();
        assert_eq!(refused.to_string(), "this is no list of verdicts: [!] ERROR");
    }
}
