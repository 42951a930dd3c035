//! VFIO devices: the ioctls behind `vfio::device::Device`. The crates' own device type reports
//! neither a failed reset nor a failed register access, so those calls are made here. How a device
//! is taken, and what it reaches, is in `sys::iommu`.
//! Source: linux/vfio.h.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use types::node::Bdf;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_CAPS, VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET,
    VFIO_DEVICE_INFO_CAP_PCI_ATOMIC_COMP, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_FLAG_MMAP, vfio_device_info, vfio_irq_info,
};

use super::memory::{Access, Alignment, Mapping};
use crate::{
    pci::port::AtomicOps,
    vfio::alarms::Alarm,
    vfio::device::{Area, Device, IrqInfo, IrqKind, Region, RegionInfo, Rung},
};

/// All requests of both interfaces are `_IO(';', number)`.
pub(super) const fn request(number: u8) -> libc::c_ulong {
    0x3b00 | number as libc::c_ulong
}

const GET_INFO: libc::c_ulong = request(107);
const GET_REGION_INFO: libc::c_ulong = request(108);
const GET_IRQ_INFO: libc::c_ulong = request(109);
const SET_IRQS: libc::c_ulong = request(110);
const RESET: libc::c_ulong = request(111);
const PCI_HOT_RESET: libc::c_ulong = request(113);
const FEATURE: libc::c_ulong = request(117);

/// VFIO_DEVICE_FEATURE_DMA_BUF, to be had (VFIO_DEVICE_FEATURE_GET).
const GET_EXPORT: u32 = 11 | 1 << 16;
/// The same, asked only whether it can be (VFIO_DEVICE_FEATURE_PROBE).
const PROBE_EXPORT: u32 = GET_EXPORT | 1 << 18;

/// Regions that a device can have are BARs 0..=5, ROM, configuration space.
const CONFIG_REGION: u32 = 7;
const ROM_REGION: u32 = 6;
/// Size of `struct vfio_region_info`, behind which its capabilities lie.
const REGION_INFO_SIZE: usize = 32;
/// Size of `struct vfio_device_info`, likewise.
const DEVICE_INFO_SIZE: usize = size_of::<vfio_device_info>();
/// Most bytes of information about a region or a device that are taken from the kernel.
const INFO_MAX: usize = 1 << 16;
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

/// Devices of a machine that came by groups and are still there. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Groups(Arc<Mutex<Vec<Weak<Member>>>>);

/// A device, and its group's descriptor.
struct Member {
    device: Bdf,
    group: File,
}

/// What holds a device's group, and finds those of its neighbours.
pub(super) struct Membership {
    own: Arc<Member>,
    all: Groups,
}

impl Groups {
    /// Notes that `device` came by `group`, until the result is dropped.
    pub(super) fn note(&self, device: Bdf, group: File) -> Membership {
        let own = Arc::new(Member { device, group });
        let mut members = self.members();
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&own));
        drop(members);
        Membership { own, all: self.clone() }
    }

    fn members(&self) -> MutexGuard<'_, Vec<Weak<Member>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership {
    /// Returns the devices on the bus of this one, which is among them.
    fn on_bus(&self) -> Vec<Arc<Member>> {
        let bus = |member: &Member| (member.device.segment, member.device.bus);
        let members = self.all.members();
        let all = members.iter().filter_map(Weak::upgrade);
        all.filter(|member| bus(member) == bus(&self.own)).collect()
    }
}

/// A VFIO PCI device.
pub struct VfioDevice {
    file: File,
    /// By which group it came, if it came by one.
    group: Option<Membership>,
    flags: u32,
    atomics: AtomicOps,
    regions: Vec<(u64, RegionInfo)>,
}

impl VfioDevice {
    /// Reads what a device is that the kernel has given to us.
    pub(super) fn new(file: File, group: Option<Membership>) -> io::Result<Self> {
        let info = with_capabilities(&file, GET_INFO, 0, DEVICE_INFO_SIZE)?;
        let (flags, regions) = (dword(&info, 4), dword(&info, 8));
        if flags & VFIO_DEVICE_FLAGS_PCI == 0 || regions <= CONFIG_REGION {
            return Err(io::Error::other("the descriptor is not that of a PCI device"));
        }
        let regions =
            (0..=CONFIG_REGION).map(|index| region(&file, index)).collect::<io::Result<_>>()?;
        Ok(Self { file, group, flags, atomics: atomic_ops(&info), regions })
    }

