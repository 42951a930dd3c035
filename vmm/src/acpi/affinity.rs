//! What is near what: SRAT (processors and memory of each node), SLIT (distances), PPTT (packages,
//! cores and threads).
//! Source: ACPI 6.5 §5.2.16 (SRAT), §5.2.17 (SLIT), §5.2.30 (PPTT).

use acpi_tables::{
    pptt::{PPTT, ProcessorNode},
    sdt::Sdt,
    slit::SLIT,
};

use super::{OEM, OEM_REVISION, OEM_TABLE, bytes};
use crate::{machine::numa::Node, vcpu::Cpus};

/// SRAT structure types: local APIC (16 bytes), memory (40), local x2APIC (24).
const LOCAL_APIC: u8 = 0;
const MEMORY: u8 = 1;
const LOCAL_X2APIC: u8 = 2;
/// First APIC id that needs the structure of x2APICs.
pub(super) const FIRST_X2APIC: u32 = 255;
/// Flags: the structure counts.
const ENABLED: u32 = 1;

/// Processors and memory of each node.
pub(super) fn srat(nodes: &[Node], cpus: &Cpus) -> Vec<u8> {
    let id = |vcpu: &u32| usize::try_from(*vcpu).ok().and_then(|at| cpus.ids().get(at));
    let mut table = Sdt::new(*b"SRAT", 36, 3, OEM, OEM_TABLE, OEM_REVISION);
    // Reserved: one as in the first revision, then zeros.
    table.append_slice(&1u32.to_le_bytes());
    table.append_slice(&[0; 8]);
    for node in nodes {
        for id in node.vcpus.iter().filter_map(id) {
            table.append_slice(&processor(*id, node.id));
        }
        for (base, length) in &node.memory {
            table.append_slice(&memory(*base, *length, node.id));
        }
    }
    table.as_slice().to_vec()
}

fn processor(apic: u32, node: u32) -> Vec<u8> {
    let domain = node.to_le_bytes();
    match u8::try_from(apic) {
        Ok(id) if apic < FIRST_X2APIC => {
            let mut entry = vec![LOCAL_APIC, 16, domain[0], id];
            entry.extend(ENABLED.to_le_bytes());
            entry.extend([0, domain[1], domain[2], domain[3]]);
            entry.extend([0; 4]);
            entry
        }
        Ok(_) | Err(_) => {
            let mut entry = vec![LOCAL_X2APIC, 24, 0, 0];
            entry.extend(domain);
            entry.extend(apic.to_le_bytes());
            entry.extend(ENABLED.to_le_bytes());
            entry.extend([0; 8]);
            entry
        }
    }
}

fn memory(base: u64, length: u64, node: u32) -> Vec<u8> {
    let mut entry = vec![MEMORY, 40];
    entry.extend(node.to_le_bytes());
    entry.extend([0; 2]);
    entry.extend(base.to_le_bytes());
    entry.extend(length.to_le_bytes());
    entry.extend([0; 4]);
    entry.extend(ENABLED.to_le_bytes());
    entry.extend([0; 8]);
    entry
}

/// Distances. The table counts domains from 0, so the ids of the nodes have to be 0, 1, …; with
/// others there is none, and the OS assumes the usual distances.
pub(super) fn slit(nodes: &[Node]) -> Option<Vec<u8>> {
    let numbered = nodes.iter().zip(0u32..).all(|(node, number)| node.id == number);
    let count = u32::try_from(nodes.len()).ok().filter(|count| numbered && *count > 0)?;
    let mut table = SLIT::new(OEM, OEM_TABLE, OEM_REVISION, count);
    for (from, node) in nodes.iter().enumerate() {
        for (to, distance) in node.distances.iter().enumerate() {
            table.set_distance(from, to, *distance);
        }
    }
    Some(bytes(&table))
}

