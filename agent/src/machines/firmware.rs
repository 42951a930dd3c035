//! UEFI firmware for machines that start from their disk: its code is the same for all, its
//! variables are a machine's own and live as long as its disk.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use types::{ids::MachineId, vm::PciWindows};

use super::disk;

/// The firmware's code, below the root.
pub const CODE: &str = "usr/share/ovmf/OVMF_CODE_4M.fd";
/// Variables of a machine that never started, below the root.
const VARIABLES: &str = "usr/share/ovmf/OVMF_VARS_4M.fd";

/// Where it has its PCI windows from: the image's is Debian 13's, edk2 2025.02.
pub const PCI_WINDOWS: PciWindows = PciWindows::Told;

/// Opens a machine's variables below `data`, and makes them the first time.
pub fn variables(root: &Path, data: &Path, machine: MachineId) -> io::Result<File> {
    let folder = disk::folder(data, machine);
    let path = folder.join("variables.fd");
    if !path.exists() {
        fs::create_dir_all(&folder)?;
        let partial = folder.join("variables.partial");
        // Not `fs::copy`, which would take over that the original cannot be written.
        fs::write(&partial, fs::read(root.join(VARIABLES))?)?;
        File::open(&partial)?.sync_all()?;
        fs::rename(&partial, &path)?;
        File::open(&folder)?.sync_all()?;
    }
    File::options().read(true).write(true).open(&path)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn variables_begin_as_shipped_stay_and_go_with_the_machine() {
        let folder = tempfile::tempdir().expect("a directory");
        let (root, data) = (folder.path().join("root"), folder.path().join("data"));
        let machine = MachineId::from_bytes([6; 16]);
        assert!(variables(&root, &data, machine).is_err(), "an image without firmware");
        fs::create_dir_all(root.join("usr/share/ovmf")).expect("made");
        fs::write(root.join(VARIABLES), b"shipped").expect("written");
        let mut file = variables(&root, &data, machine).expect("made");
        file.write_all(b"own").expect("written");
        let mut again = String::new();
        let mut file = variables(&root, &data, machine).expect("opened");
        file.read_to_string(&mut again).expect("read");
        assert_eq!(again, "ownpped");
        let places = disk::Places { data: data.clone(), keys: folder.path().join("keys") };
        disk::destroy(&places, machine).expect("destroyed");
        let mut fresh = String::new();
        let mut file = variables(&root, &data, machine).expect("made");
        file.read_to_string(&mut fresh).expect("read");
        assert_eq!(fresh, "shipped");
    }
}
