//! Resets a device that came back from a machine, rung by rung.
//!
//! | rung     | how                                                   | when                        |
//! |----------|-------------------------------------------------------|-----------------------------|
//! | function | `reset`: function-level reset, or what the kernel has | first, but for NVIDIA's     |
//! |          | in its place                                          | GPUs                        |
//! | bus      | `reset_subordinate` of the bridge above: everything   | the first failed or left it |
//! |          | below it is reset                                     | silent, or it is such a GPU;|
//! |          |                                                       | and everything below        |
//! |          |                                                       | belongs to the set          |
//! | slot     | `remove`, and `rescan` of its bus: the kernel         | it answers, and lost its    |
//! |          | configures it as one that was just plugged in, and it | configuration               |
//! |          | is reset as at first                                  |                             |
//!
//! One that the kernel does not know any more, because it was found in no such attempt or was unplugged, is looked for
//! first. After each rung the device has to answer, where the kernel put it. One that does not is quarantined by the
//! caller, with the reason that this gives.
//! Source: Linux Documentation/ABI/testing/sysfs-bus-pci, `reset`, `reset_subordinate`, `remove` and `rescan`.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use types::node::Bdf;

use super::{
    AssignError, KERNEL_WAIT, RESET_LIMIT, bind_group, check_answers, device_path, identity,
    interface::note_drives, lent,
};
use crate::events::Event;

/// Says whether devices that are found get drivers.
const PROBING: &str = "sys/bus/pci/drivers_autoprobe";
/// Looks for devices on all buses.
const RESCAN: &str = "sys/bus/pci/rescan";
/// Is there for as long as a device is taken out that is to be found anew.
const TAKEN_OUT: &str = "run/holdfast/rescan";

/// What brought a device back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// The function's own reset.
    Function,
    /// That of everything below the bridge.
    Bus,
    /// It was taken out and found anew.
    Slot,
}

/// A device that answers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovered {
    /// How.
    pub rung: Rung,
    /// How long it took.
    pub took: Duration,
}

/// NVIDIA, and the base class of displays.
const NVIDIA: u16 = 0x10de;
const DISPLAY: &str = "0x03";

/// Whether a function-level reset is too little for a device. Where a guest was ended while its driver started
/// NVIDIA's security processor, the next driver fails on what an H200 keeps of that, unless the bus was reset.
/// That driver may be the same renter's next: between a machine's starts the VMM resets the function only.
/// From 7.3 on, which is the image's, the kernel tells a slot's hotplug driver of such a reset.
/// Sources: dstack pull request 1048; Linux drivers/pci/pci.c, `pci_reset_bridge`.
fn needs_bus_reset(path: &Path, vendor: u16) -> bool {
    let class = fs::read_to_string(path.join("class")).unwrap_or_default();
    vendor == NVIDIA && class.starts_with(DISPLAY)
}

/// Resets a device and checks that it answers. `set` are the devices, this one included, that may
/// lose their state with it; nobody else gets them for [`RESET_LIMIT`]. Blocks for as long as the kernel takes.
pub fn reset(root: &Path, device: Bdf, vendor: u16, set: &[Bdf]) -> Result<Recovered, AssignError> {
    let begin = Instant::now();
    let done = |rung| Ok(Recovered { rung, took: begin.elapsed() });
    let path = device_path(root, device);
    if !path.exists() {
        lent::lose_serial(root, device)
            .map_err(|source| AssignError::Enumerate { device, source })?;
        // What is not found either is told below.
        let _ = without_drivers(root, || write(&root.join(RESCAN)));
    }
    let judge = |reset: io::Result<()>| {
        // One that is not there is not there, whatever the kernel calls it that its reset failed.
        check_answers(root, device, vendor)?;
        reset.map_err(|source| AssignError::Reset { device, source })
    };
    let is_ours = |below: Vec<Bdf>| below.iter().all(|it| set.contains(it));
    let bridge = bridge_of(&path)
        .filter(|bridge| functions_below(bridge).is_ok_and(is_ours))
        .map(|bridge| bridge.join("reset_subordinate"));
    let is_forgotten =
        || matches!(check_answers(root, device, vendor), Err(AssignError::Forgotten { .. }));
    let bus_first = bridge.is_some() && needs_bus_reset(&path, vendor) && !is_forgotten();
    if let (true, Some(bus)) = (bus_first, &bridge) {
        if judge(write(bus)).is_ok() {
            return done(Rung::Bus);
        }
        if !is_in_time(begin.elapsed()) {
            return Err(AssignError::ResetLate { device });
        }
    }
    let Err(mut failed) = judge(reset_function(&path)) else { return done(Rung::Function) };
    // The kernel would give back after a reset what it read before, which is what a device without
    // configuration has.
    let is_tried = bus_first || matches!(failed, AssignError::Forgotten { .. });
    if let (false, Some(bus)) = (is_tried, bridge) {
        if !is_in_time(begin.elapsed()) {
            return Err(AssignError::ResetLate { device });
        }
        match judge(write(&bus)) {
            Ok(()) => return done(Rung::Bus),
            Err(error) => failed = error,
        }
    }
    let AssignError::Forgotten { .. } = failed else { return Err(failed) };
    enumerate(root, device, begin).map_err(|source| AssignError::Enumerate { device, source })?;
    judge(reset_function(&path))?;
    done(Rung::Slot)
}

