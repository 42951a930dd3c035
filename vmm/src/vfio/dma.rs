//! Guest memory as devices reach it: at the same addresses as the guest, all of it, and nothing
//! else. Peer-to-peer access between BARs is not mapped.
//! Source: linux/iommufd.h, IOMMU_IOAS_IOVA_RANGES and IOMMU_IOAS_MAP.

use std::{fmt, io};

use crate::sys::memory::RamRegion;

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

/// What an address space for devices offers. The real one is `sys::vfio::Iommufd`.
pub trait AddressSpace {
    /// Returns the addresses that all attached devices can use.
    fn usable(&self) -> io::Result<Vec<IovaRange>>;

    /// Pins the memory of `region` and maps it at its guest address.
    fn map(&self, region: &RamRegion) -> io::Result<()>;

    /// Returns how much memory may be locked, in bytes.
    fn lock_limit(&self) -> u64;
}

/// Maps all of `ram`. The devices must be attached, so that their reserved addresses are known.
pub fn map_ram(space: &dyn AddressSpace, ram: &[RamRegion]) -> Result<(), DmaError> {
    let usable = space.usable().map_err(|source| DmaError::Ranges { source })?;
    let needed = ram.iter().map(|region| region.size).sum();
    for region in ram.iter().filter(|region| region.size > 0) {
        let memory = IovaRange { start: region.address, last: region.address + (region.size - 1) };
        if let Some(reserved) = first_gap(&usable, memory) {
            return Err(DmaError::Reserved { memory, reserved });
        }
        space.map(region).map_err(|source| {
            if source.raw_os_error() == Some(libc::ENOMEM) {
                DmaError::LockedMemory { memory, limit: space.lock_limit(), needed, source }
            } else {
                DmaError::Map { memory, source }
            }
        })?;
    }
    Ok(())
}

/// Returns the first stretch of `memory` that lies in none of the `usable` ranges.
fn first_gap(usable: &[IovaRange], memory: IovaRange) -> Option<IovaRange> {
    let mut sorted = usable.to_vec();
    sorted.sort_unstable_by_key(|range| range.start);
    let mut next = memory.start;
    for range in sorted.iter().filter(|range| range.last >= memory.start) {
        if range.start > next {
            return Some(IovaRange { start: next, last: memory.last.min(range.start - 1) });
        }
        match range.last.checked_add(1) {
            Some(behind) if behind <= memory.last => next = next.max(behind),
            Some(_) | None => return None,
        }
    }
    Some(IovaRange { start: next, last: memory.last })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Space {
        usable: Vec<IovaRange>,
        mapped: Mutex<Vec<(u64, u64)>>,
        error: Option<i32>,
    }

    impl AddressSpace for Space {
        fn usable(&self) -> io::Result<Vec<IovaRange>> {
            Ok(self.usable.clone())
        }

        fn map(&self, region: &RamRegion) -> io::Result<()> {
            if let Some(error) = self.error {
                return Err(io::Error::from_raw_os_error(error));
            }
            self.mapped.lock().expect("one thread").push((region.address, region.size));
            Ok(())
        }

        fn lock_limit(&self) -> u64 {
            65536
        }
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
}
