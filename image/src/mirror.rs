//! A copy of a checkout at a place that stays the same, in which files keep their age while their content
//! does. Cargo knows crates by their place and by the age of their files: what it compiled there of one
//! checkout is as good for every other, a fresh clone above all, that has the same in it.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use walkdir::{DirEntry, WalkDir};

/// A folder whose name begins with a dot that cargo looks at.
const CARGO: &str = ".cargo";
/// Where cargo puts what it makes.
const TARGET: &str = "target";

/// Makes `copy` the same as the checkout at `from`, but for what is hidden or was compiled there: writes what
/// is not the same, and removes what is not there.
///
/// # Errors
/// With the path that cannot be read, written or removed.
pub(crate) fn mirror(from: &Path, copy: &Path) -> Result<(), (PathBuf, io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    fs::create_dir_all(copy).map_err(at(copy))?;
    let mut there = BTreeSet::new();
    for path in files(from)? {
        let (source, target) = (from.join(&path), copy.join(&path));
        let content = fs::read(&source).map_err(at(&source))?;
        if fs::read(&target).ok().is_none_or(|known| known != content) {
            if let Some(folder) = target.parent() {
                fs::create_dir_all(folder).map_err(at(folder))?;
            }
            fs::write(&target, content).map_err(at(&target))?;
        }
        there.insert(path);
    }
    for path in files(copy)?.into_iter().filter(|path| !there.contains(path)) {
        let gone = copy.join(path);
        fs::remove_file(&gone).map_err(at(&gone))?;
    }
    Ok(())
}

/// Returns the files of a checkout, as seen from it.
fn files(root: &Path) -> Result<Vec<PathBuf>, (PathBuf, io::Error)> {
    let counts = |entry: &DirEntry| {
        let name = entry.file_name().to_string_lossy();
        entry.depth() == 0 || name == CARGO || !(name.starts_with('.') || name == TARGET)
    };
    let mut found = Vec::new();
    for entry in WalkDir::new(root).into_iter().filter_entry(counts) {
        let entry =
            entry.map_err(|error| (error.path().unwrap_or(root).to_owned(), error.into()))?;
        // A link is what it leads to.
        if entry.path().is_file()
            && let Ok(path) = entry.path().strip_prefix(root)
        {
            found.push(path.to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use std::time::{Duration, SystemTime};

    use super::*;

    fn write(root: &Path, path: &str, content: &str) {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), content).unwrap();
    }

    #[test]
    fn what_is_the_same_keeps_its_age_and_the_rest_becomes_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (from, copy) = (folder.path().join("from"), folder.path().join("copy"));
        for path in ["Cargo.toml", "a/src/lib.rs", "a/src/old.rs", ".cargo/config.toml"] {
            write(&from, path, path);
        }
        for path in [".git/HEAD", "target/debug/a", "a/fuzz/target/b", "a/.hidden"] {
            write(&from, path, path);
        }
        mirror(&from, &copy).unwrap();
        let names = ["Cargo.toml", "a/src/lib.rs", "a/src/old.rs", ".cargo/config.toml"];
        let sorted = |paths: Vec<PathBuf>| paths.into_iter().collect::<BTreeSet<_>>();
        assert_eq!(sorted(files(&copy).unwrap()), names.map(PathBuf::from).into());

        let early = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        for name in names {
            fs::File::open(copy.join(name)).unwrap().set_modified(early).unwrap();
        }
        // A clone: all files are younger. One has another content of the same length, one is gone.
        write(&from, "Cargo.toml", "Cargo.toml");
        write(&from, "a/src/lib.rs", "a/src/LIB.rs");
        fs::remove_file(from.join("a/src/old.rs")).unwrap();
        mirror(&from, &copy).unwrap();
        let age = |name: &str| fs::metadata(copy.join(name)).unwrap().modified().unwrap();
        assert_eq!((age("Cargo.toml"), age(".cargo/config.toml")), (early, early));
        assert!(age("a/src/lib.rs") > early);
        assert_eq!(fs::read_to_string(copy.join("a/src/lib.rs")).unwrap(), "a/src/LIB.rs");
        assert!(!copy.join("a/src/old.rs").exists());
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let (path, _) = mirror(&missing, &folder.path().join("copy")).unwrap_err();
        assert_eq!(path, missing);
    }
}