/// Packages, their cores, and threads where a core has several. Leaves are known by the unique ids of
/// processors; packages and cores have no objects in the namespace, so that their ids are not valid ones.
pub(super) fn pptt(cpus: &Cpus) -> Vec<u8> {
    let mut table = PPTT::new(OEM, OEM_TABLE, OEM_REVISION);
    let (cores, uids) = (cpus.cores(), cpus.uids());
    let uid =
        |vcpu: u32| usize::try_from(vcpu).ok().and_then(|at| uids.get(at)).copied().unwrap_or(vcpu);
    for (number, package) in (0u32..).zip(cpus.packages()) {
        let node = ProcessorNode::new(None, number).physical().identical();
        let package_node = table.add_processor(node);
        let inside = |core: &&Vec<u32>| core.first().is_some_and(|vcpu| package.contains(vcpu));
        for (number, core) in (0u32..).zip(cores.iter().filter(inside)) {
            if let [vcpu] = core[..] {
                let leaf = ProcessorNode::new(Some(&package_node), uid(vcpu)).valid().leaf();
                table.add_processor(leaf);
                continue;
            }
            let node = ProcessorNode::new(Some(&package_node), number).identical();
            let core_node = table.add_processor(node);
            for vcpu in core {
                let leaf = ProcessorNode::new(Some(&core_node), uid(*vcpu)).valid().leaf().thread();
                table.add_processor(leaf);
            }
        }
    }
    bytes(&table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::tests::placed;

    fn node(id: u32, vcpus: Vec<u32>) -> Node {
        Node { id, vcpus, memory: vec![(0x1000, 0x2000)], distances: vec![10, 20] }
    }

    #[test]
    fn processors_are_told_by_the_width_of_their_ids() {
        let table = srat(&[node(0x0302_0107, vec![3, 300])], &Cpus::in_one_package(301));
        let [small, rest] = [&table[48..64], &table[64..]];
        assert_eq!(small, [0, 16, 7, 3, 1, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]);
        assert_eq!(rest[..12], [2, 24, 0, 0, 7, 1, 2, 3, 44, 1, 0, 0]);
        let memory = &rest[24..];
        assert_eq!(memory[..8], [1, 40, 7, 1, 2, 3, 0, 0]);
        assert_eq!((memory[8..16].to_vec(), memory.len()), (0x1000u64.to_le_bytes().to_vec(), 40));
    }

    #[test]
    fn distances_need_nodes_that_count_from_zero() {
        let table = slit(&[node(0, vec![0]), node(1, vec![1])]).expect("numbered");
        assert_eq!(table[36..44], 2u64.to_le_bytes());
        assert_eq!(slit(&[node(1, vec![0])]), None);
        assert_eq!(slit(&[]), None);
    }

    #[test]
    fn processors_of_nodes_are_told_by_their_apic_ids() {
        let cpus = placed(&[(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 2)]);
        let table = srat(&[node(0, vec![0]), node(1, vec![1, 2, 3])], &cpus);
        // Each node has 40 bytes of memory behind its processors.
        let told = [0, 1, 2, 3].map(|at| table[48 + at * 16 + if at > 0 { 40 } else { 0 } + 3]);
        assert_eq!(told, [0, 4, 5, 6]);
    }

    /// Every node of a PPTT: flags, parent, unique id. Source: ACPI 6.5 §5.2.30.1.
    fn told(table: &[u8]) -> Vec<(u32, u32, u32)> {
        let field = |node: &[u8], at: usize| {
            u32::from_le_bytes(node[at..at + 4].try_into().expect("four bytes"))
        };
        table[36..].chunks(20).map(|n| (field(n, 4), field(n, 8), field(n, 12))).collect()
    }

    #[test]
    fn a_package_has_its_cores_and_a_core_its_threads() {
        const PHYSICAL: u32 = 1;
        const VALID: u32 = 1 << 1;
        const THREAD: u32 = 1 << 2;
        const LEAF: u32 = 1 << 3;
        const IDENTICAL: u32 = 1 << 4;
        let cpus = placed(&[(0, 0, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]);
        let node = |at: u32| 36 + 20 * at;
        assert_eq!(
            told(&pptt(&cpus)),
            [
                (PHYSICAL | IDENTICAL, 0, 0),
                (IDENTICAL, node(0), 0),
                (VALID | THREAD | LEAF, node(1), 0),
                (VALID | THREAD | LEAF, node(1), 1),
                (VALID | LEAF, node(0), 2),
                (PHYSICAL | IDENTICAL, 0, 1),
                (VALID | LEAF, node(5), 3),
            ]
        );
        let flat = told(&pptt(&Cpus::in_one_package(3)));
        assert_eq!(flat.iter().map(|node| node.1).collect::<Vec<_>>(), [0, 36, 36, 36]);
    }
}
