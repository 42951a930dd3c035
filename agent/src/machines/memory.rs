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

/// Huge pages that are set aside.
#[derive(Debug, Default)]
pub struct Reserved {
    /// How much memory they are, in MiB.
    pub mib: u64,
    /// Nodes that gave less than they were asked for as something failed, and what.
    pub failed: Vec<(u32, io::Error)>,
}

/// Sets huge pages aside as the configuration says, but no more than `most`, in MiB, over the nodes as they
/// have memory; what one cannot give the others are asked for. Pages that are there stay, and count.
///
/// The kernel clears what it sets aside, for minutes on a large server; `went_on` is called whenever [`STEP_MIB`] more
/// are done.
pub fn reserve(root: &Path, wanted: &Machines, most: u64, went_on: impl Fn()) -> Reserved {
    let page = wanted.huge_page;
    let pages = wanted.huge_pages_mib.0.min(most) / page_mib(page);
    if pages == 0 {
        return Reserved::default();
    }
    let giver = |node: &Node| Giver {
        node: node.id,
        mib: node_mib(root, node.id),
        total: node.total,
        can: Can::More,
    };
    let mut givers: Vec<Giver> = nodes(root, page).iter().map(giver).collect();
    if givers.iter().all(|giver| giver.mib == 0) {
        // A host that does not tell: they are taken for equal.
        givers.iter_mut().for_each(|giver| giver.mib = 1);
    }
    let failed = ask_all(pages, &mut givers, |node, total| {
        let file = root.join(format!("{NODES}/node{node}/{}/nr_hugepages", counters(page)));
        set_aside(&file, total, STEP_MIB / page_mib(page), &went_on)
    });
    let total: u64 = givers.iter().map(|giver| giver.total).sum();
    Reserved { mib: total * page_mib(page), failed }
}

/// How much memory is set aside at once, in MiB: a few seconds' work (`docs/memory.md`).
const STEP_MIB: u64 = 16 << 10;

/// Has a node's `file` say `total` pages, by `step` at a time with `went_on` in between. Returns how many there are, as
/// far as it told, and what failed: what earlier steps gave is there.
fn set_aside(
    file: &Path,
    total: u64,
    step: u64,
    went_on: impl Fn(),
) -> (Option<u64>, io::Result<()>) {
    let count = || -> io::Result<u64> {
        fs::read_to_string(file)?.trim().parse().map_err(io::Error::other)
    };
    let mut there = match count() {
        Ok(there) => there,
        Err(error) => return (None, Err(error)),
    };
    loop {
        let wanted = total.min(there.saturating_add(step));
        // The kernel gives what it can, and says no more about that.
        match fs::write(file, wanted.to_string()).and_then(|()| count()) {
            Ok(now) => there = now,
            Err(error) => return (Some(there), Err(error)),
        }
        if there < wanted || wanted == total {
            return (Some(there), Ok(()));
        }
        went_on();
    }
}

/// Returns how much memory a node has, in MiB; 0 when it does not tell, or has none.
fn node_mib(root: &Path, node: u32) -> u64 {
    let text = fs::read_to_string(root.join(format!("{NODES}/node{node}/meminfo")));
    // "Node 0 MemTotal:       24684096 kB"
    let kib = text.unwrap_or_default().lines().find_map(|line| {
        line.split_once("MemTotal:")?.1.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kib.unwrap_or(0) / 1024
}

/// A node that is asked for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Giver {
    node: u32,
    /// How much memory it has, in MiB.
    mib: u64,
    /// Pages that it gave.
    total: u64,
    can: Can,
}

/// Whether a node is worth asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Can {
    /// It gave what it was asked for.
    More,
    /// It gave less.
    NoMore,
}

