//! CPU features and topology as the guest sees them: the host's features as KVM passes them on,
//! one socket, one thread per core. `CPU.md` shows all of it in one table.
//! Source: Intel SDM vol. 2A "CPUID"; AMD APM vol. 3 appendix E; Linux
//! Documentation/virt/kvm/x86/cpuid.rst.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::Cpus;
use crate::sys::kvm::Controllers;

/// Leaf 1 ECX: a hypervisor is there.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 ECX: the local APIC timer has a deadline mode.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 0x8000_0007 EDX: the time-stamp counter runs at one rate in all states.
const INVARIANT_TSC: u32 = 1 << 8;
/// Leaf 1 EDX: more than one logical processor in the package.
const MULTI_THREADED: u32 = 1 << 28;
/// Leaf 0x8000_0001 ECX: AMD, more cores than one.
const LEGACY_CORES: u32 = 1 << 1;
/// Leaves that tell the host's topology: 0xb, its successor on Intel, and AMD's.
const TOPOLOGY_LEAVES: [u32; 3] = [0xb, 0x1f, 0x8000_0026];
/// Level types of leaf 0xb.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Returns the number of physical address bits that the host's features tell, 36 when they do not.
pub fn address_bits(supported: &CpuId) -> u8 {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    leaf.map_or(36, |entry| entry.eax.to_le_bytes()[0])
}

/// Leaf of the extended state, and leaf 1 ECX: there is such state.
const EXTENDED_STATE: u32 = 0xd;
const XSAVE: u32 = 1 << 26;

/// Returns the bits that XCR0 can have with these features; `None` when there is no XCR0.
pub(super) fn extended_state(features: &CpuId) -> Option<u64> {
    let entries = features.as_slice();
    let has = entries.iter().any(|entry| entry.function == 1 && entry.ecx & XSAVE != 0);
    let leaf = entries.iter().find(|e| (e.function, e.index) == (EXTENDED_STATE, 0));
    leaf.filter(|_| has).map(|leaf| u64::from(leaf.edx) << 32 | u64::from(leaf.eax))
}

/// Features that KVM can pass on but this machine does not keep: (leaf, index, eax, ebx, ecx, edx)
/// bits that are cleared. Nested virtualisation, performance counters, tracing and enclaves would
/// each need state or resources that nobody here gives; MONITOR would sleep past our timers.
const WITHHELD: [(u32, u32, [u32; 4]); 8] = [
    // MONITOR, VMX, SMX, perfmon capabilities.
    (1, 0, [0, 0, 1 << 3 | 1 << 5 | 1 << 6 | 1 << 15, 0]),
    // SGX, processor trace; SGX launch control.
    (7, 0, [0, 1 << 2 | 1 << 25, 1 << 30, 0]),
    (0xa, 0, [u32::MAX; 4]),
    (0x12, 0, [u32::MAX; 4]),
    (0x14, 0, [u32::MAX; 4]),
    // SVM, performance counters of three kinds.
    (0x8000_0001, 0, [0, 0, 1 << 2 | 1 << 23 | 1 << 24 | 1 << 28, 0]),
    (0x8000_000a, 0, [u32::MAX; 4]),
    (0x8000_0022, 0, [u32::MAX; 4]),
];

/// Bits of XCR0 for AMX, Intel's tiles: their configuration and their data.
const TILES: u64 = 1 << 17 | 1 << 18;
/// Features that use tiles: AMX-BF16, AMX-TILE, AMX-INT8; AMX-FP16, AMX-COMPLEX. As [`WITHHELD`].
const TILE_FEATURES: [(u32, u32, [u32; 4]); 2] =
    [(7, 0, [0, 0, 0, 1 << 22 | 1 << 24 | 1 << 25]), (7, 1, [1 << 21, 0, 0, 1 << 8])];
/// Leaves that tell the shapes of tiles, and what multiplies them.
const TILE_LEAVES: [u32; 2] = [0x1d, 0x1e];

/// KVM's features, and bit 15 of their eax: messages have destinations of 15 bits.
const KVM_FEATURES: u32 = 0x4000_0001;
const WIDE_DESTINATIONS: u32 = 1 << 15;

