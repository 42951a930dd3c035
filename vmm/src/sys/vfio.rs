//! VFIO character devices and iommufd: the ioctls behind `vfio::device::Device` and
//! `vfio::dma::AddressSpace`. The crates' own device type reports neither a failed reset nor a
//! failed register access, so those calls are made here.
//! Source: linux/vfio.h, linux/iommufd.h.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    sync::Arc,
};

use iommufd_bindings::iommufd::{
    iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map, iommu_iova_range,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
};
use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_NORESIZE,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_MMAP,
    vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_device_info, vfio_irq_info,
};

use super::memory::{Access, Alignment, Mapping, RamRegion};
use crate::vfio::{
    device::{Area, Device, IrqInfo, IrqKind, Region, RegionInfo},
    dma::{AddressSpace, IovaRange},
};

/// All requests of both interfaces are `_IO(';', number)`.
const fn request(number: u8) -> libc::c_ulong {
    0x3b00 | number as libc::c_ulong
}

const GET_INFO: libc::c_ulong = request(107);
const GET_REGION_INFO: libc::c_ulong = request(108);
const GET_IRQ_INFO: libc::c_ulong = request(109);
const SET_IRQS: libc::c_ulong = request(110);
const RESET: libc::c_ulong = request(111);
const PCI_HOT_RESET: libc::c_ulong = request(113);
const BIND_IOMMUFD: libc::c_ulong = request(118);
const ATTACH_IOMMUFD_PT: libc::c_ulong = request(119);
const IOAS_IOVA_RANGES: libc::c_ulong = request(132);

/// Regions that a device can have are BARs 0..=5, ROM, configuration space.
const CONFIG_REGION: u32 = 7;
/// Size of `struct vfio_region_info`, behind which its capabilities lie.
const REGION_INFO_SIZE: usize = 32;
/// Most bytes of region information that are taken from the kernel.
const REGION_INFO_MAX: usize = 1 << 16;
/// Most usable address ranges that are taken from the kernel.
const RANGES_MAX: u32 = 1 << 12;
/// Most descriptors in one call: all vectors of MSI-X.
const TRIGGERS_MAX: usize = 2048;

/// Takes ownership of a descriptor that the machine's specification names.
pub(crate) fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD takes no pointer; a number that is not open is answered by EBADF.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and the specification gives each one to one owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// One address space of an iommufd.
pub struct Iommufd {
    fd: IommuFd,
    raw: RawFd,
    ioas: u32,
}

impl Iommufd {
    /// Makes an empty address space in an open `/dev/iommu`.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let raw = file.as_raw_fd();
        let fd = IommuFd::new_from_fd(file);
        let mut alloc =
            iommu_ioas_alloc { size: size_of_32::<iommu_ioas_alloc>(), ..Default::default() };
        fd.alloc_iommu_ioas(&mut alloc).map_err(|error| os_error(&error))?;
        Ok(Self { fd, raw, ioas: alloc.out_ioas_id })
    }

    fn ranges(&self, room: u32) -> Result<Vec<iommu_iova_range>, (io::Error, u32)> {
        let mut ranges = vec![iommu_iova_range::default(); room as usize];
        let mut query = iommu_ioas_iova_ranges {
            size: size_of_32::<iommu_ioas_iova_ranges>(),
            ioas_id: self.ioas,
            num_iovas: room,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: the structure has the announced size, and the array room for the announced
        // number of ranges, for the whole call.
        let ret = unsafe { libc::ioctl(self.raw, IOAS_IOVA_RANGES, &mut query) };
        if ret < 0 {
            return Err((io::Error::last_os_error(), query.num_iovas));
        }
        ranges.truncate(query.num_iovas as usize);
        Ok(ranges)
    }
}

impl AddressSpace for Iommufd {
    fn usable(&self) -> io::Result<Vec<IovaRange>> {
        let ranges = match self.ranges(64) {
            Err((error, needed))
                if error.raw_os_error() == Some(libc::EMSGSIZE) && needed <= RANGES_MAX =>
            {
                self.ranges(needed)
            }
            result => result,
        };
        let ranges = ranges.map_err(|(error, _)| error)?;
        Ok(ranges.iter().map(|r| IovaRange { start: r.start, last: r.last }).collect())
    }

    fn map(&self, region: &RamRegion) -> io::Result<()> {
        let map = iommu_ioas_map {
            size: size_of_32::<iommu_ioas_map>(),
            flags: iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
                | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
                | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
            ioas_id: self.ioas,
            user_va: region.host_address,
            length: region.size,
            iova: region.address,
            ..Default::default()
        };
        self.fd.map_iommu_ioas(&map).map_err(|error| os_error(&error))
    }

    fn lock_limit(&self) -> u64 {
        rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
    }
}

/// Returns the system's error inside an error of the crate.
fn os_error(error: &IommufdError) -> io::Error {
    let source = std::error::Error::source(error);
    match source.and_then(|source| source.downcast_ref::<vmm_sys_util::errno::Error>()) {
        Some(errno) => io::Error::from_raw_os_error(errno.errno()),
        None => io::Error::other(error.to_string()),
    }
}

