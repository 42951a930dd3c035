//! How hardened the kernel is: checks of its configuration, its command line and its settings, counted
//! as the kernel-hardening-checker counts them.
//!
//! Pure. The checks are in `kernel-config/hardening.checks`, whose head explains the notation; what
//! is not met and why is in `kernel-config/hardening.waived`.

use std::collections::BTreeMap;

use crate::annotated::{self, AnnotationError};

/// What is checked, as text.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Of the kernel's configuration.
    Kconfig,
    /// Of its command line.
    Cmdline,
    /// Of its settings.
    Sysctl,
}

/// One check and whether it is met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What it is about.
    pub kind: Kind,
    /// The check as it is written.
    pub check: String,
    /// Whether it is met.
    pub met: bool,
}

/// A check that is not met, and why that is so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiver {
    /// The check as it is written.
    pub check: String,
    /// Why it is not met.
    pub reason: String,
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum HardeningError {
    #[error("hardening.checks:{line}: a check before the first of [kconfig], [cmdline], [sysctl]")]
    NoKind { line: usize },
    #[error("hardening.checks:{line}: there is no [{name}]")]
    UnknownKind { line: usize, name: String },
    #[error("hardening.checks:{line}: `{atom}` says nothing")]
    Atom { line: usize, atom: String },
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
}

/// Checks `subject` with every line of `checks`.
pub fn check(checks: &str, subject: Subject<'_>) -> Result<Vec<Verdict>, HardeningError> {
    let facts = Facts::of(subject)?;
    let mut kind = None;
    let mut verdicts = Vec::new();
    for (index, text) in checks.lines().enumerate() {
        let (line, text) = (index + 1, text.trim());
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if let Some(name) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            kind = Some(match name {
                "kconfig" => Kind::Kconfig,
                "cmdline" => Kind::Cmdline,
                "sysctl" => Kind::Sysctl,
                _ => return Err(HardeningError::UnknownKind { line, name: name.to_owned() }),
            });
            continue;
        }
        let kind = kind.ok_or(HardeningError::NoKind { line })?;
        let met = facts
            .any(text, kind)
            .map_err(|atom| HardeningError::Atom { line, atom: atom.to_owned() })?;
        verdicts.push(Verdict { kind, check: text.to_owned(), met });
    }
    Ok(verdicts)
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

/// What the subject says, by name.
struct Facts {
    kconfig: BTreeMap<String, String>,
    cmdline: BTreeMap<String, String>,
    sysctl: BTreeMap<String, String>,
    version: Vec<u64>,
}

impl Facts {
    fn of(subject: Subject<'_>) -> Result<Self, HardeningError> {
        let options = subject.kconfig.lines().filter_map(|line| {
            let named = line.strip_prefix("CONFIG_").and_then(|rest| rest.split_once('='));
            let unset = || {
                let name = line.strip_prefix("# CONFIG_")?.strip_suffix(" is not set")?;
                Some((name, "n"))
            };
            let (name, value) = named.or_else(unset)?;
            Some((name.to_owned(), value.trim_matches('"').to_owned()))
        });
        let words = subject.cmdline.split_whitespace().map(|word| {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            (name.to_owned(), value.to_owned())
        });
        let settings = annotated::parse("rootfs/sysctl.txt", subject.sysctl)?;
        let settings = settings.into_iter().filter_map(|line| {
            let (path, value) = line.value.split_once('=')?;
            Some((path.replace('/', "."), value.to_owned()))
        });
        // "# Linux/x86 7.3.4 Kernel Configuration"
        let head = subject.kconfig.lines().find(|line| line.ends_with("Kernel Configuration"));
        let version = head.and_then(|line| line.split(' ').nth(2)).unwrap_or_default();
        Ok(Self {
            kconfig: options.collect(),
            cmdline: words.collect(),
            sysctl: settings.collect(),
            version: numbers(version),
        })
    }

    fn any<'a>(&self, text: &'a str, kind: Kind) -> Result<bool, &'a str> {
        let mut met = false;
        for part in text.split('|') {
            let mut all = true;
            for atom in part.split('&') {
                all &= self.atom(atom.trim(), kind)?;
            }
            met |= all;
        }
        Ok(met)
    }

    fn atom<'a>(&self, atom: &'a str, kind: Kind) -> Result<bool, &'a str> {
        if let Some(version) = atom.strip_prefix(">=") {
            return Ok(self.version >= numbers(version));
        }
        if let Some(name) = atom.strip_prefix('!') {
            return Ok(self.value(name, kind).is_none_or(|value| value == "n"));
        }
        if let Some((one, other)) = atom.split_once("==") {
            let (one, other) = (self.value(one, kind), self.value(other, kind));
            return Ok(one.is_some() && one == other);
        }
        if let Some((name, value)) = atom.split_once("!=") {
            return Ok(self.value(name, kind).is_some_and(|found| found != value));
        }
        match atom.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok(self.value(name, kind).is_some_and(|found| found == value))
            }
            Some(_) => Err(atom),
            None if atom.is_empty() => Err(atom),
            None => Ok(self.value(atom, kind).is_some()),
        }
    }

    fn value(&self, name: &str, kind: Kind) -> Option<&str> {
        let option = name.starts_with(|first: char| first.is_ascii_uppercase());
        let facts = match kind {
            Kind::Kconfig => &self.kconfig,
            Kind::Cmdline | Kind::Sysctl if option => &self.kconfig,
            Kind::Cmdline => &self.cmdline,
            Kind::Sysctl => &self.sysctl,
        };
        facts.get(name).map(String::as_str)
    }
}

fn numbers(version: &str) -> Vec<u64> {
    version.split('.').map(|number| number.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    const SUBJECT: Subject<'_> = Subject {
        kconfig: "# Linux/x86 7.3.4 Kernel Configuration\nCONFIG_A=y\nCONFIG_N=100\n\
                  CONFIG_M=100\n# CONFIG_B is not set\n",
        cmdline: "quiet iommu=force",
        sysctl: "kernel/x=2 # why\n",
    };

    fn met(section: &str, line: &str) -> bool {
        check(&format!("[{section}]\n{line}\n"), SUBJECT).unwrap()[0].met
    }

    #[test]
    fn every_form_of_a_check_is_judged() {
        let good =
            ["A=y", "!B", "!C", "B=n", "N==M", "B=y | A=y", "!B & A=y", "A", ">=7.2.99", "A!=n"];
        assert_eq!(good.into_iter().find(|line| !met("kconfig", line)), None);
        let bad = ["B=y", "!A", "C=n", "C", "A==N", "A=y & B=y", ">=7.4", ">=7.3.10", "C!=n"];
        assert_eq!(bad.into_iter().find(|line| met("kconfig", line)), None);
        let good = ["quiet", "iommu=force", "!nosmt", "iommu!=off", "nosmt | !B"];
        assert_eq!(good.into_iter().find(|line| !met("cmdline", line)), None);
        assert!(!met("cmdline", "spectre_v2!=off"));
        assert!(met("sysctl", "kernel.x=2") && !met("sysctl", "kernel.y=2"));
    }

    #[test]
    fn lines_that_say_nothing_are_refused() {
        let refused = |text: &str| check(text, SUBJECT).unwrap_err();
        assert_eq!(refused("A=y\n"), HardeningError::NoKind { line: 1 });
        assert!(matches!(refused("[more]\n"), HardeningError::UnknownKind { line: 1, .. }));
        assert!(matches!(refused("[kconfig]\nA=y |\n"), HardeningError::Atom { line: 2, .. }));
    }
}
