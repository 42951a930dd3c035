//! The server's disks, as sysfs tells them, and what is on them. Reads and changes nothing.
//!
//! Every function takes the root under which `sys`, `proc` and `dev` are, so tests use directories.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use types::node::Bdf;
use update::disk::gpt::{ALIGNMENT, BlockSize};

use super::probe::{self, Content};
use crate::assign::lent;

/// Block devices that are no disks: what the kernel makes up, and what is made of other devices.
const NO_DISKS: &[&str] = &["loop", "ram", "zram", "dm-", "md", "nbd", "sr", "fd", "mtdblock"];

/// One disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, which the next boot may give to another disk.
    pub name: String,
    /// Its device file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its logical blocks; `None` when they are of no length that a partition table counts in.
    pub block: Option<BlockSize>,
    /// Serial number, when it tells one.
    pub serial: Option<String>,
    /// World Wide Name, when it has one.
    pub wwn: Option<String>,
    /// What its hardware is called.
    pub hardware: String,
    /// Model, when it tells one.
    pub model: Option<String>,
    /// The PCI function it is attached to.
    pub pci: Option<Bdf>,
    /// Why it is no place for an installation that nobody asked for by name.
    pub kind: Kind,
    /// Whether it can be written to.
    pub access: Access,
    /// What uses it.
    pub users: Vec<String>,
    /// What is on it.
    pub content: Content,
}

/// How a disk is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// To stay.
    Fixed,
    /// By USB, or removable as a card is: rarely what anyone means.
    Removable,
}

/// Whether a disk can be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It can.
    Writable,
    /// It is write-protected.
    ReadOnly,
}

impl Disk {
    /// Returns the word by which the disk is confirmed: its serial number, or else its name.
    pub fn word(&self) -> &str {
        self.serial.as_deref().unwrap_or(&self.name)
    }

    /// Returns all that `[install.disk]` can name it by: `sda (serial S1, SAMSUNG MZ, 960 GB, wwn "naa.5000c500a1b2c3d4",
    /// pci "0000:00:1f.2")`.
    pub fn in_full(&self) -> String {
        let wwn = self.wwn.as_ref().map(|wwn| format!(", wwn {wwn:?}"));
        let pci = self.pci.map(|pci| format!(", pci \"{pci}\""));
        let more = wwn.unwrap_or_default() + &pci.unwrap_or_default();
        let text = self.to_string();
        text.strip_suffix(')').map_or_else(|| text.clone(), |start| format!("{start}{more})"))
    }
}

/// Returns a World Wide Name without what tools write before its digits, and in small letters: the kernel says
/// `naa.5000c500a1b2c3d4` and `eui.0025388b710116a1`, labels and udev `0x5000C500A1B2C3D4`.
pub fn plain_wwn(text: &str) -> String {
    let small = text.trim().to_ascii_lowercase();
    let mut rest = small.as_str();
    for prefix in ["wwn-", "nvme-", "naa.", "eui.", "uuid.", "0x"] {
        rest = rest.strip_prefix(prefix).unwrap_or(rest);
    }
    let digits = |c: char| c.is_ascii_hexdigit() || "-: ".contains(c);
    match rest.chars().all(digits) {
        true => rest.chars().filter(char::is_ascii_hexdigit).collect(),
        false => rest.to_owned(),
    }
}

/// Makes one of disks that are one: a drive with two ports is found on each. `medium` stays the name of its disk.
pub fn fold(disks: &[Disk], medium: Option<&str>) -> Vec<Disk> {
    let mut folded: Vec<Disk> = Vec::new();
    for disk in disks {
        // Some devices have made up names; those of two disks differ in something else.
        let is_same = |other: &&mut Disk| {
            let named = disk.wwn.as_ref().is_some_and(|wwn| plain_wwn(wwn).contains(|c| c != '0'));
            named
                && (&other.wwn, &other.serial, other.bytes) == (&disk.wwn, &disk.serial, disk.bytes)
        };
        let Some(other) = folded.iter_mut().find(is_same) else {
            folded.push(disk.clone());
            continue;
        };
        let users: Vec<String> = other.users.iter().chain(&disk.users).cloned().collect();
        if medium == Some(disk.name.as_str()) {
            *other = disk.clone();
        }
        other.users = users;
        if disk.access == Access::ReadOnly {
            other.access = Access::ReadOnly;
        }
    }
    folded
}

/// `nvme0n1 (serial S1, SAMSUNG MZ, 960 GB)`.
impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let serial = self.serial.as_ref().map(|serial| format!("serial {serial}"));
        let size = format!("{} MB", self.bytes / 1_000_000);
        let parts: Vec<_> =
            [serial, self.model.clone(), Some(size)].into_iter().flatten().collect();
        write!(f, "{} ({})", self.name, parts.join(", "))
    }
}

