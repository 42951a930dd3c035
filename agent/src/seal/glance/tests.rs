//! Whatever a glance finds nothing in, e2fsck finds nothing in either: file systems that mke2fs made, the kernel
//! filled and resize2fs grew; those with a bit or sixteen bytes altered; and those of which a block is an old one.
//!
//! A run prints its seed. `HOLDFAST_GLANCE_SEED` repeats one, `HOLDFAST_GLANCES` sets how many places are tried.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use rustix::fs::{CWD, FallocateFlags, FileType, Mode, XattrFlags, fallocate, lsetxattr, mknodat};

use super::{BLOCK, Budget, Glance, glance};
use crate::{
    seal::flips::FEATURES,
    testing::{Mounted, Random, setting},
};

/// Places that are tried unless the environment says how many.
const PLACES: usize = 60;
/// Old blocks that are tried, of those that there are.
const OLD: usize = 60;
const GARBLED: usize = 16;
const MIB: u64 = 1 << 20;

fn look(volume: &impl FileExt) -> Glance {
    glance(volume, Budget { until: Instant::now() + Duration::from_secs(60), bytes: 1 << 30 })
}

/// Whether e2fsck finds nothing in it.
fn is_whole(volume: &Path) -> bool {
    let output = Command::new("e2fsck").arg("-fn").arg(volume).output().unwrap();
    output.status.code() == Some(0)
}

/// Both find nothing.
fn agree(volume: &Path, what: &str) {
    assert_eq!(look(&File::open(volume).unwrap()), Glance::Whole, "{what}");
    assert!(is_whole(volume), "{what}");
}

/// Makes an empty file system; `None` where there is no mke2fs.
fn make(volume: &Path, bytes: u64, features: &str) -> Option<()> {
    File::create(volume).unwrap().set_len(bytes).unwrap();
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-O", features])
        .args(["-E", "lazy_itable_init=1"])
        .arg(volume)
        .status();
    made.is_ok_and(|status| status.success()).then_some(())
}

/// Fills it with what has metadata of each kind. What the files hold is zeros, so that whatever is not zero on the
/// volume is metadata.
fn fill(root: &Path) {
    let folder = root.join("many");
    fs::create_dir(&folder).unwrap();
    let file = folder.join("file");
    fs::write(&file, [0; 10_000]).unwrap();
    // An index with two levels.
    for index in 0..9000 {
        fs::hard_link(&file, folder.join(format!("{index:0>240}"))).unwrap();
    }
    for index in 0..300 {
        fs::write(root.join(format!("f{index}")), vec![0; index * 40]).unwrap();
    }
    let mut deep = root.to_owned();
    for level in 0..40 {
        deep.push(format!("d{level}"));
        fs::create_dir(&deep).unwrap();
    }
    // Trees of extents of one and of two further levels.
    for (name, pieces) in [("sparse", 500), ("sparser", 2500)] {
        let file = File::create(root.join(name)).unwrap();
        for piece in 0..pieces {
            file.write_all_at(&[0; BLOCK], piece * 2 * BLOCK as u64).unwrap();
        }
        file.sync_all().unwrap();
    }
    let kept = File::create(root.join("kept")).unwrap();
    fallocate(&kept, FallocateFlags::KEEP_SIZE, 0, 20 * MIB).unwrap();
    symlink("short", root.join("short")).unwrap();
    symlink("long/".repeat(30), root.join("long")).unwrap();
    for (name, kind) in [("fifo", FileType::Fifo), ("socket", FileType::Socket)] {
        mknodat(CWD, root.join(name), kind, Mode::RUSR, 0).unwrap();
    }
    mknodat(CWD, root.join("null"), FileType::CharacterDevice, Mode::RUSR, 0x103).unwrap();
    // Attributes in a block of their own, and in one that is shared.
    for (index, value) in [(100, 1), (101, 2), (102, 3), (103, 3), (104, 3)] {
        let path = root.join(format!("f{index}"));
        lsetxattr(path, "user.large", &[value; 3000], XattrFlags::empty()).unwrap();
    }
}

/// Removes a part of it, and adds another.
fn change(root: &Path) {
    for index in (0..300).step_by(3) {
        fs::remove_file(root.join(format!("f{index}"))).unwrap();
    }
    for index in (0..9000).step_by(2) {
        fs::remove_file(root.join(format!("many/{index:0>240}"))).unwrap();
    }
    fs::remove_file(root.join("sparse")).unwrap();
    fs::rename(root.join("d0/d1/d2"), root.join("many/d2")).unwrap();
    fs::rename(root.join("long"), root.join("longer")).unwrap();
    for index in 0..100 {
        fs::write(root.join(format!("g{index}")), vec![0; 5000]).unwrap();
        fs::create_dir(root.join(format!("h{index}"))).unwrap();
    }
    File::options().write(true).open(root.join("sparser")).unwrap().set_len(5 * MIB).unwrap();
}

