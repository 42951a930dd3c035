//! New files that have their name only when they are whole: what breaks off, by an error, a signal or a power cut,
//! is beside them as `NAME.partial`, or gone.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};

/// A file that is being written.
#[derive(Debug)]
pub struct Whole {
    file: File,
    partial: PathBuf,
    to: PathBuf,
}

impl Whole {
    /// Returns where the file `to` is while it is written.
    pub fn partial(to: &Path) -> PathBuf {
        let mut partial = to.as_os_str().to_owned();
        partial.push(".partial");
        PathBuf::from(partial)
    }

    /// Begins the file `to` with these permissions. What is left of an earlier try goes.
    pub fn begin(to: &Path, mode: u32) -> io::Result<Self> {
        let partial = Self::partial(to);
        // Somebody else's rights to it must not last.
        let _ = fs::remove_file(&partial);
        let file = File::options().write(true).create_new(true).mode(mode).open(&partial)?;
        Ok(Self { file, partial, to: to.to_owned() })
    }

    /// The same where nothing may be at `to`.
    pub fn begin_new(to: &Path, mode: u32) -> io::Result<Self> {
        free(to)?;
        Self::begin(to, mode)
    }

    /// What is written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, in the place of what has it.
    pub fn replace(self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.partial, &self.to)
    }

    /// Gives the file its name unless something has it.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        match renameat_with(CWD, &self.partial, CWD, &self.to, RenameFlags::NOREPLACE) {
            // Some file systems cannot look and rename at once (rename(2)).
            Err(Errno::INVAL | Errno::NOSYS) => {
                free(&self.to)?;
                fs::rename(&self.partial, &self.to)
            }
            renamed => Ok(renamed?),
        }
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // It is not there any more when it has its name. What stays is in its owner's folder.
        let _ = fs::remove_file(&self.partial);
    }
}

/// Sees to it that nothing has a name.
pub fn free(to: &Path) -> io::Result<()> {
    match fs::symlink_metadata(to) {
        Ok(_) => {
            let what = "it is there already, and is not replaced; name another file";
            Err(io::Error::new(io::ErrorKind::AlreadyExists, what))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes a file whole or not at all, in the place of what has its name. What is no file, as a pipe, is written to.
pub fn write(to: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(to).is_ok_and(|found| !found.is_file()) {
        return File::options().write(true).open(to)?.write_all(bytes);
    }
    let whole = Whole::begin(to, 0o644)?;
    whole.file().write_all(bytes)?;
    whole.replace()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder").flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_breaks_off_has_no_name_and_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let to = folder.path().join("disk.raw");
        let whole = Whole::begin_new(&to, 0o600).expect("begun");
        whole.file().set_len(1 << 20).expect("long");
        assert_eq!(names(folder.path()), ["disk.raw.partial"]);
        drop(whole);
        assert!(names(folder.path()).is_empty());
        // What a signal left is none of the next one's.
        fs::write(folder.path().join("disk.raw.partial"), "old and longer").expect("written");
        let whole = Whole::begin_new(&to, 0o600).expect("begun");
        whole.file().write_all(b"new").expect("written");
        whole.finish().expect("finished");
        assert_eq!(fs::read(&to).expect("read"), b"new");
        assert_eq!(names(folder.path()), ["disk.raw"]);
    }

    #[test]
    fn what_is_there_is_not_replaced_unless_that_is_wanted() {
        let folder = tempfile::tempdir().expect("a folder");
        let to = folder.path().join("core");
        let whole = Whole::begin_new(&to, 0o600).expect("begun");
        fs::write(&to, "mine").expect("written meanwhile");
        assert_eq!(whole.finish().expect_err("there").kind(), io::ErrorKind::AlreadyExists);
        let told = Whole::begin_new(&to, 0o600).expect_err("there").to_string();
        assert!(told.contains("name another file"), "{told}");
        assert_eq!(fs::read(&to).expect("read"), b"mine");
        write(&to, b"other").expect("replaced");
        assert_eq!(fs::read(&to).expect("read"), b"other");
        assert_eq!(names(folder.path()), ["core"]);
    }

    #[test]
    fn folders_and_devices_stay_what_they_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let below = folder.path().join("below");
        fs::create_dir(&below).expect("made");
        assert!(write(&below, b"x").is_err());
        assert_eq!(names(folder.path()), ["below"]);
        write(Path::new("/dev/null"), b"x").expect("taken");
        assert!(!Path::new("/dev/null.partial").exists());
    }
}
