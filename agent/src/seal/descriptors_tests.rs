//! Tests of descriptors that the superblock is ahead of, on file systems that e2fsprogs made.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

use super::superblock::{Found, mend};

/// Bytes of a block; descriptors lie in the second one.
const BLOCK: usize = 4096;
const AT: u64 = BLOCK as u64;

/// Runs a program on the file system; returns whether it ended well.
fn run(program: &str, arguments: &[&str], path: &Path) -> bool {
    let output = Command::new(program).args(arguments).arg(path).output();
    output.is_ok_and(|output| output.status.success())
}

fn descriptors(file: &File) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    file.read_exact_at(&mut block, AT).unwrap();
    block
}

/// Makes a file system that has grown from two groups to eight, with its new descriptors in the journal
/// only; returns it and what the journal has.
fn grown(folder: &Path) -> Option<(File, PathBuf, Vec<u8>)> {
    let path = folder.join("volume");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(256 << 20).unwrap();
    if !run("mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=8"], &path) {
        println!("skipped: descriptors behind their superblock: needs e2fsprogs");
        return None;
    }
    let old = descriptors(&file);
    file.set_len(1 << 30).unwrap();
    let grown = Command::new("resize2fs").arg("-f").arg(&path).output().unwrap();
    assert!(grown.status.success(), "{grown:?}");
    let new = descriptors(&file);
    assert_ne!(old, new);
    let (copy, script) = (folder.join("new"), folder.join("script"));
    fs::write(&copy, &new).unwrap();
    fs::write(&script, format!("jo -c\njw -b 1 {}\njc\n", copy.display())).unwrap();
    assert!(run("debugfs", &["-w", "-f", script.to_str().unwrap()], &path));
    file.write_all_at(&old, AT).unwrap();
    Some((file, path, new))
}

#[test]
fn descriptors_that_only_the_journal_has_are_taken_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, path, new)) = grown(folder.path()) else { return };
    assert_eq!(mend(&file).unwrap(), Found::AheadOfGroups);
    assert_eq!(descriptors(&file), new);
    assert_eq!(mend(&file).unwrap(), Found::Whole);
    // The journal is left to be replayed, and then everything is right.
    let checked = Command::new("e2fsck").arg("-fy").arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.code().unwrap() <= 1, "{said}");
    assert!(said.contains("recovering journal"), "{said}");
    assert!(run("e2fsck", &["-fn"], &path));
}

#[test]
fn where_a_journal_is_damaged_the_backups_help() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, path, _)) = grown(folder.path()) else { return };
    // Every copy that the journal may have, wherever it lies: one bit of each.
    let bytes = fs::read(&path).unwrap();
    let wanted = fs::read(folder.path().join("new")).unwrap();
    let copies = bytes.chunks_exact(BLOCK).enumerate().skip(2);
    let mut found = 0;
    for (index, _) in copies.filter(|(_, block)| *block == wanted) {
        file.write_all_at(&[wanted[5] ^ 1], index as u64 * AT + 5).unwrap();
        found += 1;
    }
    assert!(found > 0);
    assert_eq!(mend(&file).unwrap(), Found::GroupRestored { group: 2 });
    // The rest of the descriptors is for e2fsck to find out.
    assert_eq!(mend(&file).unwrap(), Found::GroupDamaged { group: 2 });
    let checked = Command::new("e2fsck").arg("-fy").arg(&path).output().unwrap();
    assert!(checked.status.code().unwrap() <= 1, "{checked:?}");
    assert_eq!(mend(&file).unwrap(), Found::Whole);
}

#[test]
fn without_a_backup_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(256 << 20).unwrap();
    if !run("mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096"], &path) {
        println!("skipped: descriptors without a backup: needs e2fsprogs");
        return;
    }
    // The second group begins with the superblock's backup, and the descriptors'.
    file.write_all_at(&[0; BLOCK], (32_768 + 1) * AT).unwrap();
    let whole = descriptors(&file);
    file.write_all_at(&[whole[8] ^ 4], AT + 8).unwrap();
    let altered = descriptors(&file);
    assert_eq!(mend(&file).unwrap(), Found::GroupDamaged { group: 0 });
    assert_eq!(descriptors(&file), altered);
}

/// Wherever a descriptor says that a group's tables lie: with blocks of either size, and descriptors that
/// lie in their own groups.
#[test]
fn where_the_tables_lie_is_taken_from_a_backup() {
    let shapes: [&[&str]; 4] = [
        &["-b", "4096"],
        &["-b", "1024"],
        &["-b", "1024", "-O", "meta_bg,^resize_inode"],
        &["-b", "4096", "-O", "^64bit"],
    ];
    for shape in shapes {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        file.set_len(256 << 20).unwrap();
        if !run("mke2fs", &[&["-q", "-F", "-t", "ext4"], shape].concat(), &path) {
            println!("skipped: descriptors from their backup: needs e2fsprogs");
            return;
        }
        let at = if shape[1] == "1024" { 2048 } else { 4096 };
        let size = if shape.contains(&"^64bit") { 32 } else { 64 };
        let mut whole = [0; 128];
        file.read_exact_at(&mut whole, at).unwrap();
        for (group, place) in [(0_u8, 0), (0, 4), (0, 10), (1, 8), (1, 0x28)] {
            if place >= size {
                continue;
            }
            let offset = usize::from(group) * size + place;
            file.write_all_at(&[whole[offset] ^ 0x21], at + offset as u64).unwrap();
            assert_eq!(
                mend(&file).unwrap(),
                Found::GroupRestored { group: group.into() },
                "{shape:?}, {place:#x}"
            );
            assert_eq!(mend(&file).unwrap(), Found::Whole, "{shape:?}, {place:#x}");
            let mut now = [0; 128];
            file.read_exact_at(&mut now, at).unwrap();
            assert_eq!(now, whole, "{shape:?}, {place:#x}");
        }
    }
}

#[test]
fn a_descriptor_that_rotted_is_taken_from_the_journal_too() {
    let folder = tempfile::tempdir().unwrap();
    let Some((file, _, new)) = grown(folder.path()) else { return };
    file.write_all_at(&new, AT).unwrap();
    assert_eq!(mend(&file).unwrap(), Found::Whole);
    // The journal's copy is taken, wherever the bit is.
    file.write_all_at(&[new[70] ^ 4], AT + 70).unwrap();
    assert_eq!(mend(&file).unwrap(), Found::AheadOfGroups);
    assert_eq!(descriptors(&file), new);
}

/// Whatever bit of it says something that e2fsck does not know, which then leaves everything as it is.
#[test]
fn the_head_of_a_journal_that_rotted_is_one_that_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    if !run("mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"], &path) {
        println!("skipped: the head of a journal: needs e2fsprogs");
        return;
    }
    let whole = fs::read(&path).unwrap();
    let head = [0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 4];
    let at = whole.chunks_exact(BLOCK).position(|block| block.starts_with(&head)).unwrap() * BLOCK;
    // Magic, kind, sequence, length of blocks and their number, first one, state, features.
    for offset in (0..0x30).filter(|offset| offset % 4 == 0 || offset % 4 == 3) {
        file.write_all_at(&whole, 0).unwrap();
        file.write_all_at(&[whole[at + offset] ^ 4], (at + offset) as u64).unwrap();
        mend(&file).unwrap();
        let checked = Command::new("e2fsck").arg("-fy").arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.code().unwrap() <= 1, "{offset:#x}: {said}");
        assert!(run("e2fsck", &["-fn"], &path), "{offset:#x}");
    }
}