/// Returns all disks below `root`, but for renters'.
pub fn read(root: &Path) -> Vec<Disk> {
    let class = root.join("sys/class/block");
    let entries = fs::read_dir(&class).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| !lent::is_foreign(root, &entry.path()));
    let mut names: Vec<String> =
        ours.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let whole = |name: &String| {
        !NO_DISKS.iter().any(|kind| name.starts_with(kind))
            && !class.join(name).join("partition").exists()
    };
    names.into_iter().filter(whole).filter_map(|name| read_disk(root, &class, name)).collect()
}

fn read_disk(root: &Path, class: &Path, name: String) -> Option<Disk> {
    let folder = class.join(&name);
    let number = |file: &str| text(&folder.join(file)).and_then(|text| text.parse::<u64>().ok());
    // sysfs counts in 512 bytes, whatever the disk does.
    let bytes = number("size")?.checked_mul(512).filter(|&bytes| bytes > 0)?;
    let real = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
    let usb = real.to_string_lossy().contains("/usb");
    let removable = usb || number("removable") == Some(1);
    let path = root.join("dev").join(&name);
    let partitions = partition_names(&folder, &name);
    let content =
        read_ends(&path, bytes).map(|(first, last)| probe::content(&first, &last, &partitions));
    Some(Disk {
        path,
        bytes,
        block: number("queue/logical_block_size").and_then(BlockSize::from_bytes),
        serial: serial(&folder),
        wwn: wwn(&folder),
        hardware: hardware(&folder),
        model: text(&folder.join("device/model")),
        pci: owner(&real),
        kind: if removable { Kind::Removable } else { Kind::Fixed },
        access: if number("ro") == Some(1) { Access::ReadOnly } else { Access::Writable },
        users: users(root, &folder, &name),
        content: content.unwrap_or_else(|error| Content::Unreadable(error.to_string())),
        name,
    })
}

/// Returns what a disk's hardware is called, which tells it from a disk that it was copied to: its World Wide
/// Name, or else its serial number, or else the PCI function that it is attached to. `folder` is its own in sysfs.
pub(crate) fn hardware(folder: &Path) -> String {
    let place = || {
        let real = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        // What is below the function is numbered as it was found.
        owner(&real).map_or_else(|| real.display().to_string(), |function| function.to_string())
    };
    wwn(folder).or_else(|| serial(folder)).unwrap_or_else(place)
}

fn wwn(folder: &Path) -> Option<String> {
    text(&folder.join("wwid")).or_else(|| text(&folder.join("device/wwid")))
}

/// Where disks keep their serial number: NVMe and MMC, virtio, SCSI and SATA (SPC-4 §7.8.16: page
/// 0x80, four bytes of header and then text).
fn serial(folder: &Path) -> Option<String> {
    let page = || {
        let bytes = fs::read(folder.join("device/vpd_pg80")).ok()?;
        let text = String::from_utf8_lossy(bytes.get(4..)?).trim().to_owned();
        Some(text).filter(|text| !text.is_empty())
    };
    text(&folder.join("device/serial")).or_else(|| text(&folder.join("serial"))).or_else(page)
}

/// Returns the names of a disk's partitions, as the kernel read them; nothing for those without.
fn partition_names(folder: &Path, name: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut parts: Vec<_> =
        entries.map(|entry| entry.path()).filter(|path| path.join("partition").exists()).collect();
    parts.sort();
    let of = |path: PathBuf| {
        let uevent = text(&path.join("uevent")).unwrap_or_default();
        let named =
            uevent.lines().find_map(|line| line.strip_prefix("PARTNAME=").map(str::to_owned));
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        named.unwrap_or_else(|| file.trim_start_matches(name).to_owned())
    };
    parts.into_iter().map(of).collect()
}

/// Returns what uses a disk or a partition of it: mounts, swap, and devices made of it.
fn users(root: &Path, folder: &Path, name: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let parts = entries.map(|entry| entry.path()).filter(|path| path.join("partition").exists());
    let places: Vec<PathBuf> = [folder.to_owned()].into_iter().chain(parts).collect();
    let numbers: BTreeSet<String> =
        places.iter().filter_map(|path| text(&path.join("dev"))).collect();
    let mut users = Vec::new();
    let mountinfo = text(&root.join("proc/self/mountinfo")).unwrap_or_default();
    for line in mountinfo.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        if let [_, _, number, _, at, ..] = fields[..]
            && numbers.contains(number)
        {
            users.push(format!("mounted on {at}"));
        }
    }
    for path in &places {
        let holders = fs::read_dir(path.join("holders")).into_iter().flatten().flatten();
        users.extend(holders.map(|holder| format!("part of {}", holder.file_name().display())));
    }
    let swaps = text(&root.join("proc/swaps")).unwrap_or_default();
    let swap = |line: &&str| line.strip_prefix("/dev/").is_some_and(|rest| rest.starts_with(name));
    users.extend(swaps.lines().filter(swap).map(|_| "swap space".to_owned()));
    users
}

/// Returns what somebody made of a whole disk, by its name: partitions, a file system, or whatever else is
/// known by its signature; `None` when there is nothing of the kind.
pub fn signature(root: &Path, name: &str) -> Option<String> {
    let folder = root.join("sys/class/block").join(name);
    let sectors = text(&folder.join("size"))?.parse::<u64>().ok()?;
    let bytes = sectors.checked_mul(512).filter(|&bytes| bytes > 0)?;
    match read_ends(&root.join("dev").join(name), bytes) {
        Ok((first, last)) => probe::known(&first, &last, &partition_names(&folder, name)),
        Err(error) => Some(format!("what cannot be read ({error})")),
    }
}

