//! The files of STATE and DATA know their names. Where a disk altered a folder, e2fsck keeps what lay in it,
//! but under numbers in `lost+found`, or under the altered name; so each file and folder has an extended
//! attribute with its path below the volume, and goes back there. The path has a checksum (CRC-32C) behind it: a file
//! whose attribute is what the disk altered stays where it is.
//!
//! Names follow files: what was moved by the node has its new name by the next round. Nothing is moved unless
//! the volume was mended at this start, and nothing that has a place is ever replaced. A file where others say
//! that there is a folder was one before a disk altered it: it goes to `lost+found`.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use rustix::{
    buffer::spare_capacity,
    fs::{XattrFlags, lgetxattr, lsetxattr},
};

use super::superblock::crc32c;

/// The attribute. The shorter it is, the more often it fits into the inode.
const NAME: &str = "user.path";
/// Longest path that is kept, and its checksum, in bytes.
const MAX_PATH: usize = 255;
const SUM: usize = 4;
/// Most entries of a volume that are looked at.
const MAX_ENTRIES: usize = 65_536;
/// Where e2fsck puts what lost its name.
pub const FOUND: &str = "lost+found";
/// What is not named: e2fsck's own folder, and content, which has its digest as its name and is fetched anew.
const NAMELESS: [&str; 2] = [FOUND, "content"];
/// Ends of the names of what is not whole yet.
const UNFINISHED: [&str; 3] = ["new", "partial", "unfinished"];

/// What became of files that had lost their names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// They are where they belong again.
    pub back: Vec<String>,
    /// They stay in `lost+found`, under numbers: nobody knows their names, or something else has them.
    pub left: usize,
}

/// Gives all files below `root` their names. Returns how many were new.
///
/// # Errors
/// When a folder cannot be read. A file system that has no attributes, or no room for them, is no error.
pub fn keep(root: &Path) -> io::Result<usize> {
    let mut new = 0;
    for path in entries(root)? {
        let Ok(place) = path.strip_prefix(root) else { continue };
        let first = place.components().next().map(Component::as_os_str);
        let nameless = NAMELESS.iter().any(|name| first == Some(OsStr::new(name)));
        let unfinished = |end: &OsStr| UNFINISHED.iter().any(|name| end == *name);
        let bytes = place.as_os_str().as_bytes();
        if nameless || path.extension().is_some_and(unfinished) || bytes.len() > MAX_PATH {
            continue;
        }
        if name_of(&path).is_none_or(|name| name.as_os_str().as_bytes() != bytes)
            && lsetxattr(&path, NAME, &value(bytes), XattrFlags::empty()).is_ok()
        {
            new += 1;
        }
    }
    Ok(new)
}

/// Moves every file below `root` to where its name says, if nothing is there.
///
/// # Errors
/// When a folder cannot be read, or a file cannot be moved.
pub fn restore(root: &Path) -> io::Result<Restored> {
    let mut restored = Restored::default();
    // Each round moves one, a folder before what is in it.
    for _ in 0..MAX_ENTRIES {
        let Some((from, name)) = misplaced(root)? else { break };
        let to = root.join(&name);
        clear(root, &name)?;
        to.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::rename(&from, &to)?;
        restored.back.push(name.display().to_string());
    }
    let found = root.join(FOUND);
    if found.is_dir() {
        for path in entries(&found)?.into_iter().rev() {
            // Folders whose files went back; one that is not empty stays.
            if fs::remove_dir(&path).is_err() && !path.is_dir() {
                restored.left += 1;
            }
        }
    }
    if !restored.back.is_empty() {
        rustix::fs::syncfs(File::open(root)?)?;
    }
    Ok(restored)
}