/// Returns the features of virtual CPU `id` of `cpus`.
pub(super) fn for_vcpu(supported: &CpuId, id: u32, cpus: Cpus) -> CpuId {
    let mut features = supported.clone();
    let steady = has_invariant_tsc(supported);
    for entry in features.as_mut_slice() {
        clear(entry, &WITHHELD);
        adapt(entry, id, cpus);
        // A deadline in ticks of a counter that drifts is missed, and the guest sleeps on.
        if entry.function == 1 && !steady {
            entry.ecx &= !TSC_DEADLINE;
        }
    }
    features.retain(|entry| !TOPOLOGY_LEAVES.contains(&entry.function));
    if extended_state(&features).unwrap_or(0) & TILES != TILES {
        withdraw_tiles(&mut features);
    }
    for level in 0..2 {
        // The list has room: two leaves were reserved by the filter above or are far below the
        // limit; a full list keeps the other leaves and the guest falls back to leaf 1.
        let _ = features.push(topology(level, id, cpus.count));
    }
    features
}

fn clear(entry: &mut kvm_cpuid_entry2, features: &[(u32, u32, [u32; 4])]) {
    for (function, index, [eax, ebx, ecx, edx]) in features {
        if (entry.function, entry.index) == (*function, *index) {
            entry.eax &= !eax;
            entry.ebx &= !ebx;
            entry.ecx &= !ecx;
            entry.edx &= !edx;
        }
    }
}

/// Takes tiles away where KVM does not keep their state. It names their instructions all the same to
/// a process without permission for the state (`sys::vcpu::ask_for_tiles`), and a program that
/// looks for the instructions alone would fault.
fn withdraw_tiles(features: &mut CpuId) {
    features.as_mut_slice().iter_mut().for_each(|entry| clear(entry, &TILE_FEATURES));
    features.retain(|entry| !TILE_LEAVES.contains(&entry.function));
}

fn has_invariant_tsc(supported: &CpuId) -> bool {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0007);
    leaf.is_some_and(|entry| entry.edx & INVARIANT_TSC != 0)
}

fn adapt(entry: &mut kvm_cpuid_entry2, id: u32, cpus: Cpus) {
    let count = cpus.count;
    match entry.function {
        1 => {
            entry.ebx =
                entry.ebx & 0x0000_ffff | count.next_power_of_two().min(255) << 16 | id << 24;
            entry.ecx |= HYPERVISOR;
            if count > 1 {
                entry.edx |= MULTI_THREADED;
            } else {
                entry.edx &= !MULTI_THREADED;
            }
        }
        // Deterministic caches.
        4 => entry.eax = shared(entry.eax, cpus) | (count - 1).min(63) << 26,
        0x8000_0001 => {
            entry.ecx =
                if count > 1 { entry.ecx | LEGACY_CORES } else { entry.ecx & !LEGACY_CORES };
        }
        0x8000_0008 => {
            let bits = 32 - (count - 1).leading_zeros();
            entry.ecx = entry.ecx & !0xf0ff | (count - 1).min(255) | bits << 12;
        }
        // AMD caches, as leaf 4.
        0x8000_001d => entry.eax = shared(entry.eax, cpus),
        // AMD: extended APIC id, core id, one thread per core; one node.
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = id & 0xff;
            entry.ecx = 0;
        }
        KVM_FEATURES if Controllers::of(count) == Controllers::Split => {
            entry.eax |= WIDE_DESTINATIONS;
        }
        _ => {}
    }
}

/// Register eax of a cache: the last level is shared by those who share one, the others by one.
fn shared(eax: u32, cpus: Cpus) -> u32 {
    let last_level = eax >> 5 & 7 >= 3;
    let sharing = if last_level { cpus.sharing - 1 } else { 0 };
    eax & 0x3fff | sharing << 14
}

