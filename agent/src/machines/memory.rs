//! Memory of machines: huge pages set aside when the agent starts, and which of the host's NUMA
//! nodes a machine's memory comes from. Where machines go is decided in pure functions.
//! Source: Linux Documentation/admin-guide/mm/hugetlbpage.rst; Documentation/ABI/stable/
//! sysfs-devices-node.

use std::{fs, io, path::Path};

use types::{
    config::{HugePage, Machines},
    units::Mebibytes,
    vm::{HostMemory, MemoryBacking},
};

/// Where the host's nodes are, in the root.
const NODES: &str = "sys/devices/system/node";

/// One NUMA node of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: Vec<u32>,
    /// Huge pages, of the configured size, that nobody uses.
    pub free: u64,
    /// All huge pages of that size.
    pub total: u64,
}

/// What one page of a size holds, in MiB.
pub const fn page_mib(page: HugePage) -> u64 {
    match page {
        HugePage::Size2M => 2,
        HugePage::Size1G => 1024,
    }
}

/// Returns the memory that pages of a size back.
pub const fn backing(page: HugePage) -> MemoryBacking {
    match page {
        HugePage::Size2M => MemoryBacking::Hugetlb2M,
        HugePage::Size1G => MemoryBacking::Hugetlb1G,
    }
}

/// Reads the host's nodes.
pub fn nodes(root: &Path, page: HugePage) -> Vec<Node> {
    let Ok(folder) = fs::read_dir(root.join(NODES)) else { return Vec::new() };
    let mut nodes: Vec<Node> = folder
        .flatten()
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let text = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let pages = |name: &str| text(&format!("{}/{name}", counters(page))).trim().parse();
            Some(Node {
                id,
                cpus: numbers(&text("cpulist")),
                free: pages("free_hugepages").unwrap_or(0),
                total: pages("nr_hugepages").unwrap_or(0),
            })
        })
        .collect();
    nodes.sort_unstable_by_key(|node| node.id);
    nodes
}

/// Folder of a size's counters in a node.
fn counters(page: HugePage) -> String {
    format!("hugepages/hugepages-{}kB", page_mib(page) * 1024)
}

/// Returns how much may be set aside as huge pages on a server with `memory_mib`, in MiB: what the node keeps
/// for itself stays ordinary memory, which its own programs live on.
pub fn most(wanted: &Machines, memory_mib: u64) -> u64 {
    memory_mib.saturating_sub(wanted.reserve_mib.0)
}

/// Sets huge pages aside as the configuration says, but no more than `most`, in MiB, evenly over the nodes;
/// those that are there stay. Returns how much there is then, in MiB, which may be less than asked for.
pub fn reserve(root: &Path, wanted: &Machines, most: u64) -> io::Result<u64> {
    let page = wanted.huge_page;
    let pages = wanted.huge_pages_mib.0.min(most) / page_mib(page);
    if pages == 0 {
        return Ok(0);
    }
    let before = nodes(root, page);
    for (node, share) in before.iter().zip(even(pages, before.len())) {
        if node.total < share {
            let file = format!("{NODES}/node{}/{}/nr_hugepages", node.id, counters(page));
            fs::write(root.join(file), share.to_string())?;
        }
    }
    Ok(nodes(root, page).iter().map(|node| node.total).sum::<u64>() * page_mib(page))
}

/// Divides `pages` into `parts` that differ by one at most.
fn even(pages: u64, parts: usize) -> Vec<u64> {
    let count = u64::try_from(parts).unwrap_or(u64::MAX).max(1);
    (0..count).map(|part| pages / count + u64::from(part < pages % count)).collect()
}

/// Returns whether a machine of `mib` can be of huge pages when `free_mib` of them are left.
pub fn fits(mib: Mebibytes, page: HugePage, free_mib: u64) -> bool {
    mib.0.is_multiple_of(page_mib(page)) && mib.0 <= free_mib
}

/// Returns where the memory of a machine comes from. `near` are the nodes of its devices, which come
/// first; of several, each gives the same when it can.
pub fn place(
    mib: Mebibytes,
    backing: MemoryBacking,
    nodes: &[Node],
    near: &[u32],
) -> Vec<HostMemory> {
    let page = match backing {
        MemoryBacking::Memfd => return beside(mib, nodes, near),
        MemoryBacking::Hugetlb2M => page_mib(HugePage::Size2M),
        MemoryBacking::Hugetlb1G => page_mib(HugePage::Size1G),
    };
    let mut missing = mib.0 / page;
    let mut taken = vec![0; nodes.len()];
    let is_near = |node: &Node| near.contains(&node.id);
    // Near nodes share evenly; what one lacks the others give, and then the far ones, largest first.
    let close: Vec<usize> = (0..nodes.len()).filter(|at| is_near(&nodes[*at])).collect();
    for (at, share) in close.iter().zip(even(missing, close.len())) {
        taken[*at] = share.min(nodes[*at].free);
    }
    missing -= taken.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|at| (!is_near(&nodes[*at]), std::cmp::Reverse(nodes[*at].free)));
    for at in order {
        let more = missing.min(nodes[at].free - taken[at]);
        taken[at] += more;
        missing -= more;
    }
    if missing > 0 {
        // More than there is: the VMM says of which node.
        return Vec::new();
    }
    nodes
        .iter()
        .zip(taken)
        .filter(|(_, pages)| *pages > 0)
        .map(|(node, pages)| HostMemory {
            node: Some(node.id),
            memory_mib: Mebibytes(pages * page),
            cpus: node.cpus.clone(),
        })
        .collect()
}