/// Sees to it that a device, which is bound to vfio-pci and which nobody uses, is whole before a machine gets it:
/// what reset a link since the device was looked at last leaves it without its configuration, which VFIO would take
/// for the device's own. One that is not is reset as one that came back, with the same `set`, and bound again.
/// A drive is noted as a renter's before, by what it told of itself when it was looked at.
pub fn make_whole(root: &Path, device: Bdf, set: &[Bdf]) -> Result<(), AssignError> {
    let ((vendor, _), _) = identity(root, device).ok_or(AssignError::Absent { device })?;
    let Err(failed) = check_answers(root, device, vendor) else { return Ok(()) };
    if !matches!(failed, AssignError::Forgotten { .. } | AssignError::Gone { .. }) {
        return Err(failed);
    }
    note_drives(root, &[device])?;
    let mended = reset(root, device, vendor, set)
        .and_then(|recovered| bind_group(root, &[device]).map(|()| recovered));
    let Recovered { rung, took } =
        mended.map_err(|source| AssignError::NotWhole { device, source: Box::new(source) })?;
    eprintln!("{}", Event::DeviceReset { address: device, rung, ms: took.as_millis() });
    Ok(())
}

/// Returns whether another rung ends within [`RESET_LIMIT`]. Later nobody waits any more, and what may lose its state
/// with the device may be somebody's.
fn is_in_time(passed: Duration) -> bool {
    passed + KERNEL_WAIT <= RESET_LIMIT
}

/// Resets a function. One that knows no reset of its own has no such file; VFIO then reset what it could when the
/// VMM closed it.
fn reset_function(path: &Path) -> io::Result<()> {
    let own = path.join("reset");
    if own.exists() { write(&own) } else { Ok(()) }
}

/// Has the kernel forget a device and find it again. No driver gets it meanwhile.
fn enumerate(root: &Path, device: Bdf, begin: Instant) -> io::Result<()> {
    let path = fs::canonicalize(device_path(root, device))?;
    let parent = path.parent().ok_or(io::ErrorKind::NotFound)?;
    let bus = parent.join(format!("pci_bus/{:04x}:{:02x}/rescan", device.segment, device.bus));
    lent::lose_serial(root, device)?;
    without_drivers(root, || {
        if !is_in_time(begin.elapsed()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mark = root.join(TAKEN_OUT);
        mark.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&mark, "")?;
        write(&path.join("remove")).and_then(|()| write(&bus))?;
        fs::remove_file(&mark)
    })
}

/// Has the kernel find what an agent took out that died before it was found again.
pub fn find_taken_out(root: &Path) -> io::Result<()> {
    let mark = root.join(TAKEN_OUT);
    if !mark.exists() {
        return Ok(());
    }
    without_drivers(root, || write(&root.join(RESCAN)))?;
    fs::remove_file(&mark)
}

