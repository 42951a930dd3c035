//! Guest memory and other mappings: memfd and hugetlb pages, and files mapped at an address that
//! is congruent to a large page. The kernel maps huge pages at multiples of their size, so guest
//! memory, which begins at such multiples, is congruent too.
//! Source: memfd_create(2), mmap(2).

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use types::{
    units::Mebibytes,
    vm::{HostMemory, MemoryBacking},
};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use super::populate::{self, Missing, PopulateError, Share, Span};

/// Guest memory as devices see it: cheap to clone, addressed by guest-physical address.
pub type GuestRam = GuestMemoryMmap<()>;

/// Why guest memory cannot be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum MemoryError {
    #[error("{size} of guest memory do not divide into {pages}; use a multiple of {step} MiB")]
    Size { size: Mebibytes, pages: &'static str, step: u64 },
    #[error("the host has not enough {pages} for {size} of guest memory")]
    Short { size: Mebibytes, pages: &'static str, source: io::Error },
    #[error("{place} lacks {missing} of the {of} {pages} that its part of guest memory takes")]
    Missing { place: String, missing: u64, of: u64, pages: &'static str },
    #[error("the parts of guest memory on the host's nodes are {parts}, not the {size} there are")]
    Parts { parts: Mebibytes, size: Mebibytes },
    #[error("the host has {host} of memory in all, less than the {size} asked for")]
    Host { size: Mebibytes, host: Mebibytes },
    #[error("cannot {what}")]
    Call { what: &'static str, source: io::Error },
    #[error("guest memory does not fit this layout: {0}")]
    Layout(String),
}

/// Which memory is fetched from the host before the guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetch {
    /// Huge pages, which cannot be waited for later. Other pages come as the guest touches them: the
    /// limit of the machine's control group is what bounds them.
    WhenHuge,
    /// All: devices will reach it, so it is pinned anyway, and here many threads fetch it.
    All,
}

/// One contiguous piece of guest memory.
#[derive(Debug, Clone)]
pub struct RamRegion {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Offset in [`Ram::file`].
    pub offset: u64,
    /// Host address; valid as long as the [`Ram`] or a [`GuestRam`] made from it lives.
    pub host_address: u64,
}

/// All guest memory, as the parts that map it (KVM, IOMMU) need it.
#[derive(Debug, Clone)]
pub struct Ram {
    /// The memory itself.
    pub memory: GuestRam,
    /// Its pieces, ascending by address.
    pub regions: Vec<RamRegion>,
    /// The file behind all of them.
    pub file: Arc<File>,
}

impl Ram {
    /// Allocates guest memory for `ranges` (guest address, length; ascending). Huge pages are fetched,
    /// so that a shortage is an error now and not a fault in the guest.
    pub fn new(ranges: &[(u64, u64)], backing: MemoryBacking) -> Result<Self, MemoryError> {
        Self::placed(ranges, backing, &[], Fetch::WhenHuge)
    }

    /// The same with memory where `parts` say, in the order of its addresses; without parts,
    /// wherever there is room.
    pub fn placed(
        ranges: &[(u64, u64)],
        backing: MemoryBacking,
        parts: &[HostMemory],
        fetch: Fetch,
    ) -> Result<Self, MemoryError> {
        let total = ranges.iter().fold(0u64, |total, (_, size)| total.saturating_add(*size));
        let pages = Pages::of(backing);
        let size = Mebibytes(total >> 20);
        if !total.is_multiple_of(pages.bytes)
            || ranges.iter().any(|(_, s)| !s.is_multiple_of(pages.bytes))
        {
            return Err(MemoryError::Size { size, pages: pages.name, step: pages.bytes >> 20 });
        }
        let host = host_memory();
        if size > host {
            return Err(MemoryError::Host { size, host });
        }
        let file = Arc::new(create_memfd(&pages, total).map_err(|source| match backing {
            MemoryBacking::Memfd => MemoryError::Call { what: "create guest memory", source },
            MemoryBacking::Hugetlb2M | MemoryBacking::Hugetlb1G => {
                MemoryError::Short { size, pages: pages.name, source }
            }
        })?);
        let mut regions = Vec::new();
        let mut mapped = Vec::new();
        let mut offset = 0;
        for (address, length) in ranges {
            let region = map_region(&file, offset, *length)?;
            regions.push(RamRegion {
                address: *address,
                size: *length,
                offset,
                host_address: region.as_ptr() as u64,
            });
            let region = GuestRegionMmap::new(region, GuestAddress(*address)).ok_or_else(|| {
                MemoryError::Layout("a region passes the end of addresses".into())
            })?;
            mapped.push(region);
            offset += length;
        }
        let shares = shares(&regions, parts, &pages)?;
        populate::bind(&shares).map_err(|error| pages.explain(error))?;
        if backing == MemoryBacking::Memfd {
            regions.iter().for_each(prefer_large_pages);
        }
        if backing != MemoryBacking::Memfd || fetch == Fetch::All {
            populate::populate(&shares, pages.bytes).map_err(|error| pages.explain(error))?;
        }
        let memory = GuestMemoryMmap::from_regions(mapped)
            .map_err(|error| MemoryError::Layout(error.to_string()))?;
        Ok(Self { memory, regions, file })
    }

    /// Returns the number of bytes.
    pub fn size(&self) -> u64 {
        self.memory.iter().map(GuestMemoryRegion::len).sum()
    }

    /// Returns where the guest has what is at an address of this process; `None` when it has not.
    pub fn guest_address(&self, host: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let within = host.checked_sub(region.host_address).filter(|at| *at < region.size)?;
            region.address.checked_add(within)
        })
    }

    /// Returns the number of bytes for which the host gave pages; `None` where it does not tell.
    pub fn resident(&self) -> Option<u64> {
        // Blocks of 512 bytes, whatever the page size (stat(3type), `st_blocks`).
        u64::try_from(rustix::fs::fstat(&self.file).ok()?.st_blocks).ok()?.checked_mul(512)
    }
}

