//! The firmware's boot entry for an installed disk, through efivarfs.
//!
//! A file there holds four bytes of attributes and then the variable. Source: the kernel's
//! Documentation/filesystems/efivarfs.rst; `update::efi` for the variables themselves.

use std::{fs, io, path::Path};

use update::{
    efi::{self, Place},
    slots::{self, firmware},
};

/// What the entry is called. Entries of this name that are already there are of an earlier
/// installation and go, as do those for its slots.
pub const DESCRIPTION: &str = firmware::description(slots::Place::Fallback);
/// Bytes of attributes before a variable.
const ATTRIBUTES: usize = 4;
/// Most options that are looked at.
const OPTIONS: usize = 4096;

/// Makes the program at `place` what firmware starts first. `variables` is where efivarfs is
/// mounted, writable. Returns the number of the new entry.
pub fn put_first(variables: &Path, place: &Place) -> io::Result<u16> {
    let mut taken = Vec::new();
    let names = slots::Place::ALL.map(firmware::description);
    for entry in fs::read_dir(variables)?.take(OPTIONS) {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(variable) = name.strip_suffix(&format!("-{}", efi::GLOBAL)) else { continue };
        let Some(number) = efi::option_number(variable) else { continue };
        let content = fs::read(variables.join(&name)).unwrap_or_default();
        let ours = content.get(ATTRIBUTES..).and_then(efi::description);
        if ours.is_some_and(|name| names.contains(&name.as_str())) {
            fs::remove_file(variables.join(&name))?;
        } else {
            taken.push(number);
        }
    }
    let old = fs::read(file(variables, "BootOrder")).unwrap_or_default();
    let old = efi::order(old.get(ATTRIBUTES..).unwrap_or_default());
    // A number that only the order still names may come back with a medium.
    let avoided: Vec<u16> = taken.iter().chain(&old).copied().collect();
    let number = efi::free_number(&avoided)
        .ok_or_else(|| io::Error::other("firmware has no free number for a boot entry"))?;
    let option = efi::load_option(DESCRIPTION, place);
    write(variables, &format!("Boot{number:04X}"), &option)?;
    let kept: Vec<u16> = old.into_iter().filter(|number| taken.contains(number)).collect();
    write(variables, "BootOrder", &efi::order_with(number, &kept))?;
    Ok(number)
}

fn file(variables: &Path, name: &str) -> std::path::PathBuf {
    variables.join(format!("{name}-{}", efi::GLOBAL))
}

/// Sets a variable. The kernel wants it in one piece.
fn write(variables: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let bytes = [&efi::ATTRIBUTES.to_le_bytes(), content].concat();
    fs::write(file(variables, name), bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn place(path: &'static str) -> Place {
        let partition = update::disk::gpt::Uuid::from_u128(7);
        Place { number: 1, first: 2048, blocks: 4096, partition, path }
    }

    fn order(variables: &Path) -> Vec<u16> {
        efi::order(&fs::read(file(variables, "BootOrder")).unwrap()[ATTRIBUTES..])
    }

    #[test]
    fn ours_comes_first_and_replaces_an_older_one() {
        let folder = tempfile::tempdir().unwrap();
        let variables = folder.path();
        write(variables, "Boot0000", &efi::load_option("UiApp", &place("X"))).unwrap();
        write(variables, "Boot0002", &efi::load_option(DESCRIPTION, &place("OLD"))).unwrap();
        write(variables, "Boot0003", &efi::load_option("Holdfast B", &place("OLD"))).unwrap();
        write(variables, "BootOrder", &[2, 0, 3, 0, 0, 0]).unwrap();
        fs::write(variables.join("Other-1234"), b"x").unwrap();
        let number = put_first(variables, &place("EFI/A.EFI")).unwrap();
        assert_eq!(number, 1);
        assert_eq!(order(variables), [1, 0]);
        assert!(!file(variables, "Boot0002").exists() && !file(variables, "Boot0003").exists());
        let option = fs::read(file(variables, "Boot0001")).unwrap();
        assert_eq!(option[..4], [7, 0, 0, 0]);
        assert_eq!(efi::description(&option[4..]).as_deref(), Some(DESCRIPTION));
        assert_eq!(put_first(variables, &place("EFI/A.EFI")).unwrap(), 2);
        assert_eq!(order(variables), [2, 0]);
    }

    #[test]
    fn firmware_that_knew_nothing_gets_its_first_entry() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(put_first(folder.path(), &place("EFI/A.EFI")).unwrap(), 0);
        assert_eq!(order(folder.path()), [0]);
        assert!(put_first(&folder.path().join("none"), &place("X")).is_err());
    }
}
