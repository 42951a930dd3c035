//! The two ways to the host's IOMMU: iommufd with VFIO character devices, and containers with VFIO
//! groups. Either gives one address space that all devices of the machine share.
//! Source: linux/iommufd.h; linux/vfio.h, "API for Type1 VFIO IOMMU" and "GROUP file descriptor
//! ioctls"; Documentation/driver-api/vfio.rst.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use iommufd_bindings::iommufd::{
    iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_map_file,
    iommu_ioas_unmap, iommu_iova_range, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
};
use types::node::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_CONTAINER_SET,
    VFIO_GROUP_FLAGS_VIABLE, VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_TYPE1v2_IOMMU, vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_group_status,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
};

use super::{
    memory::RamRegion,
    vfio::{Groups, VfioDevice, call, dword, qword, request, size_of_32},
};
use crate::vfio::{
    device::{Device, Region},
    dma::{AddressSpace, IovaRange, PeerArea},
};

// VFIO: containers, groups, and how a device meets an iommufd.
const SET_IOMMU: libc::c_ulong = request(102);
const GROUP_GET_STATUS: libc::c_ulong = request(103);
const GROUP_SET_CONTAINER: libc::c_ulong = request(104);
const GROUP_GET_DEVICE_FD: libc::c_ulong = request(106);
const TYPE1_GET_INFO: libc::c_ulong = request(112);
const TYPE1_MAP_DMA: libc::c_ulong = request(113);
const TYPE1_UNMAP_DMA: libc::c_ulong = request(114);
const BIND_IOMMUFD: libc::c_ulong = request(118);
const ATTACH_IOMMUFD_PT: libc::c_ulong = request(119);
// iommufd.
const IOAS_ALLOC: libc::c_ulong = request(129);
const IOAS_IOVA_RANGES: libc::c_ulong = request(132);
const IOAS_MAP: libc::c_ulong = request(133);
const IOAS_UNMAP: libc::c_ulong = request(134);
const IOAS_MAP_FILE: libc::c_ulong = request(143);

/// Most usable address ranges that are taken from the kernel.
const RANGES_MAX: u32 = 1 << 12;
/// Most bytes of a container's description that are taken from the kernel.
const INFO_MAX: usize = 1 << 16;
/// `struct vfio_iommu_type1_info`, behind which its capabilities lie.
const INFO_SIZE: usize = 24;

/// A way to the IOMMU: takes devices in, and is their address space.
pub trait Interface: AddressSpace {
    /// Takes a device out of its descriptor. The kernel resets it meanwhile, which may take long.
    fn take(&self, address: Bdf, fd: OwnedFd) -> io::Result<VfioDevice>;

    /// Returns whether devices can be taken at once.
    fn taking(&self) -> Taking;

    /// Lets a device that was taken reach what this address space maps.
    fn admit(&self, device: &VfioDevice) -> io::Result<()>;
}

/// How devices are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taking {
    /// All at once: each stands for itself.
    AtOnce,
    /// One after the other: the first of a group brings the group in.
    InTurn,
}

/// One address space of an iommufd; devices come as `/dev/vfio/devices/vfioN`.
pub struct Iommufd {
    file: File,
    ioas: u32,
}

impl Iommufd {
    /// Makes an empty address space in an open `/dev/iommu`.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let mut alloc =
            iommu_ioas_alloc { size: size_of_32::<iommu_ioas_alloc>(), ..Default::default() };
        call(&file, IOAS_ALLOC, &mut alloc)?;
        Ok(Self { file, ioas: alloc.out_ioas_id })
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
        // The array has room for the announced number of ranges during the whole call.
        if let Err(error) = call(&self.file, IOAS_IOVA_RANGES, &mut query) {
            return Err((error, query.num_iovas));
        }
        ranges.truncate(query.num_iovas as usize);
        Ok(ranges)
    }

    /// Maps `length` bytes of a file, from `start`: a memfd, or a device's exported BAR.
    fn map_file(&self, fd: RawFd, start: u64, length: u64, iova: u64) -> io::Result<()> {
        let mut map = iommu_ioas_map_file {
            size: size_of_32::<iommu_ioas_map_file>(),
            flags: both_ways(),
            ioas_id: self.ioas,
            fd,
            start,
            length,
            iova,
        };
        call(&self.file, IOAS_MAP_FILE, &mut map)
    }
}

