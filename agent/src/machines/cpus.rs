//! Which of the host's CPUs a machine's virtual ones run on. [`promise`] decides and is pure.
//!
//! A virtual CPU has a host CPU that no other machine was promised. Machines take whole cores, near
//! their devices, as long as there are any; then threads beside other machines' (core scheduling
//! keeps two machines from running on one core at the same time); and when even these are all
//! promised, which only a node that offers more virtual CPUs than it has can bring about, they run
//! anywhere. Whatever is not the best is noted.
//! Source: Linux Documentation/admin-guide/cputopology.rst.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::memory::Node;

/// Where the host's CPUs are, in the root.
const CPUS: &str = "sys/devices/system/cpu";

/// Caches from this level on are shared by cores.
const LAST_LEVEL: u32 = 3;

/// CPUs from this number on cannot be named to a VMM.
const MAX_CPUS: u32 = 1024;

/// One CPU of the host: a thread of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostCpu {
    /// Its number.
    pub id: u32,
    /// The lowest number of its core's CPUs.
    pub core: u32,
    /// The lowest number of those that share its last-level cache; 0 where the kernel knows of none.
    pub cache: u32,
    /// Its package, by the kernel's number; 0 where the kernel knows of none.
    pub package: u32,
    /// NUMA node; none where the host has no nodes.
    pub node: Option<u32>,
}

/// Reads the host's CPUs that are online.
pub fn read(root: &Path, nodes: &[Node]) -> Vec<HostCpu> {
    let online = fs::read_to_string(root.join(CPUS).join("online")).unwrap_or_default();
    let known = super::memory::numbers(&online).into_iter().filter(|id| *id < MAX_CPUS);
    known
        .map(|id| {
            let of = root.join(format!("{CPUS}/cpu{id}"));
            let text = |name: &str| fs::read_to_string(of.join(name)).unwrap_or_default();
            let core = lowest(&text("topology/thread_siblings_list")).unwrap_or(id);
            let package = text("topology/physical_package_id").trim().parse().unwrap_or(0);
            let node = nodes.iter().find(|node| node.cpus.contains(&id)).map(|node| node.id);
            HostCpu { id, core, cache: last_level_cache(&of).unwrap_or(0), package, node }
        })
        .collect()
}

/// Returns the lowest number of a list as the kernel writes it.
fn lowest(list: &str) -> Option<u32> {
    super::memory::numbers(list).into_iter().min()
}

/// Returns the lowest number of the CPUs that share the last-level cache of the CPU with this folder.
/// Source: Linux Documentation/ABI/testing/sysfs-devices-system-cpu, "cache/index*".
fn last_level_cache(cpu: &Path) -> Option<u32> {
    let indices = fs::read_dir(cpu.join("cache")).ok()?.flatten();
    let cache = |index: fs::DirEntry| {
        let text = |name: &str| fs::read_to_string(index.path().join(name)).ok();
        let level: u32 = text("level")?.trim().parse().ok()?;
        Some((level, lowest(&text("shared_cpu_list")?)?))
    };
    indices
        .filter_map(cache)
        .filter(|(level, _)| *level >= LAST_LEVEL)
        .max()
        .map(|(_, lowest)| lowest)
}

/// The CPUs of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promise {
    /// One host CPU for each virtual one, in order; empty when they run anywhere.
    pub cpus: Vec<u32>,
    /// What is not as it would be best.
    pub notes: Vec<String>,
}