/// A kind of host page.
struct Pages {
    name: &'static str,
    bytes: u64,
    flags: libc::c_uint,
}

impl Pages {
    fn of(backing: MemoryBacking) -> Self {
        match backing {
            MemoryBacking::Memfd => Self { name: "4 KiB pages", bytes: 4096, flags: 0 },
            MemoryBacking::Hugetlb2M => Self {
                name: "2 MiB huge pages",
                bytes: 2 << 20,
                flags: libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
            },
            MemoryBacking::Hugetlb1G => Self {
                name: "1 GiB huge pages",
                bytes: 1 << 30,
                flags: libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
            },
        }
    }
}

impl Pages {
    fn explain(&self, error: PopulateError) -> MemoryError {
        match error {
            PopulateError::Missing(Missing { node, pages, of }) => MemoryError::Missing {
                place: node.map_or("the host".into(), |node| format!("node {node} of the host")),
                missing: pages,
                of,
                pages: self.name,
            },
            PopulateError::Call(what, source) => MemoryError::Call { what, source },
        }
    }
}

/// Returns all memory of the host. Pages of a memfd come only when they are touched, so a guest
/// that can never have its memory would start, and die later.
fn host_memory() -> Mebibytes {
    let told = rustix::system::sysinfo();
    Mebibytes(told.totalram.saturating_mul(u64::from(told.mem_unit)) >> 20)
}

