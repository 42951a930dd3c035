//! What a disk alters in the file systems of STATE and DATA: a bit, or sixteen bytes, as one bit below the
//! encryption becomes. The node's own code mends and judges, and the kernel mounts. Whatever is hit, the
//! volume is mounted, the node stays itself, every machine finds its disk and its key, and what did
//! not come through as it was is told.
//!
//! A run prints its seed. `HOLDFAST_FLIP_SEED` repeats one, `HOLDFAST_FILE_FLIPS` sets how many places are tried.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use types::{ids::MachineId, units::Mebibytes};

use super::{
    check::{Checked, Limits, check},
    names,
    superblock::{self, Found},
};
use crate::{
    machines::{
        disk::{self, Places},
        disk_keys,
        plan::fixture,
        store::Store,
    },
    sys,
    testing::{Mounted, Random, setting},
    twice,
};

/// Places that are tried unless the environment says how many.
const FLIPS: usize = 60;
/// Bytes of the volume: those of STATE behind its header.
const VOLUME: u64 = 240 << 20;
/// Bytes of a block of the file system, and of one of the cipher's.
const BLOCK: usize = 4096;
const GARBLED: usize = 16;
/// Where Debian has it.
const E2FSCK: &str = "/usr/sbin/e2fsck";
const LIMITS: Limits = Limits { look: Duration::from_secs(60), mend: Duration::from_secs(60) };
/// What the image's builder gives ext4 (`image/src/media.rs`).
pub(super) const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,\
    sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// The node's key, and its machines.
const SEED: [u8; 32] = [7; 32];
const MACHINES: [MachineId; 3] = [
    MachineId::from_bytes([1; 16]),
    MachineId::from_bytes([2; 16]),
    MachineId::from_bytes([3; 16]),
];

fn places(root: &Path) -> Places {
    Places { data: root.join("data"), keys: root.join("disk-keys") }
}

/// Writes what a node keeps, by its own code.
fn fill(root: &Path) {
    twice::write(&root.join("node.key"), &SEED).unwrap();
    let store = Store::open(&root.join("agent.redb")).unwrap();
    store.put_machine(&fixture::record()).unwrap();
    drop(store);
    for machine in MACHINES {
        disk::open(&places(root), machine, Mebibytes(1), None).unwrap();
    }
    fs::create_dir_all(root.join("tuf")).unwrap();
    fs::write(root.join("tuf/1.root.json"), [b'r'; 5000]).unwrap();
    assert!(names::keep(root).unwrap() > 10);
}

/// What is on a volume: its length, by path.
fn files(root: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let facts = entry.metadata().unwrap();
            let name = entry.path().strip_prefix(root).unwrap().to_owned();
            if facts.is_dir() {
                folders.push(entry.path());
            } else {
                found.insert(name, facts.len());
            }
        }
    }
    found
}

/// A volume as a node left it.
struct Base {
    /// Blocks that are not empty, by their number.
    blocks: BTreeMap<u64, Vec<u8>>,
    files: BTreeMap<PathBuf, u64>,
}

impl Base {
    /// Makes the volume of a node that was shut down, and of one whose power was cut a while after it wrote; `None` where nothing can
    /// be mounted.
    fn both(folder: &Path) -> Option<[Self; 2]> {
        let volume = folder.join("base");
        File::create(&volume).unwrap().set_len(VOLUME).unwrap();
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-O", FEATURES])
            .args(["-E", "lazy_itable_init=1"])
            .arg(&volume)
            .status();
        if !made.is_ok_and(|status| status.success()) {
            return None;
        }
        let mounted = Mounted::ext4(&volume, &folder.join("mounted"))?;
        fill(&mounted.0);
        // As the service does all the time.
        let root = File::open(&mounted.0).unwrap();
        rustix::fs::syncfs(&root).unwrap();
        sys::block::checkpoint_ext4(root.as_fd()).unwrap();
        drop(root);
        let files = files(&mounted.0);
        let cut = Self { blocks: blocks(&volume), files: files.clone() };
        drop(mounted);
        Some([Self { blocks: blocks(&volume), files }, cut])
    }

    fn write(&self, volume: &Path) -> File {
        let options =
            File::options().read(true).write(true).create(true).truncate(true).open(volume);
        let file = options.unwrap();
        file.set_len(VOLUME).unwrap();
        for (number, block) in &self.blocks {
            file.write_all_at(block, number * BLOCK as u64).unwrap();
        }
        file
    }
}

fn blocks(volume: &Path) -> BTreeMap<u64, Vec<u8>> {
    let file = File::open(volume).unwrap();
    let mut found = BTreeMap::new();
    let mut block = vec![0; BLOCK];
    for number in 0..VOLUME / BLOCK as u64 {
        file.read_exact_at(&mut block, number * BLOCK as u64).unwrap();
        if block.iter().any(|byte| *byte != 0) {
            found.insert(number, block.clone());
        }
    }
    found
}

/// What became of an altered place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Nothing of the file system is otherwise.
    Harmless,
    /// It was told, and all is where it was.
    Mended,
    /// It was told, and something is gone that has a copy or is set aside.
    Told,
}

