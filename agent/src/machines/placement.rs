//! Where a machine is on its host: its NUMA nodes, the ports above its devices, and the spare ones.
//! Pure but for what it reads of the host.

use std::{collections::BTreeSet, fs, path::Path};

use lease::hardware::{Hardware, MemoryPlace, Placement};
use types::{
    node::{Bdf, MachineShape},
    topology::{CpuPlace, LOCAL_DISTANCE, NumaNode, SparePort, Topology},
    units::Mebibytes,
    vm::{HostMemory, MemoryBacking},
};

use super::cpus::HostCpu;
use crate::assign;

/// Distance of nodes that do not say theirs, as ACPI assumes, and the largest that is one.
const REMOTE_DISTANCE: u8 = 20;
const MAX_DISTANCE: u8 = 254;

/// 32-bit memory behind a port for disks: a page or two are needed, 1 MiB is the least that a
/// bridge can have.
const DISK_WINDOW: Mebibytes = Mebibytes(1);
/// 64-bit memory behind it: virtio's registers.
const DISK_PREFETCHABLE: Mebibytes = Mebibytes(1);
/// Largest windows that a VMM keeps behind a port.
const MAX_WINDOW_MIB: u64 = 256;
const MAX_PREFETCHABLE_MIB: u64 = 1 << 20;

/// BARs of a device. The ROM comes behind them; guests have that of AMD's GPUs.
const BARS: usize = 6;
const AMD: u16 = 0x1002;

/// Flags of a line of a device's `resource` file (Linux include/linux/ioport.h).
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_PREFETCH: u64 = 0x2000;
const IORESOURCE_MEM_64: u64 = 0x10_0000;

/// A machine's NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestNodes {
    /// As the VMM takes them.
    pub nodes: Vec<NumaNode>,
    /// The host's node of each.
    pub host: Vec<u32>,
    /// Why there are none, if that is worth saying.
    pub note: Option<String>,
}

/// Makes the machine's NUMA nodes from where its virtual CPUs and its memory are. `host` are the
/// host's CPUs, `distance` the distances between its nodes.
pub fn guest_nodes(
    promised: &[u32],
    memory: &[HostMemory],
    total: Mebibytes,
    host: &[HostCpu],
    distance: impl Fn(u32, u32) -> u8,
) -> GuestNodes {
    let there: BTreeSet<u32> = host.iter().filter_map(|cpu| cpu.node).collect();
    if there.len() < 2 {
        return GuestNodes::default();
    }
    let none = |reason: &str| GuestNodes {
        note: Some(format!("the guest sees no NUMA nodes: {reason}")),
        ..GuestNodes::default()
    };
    if promised.is_empty() {
        return none("its virtual CPUs run anywhere");
    }
    let node_of = |cpu: &u32| host.iter().find(|known| known.id == *cpu)?.node;
    let Some(of_cpus) = promised.iter().map(node_of).collect::<Option<Vec<u32>>>() else {
        return none("the host does not say of which its CPUs are");
    };
    let of_memory: Option<Vec<(u32, u64)>> =
        memory.iter().map(|part| Some((part.node?, part.memory_mib.0))).collect();
    let of_memory = match of_memory {
        Some(parts) if !parts.is_empty() => parts,
        // The kernel takes ordinary memory from the node of who fetches it first.
        Some(_) | None if of_cpus.iter().all(|node| *node == of_cpus[0]) => {
            vec![(of_cpus[0], total.0)]
        }
        Some(_) | None => return none("ordinary memory is bound to none"),
    };
    let mut all: BTreeSet<u32> = of_cpus.iter().copied().collect();
    all.extend(of_memory.iter().map(|(node, _)| *node));
    let host: Vec<u32> = all.into_iter().collect();
    let make = |(id, node): (u32, &u32)| NumaNode {
        id,
        vcpus: (0u32..).zip(&of_cpus).filter(|(_, of)| *of == node).map(|(vcpu, _)| vcpu).collect(),
        memory_mib: Mebibytes(of_memory.iter().filter(|part| part.0 == *node).map(|p| p.1).sum()),
        distances: host.iter().map(|other| between(*node, *other, &distance)).collect(),
    };
    GuestNodes { nodes: (0u32..).zip(&host).map(make).collect(), host, note: None }
}