/// Asks nodes until there are `pages`, or none gives more. `ask` asks one for so many in all, and returns
/// how many it has then, as far as that is known, and how it went. Returns which failed.
fn ask_all(
    pages: u64,
    givers: &mut [Giver],
    mut ask: impl FnMut(u32, u64) -> (Option<u64>, io::Result<()>),
) -> Vec<(u32, io::Error)> {
    let mut failed = Vec::new();
    // Each round but the last leaves one node less to ask.
    for _ in 0..=givers.len() {
        let there = givers.iter().map(|giver| giver.total).sum();
        let mut missing = pages.saturating_sub(there);
        let able = |giver: &&mut Giver| giver.can == Can::More && giver.mib > 0;
        let mut able: Vec<&mut Giver> = givers.iter_mut().filter(able).collect();
        if missing == 0 || able.is_empty() {
            break;
        }
        let theirs = missing + able.iter().map(|giver| giver.total).sum::<u64>();
        let sizes: Vec<u64> = able.iter().map(|giver| giver.mib).collect();
        for (giver, share) in able.iter_mut().zip(by_size(theirs, &sizes)) {
            let more = share.saturating_sub(giver.total).min(missing);
            if more == 0 {
                continue;
            }
            missing -= more;
            let wanted = giver.total + more;
            let (there, asked) = ask(giver.node, wanted);
            giver.total = there.unwrap_or(giver.total);
            if giver.total < wanted || asked.is_err() {
                giver.can = Can::NoMore;
            }
            failed.extend(asked.err().map(|error| (giver.node, error)));
        }
    }
    failed
}

