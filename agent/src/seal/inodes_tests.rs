//! Each bit of an inode, altered in a file and in a folder of its own; e2fsck and the node's code mend, and the
//! kernel judges.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use super::{
    check::{Checked, Limits, check},
    descriptors::Shape,
    flips::FEATURES,
    glance::{Budget, Glance, glance},
    inodes::{BYTES, attributes_are_good},
    names,
    superblock::{self, word},
};
use crate::testing::Mounted;

const E2FSCK: &str = "/usr/sbin/e2fsck";
const LIMITS: Limits = Limits { look: Duration::from_secs(60), mend: Duration::from_secs(60) };
/// Bits of an inode, and the kinds of file that have each of them altered.
const BITS: usize = BYTES * 8;
/// One of so many inodes in a row is altered: where it is more than every second one, e2fsck takes none of them for
/// an inode.
const SPREAD: u64 = 4;
/// Bytes that say where else something lies, and how much: so many of them altered at once contradict each other
/// everywhere. `flips` tries them one by one.
const ELSEWHERE: [std::ops::Range<usize>; 5] =
    [0x04..0x08, 0x28..0x64, 0x68..0x6c, 0x6c..0x70, 0x76..0x78];
const KINDS: [&str; 2] = ["files", "folders"];

/// Returns where an inode is on its volume, in bytes.
fn place(volume: &File, number: u64) -> u64 {
    let mut own = [0; superblock::BYTES];
    volume.read_exact_at(&mut own, superblock::AT).unwrap();
    let (shape, per_group) = (Shape::of(&own).unwrap(), u64::from(word(&own, 0x28)));
    let (group, index) = ((number - 1) / per_group, (number - 1) % per_group);
    let mut table = [0; 4];
    let at = shape.place(group / shape.each()) * 4096 + group % shape.each() * 64 + 8;
    volume.read_exact_at(&mut table, at).unwrap();
    u64::from(u32::from_le_bytes(table)) * 4096 + index * BYTES as u64
}

/// Returns all that is below a folder. Panics at what the kernel refuses.
fn below(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
        for entry in entries {
            let path = entry.unwrap().path();
            let facts = path.symlink_metadata().unwrap_or_else(|error| panic!("{path:?}: {error}"));
            if facts.is_dir() {
                folders.push(path.clone());
            }
            found.push(path);
        }
    }
    found
}

/// Makes a volume with a file and a folder for each bit, and returns their paths and inodes; `None` where nothing
/// can be mounted.
fn made(volume: &Path, at: &Path) -> Option<Vec<(PathBuf, u64)>> {
    File::create(volume).unwrap().set_len(240 << 20).unwrap();
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-O", FEATURES])
        .args(["-E", "lazy_itable_init=1"])
        .arg(volume)
        .status();
    let mounted = Some(at).filter(|_| made.is_ok_and(|status| status.success()));
    let mounted = mounted.and_then(|at| Mounted::ext4(volume, at))?;
    let root = &mounted.0;
    let mut chosen = Vec::new();
    for kind in KINDS {
        fs::create_dir(root.join(kind)).unwrap();
        let mut left = BITS;
        for number in 0.. {
            let path = PathBuf::from(format!("{kind}/{number:05}"));
            if kind == "files" {
                fs::write(root.join(&path), [0; 5000]).unwrap();
            } else {
                fs::create_dir(root.join(&path)).unwrap();
            }
            let inode = root.join(&path).metadata().unwrap().ino();
            if inode % SPREAD == 0 {
                left -= 1;
                chosen.push((path, inode));
            }
            if left == 0 {
                break;
            }
        }
    }
    assert!(names::keep(root).unwrap() >= 2 * BITS);
    Some(chosen)
}

#[test]
fn whatever_bit_of_an_inode_is_altered_the_kernel_reads_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let [volume, at] = ["volume", "mounted"].map(|name| folder.path().join(name));
    let Some(made) = made(&volume, &at) else {
        println!("skipped: altered inodes: needs root, loop devices and Debian's e2fsprogs");
        return;
    };
    let file = File::options().read(true).write(true).open(&volume).unwrap();
    for (index, (path, inode)) in made.iter().enumerate() {
        let (place, bit) = (place(&file, *inode), index % BITS);
        if ELSEWHERE.iter().any(|bytes| bytes.contains(&(bit / 8))) {
            continue;
        }
        let mut bytes = [0; BYTES];
        file.read_exact_at(&mut bytes, place).unwrap();
        assert!(attributes_are_good(&bytes), "{path:?}");
        bytes[bit / 8] ^= 1 << (bit % 8);
        file.write_all_at(&bytes, place).unwrap();
    }
    let budget = || Budget { until: Instant::now() + Duration::from_secs(60), bytes: 1 << 30 };
    assert!(matches!(glance(&file, budget()), Glance::Doubtful { .. }));
    let checked = check(Path::new(E2FSCK), &volume, LIMITS);
    let Checked::Mended { what } = checked else { panic!("{checked:?}") };
    assert!(what.contains("with attributes that no kernel reads"), "{what}");
    assert!(what.contains("with marks that no file of a node has"), "{what}");
    assert_eq!(glance(&file, budget()), Glance::Whole);

    let mounted = Mounted::ext4(&volume, &at).unwrap();
    let root = &mounted.0;
    let restored = names::restore(root).unwrap();
    assert!(restored.back.is_empty(), "{:?} were where they belonged", restored.back);
    let left = below(root);
    for path in left.iter().filter(|path| path.is_file()) {
        let opened = File::options().write(true).open(path);
        assert!(opened.and_then(|file| file.sync_all()).is_ok(), "{path:?} cannot be written");
    }
    for path in left.iter().filter(|path| path.is_dir()) {
        let within = path.join("new");
        assert!(fs::write(&within, "x").is_ok(), "{within:?} cannot be written");
    }
    let there = made.iter().filter(|(path, _)| root.join(path).exists()).count();
    println!("altered inodes: {there} of {} are where they were", made.len());
    assert!(there > made.len() * 9 / 10, "{there}");
}