/// A VFIO PCI device by its character device.
pub struct Cdev {
    file: File,
    flags: u32,
    regions: Vec<(u64, RegionInfo)>,
}

impl Cdev {
    /// Binds an open `/dev/vfio/devices/vfioN` to the iommufd. The kernel resets the device as it
    /// does so, which may take long.
    pub fn bind(fd: OwnedFd, space: BorrowedFd<'_>) -> io::Result<Self> {
        let file = File::from(fd);
        let mut bind = vfio_device_bind_iommufd {
            argsz: size_of_32::<vfio_device_bind_iommufd>(),
            iommufd: space.as_raw_fd(),
            ..Default::default()
        };
        call(&file, BIND_IOMMUFD, &mut bind)?;
        let mut info =
            vfio_device_info { argsz: size_of_32::<vfio_device_info>(), ..Default::default() };
        call(&file, GET_INFO, &mut info)?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 || info.num_regions <= CONFIG_REGION {
            return Err(io::Error::other("the descriptor is not that of a PCI device"));
        }
        let regions =
            (0..=CONFIG_REGION).map(|index| region(&file, index)).collect::<io::Result<_>>()?;
        Ok(Self { file, flags: info.flags, regions })
    }

    /// Lets the device reach what the address space maps.
    pub fn attach(&self, space: &Iommufd) -> io::Result<()> {
        let mut attach = vfio_device_attach_iommufd_pt {
            argsz: size_of_32::<vfio_device_attach_iommufd_pt>(),
            pt_id: space.ioas,
            ..Default::default()
        };
        call(&self.file, ATTACH_IOMMUFD_PT, &mut attach)
    }

