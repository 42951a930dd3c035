//! Addresses of bridged machines for which their taps' aliases have no room: a file per machine that has
//! such, in a folder that is lost when the host restarts, as taps are. An address per line; what was used
//! longest ago comes first.

use std::{collections::BTreeSet, fs, io, net::Ipv6Addr, path::Path};

use types::ids::MachineId;

use super::bindings::MAX_ADDRESSES;

/// Longest file: an address has at most 39 characters, and an end of line.
const LONGEST: u64 = 40 * MAX_ADDRESSES as u64;

/// Keeps a machine's addresses. Nothing is kept when there are none.
///
/// Fails as files do. Then what was kept before is kept.
pub(super) fn keep(folder: &Path, machine: MachineId, rest: &[Ipv6Addr]) -> io::Result<()> {
    let path = folder.join(machine.to_string());
    if rest.is_empty() {
        return match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    }
    let text: String = rest.iter().map(|address| format!("{address}\n")).collect();
    if fs::read_to_string(&path).is_ok_and(|known| known == text) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    let new = folder.join(format!("{machine}.new"));
    fs::write(&new, text)?;
    fs::rename(new, path)
}

/// Returns what was kept of a machine: nothing, unless all of it can be read.
pub(super) fn kept(folder: &Path, machine: MachineId) -> Vec<Ipv6Addr> {
    let path = folder.join(machine.to_string());
    let is_short = fs::metadata(&path).is_ok_and(|about| about.len() <= LONGEST);
    let text = is_short.then(|| fs::read_to_string(path).ok()).flatten().unwrap_or_default();
    text.lines().map(str::parse).collect::<Result<_, _>>().unwrap_or_default()
}

/// Removes what was kept of all other machines. As much as can be done is done.
pub(super) fn clean(folder: &Path, machines: &BTreeSet<MachineId>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let machine = name.to_str().and_then(|name| name.parse::<MachineId>().ok());
        if machine.is_none_or(|machine| !machines.contains(&machine)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_comes_back_until_its_machine_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("made");
        let [one, other] = [1, 2].map(|number| MachineId::from_bytes([number; 16]));
        let rest: Vec<Ipv6Addr> =
            (0..32).map(|n| Ipv6Addr::from_bits(u128::MAX - n)).collect::<Vec<_>>();
        assert!(kept(&folder, one).is_empty());
        keep(&folder, one, &[]).expect("nothing to remove");
        keep(&folder, one, &rest).expect("kept");
        keep(&folder, other, &rest[..1]).expect("kept");
        assert_eq!((kept(&folder, one), kept(&folder, other)), (rest.clone(), rest[..1].to_vec()));
        keep(&folder, one, &rest[2..]).expect("kept");
        assert_eq!(kept(&folder, one), &rest[2..]);
        keep(&folder, one, &[]).expect("removed");
        assert!(kept(&folder, one).is_empty());
        fs::write(folder.join(format!("{other}.new")), "2001:db8::").expect("written");
        clean(&folder, &BTreeSet::from([other]));
        assert_eq!(kept(&folder, other), &rest[..1]);
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
        clean(&folder, &BTreeSet::new());
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 0);
    }

    #[test]
    fn what_cannot_be_read_is_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let machine = MachineId::from_bytes([1; 16]);
        for text in [&b"2001:db8::1\n2001:db8"[..], &[0xff], &[b'\n'; 1281]] {
            fs::write(folder.path().join(machine.to_string()), text).expect("written");
            assert!(kept(folder.path(), machine).is_empty(), "{text:?}");
        }
    }
}
