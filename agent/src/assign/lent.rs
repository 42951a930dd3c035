//! Which drives hold, or may hold, what a renter wrote.
//!
//! A drive is noted on STATE before a renter gets it, and forgotten when it was erased: so it is not offered
//! as it is after a power cut, an agent's death or a failure to erase it. A variable of firmware's remembers it
//! beside, a line for each drive: so it is known before STATE was found, where there is none, and where STATE
//! cannot be mounted. init copies that into the root's `/run`, which is read besides STATE's notes.
//!
//! One file per drive and place, which holds its line: the address, and the drive's serial number where one is
//! known. A serial number that is known counts instead of the address: cards that come and go change addresses,
//! and a provider puts other drives into the same place. Files that are named by the address alone hold the
//! serial number alone; earlier releases wrote them.
//!
//! A drive that is bound to vfio-pci tells no serial number, so the one that it told before is kept. It is lost
//! when the kernel loses sight of the drive, for another may be in its place, and read anew whenever the kernel's
//! driver has the drive. A drive is forgotten by what it told while it was erased.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use types::node::Bdf;

use super::{AssignError, device_path};
use crate::{efivars, events::Event, init::boot::chain, install};

/// Where the notes are, in the root.
const NOTES: &str = "state/lent-drives";
/// Where those are that firmware remembered when the node was started.
const RECALLED: &str = "run/holdfast/lent-drives";
/// Where serial numbers are kept for as long as the node is on, in the root: a drive that is bound to
/// vfio-pci tells none.
const SERIALS: &str = "run/holdfast/drives";

/// The variable.
const VARIABLE: &str = "LentDrives";

/// Longest serial number, in bytes (NVM Express 1.4, figure 247: bytes 23:4).
const MAX_SERIAL: usize = 20;

/// Keeps a drive's serial number, as the kernel's driver knows it, before it is bound to vfio-pci. Returns it.
/// Where that driver has no drive, what was kept stays.
pub fn keep_serial(root: &Path, device: Bdf) -> io::Result<Option<String>> {
    let Some(serial) = told(root, device) else { return Ok(None) };
    if serial.is_empty() {
        lose_serial(root, device)?;
        return Ok(None);
    }
    fs::create_dir_all(root.join(SERIALS))?;
    fs::write(root.join(SERIALS).join(device.to_string()), &serial)?;
    Ok(Some(serial))
}

/// Loses the serial number that was kept of a drive: it was out of sight, and another one may be in its place.
pub fn lose_serial(root: &Path, device: Bdf) -> io::Result<()> {
    match fs::remove_file(root.join(SERIALS).join(device.to_string())) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Loses the serial numbers of drives that are not there any more.
pub fn lose_absent(root: &Path) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(root.join(SERIALS)) else { return Ok(()) };
    let kept = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut absent = kept.filter(|device| !device_path(root, *device).exists());
    absent.try_for_each(|device| lose_serial(root, device))
}

/// Reads what firmware remembers, before the first look at any drive.
pub fn recall(root: &Path) -> io::Result<()> {
    let Some(variables) = efivars::folder(root) else { return Ok(()) };
    let remembered = efivars::read(&variables, VARIABLE).unwrap_or_default();
    parse(&remembered).iter().try_for_each(|drive| note(&root.join(RECALLED), drive))
}

/// Has firmware remember what STATE's notes say, too: they may be older than its variable.
pub fn remind(root: &Path) -> io::Result<()> {
    efivars::folder(root).map_or(Ok(()), |variables| keep_all(root, &variables))
}

/// Notes that a renter gets a drive. It outlasts a power cut when this returns.
pub fn remember(root: &Path, device: Bdf) -> Result<(), AssignError> {
    let drive = Drive { device, serial: serial(root, device).unwrap_or_default() };
    let folder = root.join(NOTES);
    note(&folder, &drive).map_err(|source| failed(device, &folder, source))?;
    tell_firmware(root, device)
}

/// Forgets a drive, which was erased and told this serial number, if any. What is noted of another that was in
/// its place stays.
pub fn forget(root: &Path, device: Bdf, serial: Option<&str>) -> Result<(), AssignError> {
    let about = |drive: &Drive| match drive.serial.as_str() {
        "" => drive.device == device,
        noted => serial == Some(noted),
    };
    for (path, _) in noted(root).filter(|(_, drive)| about(drive)) {
        fs::remove_file(&path).map_err(|source| failed(device, &path, source))?;
    }
    tell_firmware(root, device)
}