/// Does something while devices that are found get no driver. One at a time: the first that was done would give
/// drivers to what another finds.
fn without_drivers(root: &Path, act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    fs::write(root.join(PROBING), "0")?;
    let done = act();
    // Whatever became of it, others are to find their drivers.
    let restored = with_drivers(root);
    done.and(restored)
}

/// Has devices that are found get their drivers, as they do after a start of the kernel: an agent that died meanwhile
/// left it otherwise.
pub fn with_drivers(root: &Path) -> io::Result<()> {
    fs::write(root.join(PROBING), "1")
}

/// Returns what loses its state with a device when everything below its bridge is reset, but itself.
pub fn beside(root: &Path, device: Bdf) -> Vec<Bdf> {
    let bridge = bridge_of(&device_path(root, device));
    let mut below = bridge.and_then(|bridge| functions_below(&bridge).ok()).unwrap_or_default();
    below.retain(|function| *function != device);
    below
}

/// Returns the bridge above a device, if it can be told to reset what is below.
fn bridge_of(path: &Path) -> Option<PathBuf> {
    let bridge = fs::canonicalize(path).ok()?.parent()?.to_owned();
    bridge.join("reset_subordinate").exists().then_some(bridge)
}

/// Returns all functions below a bridge, at any depth.
fn functions_below(bridge: &Path) -> io::Result<Vec<Bdf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(bridge)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().parse::<Bdf>();
        if let (Ok(address), true) = (name, entry.file_type()?.is_dir()) {
            found.push(address);
            found.extend(functions_below(&entry.path())?);
        }
    }
    Ok(found)
}

