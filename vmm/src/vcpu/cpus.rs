//! How the virtual CPUs are arranged, as the guest is told: how many there are, and how many of them
//! share a last-level cache. Their APIC ids are their numbers. Pure.
//! Source: Intel SDM vol. 2A "CPUID" leaf 4; AMD APM vol. 3 appendix E, leaf 0x8000_001d.

use crate::machine::numa::Node;

/// The arrangement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus {
    /// Virtual CPUs.
    pub count: u32,
    /// How many with ids in a row share a last-level cache: all, or a power of two.
    pub(super) sharing: u32,
}

impl Cpus {
    /// Arranges `count` virtual CPUs, at least one, on `nodes`.
    ///
    /// No cache spans two nodes: Linux takes a topology that says so for broken, and taints itself. Who
    /// shares one is found by dropping low bits of the APIC id, so groups are powers of two, aligned.
    pub fn new(count: u32, nodes: &[Node]) -> Self {
        let home = |vcpu: u32| nodes.iter().position(|node| node.vcpus.contains(&vcpu));
        let homes: Vec<_> = (0..count).map(home).collect();
        let fits = |group: &[Option<usize>]| group.iter().all(|home| *home == group[0]);
        let mut sharing = 1usize;
        while sharing < homes.len() && homes.chunks(sharing * 2).all(fits) {
            sharing *= 2;
        }
        Self { count, sharing: u32::try_from(sharing).unwrap_or(count).min(count) }
    }

    /// Returns how many last-level caches there are.
    pub(super) fn last_level_caches(self) -> u32 {
        self.count.div_ceil(self.sharing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many share a cache, and how many caches there are, on nodes of these virtual CPUs.
    fn arranged<const N: usize>(nodes: [Vec<u32>; N]) -> (u32, u32) {
        let count = nodes.iter().flatten().count();
        let node = |vcpus| Node { id: 0, vcpus, memory: Vec::new(), distances: Vec::new() };
        let nodes = nodes.map(node);
        let cpus = Cpus::new(u32::try_from(count).expect("few"), &nodes);
        (cpus.sharing, cpus.last_level_caches())
    }

    #[test]
    fn without_nodes_or_in_one_all_share_the_last_cache() {
        assert_eq!(Cpus::new(1, &[]), Cpus { count: 1, sharing: 1 });
        assert_eq!(Cpus::new(6, &[]), Cpus { count: 6, sharing: 6 });
        assert_eq!(arranged([(0..6).collect()]), (6, 1));
        assert_eq!(arranged([(0..6).collect(), Vec::new()]), (6, 1));
    }

    #[test]
    fn the_last_cache_stays_inside_a_node() {
        assert_eq!(arranged([(0..4).collect(), (4..8).collect()]), (4, 2));
        assert_eq!(arranged([(0..120).collect(), (120..240).collect()]), (8, 30));
        assert_eq!(arranged([(0..4).collect(), (4..6).collect()]), (4, 2));
        assert_eq!(arranged([(0..6).collect(), (6..12).collect()]), (2, 6));
    }

    #[test]
    fn odd_and_interleaved_nodes_have_caches_that_nobody_shares() {
        assert_eq!(arranged([vec![0, 1, 2], vec![3, 4, 5]]), (1, 6));
        assert_eq!(arranged([vec![0, 2], vec![1, 3]]), (1, 4));
    }
}