fn create_memfd(pages: &Pages, size: u64) -> io::Result<File> {
    // SAFETY: the name is a NUL-terminated literal; the call touches no other memory.
    let fd =
        unsafe { libc::memfd_create(c"guest-memory".as_ptr(), libc::MFD_CLOEXEC | pages.flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just returned by the kernel and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size)?;
    Ok(file)
}

fn map_region(file: &Arc<File>, offset: u64, length: u64) -> Result<MmapRegion, MemoryError> {
    let size = usize::try_from(length)
        .map_err(|_| MemoryError::Layout(format!("{length} bytes do not fit an address space")))?;
    MmapRegion::from_file(FileOffset::from_arc(Arc::clone(file), offset), size).map_err(|error| {
        MemoryError::Call { what: "map guest memory", source: io::Error::other(error.to_string()) }
    })
}

/// Asks for 2 MiB pages where the host gives them (`shmem_enabled`): fewer faults, and larger pages
/// for the guest's processors. A host that does not is no error.
fn prefer_large_pages(region: &RamRegion) {
    let Ok(size) = usize::try_from(region.size) else { return };
    // SAFETY: the range is exactly one live mapping; the advice changes no contents.
    unsafe {
        libc::madvise(region.host_address as *mut libc::c_void, size, libc::MADV_HUGEPAGE);
    }
}

/// Divides guest memory among the parts, in the order of addresses.
fn shares(
    regions: &[RamRegion],
    parts: &[HostMemory],
    pages: &Pages,
) -> Result<Vec<Share>, MemoryError> {
    let size = Mebibytes(regions.iter().map(|region| region.size).sum::<u64>() >> 20);
    let mut left = regions.iter().map(|r| Span { address: r.host_address, size: r.size });
    if parts.is_empty() {
        return Ok(vec![Share { node: None, spans: left.collect(), cpus: Vec::new() }]);
    }
    let together = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.memory_mib.0));
    if together != size.0 {
        return Err(MemoryError::Parts { parts: Mebibytes(together), size });
    }
    let mut current = left.next();
    let mut shares = Vec::new();
    for part in parts {
        let mut wanted = part.memory_mib.0 << 20;
        if !wanted.is_multiple_of(pages.bytes) {
            let step = pages.bytes >> 20;
            return Err(MemoryError::Size { size: part.memory_mib, pages: pages.name, step });
        }
        let mut spans = Vec::new();
        while wanted > 0
            && let Some(span) = current
        {
            let size = span.size.min(wanted);
            spans.push(Span { address: span.address, size });
            wanted -= size;
            let rest = Span { address: span.address + size, size: span.size - size };
            current = if rest.size > 0 { Some(rest) } else { left.next() };
        }
        shares.push(Share { node: part.node, spans, cpus: part.cpus.clone() });
    }
    Ok(shares)
}

/// A shared mapping of part of a file, unmapped when dropped. Its address is aligned as asked for, so that
/// large pages can back it.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<libc::c_void>,
    size: usize,
    reserved: (usize, usize),
}

