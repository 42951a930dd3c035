//! Which disk is installed to, or why none is. Pure.

use std::collections::BTreeSet;

use types::install::{Confirm, DiskSelector, Install};
use update::disk::{gpt::BlockSize, layout::SMALLEST_DISK};

use super::{
    disks::{self, Access, Disk, Kind},
    probe::Content,
};
use crate::init::own_disks;

/// What will be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The disk.
    pub disk: Disk,
    /// Its blocks.
    pub block: BlockSize,
    /// Who says the last word.
    pub confirm: Confirm,
}

/// Why nothing is installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error(
        "the server has no disk that the kernel can see; check its cabling and power, and that the firmware's setup shows it to the system itself (AHCI or NVMe, not RAID), or leave [install] out to run from memory"
    )]
    NoDisk,
    #[error("no disk is {selector}; there are {there}; correct [install.disk]")]
    NoMatch { selector: String, there: String },
    #[error("several disks could be meant: {which}; name one in [install.disk], by its {by}")]
    Several { which: String, by: &'static str },
    #[error(
        "no disk can be installed to: {why}; mend one of them, attach another, or leave [install] out to run from memory"
    )]
    NoneFits { why: String },
    #[error("nobody said which disk to install to, and {absent}")]
    OwnAbsent { absent: String },
    #[error("cannot install to {disk}: {fault}{}", fault.advice())]
    Unfit { disk: String, fault: Fault },
}

/// What is wrong with a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Fault {
    #[error("the running system was started from it")]
    Medium,
    #[error("it is in use ({by})")]
    InUse { by: String },
    #[error("it is write-protected")]
    ReadOnly,
    #[error("it has {bytes} bytes, and at least {SMALLEST_DISK} are needed")]
    TooSmall { bytes: u64 },
    #[error("its blocks are neither 512 nor 4096 bytes long")]
    Blocks,
    #[error("it is removable or attached by USB; name it in [install.disk] if it is really meant")]
    Removable,
    #[error("it cannot be read ({0})")]
    Unreadable(String),
    #[error("it holds {what}; to destroy that, say erase = {word:?} in [install]")]
    Holds { what: String, word: String },
    #[error("it already holds an installation of Holdfast, which no configuration may destroy")]
    Installed,
}

impl Fault {
    /// Returns what to do about it, where the fault itself does not say.
    fn advice(&self) -> &'static str {
        match self {
            Self::Medium | Self::TooSmall { .. } => "; name another one in [install.disk]",
            Self::InUse { .. } => "; end that, or name another one in [install.disk]",
            Self::ReadOnly => "; take the protection off, or name another one in [install.disk]",
            Self::Blocks => {
                "; format it so with its maker's tool, or name another one in [install.disk]"
            }
            Self::Unreadable(_) => "; replace it, or name another one in [install.disk]",
            Self::Installed => {
                "; start the server from it, or overwrite its first and last MiB with another system to give up what it holds"
            }
            Self::Removable | Self::Holds { .. } => "",
        }
    }
}

/// Refuses to make the server another node for good that neither names a disk nor has somebody to ask, while a
/// disk of its own is `absent`. Where that one's hardware is there, somebody wrote over it or an installation on
/// it was not finished.
pub(crate) fn keep_identity(
    install: &Install,
    disks: &[Disk],
    absent: Vec<own_disks::Disk>,
) -> Result<(), Refusal> {
    if install.confirm != Confirm::Unattended || !install.disk.is_empty() {
        return Ok(());
    }
    let is_there = |hardware: &String| disks.iter().any(|disk| disk.hardware == *hardware);
    let mut away = absent.into_iter().filter(|own| !own.hardware.as_ref().is_some_and(is_there));
    let refusal = |disk: own_disks::Disk| Refusal::OwnAbsent { absent: disk.told_absent() };
    away.next().map(refusal).map_or(Ok(()), Err)
}