/// Chooses CPUs for `vcpus` virtual ones. `taken` were promised to other machines; `near` are the
/// nodes of the machine's devices.
pub fn promise(vcpus: u32, host: &[HostCpu], taken: &BTreeSet<u32>, near: &[u32]) -> Promise {
    let wanted = usize::try_from(vcpus).unwrap_or(usize::MAX);
    let free: Vec<HostCpu> = host.iter().filter(|cpu| !taken.contains(&cpu.id)).copied().collect();
    if free.len() < wanted {
        let note = format!(
            "virtual CPUs run anywhere: {vcpus} are wanted and {} of the host's {} are not promised \
             to another machine",
            free.len(),
            host.len()
        );
        return Promise { cpus: Vec::new(), notes: vec![note] };
    }
    let split: BTreeSet<u32> =
        host.iter().filter(|cpu| taken.contains(&cpu.id)).map(|cpu| cpu.core).collect();
    let whole: Vec<HostCpu> =
        free.iter().filter(|cpu| !split.contains(&cpu.core)).copied().collect();
    let mut notes = Vec::new();
    let choice = if whole.len() >= wanted {
        choose(wanted, &whole, near)
    } else {
        notes.push(
            "virtual CPUs share physical cores with another machine: no other cores are free, and \
             core scheduling keeps the two from running at the same time"
                .to_owned(),
        );
        choose(wanted, &free, near)
    };
    let near_node = |cpu: &HostCpu| cpu.node.is_none_or(|node| near.contains(&node));
    let far = choice.iter().filter(|cpu| !near_node(cpu)).count();
    if !near.is_empty() && far > 0 {
        notes.push(format!(
            "{far} of {vcpus} virtual CPUs are on another NUMA node than the devices, whose own has \
             no more that are free"
        ));
    }
    Promise { cpus: choice.iter().map(|cpu| cpu.id).collect(), notes }
}