/// Ordinary memory is bound to no node, so that a full one does not stop a machine; it is fetched by
/// CPUs beside the devices, and the kernel takes it from their node first.
fn beside(mib: Mebibytes, nodes: &[Node], near: &[u32]) -> Vec<HostMemory> {
    let close = nodes.iter().filter(|node| near.contains(&node.id));
    let cpus: Vec<u32> = close.flat_map(|node| node.cpus.iter().copied()).collect();
    if cpus.is_empty() {
        return Vec::new();
    }
    vec![HostMemory { node: None, memory_mib: mib, cpus }]
}

/// Returns the numbers that a kernel list such as `0-3,8` names.
pub(super) fn numbers(list: &str) -> Vec<u32> {
    let span = |part: &str| -> Option<std::ops::RangeInclusive<u32>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(span).flatten().take(8192).collect()
}

#[cfg(test)]
pub(crate) mod fixture {
    use super::*;

    /// Returns a root with a node for each of `pages`: free ones of `page`, and all.
    pub(crate) fn host(page: HugePage, pages: &[(u64, u64)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (id, (free, total)) in pages.iter().enumerate() {
            let folder = root.path().join(format!("{NODES}/node{id}")).join(counters(page));
            fs::create_dir_all(&folder).expect("made");
            fs::write(folder.join("free_hugepages"), format!("{free}\n")).expect("written");
            fs::write(folder.join("nr_hugepages"), format!("{total}\n")).expect("written");
        }
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, free: u64) -> Node {
        Node { id, cpus: vec![2 * id, 2 * id + 1], free, total: free }
    }

    fn placed(mib: u64, nodes: &[Node], near: &[u32]) -> Vec<(Option<u32>, u64)> {
        let parts = place(Mebibytes(mib), MemoryBacking::Hugetlb2M, nodes, near);
        parts.iter().map(|part| (part.node, part.memory_mib.0)).collect()
    }

    #[test]
    fn memory_lies_beside_the_devices() {
        let nodes = [node(0, 100), node(1, 100)];
        assert_eq!(placed(200, &nodes, &[1]), [(Some(1), 200)]);
        assert_eq!(placed(100, &nodes, &[0, 1]), [(Some(0), 50), (Some(1), 50)]);
    }

    #[test]
    fn what_is_missing_beside_them_comes_from_elsewhere() {
        let nodes = [node(0, 100), node(1, 30), node(2, 500)];
        assert_eq!(placed(200, &nodes, &[1]), [(Some(1), 60), (Some(2), 140)]);
        assert_eq!(placed(200, &nodes, &[0, 1]), [(Some(0), 140), (Some(1), 60)]);
        assert_eq!(placed(2000, &nodes, &[1]), []);
    }

    #[test]
    fn ordinary_memory_is_fetched_beside_the_devices() {
        let nodes = [node(0, 0), node(1, 0)];
        let parts = place(Mebibytes(7), MemoryBacking::Memfd, &nodes, &[1]);
        let expected = HostMemory { node: None, memory_mib: Mebibytes(7), cpus: vec![2, 3] };
        assert_eq!(parts, [expected]);
        assert_eq!(place(Mebibytes(7), MemoryBacking::Memfd, &nodes, &[]), []);
    }

    #[test]
    fn pages_are_set_aside_evenly_and_kept() {
        let root = tempfile::tempdir().expect("a folder");
        let file = |node: u32, name: &str| {
            let folder = format!("{NODES}/node{node}/hugepages/hugepages-2048kB");
            root.path().join(folder).join(name)
        };
        for (id, total) in [(0, "0"), (1, "60")] {
            fs::create_dir_all(file(id, "").parent().expect("a parent").join("hugepages-2048kB"))
                .expect("made");
            fs::write(file(id, "nr_hugepages"), total).expect("written");
            fs::write(file(id, "free_hugepages"), "0").expect("written");
        }
        let wanted = Machines { huge_pages_mib: Mebibytes(201), ..Machines::default() };
        let reserve = |wanted: &Machines, most| reserve(root.path(), wanted, most);
        assert_eq!(reserve(&wanted, 80).expect("written"), 160);
        assert_eq!(reserve(&wanted, 4096).expect("written"), 220);
        let pages = |node| fs::read_to_string(file(node, "nr_hugepages")).expect("read");
        assert_eq!((pages(0).as_str(), pages(1).as_str()), ("50", "60"));
        assert_eq!(reserve(&Machines::default(), 4096).expect("nothing"), 0);
    }

    #[test]
    fn the_node_keeps_its_own_memory() {
        let wanted = Machines { reserve_mib: Mebibytes(256), ..Machines::default() };
        assert_eq!(most(&wanted, 4096), 3840);
        assert_eq!(most(&wanted, 200), 0);
    }

    #[test]
    fn only_whole_pages_are_huge() {
        assert!(fits(Mebibytes(2048), HugePage::Size1G, 2048));
        assert!(!fits(Mebibytes(2048), HugePage::Size1G, 1024));
        assert!(!fits(Mebibytes(1536), HugePage::Size1G, 4096));
    }
}