/// A drive as it was noted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Drive {
    /// Where it was.
    device: Bdf,
    /// Its serial number; empty where none is known.
    serial: String,
}

impl Drive {
    fn line(&self) -> String {
        format!("{} {}\n", self.device, self.serial)
    }

    /// Returns the name of its file, which no other line has: serial numbers may hold what names may not.
    fn name(&self) -> String {
        let serial = self.serial.bytes().map(|byte| format!("{byte:02x}"));
        format!("{}-{}", self.device, serial.collect::<String>())
    }
}

/// Notes a drive in a folder. What is there already is not written again, which a power cut could end halfway.
fn note(folder: &Path, drive: &Drive) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let path = folder.join(drive.name());
    let line = drive.line();
    if !fs::read(&path).is_ok_and(|there| there == line.as_bytes()) {
        File::create(&path)?.write_all(line.as_bytes())?;
    }
    File::open(&path)?.sync_all()?;
    File::open(folder)?.sync_all()
}

/// Reads all notes.
fn noted(root: &Path) -> impl Iterator<Item = (PathBuf, Drive)> {
    let folders = [NOTES, RECALLED].map(|folder| fs::read_dir(root.join(folder)));
    let entries = folders.into_iter().flatten().flatten().flatten();
    entries.filter_map(|entry| {
        let content = fs::read(entry.path()).ok()?;
        let named = entry.file_name().to_str().and_then(|name| name.parse::<Bdf>().ok());
        let drive = match named {
            Some(device) => Drive { device, serial: printable(&String::from_utf8_lossy(&content)) },
            None => parse(&content).into_iter().next()?,
        };
        Some((entry.path(), drive))
    })
}

/// Has firmware remember all notes. Where STATE outlasts a power cut, what firmware does not take is told and
/// stops nobody.
fn tell_firmware(root: &Path, device: Bdf) -> Result<(), AssignError> {
    let Err(source) = remind(root) else { return Ok(()) };
    if is_in_memory(root) {
        let path = Path::new(efivars::FOLDER).join(VARIABLE);
        return Err(failed(device, &path, source));
    }
    let reason = format!(
        "firmware does not remember whether a renter had {device}, so the node knows it only while its disk can \
         be read: {}",
        chain(&source)
    );
    eprintln!("{}", Event::Trouble { place: "devices", reason });
    Ok(())
}

/// Keeps all notes in the variable. One at a time reads them and writes it: whoever noted something before has it
/// read by the last.
fn keep_all(root: &Path, variables: &Path) -> io::Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let lines: BTreeSet<String> = noted(root).map(|(_, drive)| drive.line()).collect();
    let text: String = lines.into_iter().collect();
    efivars::keep(variables, VARIABLE, text.as_bytes())
}

/// Reads lines, as far as they are any.
fn parse(bytes: &[u8]) -> Vec<Drive> {
    let text = String::from_utf8_lossy(bytes);
    let line = |line: &str| {
        let (device, serial) = line.split_once(' ')?;
        Some(Drive { device: device.parse().ok()?, serial: printable(serial) })
    };
    text.lines().filter_map(line).collect()
}

fn printable(serial: &str) -> String {
    serial.chars().filter(char::is_ascii_graphic).take(MAX_SERIAL).collect()
}

fn is_in_memory(root: &Path) -> bool {
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    install::runs_from_memory(&mounts)
}

/// Returns whether a drive is noted.
pub fn is_lent(root: &Path, device: Bdf) -> bool {
    !notes(root, device).is_empty()
}

/// Returns whether a block device is of a drive that is noted, or that this node binds as it likes, which makes
/// it a renter's and none of the node's. `entry` is its folder in sysfs.
pub fn is_foreign(root: &Path, entry: &Path) -> bool {
    let Ok(real) = fs::canonicalize(entry) else { return false };
    real.ancestors().any(|above| {
        let name = above.file_name().and_then(|name| name.to_str()?.parse::<Bdf>().ok());
        let Some(device) = name else { return false };
        // The kernel prints a null pointer where nobody wrote anything.
        let driver = fs::read_to_string(above.join("driver_override")).unwrap_or_default();
        !matches!(driver.trim(), "" | "(null)") || is_lent(root, device)
    })
}