/// Chooses the disk. `medium` is the name of the disk that the running system was started from.
pub fn choose(install: &Install, disks: &[Disk], medium: Option<&str>) -> Result<Choice, Refusal> {
    if disks.is_empty() {
        return Err(Refusal::NoDisk);
    }
    let disks = &disks::fold(disks, medium)[..];
    let fault = |disk: &Disk| fault(install, disk, medium);
    let meant: Vec<&Disk> = disks.iter().filter(|disk| matches(&install.disk, disk)).collect();
    let disk = if install.disk.is_empty() {
        // Disks that cannot be meant do not count. What one of them holds is no reason to take the
        // other one: whoever did not say which may have meant either.
        let possible = |disk: &&&Disk| {
            matches!(fault(disk), None | Some(Fault::Holds { .. } | Fault::Installed))
        };
        let possible: Vec<&Disk> = meant.iter().filter(possible).copied().collect();
        one(&possible)?.ok_or_else(|| {
            let why = |disk: &&Disk| fault(disk).map(|fault| format!("{disk}: {fault}"));
            Refusal::NoneFits { why: meant.iter().filter_map(why).collect::<Vec<_>>().join("; ") }
        })?
    } else {
        one(&meant)?.ok_or_else(|| Refusal::NoMatch {
            selector: install.disk.to_string(),
            there: list(disks.iter()),
        })?
    };
    if let Some(fault) = fault(disk) {
        return Err(Refusal::Unfit { disk: disk.to_string(), fault });
    }
    let block = disk
        .block
        .ok_or_else(|| Refusal::Unfit { disk: disk.to_string(), fault: Fault::Blocks })?;
    Ok(Choice { disk: disk.clone(), block, confirm: install.confirm })
}

/// Returns the only disk; `None` when there is none.
fn one<'a>(disks: &[&'a Disk]) -> Result<Option<&'a Disk>, Refusal> {
    match disks {
        [] => Ok(None),
        [disk] => Ok(Some(disk)),
        several => {
            let (which, by) = (list(several.iter().copied()), difference(several));
            Err(Refusal::Several { which, by })
        }
    }
}

/// Returns by what of them these disks can be told from each other: the parts of one drive (NVMe's name spaces) have
/// one serial number.
fn difference(disks: &[&Disk]) -> &'static str {
    let differ = |name: fn(&Disk) -> Option<String>| {
        let names: BTreeSet<String> = disks.iter().filter_map(|disk| name(disk)).collect();
        names.len() == disks.len()
    };
    match () {
        () if differ(|disk| disk.serial.clone()) => "serial number best",
        () if differ(|disk| disk.wwn.clone()) => "wwn: their serial numbers do not tell them apart",
        () if differ(|disk| disk.pci.map(|pci| pci.to_string())) => {
            "pci address: neither serial number nor wwn tells them apart"
        }
        () => "size or model, or take one of them away: nothing else tells them apart",
    }
}

fn list<'a>(disks: impl Iterator<Item = &'a Disk>) -> String {
    disks.map(Disk::in_full).collect::<Vec<_>>().join(", ")
}

fn matches(selector: &DiskSelector, disk: &Disk) -> bool {
    const GIB: u64 = 1 << 30;
    let same = |wanted: &Option<String>, found: &Option<String>| {
        wanted.as_ref().is_none_or(|wanted| found.as_ref() == Some(wanted))
    };
    let model = selector.model.as_ref().is_none_or(|wanted| {
        let found = disk.model.as_deref().unwrap_or_default();
        match wanted.strip_suffix('*') {
            Some(start) => found.starts_with(start),
            None => found == wanted,
        }
    });
    same(&selector.serial, &disk.serial)
        && selector.wwn.as_ref().is_none_or(|wanted| {
            let found = disk.wwn.as_deref().map(disks::plain_wwn);
            found == Some(disks::plain_wwn(wanted))
        })
        && model
        && selector.pci.is_none_or(|wanted| disk.pci == Some(wanted))
        && selector.min_gib.is_none_or(|gib| disk.bytes >= gib.saturating_mul(GIB))
        && selector.max_gib.is_none_or(|gib| disk.bytes <= gib.saturating_mul(GIB))
}