fn write(file: &Path) -> io::Result<()> {
    fs::write(file, "1")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
    const OTHER: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 1 };

    /// A device below a bridge whose vendor id reads as told; `reset` cannot be written.
    fn sysfs(vendor: [u8; 2]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let bridge = root.path().join("sys/devices/pci0000:00/0000:00:02.0");
        let path = bridge.join(DEVICE.to_string());
        fs::create_dir_all(&path).expect("made");
        fs::write(bridge.join("reset_subordinate"), "").expect("written");
        fs::write(path.join("config"), vendor).expect("written");
        fs::write(path.join("resource"), "").expect("written");
        fs::write(path.join("reset"), "").expect("written");
        let list = root.path().join("sys/bus/pci/devices");
        fs::create_dir_all(&list).expect("made");
        symlink(&path, list.join(DEVICE.to_string())).expect("linked");
        root
    }

    fn asked(root: &Path) -> String {
        let bridge = root.join("sys/devices/pci0000:00/0000:00:02.0");
        fs::read_to_string(bridge.join("reset_subordinate")).expect("read")
    }

    #[test]
    fn a_device_that_answers_was_reset() {
        let root = sysfs([0xde, 0x10]);
        let recovered = reset(root.path(), DEVICE, 0x10de, &[DEVICE]).expect("reset");
        assert_eq!(recovered.rung, Rung::Function);
        let written = fs::read_to_string(device_path(root.path(), DEVICE).join("reset"));
        assert_eq!(written.expect("read"), "1");
        assert_eq!(asked(root.path()), "");
    }

    #[test]
    fn a_gpu_of_nvidias_is_reset_with_its_bus_where_nobody_else_is_on_it() {
        let root = sysfs([0xde, 0x10]);
        fs::write(device_path(root.path(), DEVICE).join("class"), "0x030200\n").expect("written");
        let recovered = reset(root.path(), DEVICE, NVIDIA, &[DEVICE]).expect("reset");
        assert_eq!(recovered.rung, Rung::Bus);
        let alone = reset(root.path(), DEVICE, NVIDIA, &[]).expect("reset");
        assert_eq!(alone.rung, Rung::Function, "what is beside it may be somebody's");
    }

    #[test]
    fn a_silent_device_is_reset_with_its_bus_and_named_when_it_stays_silent() {
        let root = sysfs([0xff, 0xff]);
        let gone = reset(root.path(), DEVICE, 0x10de, &[DEVICE]).expect_err("gone");
        assert!(matches!(gone, AssignError::Gone { seen: 0xffff, .. }), "{gone}");
        assert_eq!(asked(root.path()), "1");
    }

    #[test]
    fn a_device_that_forgot_where_it_is_is_enumerated_anew() {
        let root = sysfs([0xde, 0x10]);
        let bridge = root.path().join("sys/devices/pci0000:00/0000:00:02.0");
        let path = bridge.join(DEVICE.to_string());
        let resources = "0x00000000fe000000 0x00000000feffffff 0x0000000000040200\n";
        fs::write(path.join("resource"), resources).expect("written");
        fs::write(path.join("config"), [&[0xde, 0x10][..], &[0; 62]].concat()).expect("written");
        fs::create_dir_all(bridge.join("pci_bus/0000:01")).expect("made");
        let serial = root.path().join("run/holdfast/drives").join(DEVICE.to_string());
        fs::create_dir_all(serial.parent().expect("a parent")).expect("made");
        fs::write(&serial, "S1").expect("written");
        // Nothing is found: what is in the files stays as it is.
        let lost = reset(root.path(), DEVICE, 0x10de, &[]).expect_err("still lost");
        assert!(matches!(lost, AssignError::Forgotten { bar: 0, seen: 0, .. }), "{lost}");
        assert!(!serial.exists(), "another may be in its place");
        for file in [path.join("remove"), bridge.join("pci_bus/0000:01/rescan")] {
            assert_eq!(fs::read_to_string(file).expect("written"), "1");
        }
        let probing = fs::read_to_string(root.path().join("sys/bus/pci/drivers_autoprobe"));
        assert_eq!(probing.expect("read"), "1");
        assert!(!root.path().join(TAKEN_OUT).exists(), "it was looked for");
        // One that is gone would not be found again.
        fs::remove_file(path.join("remove")).expect("removed");
        fs::write(path.join("config"), [0xff; 64]).expect("written");
        assert!(reset(root.path(), DEVICE, 0x10de, &[]).is_err());
        assert!(!path.join("remove").exists());
    }

    #[test]
    fn what_is_not_whole_is_reset_before_a_machine_gets_it() {
        let root = sysfs([0xde, 0x10]);
        let path = device_path(root.path(), DEVICE);
        assert!(matches!(
            make_whole(root.path(), DEVICE, &[DEVICE]),
            Err(AssignError::Absent { .. })
        ));
        for (file, text) in [("vendor", "0x10de"), ("device", "0x2335"), ("class", "0x010802")] {
            fs::write(path.join(file), text).expect("written");
        }
        let serial = root.path().join("run/holdfast/drives").join(DEVICE.to_string());
        fs::create_dir_all(serial.parent().expect("a parent")).expect("made");
        fs::write(&serial, "S1").expect("written");
        make_whole(root.path(), DEVICE, &[DEVICE]).expect("it is");
        let reset = || fs::read_to_string(path.join("reset")).expect("read");
        assert_eq!((reset(), lent::is_lent(root.path(), DEVICE)), (String::new(), false));

        // Its link was reset by somebody else, and here nothing brings it back.
        let resources = "0x00000000fe000000 0x00000000feffffff 0x0000000000040200\n";
        fs::write(path.join("resource"), resources).expect("written");
        fs::write(path.join("config"), [&[0xde, 0x10][..], &[0; 62]].concat()).expect("written");
        let failed = make_whole(root.path(), DEVICE, &[DEVICE]).expect_err("it is not");
        let AssignError::NotWhole { source, .. } = failed else { panic!("{failed}") };
        assert!(matches!(*source, AssignError::Enumerate { .. }), "{source}");
        assert!(root.path().join(TAKEN_OUT).exists(), "the next agent looks for it");
        assert_eq!(reset(), "1");
        let noted = root.path().join("state/lent-drives/0000:01:00.0-5331");
        assert!(noted.exists() && !serial.exists(), "by what it told before");

        fs::write(path.join("config"), [0xff; 64]).expect("written");
        make_whole(root.path(), DEVICE, &[DEVICE, OTHER]).expect_err("it fell off the bus");
        assert_eq!(asked(root.path()), "1", "nobody uses what else is below");
    }

    #[test]
    fn a_device_that_the_kernel_does_not_know_is_looked_for() {
        let root = sysfs([0xde, 0x10]);
        fs::remove_file(device_path(root.path(), DEVICE)).expect("removed");
        let gone = reset(root.path(), DEVICE, 0x10de, &[DEVICE]).expect_err("not found");
        assert!(matches!(gone, AssignError::Absent { .. }), "{gone}");
        let read = |file: &str| fs::read_to_string(root.path().join(file)).expect("written");
        assert_eq!([RESCAN, PROBING].map(read), ["1", "1"]);
        // An agent that died left it so.
        fs::write(root.path().join(PROBING), "0").expect("written");
        with_drivers(root.path()).expect("restored");
        assert_eq!(read(PROBING), "1");
    }

    #[test]
    fn what_an_agent_took_out_before_it_died_is_looked_for() {
        let root = testing::root(&[(PROBING, b"1"), (RESCAN, b"")]);
        let root = root.path();
        let read = |file: &str| fs::read_to_string(root.join(file)).expect("there");
        find_taken_out(root).expect("nothing was");
        assert_eq!(read(RESCAN), "");
        let mark = root.join(TAKEN_OUT);
        fs::create_dir_all(mark.parent().expect("a parent")).expect("made");
        fs::write(&mark, "").expect("written");
        find_taken_out(root).expect("looked for");
        assert_eq!([RESCAN, PROBING].map(read), ["1", "1"]);
        assert!(!mark.exists(), "it is looked for once");
    }

    #[test]
    fn a_reset_that_fails_goes_on_with_the_bus() {
        let root = sysfs([0xde, 0x10]);
        let own = device_path(root.path(), DEVICE).join("reset");
        fs::remove_file(&own).expect("removed");
        fs::create_dir(&own).expect("made: cannot be written");
        let recovered = reset(root.path(), DEVICE, 0x10de, &[DEVICE]).expect("reset");
        assert_eq!(recovered.rung, Rung::Bus);
    }

    #[test]
    fn one_that_is_gone_is_called_that_although_its_reset_failed() {
        let root = sysfs([0xff, 0xff]);
        let own = device_path(root.path(), DEVICE).join("reset");
        fs::remove_file(&own).expect("removed");
        fs::create_dir(&own).expect("made: cannot be written");
        let gone = reset(root.path(), DEVICE, 0x10de, &[]).expect_err("gone");
        assert!(matches!(gone, AssignError::Gone { seen: 0xffff, .. }), "{gone}");
    }

    #[test]
    fn devices_that_are_looked_for_at_once_get_no_driver() {
        let root = testing::root(&[(PROBING, b"1")]);
        let root = root.path();
        let probing = || fs::read_to_string(root.join(PROBING));
        let look = || {
            without_drivers(root, || {
                let seen: io::Result<String> = (0..64).map(|_| probing()).collect();
                assert_eq!(seen?, "0".repeat(64));
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            let looks = [0; 8].map(|_| scope.spawn(look));
            looks.into_iter().for_each(|done| done.join().expect("no panic").expect("done"));
        });
        assert_eq!(probing().expect("read"), "1");
    }

    #[test]
    fn no_rung_is_begun_that_nobody_waits_for() {
        let last = RESET_LIMIT.saturating_sub(KERNEL_WAIT);
        // After a reset of the function, and of its bus by the kernel.
        assert!(is_in_time(2 * KERNEL_WAIT) && is_in_time(last));
        assert!(!is_in_time(last + Duration::from_millis(1)));
    }

    #[test]
    fn somebody_elses_function_below_the_bridge_is_left_alone() {
        let root = sysfs([0xff, 0xff]);
        let bridge = root.path().join("sys/devices/pci0000:00/0000:00:02.0");
        fs::create_dir(bridge.join(OTHER.to_string())).expect("made");
        assert_eq!(beside(root.path(), DEVICE), [OTHER]);
        assert!(reset(root.path(), DEVICE, 0x10de, &[DEVICE]).is_err());
        assert_eq!(asked(root.path()), "");
        assert!(reset(root.path(), DEVICE, 0x10de, &[DEVICE, OTHER]).is_err());
        assert_eq!(asked(root.path()), "1");
    }
}