/// Takes `wanted` of `free`, of which there are enough: evenly from the nodes that are near and have
/// them, then from those with most. A machine that is near nothing goes where it fits with least
/// left over, so that larger ones find a node too.
fn choose(wanted: usize, free: &[HostCpu], near: &[u32]) -> Vec<HostCpu> {
    let mut nodes: BTreeMap<Option<u32>, Vec<HostCpu>> = BTreeMap::new();
    for cpu in free {
        nodes.entry(cpu.node).or_default().push(*cpu);
    }
    for cpus in nodes.values_mut() {
        // Core by core; the first core of the host, which has most of its own work, comes last.
        cpus.sort_by_key(|cpu| (cpu.core == 0, cpu.core, cpu.id));
    }
    let is_near = |node: &Option<u32>| node.is_some_and(|node| near.contains(&node));
    let room = |node: &Option<u32>| nodes.get(node).map_or(0, Vec::len);
    let mut shares: BTreeMap<Option<u32>, usize> = BTreeMap::new();
    let close: Vec<Option<u32>> = nodes.keys().filter(|node| is_near(node)).copied().collect();
    for (number, node) in close.iter().enumerate() {
        let share = wanted / close.len() + usize::from(number < wanted % close.len());
        shares.insert(*node, share.min(room(node)));
    }
    let mut order: Vec<Option<u32>> = nodes.keys().copied().collect();
    order.sort_by_key(|node| {
        let fits = room(node) >= wanted;
        let tight = if fits { room(node) } else { usize::MAX - room(node) };
        (!is_near(node), !fits, tight)
    });
    for node in order {
        let missing = wanted - shares.values().sum::<usize>();
        let share = shares.entry(node).or_default();
        *share += missing.min(room(&node) - *share);
    }
    let taken = nodes.iter().flat_map(|(node, cpus)| {
        let share = shares.get(node).copied().unwrap_or(0);
        cpus.iter().take(share).copied()
    });
    taken.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A host of `nodes` with `cores` each, of `threads` threads; siblings are numbered as Linux
    /// does: first all first threads.
    fn host(nodes: u32, cores: u32, threads: u32) -> Vec<HostCpu> {
        let all = nodes * cores;
        let cpu = |id| {
            let core = id % all;
            HostCpu { id, core, cache: 0, package: 0, node: Some(core / cores) }
        };
        (0..all * threads).map(cpu).collect()
    }

    fn taken(cpus: &[u32]) -> BTreeSet<u32> {
        cpus.iter().copied().collect()
    }

    #[test]
    fn whole_cores_beside_the_devices_come_first() {
        let host = host(2, 4, 2);
        let near = promise(4, &host, &taken(&[]), &[1]);
        assert_eq!(near, Promise { cpus: vec![4, 12, 5, 13], notes: vec![] });
        let both = promise(4, &host, &taken(&[]), &[0, 1]);
        assert_eq!(both, Promise { cpus: vec![1, 9, 4, 12], notes: vec![] });
    }

    #[test]
    fn what_is_not_best_is_noted() {
        let host = host(2, 2, 2);
        let far = promise(6, &host, &taken(&[]), &[1]);
        assert_eq!(far.cpus, [1, 5, 2, 6, 3, 7]);
        assert!(far.notes[0].starts_with("2 of 6 virtual CPUs are on another"), "{far:?}");
        let shared = promise(4, &host, &taken(&[0, 1, 2]), &[]);
        assert_eq!(shared.cpus.len(), 4);
        assert!(shared.notes[0].contains("share physical cores"), "{shared:?}");
        let anywhere = promise(4, &host, &taken(&[0, 1, 2, 3, 4]), &[]);
        assert!(anywhere.cpus.is_empty() && anywhere.notes[0].contains("anywhere"));
    }

    #[test]
    fn a_small_machine_leaves_room_for_a_large_one() {
        let host = host(2, 4, 1);
        // Node 0 has two left, node 1 all four: two virtual CPUs fit into what is left.
        assert_eq!(promise(2, &host, &taken(&[0, 1]), &[]).cpus, [2, 3]);
        assert_eq!(promise(3, &host, &taken(&[0, 1]), &[]).cpus, [4, 5, 6]);
    }

    #[test]
    fn the_kernels_lists_are_read() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join(CPUS);
        for (cpu, siblings) in [(0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")] {
            let topology = folder.join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).expect("made");
            fs::write(topology.join("thread_siblings_list"), siblings).expect("written");
        }
        fs::write(folder.join("online"), "0-3,2000\n").expect("written");
        // The last has a package and a third level of cache; one has no level that cores share.
        fs::write(folder.join("cpu3/topology/physical_package_id"), "1\n").expect("written");
        for (cpu, index, level, shared) in
            [(3, 2, "2", "3"), (3, 10, "3", "2-3"), (3, 1, "1", "3"), (2, 2, "2", "2")]
        {
            let cache = folder.join(format!("cpu{cpu}/cache/index{index}"));
            fs::create_dir_all(&cache).expect("made");
            fs::write(cache.join("level"), format!("{level}\n")).expect("written");
            fs::write(cache.join("shared_cpu_list"), format!("{shared}\n")).expect("written");
        }
        let node = Node { id: 7, cpus: vec![1, 3], free: 0, total: 0 };
        let cpu = |id, core, cache, package, node| HostCpu { id, core, cache, package, node };
        assert_eq!(
            read(root.path(), &[node]),
            [
                cpu(0, 0, 0, 0, None),
                cpu(1, 1, 0, 0, Some(7)),
                cpu(2, 0, 0, 0, None),
                cpu(3, 1, 2, 1, Some(7))
            ]
        );
    }

    proptest! {
        #[test]
        fn no_cpu_is_promised_twice(
            (nodes, cores, threads) in (1u32..4, 1u32..6, 1u32..3),
            wanted in proptest::collection::vec((1u32..10, proptest::collection::vec(0u32..4, 0..3)), 1..8),
        ) {
            let host = host(nodes, cores, threads);
            let mut promised = BTreeSet::new();
            for (vcpus, near) in wanted {
                let Promise { cpus, notes } = promise(vcpus, &host, &promised, &near);
                let left = host.len() - promised.len();
                let some = usize::try_from(vcpus).expect("small") <= left;
                prop_assert_eq!(cpus.len(), if some { usize::try_from(vcpus).expect("small") } else { 0 });
                prop_assert!(some || !notes.is_empty());
                let whole = |id: &u32| host.iter().filter(|c| c.core == id % (nodes * cores))
                    .all(|c| !promised.contains(&c.id));
                prop_assert!(!notes.is_empty() || cpus.iter().all(whole), "a shared core is noted");
                let of_near = |id: &u32| host.iter().any(|c| c.id == *id && c.node.is_some_and(|n| near.contains(&n)));
                let known = near.iter().any(|node| *node < nodes);
                prop_assert!(!known || !notes.is_empty() || cpus.iter().all(of_near), "far CPUs are noted");
                for cpu in cpus {
                    prop_assert!(promised.insert(cpu), "CPU {} is promised twice", cpu);
                }
            }
        }
    }
}
