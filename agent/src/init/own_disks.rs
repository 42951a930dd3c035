//! Which disks are this server's own, where the system was started from none of them: those for which the
//! firmware has a boot entry of Holdfast's.
//!
//! Whoever rents a whole drive calls its partitions what he likes, and a node that starts from the network would
//! take them for its own after a power cut: they would say who it is and whom it obeys. The firmware's variables
//! are out of a renter's reach, and the installer makes the entry (`install::entry`).

use std::{collections::BTreeSet, fs, path::Path};

use update::{
    efi,
    slots::{self, firmware},
};

/// Where efivarfs is, in the root.
const VARIABLES: &str = "sys/firmware/efi/efivars";
/// Bytes of attributes before a variable (Documentation/filesystems/efivarfs.rst).
const ATTRIBUTES: usize = 4;
/// Most variables that are looked at.
const LIMIT: usize = 4096;

/// Returns the identities of the partitions that boot entries of Holdfast's start from, in small letters; `None`
/// where no UEFI firmware tells any variables, which then decide nothing.
pub(super) fn partitions(root: &Path) -> Option<BTreeSet<String>> {
    let folder = root.join(VARIABLES);
    let names: Vec<String> = fs::read_dir(&folder)
        .ok()?
        .take(LIMIT)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    if names.is_empty() {
        return None;
    }
    let end = format!("-{}", efi::GLOBAL);
    let options = names.iter().filter(|name| {
        name.strip_suffix(&end).is_some_and(|variable| efi::option_number(variable).is_some())
    });
    let ours = slots::Place::ALL.map(firmware::description);
    let started = options.filter_map(|name| {
        let variable = fs::read(folder.join(name)).ok()?;
        let option = variable.get(ATTRIBUTES..)?;
        let is_ours = efi::description(option).is_some_and(|name| ours.contains(&name.as_str()));
        efi::partition(option).filter(|_| is_ours)
    });
    Some(started.map(|id| id.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use update::{disk::gpt::Uuid, efi::Place};

    use super::*;

    fn write(root: &Path, name: &str, description: &str, partition: u128) {
        let place = Place {
            number: 1,
            first: 2048,
            blocks: 4096,
            partition: Uuid::from_u128(partition),
            path: "EFI/BOOT/BOOTX64.EFI",
        };
        let option = efi::load_option(description, &place);
        let folder = root.join(VARIABLES);
        fs::create_dir_all(&folder).expect("made");
        let file = folder.join(format!("{name}-{}", efi::GLOBAL));
        fs::write(file, [&[7, 0, 0, 0][..], &option].concat()).expect("written");
    }

    #[test]
    fn only_entries_of_our_name_tell_a_disk_of_the_servers() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(partitions(root.path()), None, "no UEFI");
        fs::create_dir_all(root.path().join(VARIABLES)).expect("made");
        assert_eq!(partitions(root.path()), None, "no variables");
        // Firmware makes entries for whatever disk it finds.
        write(root.path(), "Boot0001", "UEFI OS", 1);
        assert_eq!(partitions(root.path()), Some(BTreeSet::new()));
        write(root.path(), "Boot0002", "Holdfast", 0xab);
        write(root.path(), "Boot000A", "Holdfast B", 3);
        write(root.path(), "BootNext", "Holdfast", 4);
        let found = partitions(root.path()).expect("variables");
        let ids = [0xab, 3].map(|id| Uuid::from_u128(id).to_string());
        assert_eq!(found, BTreeSet::from(ids));
    }
}