// SAFETY: the mapping is plain memory that belongs to no thread; access goes through volatile
// reads and writes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of `file` at `offset` for `access`. The host address is congruent to
    /// `alignment.residue` modulo `alignment.modulus`, a power of two, or a page if that is less.
    pub fn of_file(
        file: BorrowedFd<'_>,
        offset: u64,
        size: usize,
        access: Access,
        alignment: Alignment,
    ) -> io::Result<Self> {
        let congruence = alignment.modulus.max(4096);
        let reserve = size.checked_add(congruence).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh private reservation that nothing else refers to.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserve,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = base as usize;
        let wanted = alignment.residue & (congruence - 1);
        let shift = wanted.wrapping_sub(start) & (congruence - 1);
        let protection = match access {
            Access::ReadOnly => libc::PROT_READ,
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the target lies inside the reservation made above, which is replaced.
        let address = unsafe {
            libc::mmap(
                (start + shift) as *mut libc::c_void,
                size,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: exactly the reservation made above.
            unsafe { libc::munmap(base, reserve) };
            return Err(error);
        }
        let address = NonNull::new(address).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, size, reserved: (start, reserve) })
    }

    /// Returns the host address.
    pub fn host_address(&self) -> u64 {
        self.address.as_ptr() as u64
    }

    /// Returns the length in bytes.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the reservation and the mapping inside it belong to this value alone.
        unsafe { libc::munmap(self.reserved.0 as *mut libc::c_void, self.reserved.1) };
    }
}

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// Where a mapping has to lie: at an address with this remainder modulo a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// The power of two.
    pub modulus: usize,
    /// The remainder.
    pub residue: usize,
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn memory_is_zero_and_keeps_what_is_written() {
        let ram =
            Ram::new(&[(0, 1 << 20), (4 << 30, 2 << 20)], MemoryBacking::Memfd).expect("memory");
        assert_eq!(ram.size(), 3 << 20);
        let there = GuestAddress((4 << 30) + 8);
        assert_eq!(ram.memory.read_obj::<u64>(there).expect("inside"), 0);
        ram.memory.write_obj(7u64, there).expect("inside");
        assert_eq!(ram.memory.read_obj::<u64>(there).expect("inside"), 7);
        assert!(ram.memory.read_obj::<u64>(GuestAddress((1 << 20) - 4)).is_err());
    }

    #[test]
    fn huge_pages_need_whole_pages() {
        let refusal = Ram::new(&[(0, 3 << 20)], MemoryBacking::Hugetlb2M).expect_err("3 MiB");
        assert!(matches!(refusal, MemoryError::Size { step: 2, .. }), "{refusal}");
    }

    #[test]
    fn more_than_the_host_has_is_refused() {
        let refusal = Ram::new(&[(0, 1 << 45)], MemoryBacking::Memfd).expect_err("32 TiB");
        assert!(matches!(refusal, MemoryError::Host { .. }), "{refusal}");
    }

    #[test]
    fn mappings_are_congruent() {
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory");
        let alignment = Alignment { modulus: 1 << 21, residue: 0x3000 };
        let mapping = Mapping::of_file(ram.file.as_fd(), 0, 0x4000, Access::ReadWrite, alignment)
            .expect("mapping");
        assert_eq!(mapping.host_address() % (1 << 21), 0x3000);
    }

    #[test]
    fn parts_divide_memory_in_order_across_regions() {
        let region =
            |address, size, host_address| RamRegion { address, size, offset: 0, host_address };
        let regions = [region(0, 3 << 30, 0x1000_0000), region(4 << 30, 5 << 30, 0x70_0000_0000)];
        let part = |node, gib: u64| HostMemory {
            node: Some(node),
            memory_mib: Mebibytes(gib << 10),
            cpus: vec![node],
        };
        let pages = Pages::of(MemoryBacking::Hugetlb1G);
        let shares = shares(&regions, &[part(0, 4), part(1, 4)], &pages).expect("fits");
        let spans = |share: &Share| {
            share.spans.iter().map(|span| (span.address, span.size >> 30)).collect::<Vec<_>>()
        };
        assert_eq!(spans(&shares[0]), [(0x1000_0000, 3), (0x70_0000_0000, 1)]);
        assert_eq!(spans(&shares[1]), [(0x70_4000_0000, 4)]);
    }

    #[test]
    fn parts_that_are_not_the_whole_are_refused() {
        let parts = [HostMemory { node: None, memory_mib: Mebibytes(3), cpus: Vec::new() }];
        let ranges = [(0, 4 << 20)];
        let refusal = Ram::placed(&ranges, MemoryBacking::Memfd, &parts, Fetch::All);
        assert!(matches!(refusal, Err(MemoryError::Parts { .. })));
    }

    #[test]
    fn memory_on_a_node_is_there_before_it_is_touched() {
        let parts = [HostMemory { node: Some(0), memory_mib: Mebibytes(4), cpus: vec![0] }];
        let ram = Ram::placed(&[(0, 4 << 20)], MemoryBacking::Memfd, &parts, Fetch::All);
        let ram = match ram {
            Err(MemoryError::Call { source, .. })
                if source.raw_os_error() == Some(libc::ENOSYS) =>
            {
                println!("skipped: memory on a node: this kernel has no NUMA support");
                return;
            }
            result => result.expect("memory"),
        };
        let blocks = std::os::unix::fs::MetadataExt::blocks(&ram.file.metadata().expect("known"));
        assert_eq!(blocks * 512, 4 << 20);
    }
}
