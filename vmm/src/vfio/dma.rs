//! What devices reach, at the same addresses as the guest: all of its memory, and, in a set of
//! devices that ask for it, each other's BARs.
//! Source: linux/iommufd.h, IOMMU_IOAS_IOVA_RANGES and IOMMU_IOAS_MAP.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use super::{
    bars::{Part, Slots},
    device::{Area, Device},
};
use crate::{
    holes::Holes,
    sys::memory::{Mapping, Ram, RamRegion},
};

/// Addresses from `start` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IovaRange {
    /// First address.
    pub start: u64,
    /// Last address.
    pub last: u64,
}

impl fmt::Display for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..={:#x}", self.start, self.last)
    }
}

/// Why guest memory cannot be given to devices.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DmaError {
    #[error("cannot ask the IOMMU which addresses devices can use")]
    Ranges { source: io::Error },
    #[error(
        "guest memory at {memory} includes {reserved}, which the host's IOMMU keeps for itself or \
         cannot reach; a machine with less memory ends below it"
    )]
    Reserved { memory: IovaRange, reserved: IovaRange },
    #[error(
        "cannot pin guest memory at {memory} for devices: the limit on locked memory \
         (RLIMIT_MEMLOCK) is {limit} bytes and the machine has {needed}, or the host is out of memory"
    )]
    LockedMemory { memory: IovaRange, limit: u64, needed: u64, source: io::Error },
    #[error("cannot map guest memory at {memory} for devices")]
    Map { memory: IovaRange, source: io::Error },
}

/// A mapped part of a BAR that other devices are to reach.
#[derive(Debug, Clone, Copy)]
pub struct PeerArea<'a> {
    /// The BAR.
    pub bar: u8,
    /// Which part of it.
    pub area: Area,
    /// The same part as this process has it mapped.
    pub mapping: &'a Mapping,
    /// Where it goes.
    pub guest: u64,
}

/// What an address space for devices offers. The real ones are in `sys::iommu`.
pub trait AddressSpace: Send + Sync {
    /// Returns the addresses that all attached devices can use.
    fn usable(&self) -> io::Result<Vec<IovaRange>>;