/// Reads what decides whether something is on the disk: its first and last MiB.
fn read_ends(path: &Path, bytes: u64) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut disk = File::open(path)?;
    let length = usize::try_from(ALIGNMENT.min(bytes)).map_err(io::Error::other)?;
    let mut first = vec![0; length];
    disk.read_exact(&mut first)?;
    let mut last = vec![0; length];
    disk.seek(SeekFrom::Start(bytes - length as u64))?;
    disk.read_exact(&mut last)?;
    Ok((first, last))
}

/// Returns the PCI function nearest to a device in sysfs.
fn owner(device: &Path) -> Option<Bdf> {
    device.ancestors().find_map(|path| path.file_name()?.to_str()?.parse().ok())
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    Some(text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;
    use crate::testing::root;

    #[test]
    fn a_disk_tells_who_it_is_and_what_uses_it() {
        let mut content = vec![0; 4 << 20];
        content[510..512].copy_from_slice(&[0x55, 0xaa]);
        let root = root(&[
            ("sys/class/block/sda/size", b"8192\n"),
            ("sys/class/block/sda/queue/logical_block_size", b"4096\n"),
            ("sys/class/block/sda/device/model", b"FAST DISK  \n"),
            ("sys/class/block/sda/device/vpd_pg80", b"\0\x80\0\x04 S12"),
            ("sys/class/block/sda/wwid", b"naa.5000\n"),
            ("sys/class/block/sda/sda1/partition", b"1\n"),
            ("sys/class/block/sda/sda1/dev", b"8:1\n"),
            ("sys/class/block/sda1/partition", b"1\n"),
            ("sys/class/block/loop0/size", b"8\n"),
            ("sys/class/block/sdb/size", b"0\n"),
            ("proc/self/mountinfo", b"30 1 8:1 / /srv rw - ext4 /dev/sda1 rw\n"),
            ("dev/sda", &content),
        ]);
        let disks = read(root.path());
        let [disk] = &disks[..] else { panic!("{disks:?}") };
        assert_eq!(disk.to_string(), "sda (serial S12, FAST DISK, 4 MB)");
        assert_eq!(disk.block, Some(BlockSize::B4096));
        assert_eq!(disk.users, ["mounted on /srv"]);
        assert_eq!(disk.wwn.as_deref(), Some("naa.5000"));
        assert!(disk.content.to_string().contains("partition"), "{}", disk.content);
    }

    #[test]
    fn names_are_the_same_however_they_are_written() {
        let kernel = plain_wwn("naa.5000c500a1b2c3d4");
        for text in ["0x5000C500A1B2C3D4", "wwn-0x5000c500a1b2c3d4", "5000c500 a1b2c3d4\n"] {
            assert_eq!(plain_wwn(text), kernel, "{text}");
        }
        assert_eq!(plain_wwn("nvme-eui.0025388b710116a1"), plain_wwn("eui.0025388B710116A1"));
        assert_ne!(plain_wwn("naa.5000c500a1b2c3d5"), kernel);
        let text = "t10.ATA     QEMU HARDDISK  QM00001";
        assert_eq!(plain_wwn(text), text.to_ascii_lowercase());
    }

    #[test]
    fn hardware_is_called_by_the_best_name_that_it_has() {
        let root = root(&[("sys/devices/pci0000:00/0000:00:05.0/virtio2/block/vda/x", b"")]);
        let disk = root.path().join("sys/devices/pci0000:00/0000:00:05.0/virtio2/block/vda");
        assert_eq!(hardware(&disk), "0000:00:05.0");
        fs::write(disk.join("serial"), "S1\n").unwrap();
        assert_eq!(hardware(&disk), "S1");
        fs::write(disk.join("wwid"), "naa.5000\n").unwrap();
        assert_eq!(hardware(&disk), "naa.5000");
    }

    #[test]
    fn only_what_has_a_signature_was_made_of_a_disk() {
        let made_of = |first: &[u8]| {
            let mut content = vec![0; 4 << 20];
            content[..first.len()].copy_from_slice(first);
            let files = [("sys/class/block/sda/size", &b"8192\n"[..]), ("dev/sda", &content)];
            signature(root(&files).path(), "sda")
        };
        assert_eq!(made_of(b"this block lies on the rented NVMe disk"), None);
        assert!(made_of(b"LUKS\xba\xbe").expect("something").contains("LUKS"));
    }

    #[test]
    fn a_disk_that_cannot_be_read_says_so() {
        let root = root(&[("sys/class/block/sda/size", b"8192\n")]);
        assert!(signature(root.path(), "sda").expect("something").contains("cannot be read"));
        assert_eq!(signature(root.path(), "sdb"), None);
        assert!(matches!(read(root.path())[0].content, Content::Unreadable(_)));
    }
}