/// Returns where the virtual CPUs are that run on the `promised` CPUs of the `host`, one on each: as those
/// are. None when they run anywhere.
pub fn cpu_places(promised: &[u32], host: &[HostCpu]) -> Vec<CpuPlace> {
    let place = |id: &u32| {
        let cpu = host.iter().find(|cpu| cpu.id == *id)?;
        Some(CpuPlace { package: cpu.package, cache: cpu.cache, core: cpu.core })
    };
    promised.iter().map(place).collect::<Option<_>>().unwrap_or_default()
}

fn between(from: u32, to: u32, distance: impl Fn(u32, u32) -> u8) -> u8 {
    if from == to {
        return LOCAL_DISTANCE;
    }
    distance(from, to).clamp(LOCAL_DISTANCE + 1, MAX_DISTANCE)
}

/// Has memory fetched by the machine's own CPUs, where it has any on a node: its neighbours do not
/// notice a start then. On nodes where it has none, CPUs fetch that are spread over the node; with its
/// own they are `most` in all, as each is a thread of the machine's process, but one on each node.
pub fn keep_to(memory: &mut [HostMemory], promised: &[u32], most: usize) {
    let (mut left, mut foreign) = (most, Vec::new());
    for part in memory {
        let own: Vec<u32> =
            part.cpus.iter().filter(|cpu| promised.contains(cpu)).copied().collect();
        if own.is_empty() {
            foreign.push(part);
        } else {
            left = left.saturating_sub(own.len());
            part.cpus = own;
        }
    }
    let nodes = foreign.len();
    for part in foreign {
        part.cpus = spread(&part.cpus, left / nodes);
    }
}

/// Returns `most` of `cpus` at even distances, or all if there are fewer; one at least.
fn spread(cpus: &[u32], most: usize) -> Vec<u32> {
    let count = cpus.len().min(most.max(1));
    (0..count).map(|at| cpus[at * cpus.len() / count]).collect()
}

/// Reads the distance between two of the host's nodes.
pub fn distance(root: &Path, nodes: &[u32], from: u32, to: u32) -> u8 {
    let path = root.join(format!("sys/devices/system/node/node{from}/distance"));
    let text = fs::read_to_string(path).unwrap_or_default();
    // One number for each node that is online, in their order.
    let at = nodes.iter().position(|node| *node == to);
    let found = at.and_then(|at| text.split_whitespace().nth(at)?.parse().ok());
    found.unwrap_or(REMOTE_DISTANCE)
}

/// Puts the guest's numbers of nodes where `topology` has the host's.
pub fn renumber(mut topology: Topology, host: &[u32]) -> Topology {
    for root in &mut topology.roots {
        let position = root.node.and_then(|node| host.iter().position(|known| *known == node));
        root.node = position.and_then(|at| u32::try_from(at).ok());
    }
    topology
}

/// Returns the spare ports of a machine: for each device that comes later one that it fits, then
/// those for disks.
pub fn spare_ports(root: &Path, hardware: &Hardware) -> Vec<SparePort> {
    let device = |address: &Bdf| {
        let path = root.join(format!("sys/bus/pci/devices/{address}/resource"));
        let vendor = assign::identity(root, *address).map(|((vendor, _), _)| vendor);
        let registers = if vendor == Some(AMD) { BARS + 1 } else { BARS };
        window(&fs::read_to_string(path).unwrap_or_default(), registers)
    };
    let mut ports: Vec<SparePort> = hardware.plugged_later.iter().map(device).collect();
    let disk = SparePort { root: 0, memory_mib: DISK_WINDOW, prefetchable_mib: DISK_PREFETCHABLE };
    ports.extend(std::iter::repeat_n(disk, hardware.spare_ports.into()));
    ports
}

