//! Whether a disk is one that a node comes up from with everything that it acknowledged.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
};

use agent::{
    install::probe::{self, Content},
    machines::{plan::Released, store::Store},
};
use anyhow::{Context, Result, ensure};
use ed25519_dalek::SigningKey;
use gpt::{GptConfig, disk::LogicalBlockSize, mbr::ProtectiveMBR};
use serde::Deserialize;
use types::hex;
use update::{
    disk::{gpt::ALIGNMENT, layout, medium},
    slots::{Place, Program, Slot, fat, journal::Journal},
};

use crate::{
    disk::{Disk, Part},
    volume::{Opener, Region, unpack},
};

/// Something that was acknowledged, and holds from then on until another word about the same thing.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Told {
    /// How many entries of the log came before.
    pub(crate) after: usize,
    /// What.
    pub(crate) fact: Fact,
}

/// What may have been acknowledged.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Fact {
    /// The disk is one that firmware starts.
    Installed,
    /// A place holds one of these programs, by their SHA-256; anything when there is none.
    Program {
        /// `a`, `b` or `fallback`.
        place: String,
        /// Digests, hexadecimal.
        sha256: Vec<String>,
    },
    /// The node's name in the overlay.
    Node(String),
    /// A machine is known, under at least this serial.
    Machine {
        /// Its id.
        id: String,
        /// The highest serial of its lease.
        serial: u64,
    },
    /// A machine's lease ended, and what it had was taken back.
    Expired(String),
    /// Nothing more is said of a machine.
    Leaving(String),
    /// A machine was deleted: its disk's key is gone, its receipts are not.
    Deleted(String),
}

impl Fact {
    /// Which programs a place may hold, if this says so.
    fn program(&self, name: &str) -> Option<&[String]> {
        match self {
            Self::Program { place, sha256 } if place == name => Some(sha256),
            Self::Program { .. }
            | Self::Installed
            | Self::Node(_)
            | Self::Machine { .. }
            | Self::Expired(_)
            | Self::Leaving(_)
            | Self::Deleted(_) => None,
        }
    }

    fn node(&self) -> Option<&str> {
        if let Self::Node(id) = self { Some(id) } else { None }
    }

    /// Whether nothing more is said of a machine.
    fn ends(&self, machine: &str) -> bool {
        matches!(self, Self::Leaving(id) | Self::Deleted(id) if id == machine)
    }
}

/// Judges disks.
pub(crate) struct Judge {
    opener: Opener,
    folder: PathBuf,
    told: Vec<Told>,
    /// What was found good already, by facts and blocks.
    good: HashSet<(&'static str, usize, u64)>,
    /// Digests of programs, by the blocks of their partition.
    programs: HashMap<u64, [Option<String>; 3]>,
}

impl Judge {
    /// Judges by what was `told`, with files in `folder`.
    pub(crate) fn new(folder: &Path, told: Vec<Told>) -> Self {
        Self {
            opener: Opener::new(folder),
            folder: folder.to_owned(),
            told,
            good: HashSet::new(),
            programs: HashMap::new(),
        }
    }

    /// Says what is wrong with a disk after `after` entries, if anything is.
    pub(crate) fn judge(&mut self, disk: &Disk, after: usize) -> Result<()> {
        let known = self.told.iter().take_while(|told| told.after <= after).count();
        let facts: Vec<Fact> = self.told[..known].iter().map(|told| told.fact.clone()).collect();
        let Some([esp, state, data]) = partitions(disk)? else {
            let installed = facts.iter().any(|fact| matches!(fact, Fact::Installed));
            ensure!(!installed, "the partition table is gone");
            return retried(disk);
        };
        self.programs(disk, esp, &facts)?;
        let print = disk.fingerprint(state.start, state.length);
        let key = ("state", known, print);
        let both = disk.fingerprint(data.start, data.length) ^ print;
        if !self.good.contains(&key) || !self.good.contains(&("data", 0, both)) {
            let (file, opens) = self.opener.state(disk, state)?;
            let files = self.folder.join("state");
            unpack(&file, &files)?;
            remembers(&files, &facts)?;
            if self.good.insert(("data", 0, both)) {
                self.opener.data(disk, data, opens.as_ref())?;
            }
            self.good.insert(key);
        }
        Ok(())
    }