/// Lets a volume grow, while it is mounted where a kernel lets us; `None` where nothing can be mounted.
fn grow(volume: &Path, bytes: u64, at: &Path) -> Option<()> {
    File::options().write(true).open(volume).unwrap().set_len(bytes).unwrap();
    let mounted = Mounted::ext4(volume, at)?;
    let device = Command::new("findmnt").args(["-no", "SOURCE"]).arg(&mounted.0).output().unwrap();
    let device = String::from_utf8(device.stdout).unwrap();
    let grown = Command::new("resize2fs").arg(device.trim()).output().unwrap();
    drop(mounted);
    if !grown.status.success() {
        println!("grown while it is not mounted: {}", String::from_utf8_lossy(&grown.stderr));
        let grown = Command::new("resize2fs").arg("-f").arg(volume).output().unwrap();
        assert!(grown.status.success(), "{grown:?}");
    }
    Some(())
}

/// A volume that has grown, as it was filled and as it was then changed; `None` where nothing can be mounted.
fn used(folder: &Path) -> Option<[PathBuf; 2]> {
    let [before, after] = ["before", "after"].map(|name| folder.join(name));
    make(&before, 240 * MIB, FEATURES)?;
    agree(&before, "empty");
    grow(&before, 600 * MIB, &folder.join("mounted"))?;
    agree(&before, "grown");
    let mounted = Mounted::ext4(&before, &folder.join("mounted"))?;
    fill(&mounted.0);
    drop(mounted);
    agree(&before, "filled");
    fs::copy(&before, &after).unwrap();
    let mounted = Mounted::ext4(&after, &folder.join("mounted"))?;
    change(&mounted.0);
    drop(mounted);
    agree(&after, "changed");
    Some([before, after])
}

fn skipped() {
    println!("skipped: a glance at file systems: needs root, loop devices and Debian's e2fsprogs");
}

/// Writes down what is read.
struct Watched {
    file: File,
    read: RefCell<BTreeSet<u64>>,
}