    /// Pins the memory of `region`, which lies in `file`, and maps it at its guest address.
    fn map(&self, region: &RamRegion, file: BorrowedFd<'_>) -> io::Result<()>;

    /// Maps part of a BAR of `device` for the other devices. [`io::ErrorKind::Unsupported`] says that
    /// this part cannot be had and no harm is done: iommufd takes whole pages, and a BAR of a few registers
    /// is smaller.
    fn map_peer(&self, device: &dyn Device, area: &PeerArea<'_>) -> io::Result<()>;

    /// Undoes a mapping.
    fn unmap(&self, guest: u64, size: u64) -> io::Result<()>;

    /// Returns whether [`Self::map_peer`] is possible with this kernel.
    fn reaches_peers(&self, device: &dyn Device) -> io::Result<()>;

    /// Returns how much memory may be locked, in bytes.
    fn lock_limit(&self) -> u64;
}

/// Returns where guest memory and BARs must not lie. The devices must be attached, so that their
/// reserved addresses are known.
pub fn holes(space: &dyn AddressSpace) -> Result<Holes, DmaError> {
    let usable = space.usable().map_err(|source| DmaError::Ranges { source })?;
    Ok(Holes::outside(&usable))
}

/// Maps all of `ram`, each region in one piece. What is mapped already stays: a container forgets
/// everything when its last device leaves (`vfio_iommu_type1_detach_group`), an iommufd nothing.
pub fn map_ram(space: &dyn AddressSpace, ram: &Ram) -> Result<(), DmaError> {
    map_regions(space, &ram.regions, ram.file.as_fd())
}

fn map_regions(
    space: &dyn AddressSpace,
    ram: &[RamRegion],
    file: BorrowedFd<'_>,
) -> Result<(), DmaError> {
    let holes = holes(space)?;
    let needed = ram.iter().map(|region| region.size).sum();
    for region in ram.iter().filter(|region| region.size > 0) {
        let memory = IovaRange { start: region.address, last: region.address + (region.size - 1) };
        if let Some(hole) = holes.first_within(memory.start, memory.last) {
            let reserved =
                IovaRange { start: hole.start.max(memory.start), last: hole.last.min(memory.last) };
            return Err(DmaError::Reserved { memory, reserved });
        }
        space.map(region, file).or_else(|source| match source.raw_os_error() {
            Some(libc::EEXIST) => Ok(()),
            Some(libc::ENOMEM) => {
                let limit = space.lock_limit();
                Err(DmaError::LockedMemory { memory, limit, needed, source })
            }
            Some(_) | None => Err(DmaError::Map { memory, source }),
        })?;
    }
    Ok(())
}

/// Gives mapped parts of BARs to the guest, and to the other devices of the machine.
pub struct PeerSlots {
    /// Gives them to the guest.
    pub guest: Box<dyn Slots>,
    /// What all devices reach.
    pub space: Arc<dyn AddressSpace>,
    /// Whose BARs they are.
    pub device: Arc<dyn Device>,
}

impl Slots for PeerSlots {
    fn map(&self, guest: u64, part: &Part) -> io::Result<Box<dyn Send>> {
        let slot = self.guest.map(guest, part)?;
        let area = PeerArea { bar: part.bar, area: part.area, mapping: &part.mapping, guest };
        match self.space.map_peer(&*self.device, &area) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(slot),
            Err(error) => {
                let reason = format!("other devices cannot be given it: {error}");
                return Err(io::Error::other(reason));
            }
        }
        let reached = Reached { space: Arc::clone(&self.space), guest, size: part.area.size };
        // The devices lose it before the guest does.
        Ok(Box::new((reached, slot)))
    }
}

/// Part of a BAR that other devices reach until this is dropped.
struct Reached {
    space: Arc<dyn AddressSpace>,
    guest: u64,
    size: u64,
}

impl Drop for Reached {
    fn drop(&mut self) {
        if let Err(error) = self.space.unmap(self.guest, self.size) {
            eprintln!("devices still reach {:#x} bytes at {:#x}: {error}", self.size, self.guest);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::vfio::fake::FakeDevice;

    #[derive(Default)]
    pub(crate) struct Space {
        usable: Vec<IovaRange>,
        mapped: Mutex<Vec<(u64, u64)>>,
        error: Option<i32>,
    }

    impl AddressSpace for Space {
        fn usable(&self) -> io::Result<Vec<IovaRange>> {
            Ok(self.usable.clone())
        }

        fn map(&self, region: &RamRegion, _file: BorrowedFd<'_>) -> io::Result<()> {
            if let Some(error) = self.error {
                return Err(io::Error::from_raw_os_error(error));
            }
            let (place, mut mapped) = ((region.address, region.size), self.mapped.lock());
            let mapped = mapped.as_mut().expect("one thread");
            if mapped.contains(&place) {
                return Err(io::Error::from_raw_os_error(libc::EEXIST));
            }
            mapped.push(place);
            Ok(())
        }

        fn map_peer(&self, _device: &dyn Device, area: &PeerArea<'_>) -> io::Result<()> {
            self.mapped.lock().expect("one thread").push((area.guest, area.area.size));
            Ok(())
        }

        fn unmap(&self, guest: u64, size: u64) -> io::Result<()> {
            self.mapped.lock().expect("one thread").retain(|place| *place != (guest, size));
            Ok(())
        }

        fn reaches_peers(&self, _device: &dyn Device) -> io::Result<()> {
            Ok(())
        }

        fn lock_limit(&self) -> u64 {
            65536
        }
    }

    fn map_ram(space: &Space, ram: &[RamRegion]) -> Result<(), DmaError> {
        map_regions(space, ram, std::io::stdin().as_fd())
    }

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange { start, last }
    }

    fn region(address: u64, size: u64) -> RamRegion {
        RamRegion { address, size, offset: 0, host_address: 0 }
    }

    /// What x86 hosts report: everything but the window of message-signalled interrupts.
    fn x86() -> Vec<IovaRange> {
        vec![range(0, 0xfedf_ffff), range(0xfef0_0000, u64::MAX)]
    }

    #[test]
    fn memory_around_the_gap_is_mapped_in_whole_regions() {
        let space = Space { usable: x86(), ..Space::default() };
        let ram = [region(0, 0xc000_0000), region(0x1_0000_0000, 0x4000_0000)];
        map_ram(&space, &ram).expect("usable");
        let mapped = space.mapped.lock().expect("one thread").clone();
        assert_eq!(mapped, [(0, 0xc000_0000), (0x1_0000_0000, 0x4000_0000)]);
    }

    #[test]
    fn memory_is_mapped_again_where_it_is_not_any_more() {
        let space = Space { usable: x86(), ..Space::default() };
        let ram = [region(0, 0xc000_0000), region(0x1_0000_0000, 0x4000_0000)];
        map_ram(&space, &ram[..1]).expect("usable");
        map_ram(&space, &ram).expect("the rest");
        assert_eq!(space.mapped.lock().expect("one thread").len(), 2);
        space.mapped.lock().expect("one thread").clear();
        map_ram(&space, &ram).expect("all");
        assert_eq!(space.mapped.lock().expect("one thread").len(), 2);
    }

    #[test]
    fn memory_on_reserved_addresses_is_refused_with_both() {
        // The hypertransport range of AMD hosts, just below 1 TiB.
        let usable = vec![range(0, 0xfc_ffff_ffff), range(0x100_0000_0000, u64::MAX)];
        let space = Space { usable, ..Space::default() };
        let error = map_ram(&space, &[region(0x1_0000_0000, 0x100_0000_0000)]).expect_err("gap");
        let DmaError::Reserved { memory, reserved } = error else { panic!("{error}") };
        assert_eq!(memory, range(0x1_0000_0000, 0x100_ffff_ffff));
        assert_eq!(reserved, range(0xfd_0000_0000, 0xff_ffff_ffff));
    }

    #[test]
    fn memory_beyond_the_last_usable_address_is_refused() {
        let space = Space { usable: vec![range(0, 0x7f_ffff_ffff)], ..Space::default() };
        let error = map_ram(&space, &[region(0x70_0000_0000, 0x20_0000_0000)]).expect_err("gap");
        let DmaError::Reserved { reserved, .. } = error else { panic!("{error}") };
        assert_eq!(reserved, range(0x80_0000_0000, 0x8f_ffff_ffff));
    }

    #[test]
    fn without_usable_addresses_nothing_fits() {
        let space = Space::default();
        assert!(matches!(map_ram(&space, &[region(0, 4096)]), Err(DmaError::Reserved { .. })));
    }

    #[test]
    fn adjoining_ranges_are_one() {
        let space =
            Space { usable: vec![range(0x1000, 0x1fff), range(0, 0xfff)], ..Space::default() };
        map_ram(&space, &[region(0, 0x2000)]).expect("usable");
    }

    #[test]
    fn short_memory_names_the_limit() {
        let error = Some(libc::ENOMEM);
        let space = Space { usable: x86(), error, ..Space::default() };
        let refusal = map_ram(&space, &[region(0, 1 << 30)]).expect_err("short");
        assert!(matches!(
            refusal,
            DmaError::LockedMemory { limit: 65536, needed: 0x4000_0000, .. }
        ));
    }

    /// A guest whose slots are only counted.
    struct Guest;

    impl Slots for Guest {
        fn map(&self, _guest: u64, _part: &Part) -> io::Result<Box<dyn Send>> {
            Ok(Box::new(()))
        }
    }

    #[test]
    fn peers_reach_a_bar_where_the_guest_has_it_and_as_long() {
        let device: Arc<dyn Device> = Arc::new(FakeDevice::nvme());
        let space = Arc::new(Space { usable: x86(), ..Space::default() });
        let area = Area { offset: 0x1000, size: 0x1000 };
        let mapping = device.map(0, area, 0x4000).expect("mapped");
        let shared: Arc<dyn AddressSpace> = Arc::<Space>::clone(&space);
        let slots = PeerSlots { guest: Box::new(Guest), space: shared, device };
        let held = slots.map(0x8000_1000, &Part { bar: 0, area, mapping }).expect("reached");
        assert_eq!(*space.mapped.lock().expect("one thread"), [(0x8000_1000, 0x1000)]);
        drop(held);
        assert_eq!(*space.mapped.lock().expect("one thread"), []);
    }
}
