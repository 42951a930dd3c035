//! New files that have their name only when they are whole: what breaks off, by an error, a signal or a power cut,
//! is beside them as `NAME.partial`, or gone. That is locked while it is written (flock(2)): of two commands that
//! write the same name, the second is told so.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, renameat_with},
    io::Errno,
};

/// A file that is being written, by whoever has it locked.
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

    /// Begins the file `to` with these permissions. What is left of an earlier try goes; what somebody writes stays.
    pub fn begin(to: &Path, mode: u32) -> io::Result<Self> {
        let partial = Self::partial(to);
        clear(&partial)?;
        let file = File::options().write(true).create_new(true).mode(mode).open(&partial)?;
        lock(&file)?;
        // Before it was locked, another command may have taken it for a file that nobody writes.
        if !is_at(&file, &partial) {
            return Err(busy());
        }
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
        self.complete()?;
        fs::rename(&self.partial, &self.to)?;
        sync_folder(&self.to)
    }

    /// Gives the file its name unless something has it.
    pub fn finish(self) -> io::Result<()> {
        self.complete()?;
        match renameat_with(CWD, &self.partial, CWD, &self.to, RenameFlags::NOREPLACE) {
            // Some file systems cannot look and rename at once (rename(2)).
            Err(Errno::INVAL | Errno::NOSYS) => {
                free(&self.to)?;
                fs::rename(&self.partial, &self.to)?;
            }
            renamed => renamed?,
        }
        sync_folder(&self.to)
    }

    /// Sees to it that all of the file is kept, and that it is this file which gets the name.
    fn complete(&self) -> io::Result<()> {
        self.file.sync_all()?;
        if is_at(&self.file, &self.partial) {
            return Ok(());
        }
        let what = "what was written so far was removed or replaced meanwhile; try again";
        Err(io::Error::other(what))
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // It is not there any more when it has its name. What stays is in its owner's folder.
        if is_at(&self.file, &self.partial) {
            let _ = fs::remove_file(&self.partial);
        }
        unlock(&self.file);
    }
}

/// Removes what is left of an earlier try: somebody else's rights to it must not last.
fn clear(partial: &Path) -> io::Result<()> {
    // Opening a named pipe would wait for its writer.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = |access| rustix::fs::open(partial, flags | access, Mode::empty());
    // NFS locks only what is open for writing (flock(2)).
    let opened = match open(OFlags::RDWR) {
        Err(Errno::ACCESS | Errno::ROFS) => open(OFlags::RDONLY),
        opened => opened,
    };
    let file = match opened {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(()),
        Err(_) => {
            // A link, or nothing that this command began.
            let _ = fs::remove_file(partial);
            return Ok(());
        }
    };
    lock(&file)?;
    let is_there = is_at(&file, partial);
    if is_there {
        let _ = fs::remove_file(partial);
    }
    unlock(&file);
    // Whoever had it was just done with it, or another has begun.
    if is_there { Ok(()) } else { Err(busy()) }
}

/// Locks a file that nobody else writes. On file systems without locks, only [`is_at`] tells commands apart.
fn lock(file: &File) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(busy()),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Gives a lock back: it would last as long as any copy of its descriptor (flock(2)), and a process that another thread
/// starts just now has one until it runs its program.
fn unlock(file: &File) {
    let _ = flock(file, FlockOperation::Unlock);
}

fn busy() -> io::Error {
    io::Error::new(ErrorKind::ResourceBusy, "another command is writing it")
}

/// Returns whether an open file has this path.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |facts: fs::Metadata| (facts.dev(), facts.ino());
    let there = fs::symlink_metadata(path).map(identity);
    let ours = file.metadata().map(identity);
    matches!((there, ours), (Ok(there), Ok(ours)) if there == ours)
}

/// Sees to it that the name of a new file is kept.
fn sync_folder(to: &Path) -> io::Result<()> {
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
    let kept = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
    // Some folders may be written to and not be read, and some file systems sync none: the file has its name.
    let cannot = [ErrorKind::InvalidInput, ErrorKind::PermissionDenied, ErrorKind::Unsupported];
    match kept {
        Err(error) if !cannot.contains(&error.kind()) => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Sees to it that nothing has a name.
pub fn free(to: &Path) -> io::Result<()> {
    match fs::symlink_metadata(to) {
        Ok(_) => {
            let what = "it is there already, and is not replaced; name another file";
            Err(io::Error::new(ErrorKind::AlreadyExists, what))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
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
        assert_eq!(whole.finish().expect_err("there").kind(), ErrorKind::AlreadyExists);
        let told = Whole::begin_new(&to, 0o600).expect_err("there").to_string();
        assert!(told.contains("name another file"), "{told}");
        assert_eq!(fs::read(&to).expect("read"), b"mine");
        write(&to, b"other").expect("replaced");
        assert_eq!(fs::read(&to).expect("read"), b"other");
        assert_eq!(names(folder.path()), ["core"]);
    }

    #[test]
    fn what_another_command_writes_stays_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let to = folder.path().join("disk.raw");
        let first = Whole::begin_new(&to, 0o600).expect("begun");
        first.file().write_all(b"first").expect("written");
        let second = Whole::begin(&to, 0o600).expect_err("the first is not done");
        assert_eq!(second.kind(), ErrorKind::ResourceBusy);
        // As a process that is being started has one.
        let copy = first.file().try_clone().expect("a copy");
        first.finish().expect("finished");
        assert_eq!(fs::read(&to).expect("read"), b"first");
        let named = File::open(&to).expect("opened");
        flock(&named, FlockOperation::NonBlockingLockExclusive).expect("nobody's any more");
        drop(copy);
        assert_eq!(names(folder.path()), ["disk.raw"]);
    }

    #[test]
    fn what_replaced_an_unfinished_file_gets_no_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let to = folder.path().join("disk.raw");
        let partial = Whole::partial(&to);
        let replaced = || {
            let whole = Whole::begin(&to, 0o600).expect("begun");
            fs::remove_file(&partial).expect("removed");
            fs::write(&partial, "other").expect("written");
            whole
        };
        assert!(replaced().finish().is_err());
        assert_eq!(names(folder.path()), ["disk.raw.partial"]);
        assert!(replaced().replace().is_err());
        drop(replaced());
        assert_eq!(names(folder.path()), ["disk.raw.partial"]);
        assert_eq!(fs::read(&partial).expect("read"), b"other");
    }

    #[test]
    fn a_link_in_the_place_of_an_unfinished_file_goes_and_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let [to, mine] = ["disk.raw", "mine"].map(|name| folder.path().join(name));
        fs::write(&mine, "mine").expect("written");
        std::os::unix::fs::symlink(&mine, Whole::partial(&to)).expect("linked");
        write(&to, b"new").expect("written");
        assert_eq!(fs::read(&mine).expect("read"), b"mine");
        assert_eq!(names(folder.path()), ["disk.raw", "mine"]);
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