/// Bytes of the largest MSI-X table, of 2,048 vectors. Where a device has its own beside registers in a page, the
/// guest's is in a BAR of its own, or behind the BAR that held it, which is twice as large then.
const LARGEST_TABLE: u64 = 2048 * 16;
/// Least that a BAR takes of a window.
const PAGE: u64 = 4096;

/// Returns a port for a device whose `resource` file (Documentation/PCI/sysfs-pci.rst) is `text`:
/// one line for each BAR with first address, last address and flags, of which the guest has `registers`.
fn window(text: &str, registers: usize) -> SparePort {
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let (mut plain, mut wide, mut taken) = (Vec::new(), Vec::new(), 0);
    for line in text.lines().take(registers) {
        let words: Vec<u64> = line.split_whitespace().filter_map(number).collect();
        let [first, last, flags] = words[..] else { continue };
        if last <= first {
            continue;
        }
        taken += if flags & IORESOURCE_MEM_64 == 0 { 1 } else { 2 };
        if flags & IORESOURCE_MEM == 0 {
            continue;
        }
        let size = (last - first + 1).next_power_of_two().max(PAGE);
        let far = IORESOURCE_PREFETCH | IORESOURCE_MEM_64;
        if flags & far == far { wide.push(size) } else { plain.push(size) }
    }
    // With the largest first, each is aligned.
    let sum = |sizes: &[u64]| sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
    let doubled = |sizes: &[u64]| sizes.iter().max().map_or(0, |most| most.saturating_mul(2));
    let (memory, prefetchable) = if taken < BARS {
        (sum(&plain).saturating_add(LARGEST_TABLE), sum(&wide))
    } else {
        (sum(&plain).max(doubled(&plain)), sum(&wide).max(doubled(&wide)))
    };
    let mib = |bytes: u64, most| Mebibytes(bytes.div_ceil(1 << 20).clamp(1, most));
    SparePort {
        root: 0,
        memory_mib: mib(memory, MAX_WINDOW_MIB),
        prefetchable_mib: mib(prefetchable, MAX_PREFETCHABLE_MIB),
    }
}

/// Returns the memory of a placement as renters see it.
pub fn memory_places(
    parts: &[HostMemory],
    shape: &MachineShape,
    backing: MemoryBacking,
) -> Vec<MemoryPlace> {
    let place = |node, memory_mib| MemoryPlace { node, memory_mib, backing };
    if parts.is_empty() {
        return vec![place(None, shape.memory_mib)];
    }
    parts.iter().map(|part| place(part.node, part.memory_mib)).collect()
}