/// Sets aside what is no folder on the way to `name`.
fn clear(root: &Path, name: &Path) -> io::Result<()> {
    let no_folder =
        |way: &&Path| root.join(way).symlink_metadata().is_ok_and(|facts| !facts.is_dir());
    let Some(way) = name.ancestors().skip(1).find(no_folder) else { return Ok(()) };
    let (from, found) = (root.join(way), root.join(FOUND));
    fs::create_dir_all(&found)?;
    let aside = way.to_string_lossy().replace('/', ".");
    let free = (0..).map(|number: u32| found.join(format!("{aside}.{number}")));
    let to = free.into_iter().find(|to| to.symlink_metadata().is_err());
    to.map_or(Ok(()), |to| fs::rename(from, to))
}

/// Returns a file that is not where its name says, and that name, which is free; the shortest one.
fn misplaced(root: &Path) -> io::Result<Option<(PathBuf, PathBuf)>> {
    let named = entries(root)?.into_iter().filter_map(|path| {
        let name = name_of(&path)?;
        let place = path.strip_prefix(root).ok()?;
        // A name that cannot be looked up is not free, but where there is a file in place of a folder.
        let free = match root.join(&name).try_exists() {
            Ok(there) => !there,
            Err(error) => error.kind() == io::ErrorKind::NotADirectory,
        };
        (place != name && free && !name.starts_with(place)).then_some((path, name))
    });
    Ok(named.min_by_key(|(_, name)| name.components().count()))
}

/// Returns the attribute's value for a path. Without the inversion, zeros behind it would do no harm to it.
fn value(path: &[u8]) -> Vec<u8> {
    [path, &(!crc32c(u32::MAX, path)).to_le_bytes()].concat()
}

/// Returns the name that a file has been given, if it is a path below the volume and as it was written.
fn name_of(path: &Path) -> Option<PathBuf> {
    let mut bytes = Vec::with_capacity(MAX_PATH + SUM);
    lgetxattr(path, NAME, spare_capacity(&mut bytes)).ok()?;
    let (name, _) = bytes.split_last_chunk::<SUM>().filter(|(name, _)| value(name) == bytes)?;
    let name = PathBuf::from(OsStr::from_bytes(name));
    let good = name.components().all(|part| matches!(part, Component::Normal(_)));
    (good && name.components().next().is_some()).then_some(name)
}