/// Leaf 0xb: one thread per core, all cores in one package.
fn topology(level: u32, id: u32, count: u32) -> kvm_cpuid_entry2 {
    let core_bits = 32 - (count - 1).leading_zeros();
    let (shift, logical, kind) =
        if level == 0 { (0, 1, LEVEL_THREAD) } else { (core_bits, count, LEVEL_CORE) };
    kvm_cpuid_entry2 {
        function: 0xb,
        index: level,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: logical,
        ecx: kind << 8 | level,
        edx: id,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::machine::numa::Node;

    fn entry(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ..Default::default() }
    }

    fn all(count: u32) -> Cpus {
        Cpus::new(count, &[])
    }

    fn find(features: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut entries = features.as_slice().iter();
        *entries.find(|e| e.function == function && e.index == index).expect("present")
    }

    #[test]
    fn topology_is_one_socket_of_single_threaded_cores() {
        let host =
            CpuId::from_entries(&[entry(1), entry(0x8000_0008), entry(0x8000_001e)]).expect("few");
        let features = for_vcpu(&host, 2, all(4));
        assert_eq!(find(&features, 1, 0).ebx >> 24, 2);
        assert_eq!(find(&features, 1, 0).ecx & HYPERVISOR, HYPERVISOR);
        let (thread, core) = (find(&features, 0xb, 0), find(&features, 0xb, 1));
        assert_eq!((thread.eax, thread.ebx, core.eax, core.ebx, core.edx), (0, 1, 2, 4, 2));
        assert_eq!(find(&features, 0x8000_0008, 0).ecx, 3 | 2 << 12);
        assert_eq!(find(&features, 0x8000_001e, 0).eax, 2);
    }

    #[test]
    fn the_last_cache_is_shared_inside_a_node_and_the_others_by_none() {
        let cache = |function, index, level: u32| kvm_cpuid_entry2 {
            index,
            eax: u32::MAX << 14 | level << 5 | 3,
            ..entry(function)
        };
        let leaves = [4, 0x8000_001d];
        let host = leaves.map(|leaf| [cache(leaf, 0, 2), cache(leaf, 1, 3)]);
        let host = CpuId::from_entries(host.as_flattened()).expect("few");
        let node = |vcpus| Node { id: 0, vcpus, memory: Vec::new(), distances: Vec::new() };
        let nodes = [node((0..4).collect()), node((4..8).collect())];
        let sharers = |cpus| {
            let features = for_vcpu(&host, 0, cpus);
            let sharers = |leaf, index| (find(&features, leaf, index).eax >> 14 & 0xfff) + 1;
            leaves.map(|leaf| (sharers(leaf, 0), sharers(leaf, 1)))
        };
        assert_eq!(sharers(Cpus::new(8, &nodes)), [(1, 4); 2]);
        assert_eq!(sharers(all(6)), [(1, 6); 2]);
        let features = for_vcpu(&host, 0, all(6));
        assert_eq!(leaves.map(|leaf| find(&features, leaf, 1).eax >> 26), [5, 0]);
    }

    #[test]
    fn ids_past_eight_bits_are_whole_where_there_is_room() {
        let host = [entry(1), entry(0x8000_0008), entry(0x8000_001e), entry(KVM_FEATURES)];
        let host = CpuId::from_entries(&host).expect("few");
        let features = for_vcpu(&host, 287, all(288));
        assert_eq!(find(&features, 1, 0).ebx >> 16, 0x1fff);
        let core = find(&features, 0xb, 1);
        assert_eq!((core.eax, core.ebx, core.edx), (9, 288, 287));
        assert_eq!(find(&features, 0x8000_0008, 0).ecx, 255 | 9 << 12);
        let amd = find(&features, 0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx), (287, 31));
        assert_eq!(find(&features, KVM_FEATURES, 0).eax, WIDE_DESTINATIONS);
        assert_eq!(find(&for_vcpu(&host, 0, all(254)), KVM_FEATURES, 0).eax, 0);
    }

    #[test]
    fn the_deadline_timer_needs_a_steady_counter() {
        let deadline = kvm_cpuid_entry2 { ecx: TSC_DEADLINE, ..entry(1) };
        let steady = kvm_cpuid_entry2 { edx: INVARIANT_TSC, ..entry(0x8000_0007) };
        let drifting = CpuId::from_entries(&[deadline]).expect("few");
        assert_eq!(find(&for_vcpu(&drifting, 0, all(1)), 1, 0).ecx & TSC_DEADLINE, 0);
        let invariant = CpuId::from_entries(&[deadline, steady]).expect("few");
        assert_eq!(find(&for_vcpu(&invariant, 0, all(1)), 1, 0).ecx & TSC_DEADLINE, TSC_DEADLINE);
    }

    #[test]
    fn nested_machines_and_counters_are_withheld() {
        let full = |function| kvm_cpuid_entry2 {
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..entry(function)
        };
        let host = CpuId::from_entries(&[full(1), full(0xa), full(0x8000_0001)]).expect("few");
        let features = for_vcpu(&host, 0, all(1));
        assert_eq!(find(&features, 1, 0).ecx & (1 << 3 | 1 << 5), 0);
        assert_eq!(find(&features, 0x8000_0001, 0).ecx & 1 << 2, 0);
        assert_eq!(find(&features, 0xa, 0).eax, 0);
    }

    #[test]
    fn tiles_are_told_of_only_with_their_state() {
        let full = |function, index| kvm_cpuid_entry2 {
            index,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..entry(function)
        };
        // Shapes have a second subleaf.
        let named =
            [full(1, 0), full(7, 0), full(7, 1), full(0x1d, 0), full(0x1d, 1), full(0x1e, 0)];
        let with = |eax| {
            let state = kvm_cpuid_entry2 { eax, ..entry(EXTENDED_STATE) };
            let host = [&named[..], &[state]].concat();
            for_vcpu(&CpuId::from_entries(&host).expect("few"), 0, all(1))
        };
        let told = |features: &CpuId| {
            let (first, second) = (find(features, 7, 0), find(features, 7, 1));
            let shapes = features.as_slice().iter().filter(|e| TILE_LEAVES.contains(&e.function));
            (first.edx, second.eax, second.edx, shapes.count())
        };
        assert_eq!(told(&with(0x6_00e7)), (u32::MAX, u32::MAX, u32::MAX, 3));
        let without = (!0x0340_0000, !0x0020_0000, !0x0000_0100, 0);
        // Neither bit of the state, one of the two, and no such leaf at all.
        assert_eq!(told(&with(0xe7)), without);
        assert_eq!(told(&with(0x2_00e7)), without);
        let none = CpuId::from_entries(&named).expect("few");
        assert_eq!(told(&for_vcpu(&none, 0, all(1))), without);
    }

    #[test]
    fn the_table_tells_what_goes_with_the_state_of_tiles() {
        for (leaf, index, masks) in TILE_FEATURES {
            let subleaf = if index == 0 { String::new() } else { format!(".{index}") };
            for (name, mask) in ["eax", "ebx", "ecx", "edx"].iter().zip(masks) {
                let row = format!("| CPUID {leaf:#x}{subleaf} {name} | {mask:#010x} | 0 unless");
                assert!(mask == 0 || TABLE.contains(&row), "{row}");
            }
        }
        let leaves = TILE_LEAVES.map(|leaf| format!("{leaf:#x}")).join(", ");
        assert!(TABLE.contains(&format!("| CPUID {leaves} | all | nothing unless")));
    }

    const TABLE: &str = include_str!("../../CPU.md");

    /// The first three cells of each row that says `withheld`.
    fn told_as_withheld() -> BTreeSet<(String, String, String)> {
        let rows = TABLE.lines().filter(|line| line.contains("| withheld: "));
        let cells = |row: &str| {
            let cells: Vec<String> = row.split('|').map(|cell| cell.trim().to_owned()).collect();
            (cells[1].clone(), cells[2].clone(), cells[3].clone())
        };
        rows.map(cells).collect()
    }

    #[test]
    fn the_table_tells_what_is_withheld_and_nothing_else() {
        let mut expected = BTreeSet::new();
        for (leaf, _, masks) in WITHHELD {
            let names = ["eax", "ebx", "ecx", "edx"];
            let row = |register: String, mask: u32| {
                (format!("CPUID {leaf:#x} {register}"), format!("{mask:#010x}"), "0".to_owned())
            };
            if masks == [u32::MAX; 4] {
                expected.insert(row(names.join(", "), u32::MAX));
                continue;
            }
            let some = names.iter().zip(masks).filter(|(_, mask)| *mask != 0);
            expected.extend(some.map(|(name, mask)| row((*name).to_owned(), mask)));
        }
        assert_eq!(told_as_withheld(), expected);
    }

    #[test]
    fn the_table_tells_what_is_left_of_hyper_v() {
        use super::super::hyperv::{FEATURES, PRIVILEGES, RECOMMENDED};
        for (register, mask) in [
            ("0x40000003 eax", PRIVILEGES),
            ("0x40000003 edx", FEATURES),
            ("0x40000004 eax", RECOMMENDED),
        ] {
            let row = format!("| CPUID {register} | {mask:#010x} |");
            assert!(TABLE.contains(&row), "{row}");
        }
    }

    #[test]
    fn a_single_cpu_is_not_multi_threaded() {
        let host = CpuId::from_entries(&[entry(1)]).expect("few");
        assert_eq!(find(&for_vcpu(&host, 0, all(1)), 1, 0).edx & MULTI_THREADED, 0);
    }

    #[test]
    fn extended_state_is_what_leaf_13_tells_if_there_is_any() {
        let state = kvm_cpuid_entry2 { eax: 7, edx: 1, ..entry(EXTENDED_STATE) };
        let with = kvm_cpuid_entry2 { ecx: XSAVE, ..entry(1) };
        let told = |entries: &[_]| extended_state(&CpuId::from_entries(entries).expect("few"));
        assert_eq!(told(&[with, state]), Some(1 << 32 | 7));
        assert_eq!(told(&[entry(1), state]), None);
        assert_eq!(told(&[with]), None);
    }

    #[test]
    fn address_bits_come_from_the_host() {
        let wide = kvm_cpuid_entry2 { eax: 0x3030, ..entry(0x8000_0008) };
        assert_eq!(address_bits(&CpuId::from_entries(&[wide]).expect("few")), 0x30);
        assert_eq!(address_bits(&CpuId::from_entries(&[]).expect("none")), 36);
    }
}