impl FileExt for Watched {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let blocks = at / BLOCK as u64..(at + into.len() as u64).div_ceil(BLOCK as u64);
        self.read.borrow_mut().extend(blocks);
        self.file.read_at(into, at)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

/// Returns the blocks that are read by a glance, and those that are not zero.
fn blocks(volume: &Path) -> [Vec<u64>; 2] {
    let file = File::open(volume).unwrap();
    let count = file.metadata().unwrap().len() / BLOCK as u64;
    let watched = Watched { file, read: RefCell::default() };
    assert_eq!(look(&watched), Glance::Whole);
    let mut block = [0; BLOCK];
    let filled = (0..count).filter(|number| {
        watched.file.read_exact_at(&mut block, number * BLOCK as u64).unwrap();
        block.iter().any(|byte| *byte != 0)
    });
    let filled = filled.collect();
    [watched.read.take().into_iter().collect(), filled]
}

/// Writes `bytes` for as long as it takes to look, and returns whether a glance found nothing. Then e2fsck must
/// not find anything either.
fn altered(volume: &Path, at: u64, bytes: &[u8], what: &str) -> bool {
    let file = File::options().read(true).write(true).open(volume).unwrap();
    let mut before = vec![0; bytes.len()];
    file.read_exact_at(&mut before, at).unwrap();
    file.write_all_at(bytes, at).unwrap();
    let seen = look(&file);
    assert_ne!(seen, Glance::TooLong, "{what}");
    let whole = seen == Glance::Whole;
    assert!(!whole || is_whole(volume), "{what}: e2fsck finds what a glance does not");
    file.write_all_at(&before, at).unwrap();
    whole
}

#[test]
fn whatever_is_altered_a_glance_finds_it_or_e2fsck_finds_nothing_either() {
    let folder = tempfile::tempdir().unwrap();
    let Some(volumes) = used(folder.path()) else { return skipped() };
    let volumes = volumes.map(|path| (blocks(&path), path));
    let mut random = Random::start("HOLDFAST_GLANCE_SEED");
    let mut counts = [0; 2];
    for round in 0..setting("HOLDFAST_GLANCES").unwrap_or(PLACES) {
        let (blocks, volume) = &volumes[round % 2];
        // What e2fsck reads and a glance does not is among those that are not zero.
        let blocks = &blocks[usize::from(round / 2 % 4 == 3)];
        let number = blocks[random.below(blocks.len())];
        let at = number * BLOCK as u64 + (random.below(BLOCK / GARBLED) * GARBLED) as u64;
        let mut unit = [0; GARBLED];
        File::open(volume).unwrap().read_exact_at(&mut unit, at).unwrap();
        if random.below(2) == 0 {
            unit[random.below(GARBLED)] ^= 1 << random.below(8);
        } else {
            unit.fill_with(|| u8::try_from(random.below(256)).unwrap());
        }
        let what = format!("round {round}, byte {at:#x}, block {number}: {unit:02x?}");
        counts[usize::from(altered(volume, at, &unit, &what))] += 1;
    }
    println!("altered places: {} doubted, {} without consequence", counts[0], counts[1]);
    assert!(counts[0] > 0, "nothing was doubted");
    for (_, volume) in &volumes {
        agree(volume, "restored");
    }
}

#[test]
fn a_block_that_is_an_old_one_is_found_though_its_checksum_is_good() {
    let folder = tempfile::tempdir().unwrap();
    let Some([before, after]) = used(folder.path()) else { return skipped() };
    let [now, _] = blocks(&after);
    let (old, new) = (File::open(&before).unwrap(), File::open(&after).unwrap());
    let read = |file: &File, number: u64| {
        let mut block = vec![0; BLOCK];
        file.read_exact_at(&mut block, number * BLOCK as u64).unwrap();
        block
    };
    let differ: BTreeMap<u64, Vec<u8>> = now
        .into_iter()
        .map(|number| (number, read(&old, number)))
        .filter(|(number, block)| *block != read(&new, *number))
        .collect();
    let mut random = Random::start("HOLDFAST_GLANCE_SEED");
    let tried = setting("HOLDFAST_GLANCES").unwrap_or(OLD);
    let (mut left, mut counts): (Vec<_>, _) = (differ.into_iter().collect(), [0; 2]);
    while counts[0] + counts[1] < tried && !left.is_empty() {
        let (number, block) = left.swap_remove(random.below(left.len()));
        let what = format!("an old block {number}");
        counts[usize::from(altered(&after, number * BLOCK as u64, &block, &what))] += 1;
    }
    println!("old blocks: {} doubted, {} without consequence", counts[0], counts[1]);
    assert!(counts[0] > 0, "nothing was doubted");
}

#[test]
fn what_is_not_known_is_doubted_and_what_is_large_takes_no_longer_than_it_may() {
    let folder = tempfile::tempdir().unwrap();
    let volume = folder.path().join("volume");
    for more in ["inline_data", "bigalloc", "metadata_csum_seed", "encrypt", "casefold", "quota"] {
        let Some(()) = make(&volume, 64 * MIB, &format!("{FEATURES},{more}")) else {
            return skipped();
        };
        let seen = look(&File::open(&volume).unwrap());
        assert!(matches!(seen, Glance::Doubtful { .. }), "{more}: {seen:?}");
    }
    make(&volume, 64 * MIB, FEATURES).unwrap();
    agree(&volume, "empty");
    let file = File::open(&volume).unwrap();
    let enough = Budget { until: Instant::now() + Duration::from_secs(60), bytes: 10_000 };
    assert_eq!(glance(&file, enough), Glance::TooLong);
    let late = Budget { until: Instant::now(), bytes: 1 << 30 };
    assert_eq!(glance(&file, late), Glance::TooLong);
    let tuned = Command::new("debugfs").args(["-w", "-R", "ssv state 0"]).arg(&volume).status();
    assert!(tuned.unwrap().success());
    assert!(matches!(look(&file), Glance::Doubtful { .. }), "it was not unmounted");
}

/// As the image's builder makes DATA, and as it has grown then.
#[test]
fn a_volume_with_few_inodes_is_understood() {
    let folder = tempfile::tempdir().unwrap();
    let volume = folder.path().join("volume");
    File::create(&volume).unwrap().set_len(600 * MIB).unwrap();
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-i", "262144"])
        .args(["-O", FEATURES, "-E", "lazy_itable_init=1"])
        .arg(&volume)
        .status();
    if !made.is_ok_and(|status| status.success()) {
        return skipped();
    }
    agree(&volume, "empty");
    File::options().write(true).open(&volume).unwrap().set_len(2000 * MIB).unwrap();
    let grown = Command::new("resize2fs").arg("-f").arg(&volume).output().unwrap();
    assert!(grown.status.success(), "{grown:?}");
    agree(&volume, "grown");
}

#[test]
fn descriptors_that_lie_in_their_own_groups_are_understood() {
    let folder = tempfile::tempdir().unwrap();
    let volume = folder.path().join("volume");
    // As a volume has it that has used up the room for its descriptors.
    let features = format!("{FEATURES},meta_bg,^resize_inode");
    let Some(()) = make(&volume, 40 << 30, &features) else { return skipped() };
    agree(&volume, "made");
    let Some(mounted) = Mounted::ext4(&volume, &folder.path().join("mounted")) else {
        return skipped();
    };
    fs::write(mounted.0.join("file"), [0; 10_000]).unwrap();
    drop(mounted);
    agree(&volume, "filled");
}
