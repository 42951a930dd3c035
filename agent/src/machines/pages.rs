//! Huge pages of the host's nodes that machines were given. The kernel counts a page as used when it is
//! fetched, which a start does long after it was placed; machines that start at the same time would all
//! be bound to the same free pages. How many pages there are `memory` reads, and where a machine goes it
//! decides.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lease::hardware::MemoryPlace;
use types::{config::HugePage, ids::MachineId, vm::HostMemory};

use super::memory::{self, Node};

/// Where the memory is of machines that run or start. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct HeldPages(Arc<Mutex<BTreeMap<MachineId, Vec<MemoryPlace>>>>);

impl HeldPages {
    /// Reads the host's nodes in `root`, has `decide` place `machine` on what of their huge pages no other
    /// has, and remembers that. Returns the nodes as `decide` saw them, and what it chose. Machines are
    /// placed one after the other.
    pub fn place(
        &self,
        machine: MachineId,
        (root, page): (&Path, HugePage),
        decide: impl FnOnce(&[Node]) -> Vec<HostMemory>,
    ) -> (Vec<Node>, Vec<HostMemory>) {
        let mut held = self.held();
        held.remove(&machine);
        let mut nodes = memory::nodes(root, page);
        leave(&mut nodes, page, held.values().flatten());
        let parts = decide(&nodes);
        // Memory that is bound to no node is none of a node's.
        let place = |part: &HostMemory| MemoryPlace {
            node: part.node,
            memory_mib: part.memory_mib,
            backing: memory::backing(page),
        };
        held.insert(machine, parts.iter().map(place).collect());
        (nodes, parts)
    }

    /// Remembers where a machine is that another agent started.
    pub fn adopt(&self, machine: MachineId, places: &[MemoryPlace]) {
        self.held().insert(machine, places.to_vec());
    }

    /// Forgets machines that have no memory any more.
    pub fn keep_only(&self, has: impl Fn(MachineId) -> bool) {
        self.held().retain(|machine, _| has(*machine));
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<MachineId, Vec<MemoryPlace>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves of the nodes' free pages those that nobody holds: what machines have fetched is free no more,
/// and what they will fetch is free still.
fn leave<'a>(nodes: &mut [Node], page: HugePage, held: impl Iterator<Item = &'a MemoryPlace>) {
    let mut of_node = BTreeMap::<u32, u64>::new();
    let of_kind = |place: &&MemoryPlace| place.backing == memory::backing(page);
    for place in held.filter(of_kind) {
        let Some(node) = place.node else { continue };
        let pages = of_node.entry(node).or_default();
        *pages = pages.saturating_add(place.memory_mib.0.div_ceil(memory::page_mib(page)));
    }
    for node in nodes {
        let held = of_node.get(&node.id).copied().unwrap_or(0);
        node.free = node.free.min(node.total.saturating_sub(held));
    }
}

#[cfg(test)]
mod tests {
    use types::{units::Mebibytes, vm::MemoryBacking};

    use super::*;

    fn machine(number: u8) -> MachineId {
        MachineId::from_bytes([number; 16])
    }

    fn place_of(node: Option<u32>, mib: u64, backing: MemoryBacking) -> MemoryPlace {
        MemoryPlace { node, memory_mib: Mebibytes(mib), backing }
    }

    /// Returns what is left of a node of `total` pages of 2 MiB, `free` of which are free, when others
    /// hold `held`.
    fn left(free: u64, total: u64, held: &[MemoryPlace]) -> u64 {
        let mut nodes = [Node { id: 1, cpus: Vec::new(), free, total }];
        leave(&mut nodes, HugePage::Size2M, held.iter());
        nodes[0].free
    }

    #[test]
    fn what_is_held_counts_once_fetched_or_not() {
        let held = [place_of(Some(1), 60, MemoryBacking::Hugetlb2M)];
        assert_eq!(left(100, 100, &held), 70, "nothing of it is fetched");
        assert_eq!(left(90, 100, &held), 70, "some");
        assert_eq!(left(70, 100, &held), 70, "all");
        assert_eq!(left(50, 100, &held), 50, "and somebody else has some");
        assert_eq!(left(100, 20, &held), 0, "there were more of them once");
    }

    #[test]
    fn memory_elsewhere_or_of_another_kind_takes_no_page() {
        let held = [
            place_of(Some(0), 60, MemoryBacking::Hugetlb2M),
            place_of(None, 60, MemoryBacking::Hugetlb2M),
            place_of(Some(1), 60, MemoryBacking::Memfd),
            place_of(Some(1), 1024, MemoryBacking::Hugetlb1G),
        ];
        assert_eq!(left(100, 100, &held), 100);
    }

    #[test]
    fn pages_are_held_as_long_as_their_machine_is_there() {
        let root = memory::fixture::host(HugePage::Size2M, &[(100, 100)]);
        let held = HeldPages::default();
        held.adopt(machine(1), &[place_of(Some(0), 60, MemoryBacking::Hugetlb2M)]);
        let free = |number| {
            let place = (root.path(), HugePage::Size2M);
            let (nodes, _) = held.place(machine(number), place, |nodes| {
                let pages = Mebibytes(nodes[0].free * 2);
                vec![HostMemory { node: Some(0), memory_mib: pages, cpus: Vec::new() }]
            });
            nodes[0].free
        };
        assert_eq!(free(2), 70);
        assert_eq!(free(2), 70, "what it had is its own at its next start");
        assert_eq!(free(3), 0);
        held.keep_only(|known| known != machine(2));
        assert_eq!(free(3), 70);
    }
}