/// Lets a node start over `volume`, of which `what` was altered.
fn judge(volume: &Path, file: &File, base: &Base, what: &str) -> Outcome {
    let mut told = superblock::mend(file).unwrap() != Found::Whole;
    match check(Path::new(E2FSCK), volume, LIMITS) {
        Checked::Whole => {}
        Checked::Mended { what: said } => {
            println!("{what}: {said}");
            told = true;
        }
        other @ (Checked::Unknown { .. } | Checked::Damaged { .. }) => panic!("{what}: {other:?}"),
    }
    let at = volume.with_extension("mounted");
    let Some(mounted) = Mounted::ext4(volume, &at) else { panic!("{what}: it cannot be mounted") };
    let root = &mounted.0;
    let restored = names::restore(root).unwrap();
    assert!(told || restored == names::Restored::default(), "{what}: {restored:?}");
    let now = files(root);
    // The node is who it was, and opens its machines' disks, whatever copy that takes.
    let key = twice::read::<32>(&root.join("node.key")).unwrap();
    assert_eq!(key.as_deref(), Some(&SEED), "{what}");
    for machine in MACHINES {
        let key = disk_keys::read(&places(root).keys, machine, "disk");
        assert!(key.is_ok(), "{what}: {key:?}, {restored:?}, {now:?}");
        match disk::open(&places(root), machine, Mebibytes(1), None) {
            Ok(disk) => assert!(disk.key.is_some(), "{what}"),
            Err(error) => assert!(told, "{what}: {error}"),
        }
    }
    match (now == base.files, told) {
        (true, false) => Outcome::Harmless,
        (true, true) => Outcome::Mended,
        (false, true) => Outcome::Told,
        (false, false) => panic!("{what}: {now:?} instead of {:?}, unsaid", base.files),
    }
}

/// Every part of the superblock, which the random ones below rarely meet.
#[test]
fn whatever_is_altered_in_a_superblock_it_is_mended_or_told_and_the_node_stays_itself() {
    let folder = tempfile::tempdir().unwrap();
    let Some(bases) = Base::both(folder.path()) else {
        println!("skipped: altered superblocks: needs root, loop devices and Debian's e2fsprogs");
        return;
    };
    let volume = folder.path().join("volume");
    let places = (superblock::AT..superblock::AT + superblock::BYTES as u64).step_by(GARBLED);
    for (place, base) in places.flat_map(|place| bases.iter().map(move |base| (place, base))) {
        for garbage in [[0xff; GARBLED], [0, 0x40].repeat(GARBLED / 2).try_into().unwrap()] {
            let file = base.write(&volume);
            file.write_all_at(&garbage, place).unwrap();
            judge(&volume, &file, base, &format!("{garbage:02x?} at {place:#x}"));
        }
    }
}

/// The descriptors of both groups, which say where everything else lies.
#[test]
fn whatever_is_altered_in_descriptors_it_is_mended_or_told_and_the_node_stays_itself() {
    let folder = tempfile::tempdir().unwrap();
    let Some(bases) = Base::both(folder.path()) else {
        println!("skipped: altered descriptors: needs root, loop devices and Debian's e2fsprogs");
        return;
    };
    let volume = folder.path().join("volume");
    let places = (BLOCK..BLOCK + 2 * 64).step_by(GARBLED);
    for (place, base) in places.flat_map(|place| bases.iter().map(move |base| (place, base))) {
        let mut near = [0; GARBLED];
        near.copy_from_slice(&base.blocks[&1][place - BLOCK..][..GARBLED]);
        near[9] ^= 0x80;
        for garbage in [[0xff; GARBLED], [0; GARBLED], near] {
            let file = base.write(&volume);
            file.write_all_at(&garbage, place as u64).unwrap();
            judge(&volume, &file, base, &format!("{garbage:02x?} at {place:#x}"));
        }
    }
}

#[test]
fn whatever_is_altered_in_a_file_system_it_is_mended_or_told_and_the_node_stays_itself() {
    let folder = tempfile::tempdir().unwrap();
    let Some(bases) = Base::both(folder.path()) else {
        println!("skipped: altered file systems: needs root, loop devices and Debian's e2fsprogs");
        return;
    };
    let volume = folder.path().join("volume");
    let mut random = Random::start("HOLDFAST_FLIP_SEED");
    let mut counts = [0; 3];
    for round in 0..setting("HOLDFAST_FILE_FLIPS").unwrap_or(FLIPS) {
        let base = &bases[round / 2 % 2];
        // The journal and the store have most of the blocks, the rest has most of what can go wrong.
        let numbers: Vec<u64> = base.blocks.keys().copied().collect();
        let some = if round % 4 < 3 { numbers.len().min(60) } else { numbers.len() };
        let number = numbers[random.below(some)];
        let block = &base.blocks[&number];
        let units: Vec<usize> = (0..BLOCK)
            .step_by(GARBLED)
            .filter(|at| block[*at..][..GARBLED].iter().any(|byte| *byte != 0))
            .collect();
        let at = units[random.below(units.len())];
        let mut unit = block[at..][..GARBLED].to_vec();
        if round % 2 == 0 {
            unit[random.below(GARBLED)] ^= 1 << random.below(8);
        } else {
            unit.fill_with(|| u8::try_from(random.below(256)).unwrap());
        }
        let file = base.write(&volume);
        file.write_all_at(&unit, number * BLOCK as u64 + at as u64).unwrap();
        let what = format!("round {round}, {at:#x} of block {number}: {unit:02x?}");
        let outcome = judge(&volume, &file, base, &what);
        counts[outcome as usize] += 1;
    }
    println!("altered file systems: harmless, mended, told: {counts:?}");
    assert!(counts[1] > 0, "nothing was mended");
}
