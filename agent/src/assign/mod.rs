//! Hands PCI devices to machines and takes them back: vfio-pci through `driver_override`, whole
//! groups at a time, reset with a deadline, drives erased. `inventory::rules` decides which.
//! Source: Documentation/ABI/testing/sysfs-bus-pci, Documentation/driver-api/vfio.rst.

mod answers;
pub mod cliques;
pub mod erase;
mod interface;
mod ladder;
pub mod lent;

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

pub use answers::check_answers;
pub use erase::{ERASE_LIMIT, EraseError, Erased};
pub use interface::{Handover, Peers, hand_over, interface, open_one};
pub use ladder::{Recovered, Rung, beside, find_taken_out, make_whole, reset, with_drivers};
use types::node::Bdf;

/// The driver that hands devices to user space.
const DRIVER: &str = "vfio-pci";

/// Longest that the kernel waits for a device after one kind of reset: it doubles its pauses until their sum is
/// over 60 s (`pci_dev_wait` in drivers/pci/pci.c).
const KERNEL_WAIT: Duration = Duration::from_secs(66);

/// A device that takes longer to reset does not come back: the kernel waits once for a function-level reset,
/// once for that of its bus, before or after the first, and once for what the ladder does then.
pub const RESET_LIMIT: Duration = Duration::from_secs(3 * KERNEL_WAIT.as_secs() + 12);

/// Why a device could not be handed over or taken back.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AssignError {
    #[error("cannot set the driver of {device} to {driver}")]
    Override { device: Bdf, driver: &'static str, source: io::Error },
    #[error("cannot unbind {device} from {driver}")]
    Unbind { device: Bdf, driver: String, source: io::Error },
    #[error("cannot bind {device} to {driver}")]
    Bind { device: Bdf, driver: &'static str, source: io::Error },
    #[error("{device} has no VFIO character device; is it bound to {DRIVER}?")]
    NoCharacterDevice { device: Bdf },
    #[error("cannot open {path} of {device}")]
    Open { device: Bdf, path: String, source: io::Error },
    #[error("{device} was not reset")]
    Reset { device: Bdf, source: io::Error },
    #[error("{device} did not come back from its reset within {} s", RESET_LIMIT.as_secs())]
    ResetLate { device: Bdf },
    #[error(
        "{device} reads {seen:#06x} as its vendor instead of {expected:#06x}: it fell off the bus"
    )]
    Gone { device: Bdf, seen: u16, expected: u16 },
    #[error(
        "{device} is not there any more: it was unplugged or has no power; once it is back, \
         `holdfast node release-device NODE {device}` has it looked for"
    )]
    Absent { device: Bdf },
    #[error(
        "{device} has its BAR {bar} at {seen:#x} instead of {expected:#x}: without power, or in a reset by somebody \
         else, it lost its configuration; `holdfast node release-device NODE {device}` configures it anew"
    )]
    Forgotten { device: Bdf, bar: usize, seen: u64, expected: u64 },
    #[error(
        "{device} is not whole, and could not be made so: its machine does not get it like that; it is tried again \
         when that starts, and once more when its lease is over"
    )]
    NotWhole { device: Bdf, source: Box<AssignError> },
    #[error("{device} was not found by its bus again")]
    Enumerate { device: Bdf, source: io::Error },
    #[error(
        "{device} still holds what its last renter wrote, and nobody else gets it so: mend or replace the \
         drive, then `holdfast node release-device NODE {device}` erases and offers it; it was not erased \
         because"
    )]
    NotErased { device: Bdf, source: EraseError },
}

/// Binds every device of `group` to vfio-pci: first all are taken from their drivers, then all
/// are bound, so that the group is never split between host and tenant.
pub fn bind_group(root: &Path, group: &[Bdf]) -> Result<(), AssignError> {
    bind(root, group, DRIVER)
}

fn bind(root: &Path, group: &[Bdf], driver: &'static str) -> Result<(), AssignError> {
    for device in group {
        let device = *device;
        let path = device_path(root, device);
        fs::write(path.join("driver_override"), driver)
            .map_err(|source| AssignError::Override { device, driver, source })?;
        if let Some(driver) = driver_of(&path).filter(|bound| bound != driver) {
            fs::write(path.join("driver/unbind"), device.to_string())
                .map_err(|source| AssignError::Unbind { device, driver, source })?;
        }
    }
    for device in group {
        let device = *device;
        if driver_of(&device_path(root, device)).as_deref() == Some(driver) {
            continue;
        }
        fs::write(root.join("sys/bus/pci/drivers_probe"), device.to_string())
            .map_err(|source| AssignError::Bind { device, driver, source })?;
        if driver_of(&device_path(root, device)).as_deref() != Some(driver) {
            let source = io::Error::other("the kernel bound no driver");
            return Err(AssignError::Bind { device, driver, source });
        }
    }
    Ok(())
}

/// Opens a bound device's character device.
pub fn open(root: &Path, device: Bdf) -> Result<OwnedFd, AssignError> {
    let directory = device_path(root, device).join("vfio-dev");
    let name = fs::read_dir(directory).ok().and_then(|mut entries| entries.next()?.ok());
    let name = name.ok_or(AssignError::NoCharacterDevice { device })?.file_name();
    let path = root.join("dev/vfio/devices").join(name);
    let file = File::options().read(true).write(true).open(&path);
    file.map(OwnedFd::from).map_err(|source| AssignError::Open {
        device,
        path: path.display().to_string(),
        source,
    })
}

/// Returns the NUMA node of a device, where the firmware tells one.
pub fn node_of(root: &Path, device: Bdf) -> Option<u32> {
    let text = fs::read_to_string(device_path(root, device).join("numa_node")).ok()?;
    // -1 stands for none.
    text.trim().parse().ok()
}

/// Returns vendor and device id, and the class code, as the kernel read them.
pub fn identity(root: &Path, device: Bdf) -> Option<((u16, u16), u32)> {
    let number = |name: &str| {
        let text = fs::read_to_string(device_path(root, device).join(name)).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    let half = |name| u16::try_from(number(name)?).ok();
    Some(((half("vendor")?, half("device")?), number("class")?))
}

/// Returns the class code of a device.
fn class_of(root: &Path, device: Bdf) -> Option<u32> {
    let text = fs::read_to_string(device_path(root, device).join("class")).ok()?;
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

fn device_path(root: &Path, device: Bdf) -> PathBuf {
    root.join("sys/bus/pci/devices").join(device.to_string())
}

fn driver_of(path: &Path) -> Option<String> {
    Some(fs::read_link(path.join("driver")).ok()?.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };

    #[test]
    fn a_device_without_driver_is_named() {
        let root = tempfile::tempdir().expect("a directory");
        let missing = open(root.path(), DEVICE).expect_err("no vfio-dev");
        assert!(matches!(missing, AssignError::NoCharacterDevice { device: DEVICE }));
    }
}