    /// Checks what the EFI system partition holds. Something whole is always on the fallback path.
    fn programs(&mut self, disk: &Disk, at: Region, facts: &[Fact]) -> Result<()> {
        let print = disk.fingerprint(at.start, at.length);
        let found = match self.programs.get(&print) {
            Some(found) => found,
            None => {
                let found = read_programs(disk, at)?;
                self.programs.entry(print).or_insert(found)
            }
        };
        for (place, found) in Place::ALL.into_iter().zip(found) {
            let name = match place {
                Place::Slot(Slot::A) => "a",
                Place::Slot(Slot::B) => "b",
                Place::Fallback => "fallback",
            };
            let wanted = facts.iter().rev().find_map(|fact| fact.program(name));
            let Some(wanted) = wanted.filter(|wanted| !wanted.is_empty()) else { continue };
            let found = found.as_deref().unwrap_or("nothing");
            ensure!(
                wanted.iter().any(|wanted| wanted == found),
                "{name} holds {found} instead of {}",
                wanted.join(" or ")
            );
        }
        Ok(())
    }
}

fn read_programs(disk: &Disk, at: Region) -> Result<[Option<String>; 3]> {
    let mut found = [const { None }; 3];
    for (place, found) in Place::ALL.into_iter().zip(&mut found) {
        let mut volume = fat::Volume::open(Part::new(disk, at.start, at.length))?;
        // A file that cannot be read is none, as for the node.
        let bytes = volume.read(place.path(), medium::PROGRAM_LIMIT).unwrap_or_default();
        *found = bytes.map(|bytes| hex::encode(&Program::of(&bytes).sha256.0));
    }
    Ok(found)
}

/// Where the partitions are, if the kernel finds them: it believes a table only below a protective
/// MBR, and the backup of one never by itself (block/partitions/efi.c).
fn partitions(disk: &Disk) -> Result<Option<[Region; 3]>> {
    let mut reader = disk.clone();
    let sector = LogicalBlockSize::Lb512;
    if ProtectiveMBR::from_disk(&mut reader, sector).is_err() {
        return Ok(None);
    }
    let config = GptConfig::new().writable(false).logical_block_size(sector);
    let Ok(table) = config.only_valid_headers(false).open_from_device(reader) else {
        return Ok(None);
    };
    if table.primary_header().is_err() {
        return Ok(None);
    }
    let region = |name: &str| {
        let found = table.partitions().values().find(|partition| partition.name == name);
        let found = found.with_context(|| format!("the table has no partition {name}"))?;
        let start = found.bytes_start(sector)?;
        anyhow::Ok(Region { start, length: found.bytes_len(sector)? })
    };
    Ok(Some([region(layout::ESP)?, region(layout::STATE)?, region(layout::DATA)?]))
}

/// A disk whose installation was cut short is one that the next try takes.
fn retried(disk: &Disk) -> Result<()> {
    let bytes = usize::try_from(ALIGNMENT)?;
    let (first, last) = (disk.get(0, bytes)?, disk.get(disk.length - ALIGNMENT, bytes)?);
    let found = probe::content(&first, &last, &[]);
    ensure!(
        found == Content::Nothing,
        "nothing is installed, and the next try would refuse the disk: it has {found}"
    );
    Ok(())
}

/// Checks what STATE's files say against what was acknowledged.
fn remembers(files: &Path, facts: &[Fact]) -> Result<()> {
    let journal = files.join("slots.journal");
    if journal.exists() {
        Journal::parse(&fs::read(journal)?).context("the journal of the slots")?;
    }
    if let Some(wanted) = facts.iter().rev().find_map(Fact::node) {
        let seed = fs::read(files.join("node.key")).context("the node's key")?;
        let seed: [u8; 32] = seed.as_slice().try_into().context("the node's key")?;
        let found = hex::encode(SigningKey::from_bytes(&seed).verifying_key().as_bytes());
        ensure!(found == *wanted, "the node is {found} and was {wanted}");
    }
    let store = files.join("agent.redb");
    let machines = if store.exists() { Store::open(&store)?.machines()? } else { Vec::new() };
    for (index, fact) in facts.iter().enumerate() {
        let later = &facts[index + 1..];
        if let Fact::Machine { id, serial } = fact
            && !later.iter().any(|later| later.ends(id))
        {
            let found = machines.iter().find(|record| record.lease.id.to_string() == *id);
            let found = found.with_context(|| format!("machine {id} is forgotten"))?.lease.serial;
            ensure!(found >= *serial, "machine {id} is back at serial {found} from {serial}");
        }
        if let Fact::Expired(id) = fact {
            let found = machines.iter().find(|record| record.lease.id.to_string() == *id);
            let ended = found.is_some_and(|found| found.released == Released::Yes);
            ensure!(ended, "machine {id}, whose lease has ended, has what was taken back");
        }
        if let Fact::Deleted(id) = fact {
            let found = machines.iter().find(|record| record.lease.id.to_string() == *id);
            ensure!(found.is_none_or(|found| found.deleted.is_some()), "machine {id} is back");
            let keys = files.join("disk-keys").join(id);
            let left = fs::read_dir(&keys).is_ok_and(|mut keys| keys.next().is_some());
            ensure!(!left, "the key of the disk of machine {id} is still there");
        }
    }
    Ok(())
}