/// Divides `pages` as the sizes are, none of which is 0; the first ones get what does not divide.
fn by_size(pages: u64, sizes: &[u64]) -> Vec<u64> {
    let all = u128::from(sizes.iter().sum::<u64>().max(1));
    let share = |size: &u64| u128::from(pages) * u128::from(*size) / all;
    let mut shares: Vec<u64> =
        sizes.iter().map(|size| u64::try_from(share(size)).unwrap_or(pages)).collect();
    let rest = usize::try_from(pages - shares.iter().sum::<u64>()).unwrap_or(usize::MAX);
    shares.iter_mut().take(rest).for_each(|share| *share += 1);
    shares
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
    fn pages_are_set_aside_and_those_that_are_there_count() {
        let root = fixture::host(HugePage::Size2M, &[(0, 0), (0, 60)]);
        let wanted = Machines { huge_pages_mib: Mebibytes(201), ..Machines::default() };
        let reserve = |wanted: &Machines, most| reserve(root.path(), wanted, most, || ()).mib;
        let pages = || nodes(root.path(), HugePage::Size2M).iter().map(|n| n.total).collect();
        assert_eq!((reserve(&wanted, 140), pages()), (140, vec![10, 60]));
        assert_eq!((reserve(&wanted, 4096), pages()), (200, vec![40, 60]));
        assert_eq!((reserve(&wanted, 80), pages()), (200, vec![40, 60]), "they stay");
        assert_eq!(reserve(&Machines::default(), 4096), 0);
    }

    #[test]
    fn nodes_give_as_they_have_memory_and_one_without_pages_stops_nobody() {
        let root = fixture::host(HugePage::Size2M, &[(0, 0), (0, 0), (0, 0)]);
        let node = |id: u32| root.path().join(format!("{NODES}/node{id}"));
        for (id, kib) in [(0, 96 << 20), (1, 32 << 20), (2, 0)] {
            let text = format!("Node {id} MemTotal:       {kib} kB\nNode {id} MemFree: 7 kB\n");
            fs::write(node(id).join("meminfo"), text).expect("written");
        }
        let wanted = |mib| Machines { huge_pages_mib: Mebibytes(mib), ..Machines::default() };
        let pages = || -> Vec<u64> {
            nodes(root.path(), HugePage::Size2M).iter().map(|n| n.total).collect()
        };
        assert_eq!(reserve(root.path(), &wanted(800), 4096, || ()).mib, 800);
        assert_eq!(pages(), [300, 100, 0], "node 2 has no memory");
        fs::remove_dir_all(node(0).join("hugepages")).expect("removed");
        let reserved = reserve(root.path(), &wanted(1000), 4096, || ());
        let failed: Vec<u32> = reserved.failed.iter().map(|(node, _)| *node).collect();
        assert_eq!((reserved.mib, failed), (1000, vec![0]));
        assert_eq!(pages(), [0, 500, 0]);
    }

    #[test]
    fn large_reservations_say_that_they_go_on() {
        let root = fixture::host(HugePage::Size1G, &[(0, 7)]);
        let file = root.path().join(format!("{NODES}/node0/{}", counters(HugePage::Size1G)));
        let file = file.join("nr_hugepages");
        let said = std::cell::RefCell::new(Vec::new());
        let say = || said.borrow_mut().push(fs::read_to_string(&file).expect("there"));
        assert_eq!(told(set_aside(&file, 40, 16, say)), (Some(40), true));
        assert_eq!(*said.borrow(), ["23", "39"]);
        let given = set_aside(&file, 56, 16, || panic!("one step"));
        assert_eq!(told(given), (Some(56), true));
    }

    /// How many pages there are, and whether nothing failed.
    fn told((there, asked): (Option<u64>, io::Result<()>)) -> (Option<u64>, bool) {
        (there, asked.is_ok())
    }

    #[test]
    fn what_was_set_aside_before_a_failure_counts_and_the_failure_is_told() {
        let root = fixture::host(HugePage::Size1G, &[(0, 7)]);
        let file = root.path().join(format!("{NODES}/node0/{}", counters(HugePage::Size1G)));
        let file = file.join("nr_hugepages");
        // It cannot be written to any more.
        let break_off = || {
            fs::remove_file(&file).expect("removed");
            fs::create_dir(&file).expect("made");
        };
        let huge_page = HugePage::Size1G;
        let wanted =
            Machines { huge_page, huge_pages_mib: Mebibytes(40 << 10), ..Machines::default() };
        let reserved = reserve(root.path(), &wanted, 1 << 20, break_off);
        let failed: Vec<u32> = reserved.failed.iter().map(|(node, _)| *node).collect();
        assert_eq!((reserved.mib, failed), (23 << 10, vec![0]));
        assert_eq!(told(set_aside(&file, 40, 16, || ())), (None, false));
        fs::remove_dir(&file).expect("removed");
        fs::write(&file, "7").expect("written");
        // It takes what is written, and tells nothing.
        let go_silent = || {
            fs::remove_file(&file).expect("removed");
            std::os::unix::fs::symlink("/dev/null", &file).expect("linked");
        };
        assert_eq!(told(set_aside(&file, 40, 16, go_silent)), (Some(23), false));
    }

    /// Asks nodes of (size, most pages that it gives) for `pages`. Returns what each gave.
    fn given(pages: u64, hosts: &[(u64, u64)]) -> Vec<u64> {
        let giver = |(node, host): (u32, &(u64, u64))| Giver {
            node,
            mib: host.0,
            total: 0,
            can: Can::More,
        };
        let mut givers: Vec<Giver> = (0..).zip(hosts).map(giver).collect();
        let give = |node, wanted: u64| {
            let most = usize::try_from(node).ok().and_then(|node| hosts.get(node)).map(|h| h.1);
            (Some(wanted.min(most.expect("one that is there"))), Ok(()))
        };
        assert!(ask_all(pages, &mut givers, give).is_empty());
        givers.iter().map(|giver| giver.total).collect()
    }

    #[test]
    fn what_one_node_cannot_give_the_others_do() {
        assert_eq!(given(100, &[(8, 100), (8, 100)]), [50, 50]);
        assert_eq!(given(100, &[(8, 20), (8, 100)]), [20, 80]);
        assert_eq!(given(100, &[(8, 20), (8, 26), (8, 99), (8, 30)]), [20, 26, 27, 27]);
        assert_eq!(given(100, &[(8, 0), (8, 30), (8, 35)]), [0, 30, 35], "there are no more");
        assert_eq!(given(100, &[(0, 100), (8, 70)]), [0, 70], "one without memory is not asked");
        assert_eq!(given(3, &[(5, 9), (1, 9)]), [3, 0]);
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