    /// Returns the device's own descriptor.
    pub(super) fn file(&self) -> &File {
        &self.file
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
            Region::Rom => ROM_REGION as usize,
        };
        self.regions.get(index).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// `struct vfio_irq_set`: size, flags, index, start, count, then descriptors.
    fn set_irqs(&self, flags: u32, index: u32, start: u32, fds: &[i32]) -> io::Result<()> {
        let size = u32::try_from(20 + 4 * fds.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let count = u32::try_from(fds.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut set = vec![size, flags, index, start, count];
        set.extend(fds.iter().map(|fd| fd.cast_unsigned()));
        // SAFETY: the buffer has the announced size; the kernel only reads it.
        let ret = unsafe { libc::ioctl(self.file.as_raw_fd(), SET_IRQS, set.as_ptr()) };
        match ret {
            0 => Ok(()),
            // Nothing is enabled then (`vfio_msi_enable`).
            1.. => Err(io::Error::other(format!("the host has {ret} vectors of {count} to spare"))),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Device for VfioDevice {
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
        self.set_irqs(
            VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
            index(kind),
            first,
            &fds,
        )
    }

    fn set_unmask(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_UNMASK;
        self.set_irqs(flags, index(IrqKind::Intx), 0, &[fd.as_raw_fd()])
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        self.set_irqs(VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER, index(kind), 0, &[])
    }

    fn set_alarm(&self, alarm: Alarm, fd: BorrowedFd<'_>) -> io::Result<()> {
        let index = match alarm {
            Alarm::Failed => VFIO_PCI_ERR_IRQ_INDEX,
            Alarm::Wanted => VFIO_PCI_REQ_IRQ_INDEX,
        };
        let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
        self.set_irqs(flags, index, 0, &[fd.as_raw_fd()])
    }

    fn atomic_ops(&self) -> AtomicOps {
        self.atomics
    }

    /// The kernel says that a device can be reset when the reset at its opening worked
    /// (`vfio_pci_core_enable`).
    fn was_reset(&self) -> bool {
        self.flags & VFIO_DEVICE_FLAGS_RESET != 0
    }

    fn reset(&self, rung: Rung) -> io::Result<()> {
        match rung {
            Rung::Function if !self.was_reset() => Err(io::Error::from_raw_os_error(libc::ENOTTY)),
            Rung::Function => {
                // SAFETY: VFIO_DEVICE_RESET takes no pointer, and the descriptor stays open.
                if unsafe { libc::ioctl(self.file.as_raw_fd(), RESET, 0) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            }
            Rung::Set => {
                // `struct vfio_pci_hot_reset`: size, flags, count, groups. Without groups the
                // kernel checks that the bus holds nothing but devices of our iommufd; with some,
                // that it holds nothing but devices of those. It takes a group twice, but not more
                // groups than the bus has devices: so those of our devices on it, one for each.
                let beside = self.group.as_ref().map_or_else(Vec::new, Membership::on_bus);
                let count = u32::try_from(beside.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
                let mut order = vec![12 + 4 * count, 0, count];
                order.extend(beside.iter().map(|one| one.group.as_raw_fd().cast_unsigned()));
                // SAFETY: the buffer has the announced size; the kernel only reads it.
                let ret =
                    unsafe { libc::ioctl(self.file.as_raw_fd(), PCI_HOT_RESET, order.as_ptr()) };
                if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            }
        }
    }

    fn exports(&self) -> io::Result<()> {
        // `struct vfio_device_feature`: size, flags.
        let mut probe: [u32; 2] = [8, PROBE_EXPORT];
        call(&self.file, FEATURE, &mut probe)
    }

    fn export(&self, bar: u8, area: Area) -> io::Result<OwnedFd> {
        // `struct vfio_device_feature`: size, flags; then `struct vfio_device_feature_dma_buf`:
        // region, flags of the descriptor, flags, number of areas; offset and size of each.
        let open = (libc::O_RDWR | libc::O_CLOEXEC).cast_unsigned();
        let [offset, size] = [area.offset, area.size].map(|value| {
            let [a, b, c, d, e, f, g, h] = value.to_ne_bytes();
            [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
        });
        let mut order: [u32; 10] =
            [40, GET_EXPORT, u32::from(bar), open, 0, 1, offset[0], offset[1], size[0], size[1]];
        // SAFETY: the buffer has the announced size, which covers the announced one area.
        let fd = unsafe { libc::ioctl(self.file.as_raw_fd(), FEATURE, order.as_mut_ptr()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn map(&self, bar: u8, area: Area, modulus: u64) -> io::Result<Arc<Mapping>> {
        let size = usize::try_from(area.size).map_err(|_| io::ErrorKind::InvalidInput)?;
        // A BAR smaller than a page is mapped with all of its page.
        let (start, info) = self.known(Region::Bar(bar))?;
        let end = info.size.checked_next_multiple_of(4096).unwrap_or(u64::MAX);
        if area.offset.checked_add(area.size).is_none_or(|last| last > end) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let offset = start + area.offset;
        let modulus = usize::try_from(modulus).map_err(|_| io::ErrorKind::InvalidInput)?;
        let residue =
            usize::try_from(area.offset).map_err(|_| io::ErrorKind::InvalidInput)? % modulus;
        let alignment = Alignment { modulus, residue };
        Mapping::of_file(self.file.as_fd(), offset, size, Access::ReadWrite, alignment)
            .map(Arc::new)
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
    let buffer = with_capabilities(file, GET_REGION_INFO, index, REGION_INFO_SIZE)?;
    let (size, offset) = (qword(&buffer, 16), qword(&buffer, 24));
    let mut mappable = Vec::new();
    if dword(&buffer, 4) & VFIO_REGION_INFO_FLAG_MMAP != 0 {
        mappable = sparse_areas(&buffer).unwrap_or_else(|| vec![Area { offset: 0, size }]);
    }
    Ok((offset, RegionInfo { size, mappable }))
}

/// Asks for a structure of `size` bytes, and again for all of it if the kernel says that capabilities lie
/// behind. Its third field is `index`, where it has such a field for the kernel to read.
fn with_capabilities(
    file: &File,
    request: libc::c_ulong,
    index: u32,
    size: usize,
) -> io::Result<Vec<u8>> {
    let info = info(file, request, index, size)?;
    let wanted = dword(&info, 0) as usize;
    if wanted > info.len() && wanted <= INFO_MAX {
        return self::info(file, request, index, wanted);
    }
    Ok(info)
}

fn info(file: &File, request: libc::c_ulong, index: u32, size: usize) -> io::Result<Vec<u8>> {
    let argsz = u32::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // Whole quadwords, for the alignment that the kernel's structure has.
    let mut buffer = vec![0u64; size.div_ceil(8)];
    buffer[0] = u64::from(argsz);
    buffer[1] = u64::from(index);
    // SAFETY: the buffer has the announced size.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(buffer.iter().flat_map(|quad| quad.to_ne_bytes()).collect())
}

/// Returns the areas of the sparse-mmap capability, if the region has one. Behind the header there are a
/// count (4 bytes), 4 reserved bytes, and per area an offset (8) and a size (8).
fn sparse_areas(info: &[u8]) -> Option<Vec<Area>> {
    let first = dword(info, 12);
    let at = capability(info, first, REGION_INFO_SIZE, VFIO_REGION_INFO_CAP_SPARSE_MMAP)?;
    let count = dword(info, at + 8) as usize;
    let areas = info.get(at + 16..)?.chunks_exact(16).take(count);
    let mut areas: Vec<Area> =
        areas.map(|area| Area { offset: qword(area, 0), size: qword(area, 8) }).collect();
    areas.sort_unstable_by_key(|area| area.offset);
    Some(areas)
}

/// Returns what `struct vfio_device_info` and the capabilities behind it say of AtomicOps: behind the
/// header there are flags (4 bytes), one for each size. The kernel has looked at all ports up to the root
/// complex; an older one says nothing.
fn atomic_ops(info: &[u8]) -> AtomicOps {
    if dword(info, 4) & VFIO_DEVICE_FLAGS_CAPS == 0 {
        return AtomicOps::NONE;
    }
    let first = dword(info, 16);
    let found = capability(info, first, DEVICE_INFO_SIZE, VFIO_DEVICE_INFO_CAP_PCI_ATOMIC_COMP);
    found.map_or(AtomicOps::NONE, |at| AtomicOps::of_sizes(dword(info, at + 8)))
}

/// Returns where in `info` the capability `id` lies: one of a chain that begins at `first`, all behind
/// the structure of `least` bytes. Header: id (2 bytes), version (2), offset of the next (4).
fn capability(info: &[u8], first: u32, least: usize, id: u32) -> Option<usize> {
    let mut at = first as usize;
    // Each capability takes 8 bytes at least.
    for _ in 0..info.len() / 8 {
        if at < least || at + 12 > info.len() {
            return None;
        }
        if dword(info, at) & 0xffff == id {
            return Some(at);
        }
        at = dword(info, at + 4) as usize;
    }
    None
}

pub(super) fn dword(bytes: &[u8], at: usize) -> u32 {
    let byte = |index: usize| bytes.get(at + index).copied().unwrap_or(0);
    u32::from_ne_bytes([byte(0), byte(1), byte(2), byte(3)])
}

pub(super) fn qword(bytes: &[u8], at: usize) -> u64 {
    u64::from(dword(bytes, at)) | u64::from(dword(bytes, at + 4)) << 32
}

/// Calls with a structure that begins with its own size.
pub(super) fn call<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: every caller passes the structure of its request, with its size in the first field.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Size of a structure as the kernel wants it.
pub(super) const fn size_of_32<T>() -> u32 {
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

    /// A device that can be reset (flag 0), is one of PCI (1), and has `capabilities` (7).
    fn device(capabilities: &[u8]) -> Vec<u8> {
        let mut info = vec![0; DEVICE_INFO_SIZE];
        info[4] = 1 | 1 << 1 | 1 << 7;
        info[16] = 24;
        info.extend(capabilities);
        info
    }

    #[test]
    fn atomic_operations_are_those_that_the_kernel_finds_the_way_free_for() {
        // Another capability first (zPCI's), then the one, with a bit that means nothing yet.
        let other = [2, 0, 1, 0, 36, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        let completed = [5, 0, 1, 0, 0, 0, 0, 0, 0b1011, 0, 0, 0];
        let mut info = device(&[other, completed].concat());
        assert_eq!(atomic_ops(&info), AtomicOps::of_sizes(0b011));
        assert_eq!(atomic_ops(&device(&other)), AtomicOps::NONE);
        // A kernel that says that there are none, and one that has no room for all of them.
        info[4] = 3;
        assert_eq!(atomic_ops(&info), AtomicOps::NONE);
        assert_eq!(atomic_ops(&device(&completed[..8])), AtomicOps::NONE);
    }

    #[test]
    fn the_groups_of_a_bus_are_those_of_its_devices_that_are_there() {
        let groups = Groups::default();
        let note = |device: &str| {
            let group = File::open("/dev/null").expect("there");
            groups.note(device.parse().expect("an address"), group)
        };
        let gpu = note("0000:01:00.0");
        let (audio, _disk, _other) =
            (note("0000:01:00.1"), note("0000:02:00.0"), note("0001:01:00.0"));
        let functions = |of: &Membership| {
            of.on_bus().iter().map(|member| member.device.function).collect::<Vec<_>>()
        };
        assert_eq!((functions(&gpu), functions(&audio)), (vec![0, 1], vec![0, 1]));
        drop(audio);
        assert_eq!(functions(&gpu), [0]);
    }

    #[test]
    fn a_number_that_is_not_open_is_an_error() {
        assert_eq!(adopt(100_000).map(drop).map_err(|e| e.raw_os_error()), Err(Some(libc::EBADF)));
    }
}
