//! What a guest said last, kept when its process is gone: of the process that runs or ran last, and
//! of the one before it. The files are in memory and hold 64 KiB each (`types::console`).

use std::{
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use types::{
    console::{self, Tail},
    ids::MachineId,
};

use super::vmm;

/// Which process's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The one that runs, or ran last.
    Latest,
    /// The one before.
    Previous,
}

fn path(machine: MachineId, which: Which) -> PathBuf {
    let extension = match which {
        Which::Latest => "console",
        Which::Previous => "console.previous",
    };
    vmm::socket_path(machine).with_extension(extension)
}

/// Returns the file for a process that is about to start; what was the latest is the previous now.
pub fn begin(machine: MachineId) -> io::Result<OwnedFd> {
    turn(&path(machine, Which::Latest), &path(machine, Which::Previous))
}

fn turn(latest: &Path, previous: &Path) -> io::Result<OwnedFd> {
    if let Some(folder) = latest.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match std::fs::rename(latest, previous) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) | Ok(()) => {}
    }
    let file = File::options().read(true).write(true).create_new(true).open(latest)?;
    Ok(file.into())
}

/// Returns what was said; `None` when no such process ran since this server started.
pub fn read(machine: MachineId, which: Which) -> Option<Tail> {
    console::parse(&head(&path(machine, which)).ok()?)
}

/// Returns as much of a file as such files have. The process that wrote it may have made it larger, as large as it
/// liked, if its guest had taken it over.
fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(console::FILE_SIZE);
    let most = u64::try_from(console::FILE_SIZE).unwrap_or(u64::MAX);
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns a number that differs between a machine's process and the next one; `None` while there was none.
pub fn process(machine: MachineId) -> Option<u64> {
    std::fs::metadata(path(machine, Which::Latest)).ok().map(|file| file.ino())
}

/// Forgets a machine's output.
pub fn forget(machine: MachineId) {
    for which in [Which::Latest, Which::Previous] {
        // One that is not there is forgotten.
        let _ = std::fs::remove_file(path(machine, which));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_latest_becomes_the_previous() {
        let folder = tempfile::tempdir().expect("a folder");
        // The first machine of all finds no folder.
        let folder = folder.path().join("machines");
        let (latest, previous) = (folder.join("latest"), folder.join("previous"));
        for text in ["first", "second", "third"] {
            let mut file = File::from(turn(&latest, &previous).expect("made"));
            file.write_all(text.as_bytes()).expect("written");
        }
        assert_eq!(std::fs::read_to_string(&latest).expect("there"), "third");
        assert_eq!(std::fs::read_to_string(&previous).expect("there"), "second");
    }

    #[test]
    fn a_file_that_grew_is_read_as_far_as_it_should_be_long() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("latest");
        let file = File::create(&path).expect("made");
        file.set_len(1 << 50).or_else(|_| file.set_len(1 << 33)).expect("sparse");
        assert_eq!(head(&path).expect("read").len(), console::FILE_SIZE);
    }

    #[test]
    fn a_machines_files_lie_beside_its_socket() {
        let machine = MachineId::from_bytes([0xab; 16]);
        let latest = path(machine, Which::Latest);
        assert_eq!(latest.parent(), vmm::socket_path(machine).parent());
        assert_ne!(latest, path(machine, Which::Previous));
    }
}