/// At the given address, for reading and writing.
const fn both_ways() -> u32 {
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
        | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
        | iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE
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

    fn map(&self, region: &RamRegion, file: BorrowedFd<'_>) -> io::Result<()> {
        // By file the kernel pins whole folios; by address it walks page tables. Kernels before
        // 6.14 know the second way only.
        match self.map_file(file.as_raw_fd(), region.offset, region.size, region.address) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {}
            result => return result,
        }
        let mut map = iommu_ioas_map {
            size: size_of_32::<iommu_ioas_map>(),
            flags: both_ways(),
            ioas_id: self.ioas,
            user_va: region.host_address,
            length: region.size,
            iova: region.address,
            ..Default::default()
        };
        call(&self.file, IOAS_MAP, &mut map)
    }

    fn map_peer(&self, device: &dyn Device, area: &PeerArea<'_>) -> io::Result<()> {
        if area.area.offset + area.area.size > device.region(Region::Bar(area.bar))?.size {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // The mapping holds on to the exported area; the descriptor is not needed any more.
        let told = |what: &str, error| io::Error::other(format!("{what}: {error}"));
        let exported = device
            .export(area.bar, area.area)
            .map_err(|error| told("VFIO does not export it", error))?;
        self.map_file(exported.as_raw_fd(), 0, area.area.size, area.guest)
            .map_err(|error| told("iommufd does not map it", error))
    }

    fn unmap(&self, guest: u64, size: u64) -> io::Result<()> {
        let mut unmap = iommu_ioas_unmap {
            size: size_of_32::<iommu_ioas_unmap>(),
            ioas_id: self.ioas,
            iova: guest,
            length: size,
        };
        call(&self.file, IOAS_UNMAP, &mut unmap)
    }

    fn reaches_peers(&self, device: &dyn Device) -> io::Result<()> {
        device.exports()
    }

    fn lock_limit(&self) -> u64 {
        lock_limit()
    }
}

impl Interface for Iommufd {
    fn take(&self, _address: Bdf, fd: OwnedFd) -> io::Result<VfioDevice> {
        let file = File::from(fd);
        let mut bind = vfio_device_bind_iommufd {
            argsz: size_of_32::<vfio_device_bind_iommufd>(),
            iommufd: self.file.as_raw_fd(),
            ..Default::default()
        };
        call(&file, BIND_IOMMUFD, &mut bind)?;
        VfioDevice::new(file, None)
    }

    fn taking(&self) -> Taking {
        Taking::AtOnce
    }

    fn admit(&self, device: &VfioDevice) -> io::Result<()> {
        let mut attach = vfio_device_attach_iommufd_pt {
            argsz: size_of_32::<vfio_device_attach_iommufd_pt>(),
            pt_id: self.ioas,
            ..Default::default()
        };
        call(device.file(), ATTACH_IOMMUFD_PT, &mut attach)
    }
}

/// A container with the IOMMU's first kind of interface; devices come as `/dev/vfio/N`, the
/// descriptor of their group.
pub struct Container {
    file: File,
    groups: Groups,
}

impl Container {
    /// Starts with an open `/dev/vfio/vfio`.
    pub fn new(fd: OwnedFd) -> Self {
        Self { file: File::from(fd), groups: Groups::default() }
    }
}

impl AddressSpace for Container {
    fn usable(&self) -> io::Result<Vec<IovaRange>> {
        let Some(mut info) = without_groups(type1_info(&self.file, INFO_SIZE))? else {
            return Ok(vec![IovaRange { start: 0, last: u64::MAX }]);
        };
        let wanted = dword(&info, 0) as usize;
        if wanted > info.len() && wanted <= INFO_MAX {
            info = type1_info(&self.file, wanted)?;
        }
        iova_ranges(&info).ok_or_else(|| {
            io::Error::other("this kernel's containers do not tell (Linux 5.10 and later do)")
        })
    }

    fn map(&self, region: &RamRegion, _file: BorrowedFd<'_>) -> io::Result<()> {
        map_dma(&self.file, region.host_address, region.address, region.size)
    }

    fn map_peer(&self, _device: &dyn Device, area: &PeerArea<'_>) -> io::Result<()> {
        map_dma(&self.file, area.mapping.host_address(), area.guest, area.area.size)
    }

    fn unmap(&self, guest: u64, size: u64) -> io::Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_of_32::<vfio_iommu_type1_dma_unmap>(),
            iova: guest,
            size,
            ..Default::default()
        };
        call(&self.file, TYPE1_UNMAP_DMA, &mut unmap)
    }

    fn reaches_peers(&self, _device: &dyn Device) -> io::Result<()> {
        Ok(())
    }

    fn lock_limit(&self) -> u64 {
        lock_limit()
    }
}