fn fault(install: &Install, disk: &Disk, medium: Option<&str>) -> Option<Fault> {
    if medium == Some(disk.name.as_str()) {
        return Some(Fault::Medium);
    }
    if !disk.users.is_empty() {
        return Some(Fault::InUse { by: disk.users.join(", ") });
    }
    if disk.access == Access::ReadOnly {
        return Some(Fault::ReadOnly);
    }
    if disk.bytes < SMALLEST_DISK {
        return Some(Fault::TooSmall { bytes: disk.bytes });
    }
    if disk.block.is_none() {
        return Some(Fault::Blocks);
    }
    if disk.kind == Kind::Removable && install.disk.is_empty() {
        return Some(Fault::Removable);
    }
    match &disk.content {
        Content::Nothing => None,
        Content::Holdfast => Some(Fault::Installed),
        Content::Unreadable(error) => Some(Fault::Unreadable(error.clone())),
        Content::Something(_) if install.erase.as_deref() == Some(disk.word()) => None,
        Content::Something(what) => {
            Some(Fault::Holds { what: what.clone(), word: disk.word().to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn disk(name: &str, serial: &str) -> Disk {
        Disk {
            name: name.to_owned(),
            path: PathBuf::from("/dev").join(name),
            bytes: 1 << 40,
            block: Some(BlockSize::B512),
            serial: Some(serial.to_owned()),
            wwn: None,
            hardware: serial.to_owned(),
            model: Some("SAMSUNG MZ".to_owned()),
            pci: None,
            kind: Kind::Fixed,
            access: Access::Writable,
            users: Vec::new(),
            content: Content::Nothing,
        }
    }

    fn named(serial: &str) -> Install {
        let disk = DiskSelector { serial: Some(serial.to_owned()), ..DiskSelector::default() };
        Install { disk, ..Install::default() }
    }

    fn refused(install: &Install, disks: &[Disk], medium: Option<&str>) -> String {
        choose(install, disks, medium).expect_err("refused").to_string()
    }

    #[test]
    fn the_only_empty_disk_is_taken() {
        let small = Disk { bytes: 1 << 30, ..disk("sdb", "B") };
        let stick = Disk { kind: Kind::Removable, ..disk("sdc", "C") };
        let disks = [disk("sda", "A"), small, stick, disk("sdd", "D")];
        let choice = choose(&Install::default(), &disks, Some("sdd")).expect("one fits");
        assert_eq!((choice.disk.name.as_str(), choice.confirm), ("sda", Confirm::Console));
    }

    #[test]
    fn of_two_that_could_be_meant_neither_is_taken() {
        let full = Disk { content: Content::Something("x".into()), ..disk("sdb", "B") };
        let text = refused(&Install::default(), &[disk("sda", "A"), full], None);
        assert!(text.contains("serial A") && text.contains("serial B"), "{text}");
        assert!(text.contains("[install.disk]"), "{text}");
        let both = Install {
            disk: DiskSelector { model: Some("SAM*".into()), ..DiskSelector::default() },
            ..Install::default()
        };
        let text = refused(&both, &[disk("sda", "A"), disk("sdb", "B")], None);
        assert!(text.starts_with("several disks"), "{text}");
    }

    fn with_wwn(name: &str, serial: &str, wwn: &str) -> Disk {
        let pci = "0000:3b:00.0".parse().ok();
        Disk { wwn: Some(wwn.to_owned()), pci, ..disk(name, serial) }
    }

    fn by_wwn(wwn: &str) -> Install {
        let disk = DiskSelector { wwn: Some(wwn.to_owned()), ..DiskSelector::default() };
        Install { disk, ..Install::default() }
    }

    /// Two name spaces of one NVMe drive: whoever names its serial number is told what to name instead.
    #[test]
    fn disks_of_one_serial_number_are_told_apart_by_their_wwn() {
        let disks = [
            with_wwn("nvme0n1", "S", "eui.0000000000000001"),
            with_wwn("nvme0n2", "S", "eui.0000000000000002"),
        ];
        for install in [Install::default(), named("S")] {
            let text = refused(&install, &disks, None);
            assert!(text.contains("by its wwn"), "{text}");
            assert!(text.contains("wwn \"eui.0000000000000002\", pci \"0000:3b:00.0\")"), "{text}");
        }
        let text = refused(&named("Z"), &disks, None);
        assert!(text.contains("there are nvme0n1 (serial S, ") && text.contains("eui.0"), "{text}");
        let choice = choose(&by_wwn("0x0000000000000002"), &disks, None).expect("it is named");
        assert_eq!(choice.disk.name, "nvme0n2");
        let text = refused(&Install::default(), &[disk("sda", "A"), disk("sdb", "B")], None);
        assert!(text.contains("by its serial number best"), "{text}");
        let cards = [disk("sda", "A"), disk("sdb", "A")];
        let text = refused(&Install::default(), &cards, None);
        assert!(text.contains("size or model"), "{text}");
    }

    #[test]
    fn a_drive_on_two_paths_is_one_disk() {
        let wwn = "naa.5000c500a1b2c3d4";
        let both = [with_wwn("sda", "A", wwn), with_wwn("sdb", "A", wwn)];
        for install in [Install::default(), named("A"), by_wwn("0x5000C500A1B2C3D4")] {
            assert_eq!(choose(&install, &both, None).expect("one disk").disk.name, "sda");
        }
        // What is wrong with either path is wrong with the disk.
        assert!(refused(&named("A"), &both, Some("sdb")).contains("started from it"));
        let used = Disk { users: vec!["mounted on /srv".into()], ..both[1].clone() };
        assert!(refused(&named("A"), &[both[0].clone(), used], None).contains("in use"));
        let locked = Disk { access: Access::ReadOnly, ..both[1].clone() };
        assert!(refused(&named("A"), &[both[0].clone(), locked], None).contains("protected"));
        // Names that devices make up are no proof.
        for other in [with_wwn("sdb", "B", wwn), Disk { bytes: 1 << 41, ..both[1].clone() }] {
            assert!(choose(&Install::default(), &[both[0].clone(), other], None).is_err());
        }
        let zero = ["sda", "sdb"].map(|name| with_wwn(name, "A", "eui.0000000000000000"));
        assert!(choose(&Install::default(), &zero, None).is_err());
    }

    #[test]
    fn every_reason_against_a_disk_is_told() {
        let good = disk("sda", "A");
        let cases = [
            (
                Disk { users: vec!["mounted on /srv".into()], ..good.clone() },
                "in use (mounted on /srv)",
            ),
            (Disk { access: Access::ReadOnly, ..good.clone() }, "write-protected"),
            (Disk { bytes: 1 << 30, ..good.clone() }, "has 1073741824 bytes, and at least"),
            (Disk { block: None, ..good.clone() }, "neither 512 nor 4096"),
            (Disk { content: Content::Holdfast, ..good.clone() }, "already holds an installation"),
            (
                Disk { content: Content::Something("swap space".into()), ..good.clone() },
                "holds swap space; to destroy that, say erase = \"A\"",
            ),
            (Disk { content: Content::Unreadable("EIO".into()), ..good.clone() }, "(EIO)"),
        ];
        for (disk, wanted) in cases {
            for install in [Install::default(), named("A")] {
                let text = refused(&install, std::slice::from_ref(&disk), None);
                assert!(text.contains(wanted) && text.contains("serial A"), "{text}");
            }
        }
        let text = refused(&named("A"), std::slice::from_ref(&good), Some("sda"));
        assert!(text.contains("started from it"), "{text}");
        assert!(
            refused(&named("Z"), &[good], None).contains("no disk is serial \"Z\"; there are sda")
        );
        assert!(
            refused(&Install::default(), &[], None).contains("no disk that the kernel can see")
        );
    }

    #[test]
    fn erasing_takes_the_right_word_and_never_an_installation() {
        let full = Disk { content: Content::Something("x".into()), ..disk("sda", "A") };
        let word = |word: &str| Install { erase: Some(word.into()), ..Install::default() };
        assert!(choose(&word("A"), std::slice::from_ref(&full), None).is_ok());
        assert!(choose(&word("B"), std::slice::from_ref(&full), None).is_err());
        let installed = Disk { content: Content::Holdfast, ..full };
        assert!(choose(&word("A"), &[installed], None).is_err());
    }

    #[test]
    fn nobody_becomes_another_node_unasked_while_its_own_disk_is_away() {
        let own = |hardware: Option<&str>| {
            let hardware = hardware.map(str::to_owned);
            vec![own_disks::Disk { partition: "aa-1".to_owned(), hardware }]
        };
        let disks = [disk("sda", "A")];
        let unattended = Install { confirm: Confirm::Unattended, ..Install::default() };
        let keeps = |install: &Install, absent| keep_identity(install, &disks, absent);
        let refused = keeps(&unattended, own(Some("B"))).expect_err("it is away").to_string();
        assert!(
            refused.contains("aa-1, hardware B") && refused.contains("[install.disk]"),
            "{refused}"
        );
        assert!(keeps(&unattended, own(None)).is_err());
        assert!(keeps(&unattended, Vec::new()).is_ok());
        // It was cleared, or a power cut ended the last try.
        assert!(keeps(&unattended, own(Some("A"))).is_ok());
        // Somebody asked for it.
        assert!(keeps(&Install::default(), own(Some("B"))).is_ok());
        let named = Install { confirm: Confirm::Unattended, ..named("A") };
        assert!(keeps(&named, own(Some("B"))).is_ok());
    }

    #[test]
    fn a_stick_is_taken_when_it_is_named() {
        let stick = Disk { kind: Kind::Removable, ..disk("sda", "A") };
        assert!(choose(&Install::default(), std::slice::from_ref(&stick), None).is_err());
        assert!(choose(&named("A"), &[stick], None).is_ok());
    }
}