    fn locate(&self, region: Region, offset: u64, length: usize) -> io::Result<u64> {
        let (start, info) = self.known(region)?;
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= info.size);
        if inside { Ok(start + offset) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    fn known(&self, region: Region) -> io::Result<&(u64, RegionInfo)> {
        let index = match region {
            Region::Bar(bar @ 0..=5) => usize::from(bar),
            Region::Bar(_) => return Err(io::ErrorKind::InvalidInput.into()),
            Region::Config => CONFIG_REGION as usize,
        };
        self.regions.get(index).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// `struct vfio_irq_set`: size, flags, index, start, count, then descriptors.
    fn set_irqs(&self, flags: u32, kind: IrqKind, start: u32, fds: &[i32]) -> io::Result<()> {
        let size = u32::try_from(20 + 4 * fds.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let count = u32::try_from(fds.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut set = vec![size, flags, index(kind), start, count];
        set.extend(fds.iter().map(|fd| fd.cast_unsigned()));
        // SAFETY: the buffer has the announced size; the kernel only reads it.
        let ret = unsafe { libc::ioctl(self.file.as_raw_fd(), SET_IRQS, set.as_ptr()) };
        if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Device for Cdev {
    fn region(&self, region: Region) -> io::Result<RegionInfo> {
        self.known(region).map(|(_, info)| info.clone())
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, self.locate(region, offset, data.len())?)
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.locate(region, offset, data.len())?)
    }

    fn irq(&self, kind: IrqKind) -> io::Result<IrqInfo> {
        let mut info = vfio_irq_info {
            argsz: size_of_32::<vfio_irq_info>(),
            index: index(kind),
            ..Default::default()
        };
        call(&self.file, GET_IRQ_INFO, &mut info)?;
        Ok(IrqInfo { count: info.count, growable: info.flags & VFIO_IRQ_INFO_NORESIZE == 0 })
    }

    fn set_triggers(
        &self,
        kind: IrqKind,
        first: u32,
        fds: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<()> {
        if fds.is_empty() || fds.len() > TRIGGERS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fds: Vec<i32> = fds.iter().map(|fd| fd.map_or(-1, |fd| fd.as_raw_fd())).collect();
        self.set_irqs(VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER, kind, first, &fds)
    }

    fn set_unmask(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_UNMASK;
        self.set_irqs(flags, IrqKind::Intx, 0, &[fd.as_raw_fd()])
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        self.set_irqs(VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER, kind, 0, &[])
    }

    fn reset(&self) -> io::Result<()> {
        if self.flags & VFIO_DEVICE_FLAGS_RESET != 0 {
            // SAFETY: VFIO_DEVICE_RESET takes no pointer, and the descriptor stays open.
            if unsafe { libc::ioctl(self.file.as_raw_fd(), RESET, 0) } == 0 {
                return Ok(());
            }
        }
        // `struct vfio_pci_hot_reset`: size, flags, count. Without groups the kernel checks that
        // the bus holds nothing but devices of our iommufd, and resets the bus.
        let mut order: [u32; 3] = [12, 0, 0];
        call(&self.file, PCI_HOT_RESET, &mut order)
    }

    fn map(&self, bar: u8, area: Area, modulus: u64) -> io::Result<Arc<Mapping>> {
        let size = usize::try_from(area.size).map_err(|_| io::ErrorKind::InvalidInput)?;
        let offset = self.locate(Region::Bar(bar), area.offset, size)?;
        let modulus = usize::try_from(modulus).map_err(|_| io::ErrorKind::InvalidInput)?;
        let residue =
            usize::try_from(area.offset).map_err(|_| io::ErrorKind::InvalidInput)? % modulus;
        let alignment = Alignment { modulus, residue };
        Mapping::of_file(self.file.as_fd(), offset, size, Access::ReadWrite, alignment)
            .map(Arc::new)
    }
}

impl AsFd for Iommufd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `fd` owns the descriptor and lives as long as the result.
        unsafe { BorrowedFd::borrow_raw(self.raw) }
    }
}

fn index(kind: IrqKind) -> u32 {
    match kind {
        IrqKind::Intx => 0,
        IrqKind::Msi => 1,
        IrqKind::Msix => 2,
    }
}

/// Returns where a region starts in the device's file, and what it is like.
fn region(file: &File, index: u32) -> io::Result<(u64, RegionInfo)> {
    let mut buffer = region_info(file, index, REGION_INFO_SIZE)?;
    let wanted = dword(&buffer, 0) as usize;
    if wanted > buffer.len() && wanted <= REGION_INFO_MAX {
        buffer = region_info(file, index, wanted)?;
    }
    let (size, offset) = (qword(&buffer, 16), qword(&buffer, 24));
    let mut mappable = Vec::new();
    if dword(&buffer, 4) & VFIO_REGION_INFO_FLAG_MMAP != 0 {
        mappable = sparse_areas(&buffer).unwrap_or_else(|| vec![Area { offset: 0, size }]);
    }
    Ok((offset, RegionInfo { size, mappable }))
}

fn region_info(file: &File, index: u32, size: usize) -> io::Result<Vec<u8>> {
    let argsz = u32::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // Whole quadwords, for the alignment that the kernel's structure has.
    let mut buffer = vec![0u64; size.div_ceil(8)];
    buffer[0] = u64::from(argsz);
    buffer[1] = u64::from(index);
    // SAFETY: the buffer has the announced size.
    if unsafe { libc::ioctl(file.as_raw_fd(), GET_REGION_INFO, buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(buffer.iter().flat_map(|quad| quad.to_ne_bytes()).collect())
}

/// Returns the areas of the sparse-mmap capability, if the region has one.
/// Capability header: id (2 bytes), version (2), offset of the next (4). Sparse mmap adds a count
/// (4), 4 reserved bytes, and per area an offset (8) and a size (8).
fn sparse_areas(info: &[u8]) -> Option<Vec<Area>> {
    let mut at = dword(info, 12) as usize;
    // Each capability takes 8 bytes at least.
    for _ in 0..info.len() / 8 {
        if at < REGION_INFO_SIZE || at + 16 > info.len() {
            return None;
        }
        if dword(info, at) & 0xffff == VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            let count = dword(info, at + 8) as usize;
            let areas = info[at + 16..].chunks_exact(16).take(count);
            let mut areas: Vec<Area> =
                areas.map(|area| Area { offset: qword(area, 0), size: qword(area, 8) }).collect();
            areas.sort_unstable_by_key(|area| area.offset);
            return Some(areas);
        }
        at = dword(info, at + 4) as usize;
    }
    None
}

fn dword(bytes: &[u8], at: usize) -> u32 {
    let byte = |index: usize| bytes.get(at + index).copied().unwrap_or(0);
    u32::from_ne_bytes([byte(0), byte(1), byte(2), byte(3)])
}

fn qword(bytes: &[u8], at: usize) -> u64 {
    u64::from(dword(bytes, at)) | u64::from(dword(bytes, at + 4)) << 32
}

/// Calls with a structure that begins with its own size.
fn call<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: every caller passes the structure of its request, with its size in the first field.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Size of a structure as the kernel wants it.
const fn size_of_32<T>() -> u32 {
    assert!(size_of::<T>() < 1 << 16);
    #[allow(clippy::cast_possible_truncation, reason = "asserted above")]
    let size = size_of::<T>() as u32;
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(capabilities: &[u8]) -> Vec<u8> {
        let mut info = vec![0; REGION_INFO_SIZE];
        info[12] = 32;
        info.extend(capabilities);
        info
    }

    #[test]
    fn sparse_areas_are_read_in_order() {
        let mut capability = vec![1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        for value in [0x3000_u64, 0x1000, 0, 0x1000] {
            capability.extend(value.to_ne_bytes());
        }
        let expected = [Area { offset: 0, size: 0x1000 }, Area { offset: 0x3000, size: 0x1000 }];
        assert_eq!(sparse_areas(&info(&capability)).as_deref(), Some(&expected[..]));
    }

    #[test]
    fn other_capabilities_are_passed_over() {
        assert_eq!(sparse_areas(&info(&[3, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])), None);
    }

    #[test]
    fn a_loop_of_capabilities_ends() {
        assert_eq!(sparse_areas(&info(&[3, 0, 1, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])), None);
    }

    #[test]
    fn a_number_that_is_not_open_is_an_error() {
        assert_eq!(adopt(100_000).map(drop).map_err(|e| e.raw_os_error()), Err(Some(libc::EBADF)));
    }
}