/// Returns the notes that are about a drive.
fn notes(root: &Path, device: Bdf) -> Vec<PathBuf> {
    let mine = serial(root, device);
    let about = |drive: &Drive| match &mine {
        Some(mine) if !drive.serial.is_empty() => *mine == drive.serial,
        Some(_) | None => drive.device == device,
    };
    noted(root).filter(|(_, drive)| about(drive)).map(|(path, _)| path).collect()
}

/// Returns a drive's serial number, as the kernel's driver tells it or as it was kept.
fn serial(root: &Path, device: Bdf) -> Option<String> {
    let kept = || fs::read_to_string(root.join(SERIALS).join(device.to_string())).ok();
    match told(root, device) {
        Some(told) => Some(told).filter(|serial| !serial.is_empty()),
        None => kept(),
    }
}

/// Returns what the kernel's driver says of a drive that it has: empty where that tells no serial number.
fn told(root: &Path, device: Bdf) -> Option<String> {
    let mut entries = fs::read_dir(device_path(root, device).join("nvme")).ok()?.flatten();
    let text = fs::read_to_string(entries.next()?.path().join("serial")).ok()?;
    Some(printable(&text))
}

fn failed(device: Bdf, path: &Path, source: io::Error) -> AssignError {
    AssignError::Open { device, path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    const OTHER: Bdf = Bdf { segment: 0, bus: 2, device: 0, function: 0 };

    #[test]
    fn a_drive_is_noted_until_it_was_erased() {
        let root = testing::root(&[]);
        assert!(!is_lent(root.path(), DEVICE));
        remember(root.path(), DEVICE).expect("noted");
        remember(root.path(), DEVICE).expect("noted again");
        assert!(is_lent(root.path(), DEVICE) && !is_lent(root.path(), OTHER));
        forget(root.path(), DEVICE, None).expect("forgotten");
        forget(root.path(), DEVICE, None).expect("nothing to forget");
        assert!(!is_lent(root.path(), DEVICE));
    }

    /// A server whose STATE is of this kind, with a drive that tells its serial number.
    fn server(kind: &str) -> (tempfile::TempDir, PathBuf) {
        let mounts = format!("31 1 0:30 / /state rw - {kind} none rw\n");
        let root = testing::root(&[
            ("sys/firmware/efi/efivars/BootOrder-1", b"123456"),
            ("proc/self/mountinfo", mounts.as_bytes()),
            (&format!("sys/bus/pci/devices/{DEVICE}/nvme/nvme0/serial"), b"S1\n"),
        ]);
        let folder = efivars::folder(root.path()).expect("there is firmware");
        (root, folder)
    }

    fn remembered(folder: &Path) -> String {
        let bytes = efivars::read(folder, VARIABLE).unwrap_or_default();
        String::from_utf8(bytes).expect("text")
    }

    /// Takes what is in memory, STATE or not, and starts again; returns which drives are noted before STATE
    /// could be looked at.
    fn cut(root: &Path) -> [bool; 2] {
        fs::remove_dir_all(root.join("run")).ok();
        fs::rename(root.join("state"), root.join("away")).expect("moved");
        recall(root).expect("recalled");
        let known = [DEVICE, OTHER].map(|device| is_lent(root, device));
        fs::rename(root.join("away"), root.join("state")).expect("moved");
        known
    }

    #[test]
    fn firmware_remembers_before_and_without_state() {
        for kind in ["tmpfs", "ext4"] {
            let (root, folder) = server(kind);
            recall(root.path()).expect("there is nothing");
            remember(root.path(), DEVICE).expect("noted");
            remember(root.path(), OTHER).expect("noted");
            assert_eq!(remembered(&folder), format!("{DEVICE} S1\n{OTHER} \n"));
            assert_eq!(cut(root.path()), [true, true]);
            forget(root.path(), OTHER, None).expect("forgotten");
            assert_eq!(remembered(&folder), format!("{DEVICE} S1\n"));
            assert_eq!(cut(root.path()), [true, false]);
        }
    }

    #[test]
    fn a_start_without_notes_of_its_own_forgets_nothing() {
        let (root, folder) = server("ext4");
        efivars::keep(&folder, VARIABLE, format!("{OTHER} S2\n").as_bytes()).expect("kept");
        recall(root.path()).expect("recalled");
        remind(root.path()).expect("nothing is new");
        assert_eq!(remembered(&folder), format!("{OTHER} S2\n"));
        // STATE is older than the variable.
        let old = root.path().join(NOTES).join(DEVICE.to_string());
        fs::create_dir_all(old.parent().expect("a parent")).expect("made");
        fs::write(old, "S1").expect("written");
        remind(root.path()).expect("reminded");
        assert_eq!(remembered(&folder), format!("{DEVICE} S1\n{OTHER} S2\n"));
    }

    #[test]
    fn what_something_else_wrote_into_the_variable_stops_nobody() {
        let (root, folder) = server("tmpfs");
        efivars::keep(&folder, VARIABLE, b"\xff\n0000:02:00.0 \0x\x7f\n0000:01:00.0")
            .expect("kept");
        recall(root.path()).expect("recalled");
        let notes: Vec<Drive> = noted(root.path()).map(|(_, drive)| drive).collect();
        assert_eq!(notes, [Drive { device: OTHER, serial: "x".to_owned() }]);
    }

    #[test]
    fn firmware_that_takes_nothing_stops_rentals_only_where_nothing_else_remembers() {
        for (kind, fails) in [("tmpfs", true), ("ext4", false)] {
            let (root, folder) = server(kind);
            // The variable's place is taken.
            efivars::keep(&folder, VARIABLE, b"x").expect("kept");
            let named = |path: &PathBuf| path.to_string_lossy().contains(VARIABLE);
            let mut files =
                fs::read_dir(&folder).expect("read").flatten().map(|entry| entry.path());
            let file = files.find(named).expect("the variable");
            fs::remove_file(&file).expect("removed");
            fs::create_dir(&file).expect("made");
            assert_eq!(remember(root.path(), DEVICE).is_err(), fails, "{kind}");
            assert!(is_lent(root.path(), DEVICE));
        }
    }

    #[test]
    fn drives_that_are_noted_and_forgotten_at_once_leave_the_variable_right() {
        let (root, folder) = server("tmpfs");
        let root = root.path();
        let drives = [1, 2, 3, 4, 5, 6, 7, 8].map(|bus| Bdf { bus: bus + 16, ..OTHER });
        let at_once = |act: fn(&Path, Bdf) -> Result<(), AssignError>| {
            std::thread::scope(|scope| {
                let begun = drives.map(|drive| scope.spawn(move || act(root, drive)));
                begun.into_iter().for_each(|done| done.join().expect("no panic").expect("done"));
            });
        };
        let lines = drives.map(|drive| format!("{drive} \n")).concat();
        for _ in 0..20 {
            at_once(remember);
            assert_eq!(remembered(&folder), lines);
            at_once(|root, drive| forget(root, drive, None));
            assert_eq!(remembered(&folder), "");
        }
    }

    #[test]
    fn a_drive_that_was_moved_stays_noted_when_another_one_in_its_place_is_rented() {
        let (root, folder) = server("tmpfs");
        let serial = |device: Bdf| {
            root.path().join(format!("sys/bus/pci/devices/{device}/nvme/nvme0/serial"))
        };
        // An earlier release noted it.
        fs::create_dir_all(root.path().join(NOTES)).expect("made");
        fs::write(root.path().join(NOTES).join(DEVICE.to_string()), "S1").expect("written");
        assert!(is_lent(root.path(), DEVICE));
        fs::create_dir_all(serial(OTHER).parent().expect("a parent")).expect("made");
        for (other, own) in [("S2", "S1"), ("S3", "S2")] {
            fs::write(serial(OTHER), own).expect("moved");
            fs::write(serial(DEVICE), other).expect("in its place");
            assert!(!is_lent(root.path(), DEVICE) && is_lent(root.path(), OTHER));
            remember(root.path(), DEVICE).expect("noted");
            assert!(is_lent(root.path(), DEVICE) && is_lent(root.path(), OTHER));
        }
        // One of which nothing is known overwrites neither.
        fs::remove_file(serial(DEVICE)).expect("removed");
        remember(root.path(), DEVICE).expect("noted");
        let lines = ["", "S1", "S2", "S3"].map(|serial| format!("{DEVICE} {serial}\n"));
        assert_eq!(remembered(&folder), lines.concat());
        assert_eq!(cut(root.path()), [true, true]);
    }

    #[test]
    fn a_drive_is_known_wherever_it_is_and_one_in_its_place_is_another() {
        let place = |device| format!("sys/bus/pci/devices/{device}/nvme/nvme0/serial");
        let root = testing::root(&[(&place(DEVICE), b"S1  \n")]);
        keep_serial(root.path(), DEVICE).expect("kept");
        // vfio-pci has it.
        fs::remove_dir_all(device_path(root.path(), DEVICE)).expect("removed");
        remember(root.path(), DEVICE).expect("noted");
        assert!(is_lent(root.path(), DEVICE));

        // The node was off, and its cards were moved.
        fs::remove_dir_all(root.path().join("run")).expect("removed");
        for (device, serial) in [(DEVICE, "S2\n"), (OTHER, "S1\n")] {
            let path = root.path().join(place(device));
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, serial).expect("written");
        }
        assert!(!is_lent(root.path(), DEVICE) && is_lent(root.path(), OTHER));
        forget(root.path(), OTHER, Some("S1")).expect("forgotten");
        assert!(!is_lent(root.path(), OTHER));
    }

    #[test]
    fn a_drive_that_was_never_erased_stays_noted_when_the_one_in_its_place_is() {
        let place = |device| format!("sys/bus/pci/devices/{device}/nvme");
        let has = |root: &Path, device, serial: &str| {
            fs::create_dir_all(root.join(place(device)).join("nvme0")).expect("made");
            fs::write(root.join(place(device)).join("nvme0/serial"), serial).expect("written");
        };
        let leaves = |root: &Path| fs::remove_dir_all(root.join(place(DEVICE))).expect("removed");
        let root = testing::root(&[(&format!("{}/nvme0/serial", place(DEVICE)), b"OLD\n")]);
        let root = root.path();
        assert_eq!(keep_serial(root, DEVICE).expect("kept"), Some("OLD".to_owned()));
        leaves(root);
        assert_eq!(keep_serial(root, DEVICE).expect("it tells nothing"), None);
        remember(root, DEVICE).expect("noted");

        // The provider swaps it, and the new one is erased.
        has(root, DEVICE, "NEW\n");
        let serial = keep_serial(root, DEVICE).expect("kept");
        leaves(root);
        forget(root, DEVICE, serial.as_deref()).expect("forgotten");
        has(root, OTHER, "OLD\n");
        assert!(!is_lent(root, DEVICE) && is_lent(root, OTHER));
        remember(root, DEVICE).expect("noted");
        let lines = || noted(root).map(|(_, drive)| drive.line()).collect::<BTreeSet<_>>();
        assert_eq!(lines(), [format!("{DEVICE} NEW\n"), format!("{DEVICE} OLD\n")].into());

        // One that tells no serial number is not the one before it, and forgets none that did.
        has(root, DEVICE, "\n");
        assert_eq!(keep_serial(root, DEVICE).expect("lost"), None);
        leaves(root);
        remember(root, DEVICE).expect("noted");
        assert_eq!(lines().len(), 3);
        forget(root, DEVICE, None).expect("forgotten");
        assert_eq!(lines().len(), 2);
    }

    #[test]
    fn a_drive_that_is_not_there_any_more_leaves_no_serial_number_behind() {
        let of = |device| format!("{SERIALS}/{device}");
        let root = testing::root(&[
            (&of(DEVICE), b"S1"),
            (&of(OTHER), b"S2"),
            (&format!("sys/bus/pci/devices/{OTHER}/class"), b"0x010802\n"),
        ]);
        lose_absent(root.path()).expect("lost");
        let known = [DEVICE, OTHER].map(|device| serial(root.path(), device));
        assert_eq!(known, [None, Some("S2".to_owned())]);
        lose_serial(root.path(), DEVICE).expect("nothing to lose");
    }

    #[test]
    fn a_disk_that_a_renter_had_or_whose_driver_was_chosen_is_not_the_nodes() {
        let device = format!("sys/devices/pci0000:00/{DEVICE}");
        let disk = format!("{device}/nvme/nvme0/nvme0n1/nvme0n1p2");
        let root = testing::root(&[
            (&format!("{disk}/uevent"), b"PARTNAME=holdfast-state\n"),
            (&format!("{device}/driver_override"), b"(null)\n"),
        ]);
        let entry = root.path().join("entry");
        symlink(root.path().join(disk), &entry).expect("linked");
        let foreign = || is_foreign(root.path(), &entry);
        assert!(!foreign());
        // After a power cut, nothing was bound yet.
        remember(root.path(), DEVICE).expect("noted");
        assert!(foreign());
        forget(root.path(), DEVICE, None).expect("forgotten");
        assert!(!foreign());
        fs::write(root.path().join(device).join("driver_override"), "nvme\n").expect("written");
        assert!(foreign());
        assert!(!is_foreign(root.path(), &root.path().join("nowhere")));
    }
}