/// Returns all files and folders below `root`, a folder before what is in it. Links are not followed. What
/// cannot be read is left out: nothing in it can be helped.
fn entries(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut next = 0;
    let mut listed = fs::read_dir(root)?;
    loop {
        for entry in listed.by_ref().flatten() {
            let known = entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_file());
            if known && found.len() < MAX_ENTRIES {
                found.push(entry.path());
            }
        }
        listed = loop {
            let Some(path) = found.get(next) else { return Ok(found) };
            next += 1;
            let folder = path.symlink_metadata().is_ok_and(|facts| facts.is_dir());
            if let Some(listed) = folder.then(|| fs::read_dir(path).ok()).flatten() {
                break listed;
            }
        };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    /// A folder on a file system that keeps attributes, with files as a node has them.
    fn volume() -> Option<tempfile::TempDir> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("disk-keys/a")).unwrap();
        fs::create_dir_all(root.join("content")).unwrap();
        fs::create_dir_all(root.join(FOUND)).unwrap();
        for name in ["node.key", "disk-keys/a/disk.key", "content/x", "agent.redb.new"] {
            fs::write(root.join(name), name).unwrap();
        }
        if keep(root).unwrap() == 0 {
            println!("skipped: names of files: the file system below {root:?} keeps none");
            return None;
        }
        assert_eq!(keep(root).unwrap(), 0, "they have them");
        Some(folder)
    }

    #[test]
    fn what_lost_its_name_goes_back_and_nothing_else_is_moved() {
        let Some(folder) = volume() else { return };
        let root = folder.path();
        assert_eq!(restore(root).unwrap(), Restored::default());
        fs::rename(root.join("disk-keys"), root.join(FOUND).join("#12")).unwrap();
        fs::rename(root.join("node.key"), root.join("nod\u{1}.key")).unwrap();
        fs::rename(root.join("content/x"), root.join(FOUND).join("#13")).unwrap();
        let mut restored = restore(root).unwrap();
        restored.back.sort();
        assert_eq!(
            restored,
            Restored { back: vec!["disk-keys".into(), "node.key".into()], left: 1 }
        );
        for name in ["node.key", "disk-keys/a/disk.key"] {
            assert_eq!(fs::read_to_string(root.join(name)).unwrap(), name);
        }
        assert_eq!(restore(root).unwrap(), Restored { back: Vec::new(), left: 1 });
    }

    #[test]
    fn a_folder_that_was_lost_is_made_again_and_what_has_its_place_stays() {
        let Some(folder) = volume() else { return };
        let root = folder.path();
        // The folders' inodes are gone, and something new has one of the names.
        fs::rename(root.join("disk-keys/a/disk.key"), root.join(FOUND).join("#14")).unwrap();
        fs::remove_dir_all(root.join("disk-keys")).unwrap();
        fs::rename(root.join("node.key"), root.join(FOUND).join("#15")).unwrap();
        fs::write(root.join("node.key"), "new").unwrap();
        let restored = restore(root).unwrap();
        assert_eq!(restored, Restored { back: vec!["disk-keys/a/disk.key".into()], left: 1 });
        assert_eq!(fs::read_to_string(root.join("node.key")).unwrap(), "new");
    }

    #[test]
    fn a_folder_that_became_a_file_is_set_aside() {
        let Some(folder) = volume() else { return };
        let root = folder.path();
        fs::rename(root.join("disk-keys/a"), root.join(FOUND).join("#16")).unwrap();
        fs::remove_dir(root.join("disk-keys")).unwrap();
        for (place, text) in [("disk-keys", "garbage"), ("lost+found/disk-keys.0", "older garbage")]
        {
            fs::write(root.join(place), text).unwrap();
        }
        lsetxattr(root.join("disk-keys"), NAME, &value(b"disk-keys"), XattrFlags::empty()).unwrap();
        let restored = restore(root).unwrap();
        assert_eq!(restored, Restored { back: vec!["disk-keys/a".into()], left: 2 });
        let key = fs::read_to_string(root.join("disk-keys/a/disk.key"));
        assert_eq!(key.unwrap(), "disk-keys/a/disk.key");
        let aside = fs::read_to_string(root.join("lost+found/disk-keys.1"));
        assert_eq!(aside.unwrap(), "garbage");
        assert_eq!(restore(root).unwrap(), Restored { back: Vec::new(), left: 2 });
    }

    #[test]
    fn names_follow_files_and_lead_nowhere_else() {
        let Some(folder) = volume() else { return };
        let root = folder.path();
        fs::rename(root.join("node.key"), root.join("node.key.damaged")).unwrap();
        assert_eq!(keep(root).unwrap(), 1);
        assert_eq!(restore(root).unwrap().back, Vec::<String>::new());
        for name in ["../out", "/out", ""] {
            let flags = XattrFlags::empty();
            let (path, value) = (root.join("node.key.damaged"), value(name.as_bytes()));
            lsetxattr(path, NAME, &value, flags).unwrap();
            assert_eq!(restore(root).unwrap().back, Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn a_name_that_a_disk_altered_is_not_believed() {
        let Some(folder) = volume() else { return };
        let (root, path) = (folder.path(), folder.path().join("node.key"));
        let good = value(b"node.key");
        for bit in 0..good.len() * 8 {
            let mut altered = good.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            lsetxattr(&path, NAME, &altered, XattrFlags::empty()).unwrap();
            assert_eq!(restore(root).unwrap(), Restored::default(), "bit {bit}");
        }
        for length in 0..good.len() * 2 {
            let mut altered = good.clone();
            altered.resize(length, 0);
            lsetxattr(&path, NAME, &altered, XattrFlags::empty()).unwrap();
            assert_eq!(restore(root).unwrap(), Restored::default(), "{length} bytes");
        }
        assert_eq!(keep(root).unwrap(), 1, "it is written anew");
    }
}
