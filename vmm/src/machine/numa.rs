//! NUMA nodes of a machine: which processors and which memory each has. Pure.

use std::collections::BTreeSet;

use types::{
    topology::{LOCAL_DISTANCE, NumaNode},
    vm::VmSpec,
};

/// Most nodes.
const MAX_NODES: usize = 64;
/// Largest distance; 255 means that there is no way (ACPI 6.5 §5.2.17).
const MAX_DISTANCE: u8 = 254;

/// Why nodes cannot be as they are written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum NumaError {
    #[error("{found} NUMA nodes; at most {MAX_NODES} are possible")]
    Count { found: usize },
    #[error("NUMA node {id} is there twice")]
    Repeated { id: u32 },
    #[error("virtual CPU {vcpu} is not in one NUMA node exactly")]
    Vcpu { vcpu: u32 },
    #[error("NUMA nodes have {found} MiB of memory together; the machine has {memory} MiB")]
    Memory { found: u64, memory: u64 },
    #[error("NUMA node {id} has {found} distances; there are {nodes} nodes")]
    Distances { id: u32, found: usize, nodes: usize },
    #[error(
        "NUMA node {id} says {distance} to itself or another; 10 to itself and 11 to 254 to others are possible"
    )]
    Distance { id: u32, distance: u8 },
    #[error("root complex {root} is near NUMA node {node}, which is not there")]
    Near { root: usize, node: u32 },
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Proximity domain.
    pub id: u32,
    /// Virtual CPUs.
    pub vcpus: Vec<u32>,
    /// Guest memory: address and length of each piece.
    pub memory: Vec<(u64, u64)>,
    /// Distance to every node.
    pub distances: Vec<u8>,
}

/// Checks the nodes of `spec`.
pub fn check(spec: &VmSpec) -> Result<(), NumaError> {
    let bytes = spec.memory_mib.to_bytes().unwrap_or(u64::MAX);
    nodes(spec, &[(0, bytes)]).map(drop)
}

/// Checks and lays out the nodes of `spec` on its pieces of `ram` (address and length, ascending);
/// none when it has none.
pub fn nodes(spec: &VmSpec, ram: &[(u64, u64)]) -> Result<Vec<Node>, NumaError> {
    let all = &spec.numa;
    if all.len() > MAX_NODES {
        return Err(NumaError::Count { found: all.len() });
    }
    let ids: BTreeSet<u32> = all.iter().map(|node| node.id).collect();
    let roots = spec.topology.iter().flat_map(|topology| topology.roots.iter().enumerate());
    for (root, complex) in roots {
        if let Some(node) = complex.node.filter(|node| !ids.contains(node)) {
            return Err(NumaError::Near { root, node });
        }
    }
    if all.is_empty() {
        return Ok(Vec::new());
    }
    check_vcpus(all, spec.vcpus)?;
    let found = all.iter().fold(0u64, |sum, node| sum.saturating_add(node.memory_mib.0));
    let memory = spec.memory_mib.0;
    if found != memory {
        return Err(NumaError::Memory { found, memory });
    }
    let mut left = ram.to_vec();
    left.reverse();
    let mut seen = BTreeSet::new();
    let mut nodes = Vec::new();
    for (number, node) in all.iter().enumerate() {
        if !seen.insert(node.id) {
            return Err(NumaError::Repeated { id: node.id });
        }
        check_distances(node, number, all.len())?;
        let memory = take(&mut left, node.memory_mib.to_bytes().unwrap_or(u64::MAX));
        let NumaNode { id, vcpus, distances, .. } = node.clone();
        nodes.push(Node { id, vcpus, memory, distances });
    }
    Ok(nodes)
}

fn check_vcpus(all: &[NumaNode], vcpus: u32) -> Result<(), NumaError> {
    let mut seen = BTreeSet::new();
    for vcpu in all.iter().flat_map(|node| &node.vcpus) {
        if *vcpu >= vcpus || !seen.insert(*vcpu) {
            return Err(NumaError::Vcpu { vcpu: *vcpu });
        }
    }
    let missing = (0..vcpus).find(|vcpu| !seen.contains(vcpu));
    missing.map_or(Ok(()), |vcpu| Err(NumaError::Vcpu { vcpu }))
}

fn check_distances(node: &NumaNode, number: usize, nodes: usize) -> Result<(), NumaError> {
    let (id, found) = (node.id, node.distances.len());
    if found != nodes {
        return Err(NumaError::Distances { id, found, nodes });
    }
    for (other, distance) in node.distances.iter().enumerate() {
        let fits = if other == number {
            *distance == LOCAL_DISTANCE
        } else {
            (LOCAL_DISTANCE + 1..=MAX_DISTANCE).contains(distance)
        };
        if !fits {
            return Err(NumaError::Distance { id, distance: *distance });
        }
    }
    Ok(())
}

/// Takes `bytes` from the end of `left`, which is where the lowest addresses are.
fn take(left: &mut Vec<(u64, u64)>, mut bytes: u64) -> Vec<(u64, u64)> {
    let mut taken = Vec::new();
    while bytes > 0 {
        let Some((base, length)) = left.pop() else { break };
        let mine = length.min(bytes);
        taken.push((base, mine));
        if mine < length {
            left.push((base + mine, length - mine));
        }
        bytes -= mine;
    }
    taken
}

#[cfg(test)]
mod tests {
    use types::units::Mebibytes;

    use super::*;
    use crate::spec;

    fn spec(vcpus: u32, memory: u64, numa: Vec<NumaNode>) -> VmSpec {
        VmSpec { numa, ..spec::tests::minimal(vcpus, memory) }
    }

    fn node(id: u32, vcpus: &[u32], memory: u64, distances: &[u8]) -> NumaNode {
        NumaNode {
            id,
            vcpus: vcpus.to_vec(),
            memory_mib: Mebibytes(memory),
            distances: distances.to_vec(),
        }
    }

    #[test]
    fn memory_goes_on_behind_the_gap() {
        let all = vec![node(0, &[0, 2], 2048, &[10, 21]), node(1, &[1, 3], 4096, &[21, 10])];
        let ram = [(0, 3 << 30), (4 << 30, 3 << 30)];
        let nodes = nodes(&spec(4, 6144, all), &ram).expect("possible");
        assert_eq!(nodes[0].memory, [(0, 2 << 30)]);
        assert_eq!(nodes[1].memory, [(2 << 30, 1 << 30), (4 << 30, 3 << 30)]);
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        let refusal = |all| check(&spec(2, 1024, all)).expect_err("refused");
        let second = node(1, &[1], 512, &[20, 10]);
        let with = |first| vec![first, second.clone()];
        assert_eq!(
            refusal(with(node(0, &[0], 256, &[10, 20]))),
            NumaError::Memory { found: 768, memory: 1024 }
        );
        assert_eq!(refusal(with(node(0, &[], 512, &[10, 20]))), NumaError::Vcpu { vcpu: 0 });
        assert_eq!(refusal(with(node(0, &[0, 1], 512, &[10, 20]))), NumaError::Vcpu { vcpu: 1 });
        assert_eq!(refusal(with(node(1, &[0], 512, &[10, 20]))), NumaError::Repeated { id: 1 });
        assert_eq!(
            refusal(with(node(0, &[0], 512, &[11, 20]))),
            NumaError::Distance { id: 0, distance: 11 }
        );
        assert!(matches!(refusal(with(node(0, &[0], 512, &[10]))), NumaError::Distances { .. }));
    }
}
