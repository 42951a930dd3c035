//! Firmware's variables through efivarfs, where a file holds four bytes of attributes and then the
//! variable. Source: the kernel's Documentation/filesystems/efivarfs.rst.

use std::{collections::BTreeMap, fs, io, path::Path};

use update::{
    efi,
    slots::{
        Place,
        firmware::{Change, Variables},
    },
};

use crate::efivars;

/// Vendor of the variables in which the stub tells what it was started from. Source: systemd's Boot
/// Loader Interface.
const LOADER: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
/// The one that names the program, as efivarfs has it.
#[cfg(test)]
pub(super) const IMAGE_IDENTIFIER: &str =
    "LoaderImageIdentifier-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
/// Bytes of attributes.
const ATTRIBUTES: usize = 4;
/// Most variables that are looked at, and most bytes of each.
const MAX_VARIABLES: usize = 4096;
const MAX_BYTES: usize = 64 << 10;

/// Reads those that matter to slots.
pub(crate) fn read(folder: &Path) -> io::Result<Variables> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder)?.take(MAX_VARIABLES) {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(variable) = name.strip_suffix(&format!("-{}", efi::GLOBAL)) else { continue };
        let known = ["BootOrder", "BootNext", "BootCurrent"].contains(&variable);
        if !known && efi::option_number(variable).is_none() {
            continue;
        }
        // One that vanished meanwhile was deleted.
        let Ok(bytes) = fs::read(folder.join(&name)) else { continue };
        if let Some(content) = bytes.get(ATTRIBUTES..).filter(|bytes| bytes.len() <= MAX_BYTES) {
            found.insert(variable.to_owned(), content.to_vec());
        }
    }
    Ok(Variables(found))
}

/// Makes changes, one after the other.
pub(crate) fn apply(folder: &Path, changes: &[Change]) -> io::Result<()> {
    efivars::writable(folder, || write(folder, changes))?
}

/// Writes; the folder must be writable. The kernel wants each variable in one piece.
fn write(folder: &Path, changes: &[Change]) -> io::Result<()> {
    let file = |name: &str| folder.join(format!("{name}-{}", efi::GLOBAL));
    for change in changes {
        match change {
            Change::Set(name, content) => {
                fs::write(file(name), [&efi::ATTRIBUTES.to_le_bytes(), &content[..]].concat())?;
            }
            Change::Delete(name) => match fs::remove_file(file(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Err(_) | Ok(()) => {}
            },
        }
    }
    Ok(())
}

/// Returns a variable of the stub's, which is text in UTF-16.
fn loader(folder: &Path, name: &str) -> Option<String> {
    let bytes = fs::read(folder.join(format!("{name}-{LOADER}"))).ok()?;
    let pairs = bytes.get(ATTRIBUTES..)?.chunks_exact(2);
    let units = pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let text = char::decode_utf16(units.take_while(|unit| *unit != 0));
    Some(text.filter_map(Result::ok).collect())
}

/// Returns the identity of the partition that the system was started from, in small letters.
pub(super) fn partition(folder: &Path) -> Option<String> {
    loader(folder, "LoaderDevicePartUUID").map(|text| text.to_ascii_lowercase())
}

/// Returns which place on that partition it was.
pub(super) fn place(folder: &Path) -> Option<Place> {
    Place::of_path(&loader(folder, "LoaderImageIdentifier")?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use update::slots::Slot;

    use super::*;

    #[test]
    fn variables_are_read_and_written() {
        let folder = tempfile::tempdir().unwrap();
        let set = |name: &str, bytes: &[u8]| Change::Set(name.to_owned(), bytes.to_vec());
        let changes = [set("BootOrder", &[1, 0]), set("Boot0001", b"x"), set("BootNext", &[1, 0])];
        write(folder.path(), &changes).unwrap();
        fs::write(folder.path().join("Other-1234"), b"1234x").unwrap();
        write(folder.path(), &[Change::Delete("BootNext".to_owned())]).unwrap();
        write(folder.path(), &[Change::Delete("BootNext".to_owned())]).unwrap();
        let found = read(folder.path()).unwrap();
        let names: Vec<_> = found.0.keys().map(String::as_str).collect();
        assert_eq!(names, ["Boot0001", "BootOrder"]);
        assert_eq!(found.0["BootOrder"], [1, 0]);
    }

    #[test]
    fn the_stub_says_where_the_system_came_from() {
        let folder = tempfile::tempdir().unwrap();
        let text = |name: &str, text: &str| {
            let units = text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes);
            let bytes: Vec<u8> = [6, 0, 0, 0].into_iter().chain(units).collect();
            fs::write(folder.path().join(format!("{name}-{LOADER}")), bytes).unwrap();
        };
        assert_eq!((partition(folder.path()), place(folder.path())), (None, None));
        text("LoaderDevicePartUUID", "AB-CD");
        text("LoaderImageIdentifier", "\\EFI\\HOLDFAST\\B.EFI");
        assert_eq!(partition(folder.path()).as_deref(), Some("ab-cd"));
        assert_eq!(place(folder.path()), Some(Place::Slot(Slot::B)));
    }
}