impl Interface for Container {
    fn take(&self, address: Bdf, fd: OwnedFd) -> io::Result<VfioDevice> {
        let group = File::from(fd);
        let mut status =
            vfio_group_status { argsz: size_of_32::<vfio_group_status>(), ..Default::default() };
        call(&group, GROUP_GET_STATUS, &mut status)?;
        if status.flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        // Devices of one group share it: the first brings the group in.
        if status.flags & VFIO_GROUP_FLAGS_CONTAINER_SET == 0 {
            let mut container = self.file.as_raw_fd();
            call(&group, GROUP_SET_CONTAINER, &mut container)?;
            // The container has its kind from the first group on.
            match value(&self.file, SET_IOMMU, u64::from(VFIO_TYPE1v2_IOMMU)) {
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        let name = std::ffi::CString::new(address.to_string())?;
        // SAFETY: the name is NUL-terminated and lives during the call, which writes nothing.
        let fd = unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        VfioDevice::new(device, Some(self.groups.note(address, group)))
    }

    fn taking(&self) -> Taking {
        Taking::InTurn
    }

    fn admit(&self, _device: &VfioDevice) -> io::Result<()> {
        // Its group was brought in when it was taken.
        Ok(())
    }
}

fn lock_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}

fn map_dma(container: &File, host: u64, guest: u64, size: u64) -> io::Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        argsz: size_of_32::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: host,
        iova: guest,
        size,
    };
    call(container, TYPE1_MAP_DMA, &mut map)
}

/// Calls with a number.
fn value(file: &File, request: libc::c_ulong, value: u64) -> io::Result<i32> {
    // SAFETY: the request takes a number, no pointer.
    let ret = unsafe { libc::ioctl(file.as_raw_fd(), request, value) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn type1_info(container: &File, size: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0u64; size.div_ceil(8)];
    buffer[0] = u64::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the buffer has the announced size, in its first field.
    let ret = unsafe { libc::ioctl(container.as_raw_fd(), TYPE1_GET_INFO, buffer.as_mut_ptr()) };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(buffer.iter().flat_map(|quad| quad.to_ne_bytes()).collect())
}

/// Returns a container's description, or nothing for one without groups: it has no IOMMU that could
/// be asked (`vfio_fops_unl_ioctl` in drivers/vfio/container.c), and nothing is kept from its devices.
fn without_groups(info: io::Result<Vec<u8>>) -> io::Result<Option<Vec<u8>>> {
    match info {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        info => info.map(Some),
    }
}

/// Returns the ranges of the capability that lists them. Capability header: id (2 bytes), version
/// (2), offset of the next (4). This one adds a count (4), 4 reserved bytes, and first and last
/// address (8 each) of each range.
fn iova_ranges(info: &[u8]) -> Option<Vec<IovaRange>> {
    if dword(info, 4) & VFIO_IOMMU_INFO_CAPS == 0 {
        return None;
    }
    let mut at = dword(info, 16) as usize;
    // Each capability takes 8 bytes at least.
    for _ in 0..info.len() / 8 {
        if at < INFO_SIZE || at + 16 > info.len() {
            return None;
        }
        if dword(info, at) & 0xffff == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            let count = dword(info, at + 8) as usize;
            let ranges = info[at + 16..].chunks_exact(16).take(count);
            let range = |range: &[u8]| IovaRange { start: qword(range, 0), last: qword(range, 8) };
            return Some(ranges.map(range).collect());
        }
        at = dword(info, at + 4) as usize;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_container_are_read() {
        let mut info = vec![0; INFO_SIZE];
        info[4] = 2;
        info[16] = 24;
        info.extend([1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        for value in [0u64, 0xfedf_ffff, 0xfef0_0000, 0xffff_ffff_ffff] {
            info.extend(value.to_ne_bytes());
        }
        let expected = [
            IovaRange { start: 0, last: 0xfedf_ffff },
            IovaRange { start: 0xfef0_0000, last: 0xffff_ffff_ffff },
        ];
        assert_eq!(iova_ranges(&info).as_deref(), Some(&expected[..]));
    }

    #[test]
    fn a_container_without_groups_has_nothing_to_tell() {
        let failed = |error| Err(io::Error::from_raw_os_error(error));
        let told = |info| without_groups(info).map_err(|error| error.raw_os_error());
        assert_eq!(told(failed(libc::EINVAL)), Ok(None));
        assert_eq!(told(failed(libc::ENOTTY)), Err(Some(libc::ENOTTY)));
        assert_eq!(told(Ok(vec![1])), Ok(Some(vec![1])));
    }

    #[test]
    fn a_container_without_ranges_or_with_a_loop_tells_none() {
        let mut info = vec![0; INFO_SIZE];
        assert_eq!(iova_ranges(&info), None);
        info[4] = 2;
        info[16] = 24;
        info.extend([2, 0, 1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(iova_ranges(&info), None);
    }
}