/// Notes what of a placement's memory is not as it would be best.
pub fn note_memory(placement: &mut Placement, near: &[u32]) {
    let far = placement.memory.iter().filter(|part| part.node.is_some_and(|n| !near.contains(&n)));
    let far: u64 = far.map(|part| part.memory_mib.0).sum();
    if far > 0 && !near.is_empty() {
        placement.notes.push(format!(
            "{far} MiB of memory are on another NUMA node than the devices or virtual CPUs, whose \
             own has no more huge pages"
        ));
    }
    if placement.memory.iter().any(|part| part.backing == MemoryBacking::Memfd) {
        placement.notes.push(
            "memory is of ordinary pages: the node has no huge pages for all of it".to_owned(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(id: u32, node: u32) -> HostCpu {
        HostCpu { id, core: id, cache: 10 + node, package: node, node: Some(node) }
    }

    fn part(node: Option<u32>, mib: u64) -> HostMemory {
        HostMemory { node, memory_mib: Mebibytes(mib), cpus: Vec::new() }
    }

    fn nodes(cpus: &[u32], memory: &[HostMemory]) -> GuestNodes {
        let host = [cpu(0, 0), cpu(1, 0), cpu(2, 3), cpu(3, 3)];
        guest_nodes(cpus, memory, Mebibytes(64), &host, |_, _| 32)
    }

    #[test]
    fn the_guests_nodes_are_the_hosts() {
        let made = nodes(&[2, 3, 1], &[part(Some(0), 24), part(Some(3), 40)]);
        assert_eq!(made.host, [0, 3]);
        let node = |id, vcpus: &[u32], mib, distances: [u8; 2]| NumaNode {
            id,
            vcpus: vcpus.to_vec(),
            memory_mib: Mebibytes(mib),
            distances: distances.to_vec(),
        };
        assert_eq!(made.nodes, [node(0, &[2], 24, [10, 32]), node(1, &[0, 1], 40, [32, 10])]);
        let far = nodes(&[2], &[part(Some(0), 64)]);
        assert_eq!(far.nodes, [node(0, &[], 64, [10, 32]), node(1, &[0], 0, [32, 10])]);
    }

    #[test]
    fn virtual_cpus_are_where_their_cpus_are() {
        let host = [cpu(0, 0), HostCpu { core: 0, ..cpu(1, 0) }, cpu(2, 3)];
        let place = |package, cache, core| CpuPlace { package, cache, core };
        assert_eq!(
            cpu_places(&[1, 2, 0], &host),
            [place(0, 10, 0), place(3, 13, 2), place(0, 10, 0)]
        );
        assert_eq!(cpu_places(&[], &host), []);
        assert_eq!(cpu_places(&[0, 9], &host), [], "one is not online any more");
    }

    #[test]
    fn ordinary_memory_is_where_all_virtual_cpus_are() {
        let one = nodes(&[2, 3], &[part(None, 64)]);
        assert_eq!((one.host, one.nodes[0].memory_mib), (vec![3], Mebibytes(64)));
        let two = nodes(&[0, 2], &[]);
        assert!(two.nodes.is_empty() && two.note.is_some(), "{two:?}");
        assert!(nodes(&[], &[part(Some(0), 64)]).note.is_some());
        let small = guest_nodes(&[0], &[], Mebibytes(64), &[cpu(0, 0)], |_, _| 20);
        assert_eq!(small, GuestNodes::default());
    }

    #[test]
    fn a_start_keeps_to_its_own_cpus() {
        let cpus = |cpus: &[u32]| HostMemory { cpus: cpus.to_vec(), ..part(Some(0), 1) };
        let mut memory = [cpus(&[0, 1, 2]), cpus(&[4, 5])];
        keep_to(&mut memory, &[1, 2, 3], 64);
        assert_eq!(memory.map(|part| part.cpus), [vec![1, 2], vec![4, 5]]);
    }

    #[test]
    fn a_start_takes_no_more_threads_than_its_process_may_have() {
        let node = |first: u32| HostMemory {
            cpus: (first..first + 128).collect(),
            ..part(Some(first / 128), 1)
        };
        let own: Vec<u32> = (128..160).collect();
        let fetched = |promised: &[u32], most| {
            let mut memory = [node(0), node(128), node(256)];
            keep_to(&mut memory, promised, most);
            memory.map(|part| part.cpus)
        };
        let [near, mine, far] = fetched(&own, 64);
        assert_eq!((near.len(), &mine, far.len()), (16, &own, 16));
        assert_eq!(near[..3], [0, 8, 16], "spread over the node");
        let anywhere = fetched(&[], 64);
        assert_eq!(anywhere.map(|cpus| cpus.len()), [21; 3]);
        assert_eq!(fetched(&own, 4).map(|cpus| cpus.len()), [1, 32, 1], "none is left without");
    }

    #[test]
    fn root_complexes_get_the_guests_numbers() {
        let root = |node| types::topology::RootComplex { node, ports: Vec::new() };
        let topology = Topology { roots: vec![root(Some(3)), root(Some(5)), root(None)] };
        let found = renumber(topology, &[0, 3]);
        let found: Vec<_> = found.roots.iter().map(|root| root.node).collect();
        assert_eq!(found, [Some(1), None, None]);
    }

    #[test]
    fn a_port_has_room_for_its_device() {
        // An H100: 16 MiB of registers, 128 GiB of memory, 32 MiB more; all 64-bit prefetchable.
        let h100 = "0x0000032042000000 0x0000032042ffffff 0x000000000014220c\n\
                    0x0 0x0 0x0\n\
                    0x0000030000000000 0x0000031fffffffff 0x000000000014220c\n\
                    0x0 0x0 0x0\n\
                    0x0000032040000000 0x0000032041ffffff 0x000000000014220c\n";
        let port = window(h100, BARS);
        assert_eq!(port.prefetchable_mib, Mebibytes(256 << 10));
        assert_eq!(port.memory_mib, Mebibytes(1));
        let nvme = "0x00000000fe800000 0x00000000fe803fff 0x0000000000140204\n";
        let small = SparePort { root: 0, memory_mib: Mebibytes(1), prefetchable_mib: Mebibytes(1) };
        assert_eq!(window(nvme, BARS), small);
        assert_eq!(window("nonsense", BARS), small);
        // Three equal ones, and the table beside them.
        let three = "0xc0000000 0xc3ffffff 0x40200\n0xc4000000 0xc7ffffff 0x40200\n\
                     0xc8000000 0xcbffffff 0x40200\n";
        assert_eq!(window(three, BARS), SparePort { memory_mib: Mebibytes(193), ..small.clone() });
        let hardware = Hardware { spare_ports: 2, ..Hardware::default() };
        assert_eq!(spare_ports(Path::new("/nowhere"), &hardware), [small.clone(), small]);
    }

    #[test]
    fn a_port_for_an_amd_gpu_has_room_for_its_rom() {
        // A Radeon RX 7900: 32 GiB and 256 MiB of memory, I/O ports, 1 MiB of registers, ROM (of 2 MiB here).
        let radeon = b"0x0000007800000000 0x0000007fffffffff 0x000000000014220c\n\
                       0x0 0x0 0x0\n\
                       0x0000008000000000 0x000000800fffffff 0x000000000014220c\n\
                       0x0 0x0 0x0\n\
                       0x000000000000f000 0x000000000000f0ff 0x0000000000040101\n\
                       0x00000000fca00000 0x00000000fcafffff 0x0000000000040200\n\
                       0x00000000fcc00000 0x00000000fcdfffff 0x0000000000046200\n";
        let device = "sys/bus/pci/devices/0000:03:00.0";
        let memory = |vendor: &[u8]| {
            let root = crate::testing::root(&[
                (&format!("{device}/resource"), radeon),
                (&format!("{device}/vendor"), vendor),
                (&format!("{device}/device"), b"0x744c\n"),
                (&format!("{device}/class"), b"0x030000\n"),
            ]);
            let plugged_later = vec!["0000:03:00.0".parse().expect("an address")];
            let hardware = Hardware { plugged_later, ..Hardware::default() };
            spare_ports(root.path(), &hardware)[0].memory_mib
        };
        assert_eq!(memory(b"0x1002\n"), Mebibytes(4));
        assert_eq!(memory(b"0x10de\n"), Mebibytes(2));
    }

    #[test]
    fn distances_are_read_by_the_order_of_nodes() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("sys/devices/system/node/node0");
        fs::create_dir_all(&folder).expect("made");
        fs::write(folder.join("distance"), "10 21 32\n").expect("written");
        assert_eq!(distance(root.path(), &[0, 3, 5], 0, 5), 32);
        assert_eq!(distance(root.path(), &[0, 3, 5], 3, 5), REMOTE_DISTANCE);
    }
}
