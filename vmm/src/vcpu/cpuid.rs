//! CPU features and topology as the guest sees them: the host's features as KVM passes them on, and
//! packages, caches, cores and threads as they are arranged. `CPU.md` shows all of it in one table.
//! Source: Intel SDM vol. 2A "CPUID"; AMD APM vol. 3 appendix E; Linux
//! Documentation/virt/kvm/x86/cpuid.rst.

use std::arch::x86_64::__cpuid;

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
/// Leaf 7 EDX: there is a register that tells what the processor's speculation does not do (Intel).
const ARCH_CAPABILITIES: u32 = 1 << 29;
/// Level types of leaf 0xb.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Returns the number of physical address bits that a guest can use on this host, 36 when its features do not tell.
///
/// A processor may have more of them than its nested page tables reach: with four levels those end at 48 bits. Since
/// Linux 6.10 KVM tells their reach where AMD has the size of guest-physical addresses; before, four levels are what
/// is sure.
pub fn address_bits(supported: &CpuId) -> u8 {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    leaf.map_or(36, |entry| match entry.eax.to_le_bytes() {
        [bits, _, 0, _] => bits.min(FOUR_LEVELS),
        [bits, _, guest, _] => bits.min(guest),
    })
}

/// Bits of an address that four levels of tables translate.
const FOUR_LEVELS: u8 = 48;

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
    // Debug store (two bits), MONITOR, VMX, SMX, perfmon capabilities.
    (1, 0, [0, 0, 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 15, 1 << 21]),
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

/// Returns the features of the virtual CPU of `cpus` with APIC id `id`.
pub(super) fn for_vcpu(supported: &CpuId, id: u32, cpus: &Cpus) -> CpuId {
    let package = size_of_largest(&cpus.packages());
    let mut features = supported.clone();
    let steady = has_invariant_tsc(supported);
    for entry in features.as_mut_slice() {
        clear(entry, &WITHHELD);
        adapt(entry, id, cpus, package);
        // Intel has the bit for nothing, and Linux takes it to say that there are no threads.
        if entry.function == 0x8000_0001 && is_intel(supported) {
            entry.ecx &= !LEGACY_CORES;
        }
        // KVM has the register on every host, and Windows ends where an AMD processor has it.
        if (entry.function, entry.index) == (7, 0) && !is_intel(supported) {
            entry.edx &= !ARCH_CAPABILITIES;
        }
        // A deadline in ticks of a counter that drifts is missed, and the guest sleeps on.
        if entry.function == 1 && !steady {
            entry.ecx &= !TSC_DEADLINE;
        }
    }
    features.retain(|entry| !TOPOLOGY_LEAVES.contains(&entry.function));
    if extended_state(&features).unwrap_or(0) & TILES != TILES {
        withdraw_tiles(&mut features);
    }
    let levels = [
        (cpus.core_shift(), size_of_largest(&cpus.cores()), LEVEL_THREAD),
        (cpus.package_shift(), package, LEVEL_CORE),
    ];
    for (number, level) in (0..).zip(levels) {
        // The list has room: two leaves were reserved by the filter above or are far below the
        // limit; a full list keeps the other leaves and the guest falls back to leaf 1.
        let _ = features.push(topology(number, id, level));
    }
    features
}

/// Tells how fast time-stamp counter and local APIC count, as VMware first did, where the guest finds KVM's leaves and
/// a counter that runs at one rate: FreeBSD would measure it by a timer, as well as that goes on a busy host.
/// Source: VMware knowledge base 1009458, leaf 0x40000010: kHz of the one and of the other.
pub(super) fn tell_frequency(features: &mut CpuId, tsc_khz: u32) {
    let steady = has_invariant_tsc(features);
    let leaves = features.as_mut_slice().iter_mut();
    let first = leaves.into_iter().find(|entry| entry.function == KVM_FIRST);
    let Some(first) = first.filter(|first| first.ebx == KVM && steady) else { return };
    first.eax = FREQUENCIES;
    let leaf = kvm_cpuid_entry2 {
        function: FREQUENCIES,
        eax: tsc_khz,
        ebx: APIC_KHZ,
        ..Default::default()
    };
    // As for the leaves above.
    let _ = features.push(leaf);
}

/// KVM's first leaf, and the first letters of "KVMKVMKVM" in its ebx.
const KVM_FIRST: u32 = 0x4000_0000;
const KVM: u32 = u32::from_le_bytes(*b"KVMK");
/// Leaf that tells frequencies.
const FREQUENCIES: u32 = 0x4000_0010;
/// KVM's local APICs count nanoseconds (Linux arch/x86/kvm/lapic.h, `APIC_BUS_CYCLE_NS_DEFAULT`).
const APIC_KHZ: u32 = 1_000_000;

/// Returns how many virtual CPUs the largest group has.
fn size_of_largest(groups: &[Vec<u32>]) -> u32 {
    let most = groups.iter().map(Vec::len).max().unwrap_or(1);
    u32::try_from(most).unwrap_or(u32::MAX)
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

/// First letters of "GenuineIntel", leaf 0 ebx.
const INTEL: u32 = u32::from_le_bytes(*b"Genu");

fn is_intel(supported: &CpuId) -> bool {
    supported.as_slice().iter().any(|entry| entry.function == 0 && entry.ebx == INTEL)
}

/// Where a guest's local APICs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LocalApics {
    /// In the processor: what a guest does with its own is no exit.
    Virtual,
    /// In KVM.
    Emulated,
}

/// Returns where local APICs are on this host: on Intel's servers in the processor since 2013 (APICv), on AMD's where
/// they are in x2APIC mode, too (x2AVIC, Zen 4). Linux uses those of earlier ones only when it is told to (6.18
/// arch/x86/kvm/svm/avic.c, `avic_want_avic_enabled`).
///
/// KVM does not say which it uses. That it uses those of the processor is an assumption, which holds for our image: no
/// parameter there turns them off, and its kernel is newer than Linux 6.18, before which AMD's were off unless
/// `kvm_amd.avic` was set. Where it does not hold, Windows has slower exits for its interrupts, and no more.
pub(super) fn local_apics(supported: &CpuId) -> LocalApics {
    // KVM does not tell guests of what the processor has for their hypervisor.
    let has_svm = __cpuid(0x8000_0000).eax >= VIRTUALISATION;
    let x2avic = has_svm && __cpuid(VIRTUALISATION).edx & X2AVIC != 0;
    if is_intel(supported) || x2avic { LocalApics::Virtual } else { LocalApics::Emulated }
}

/// AMD's leaf of what there is for hypervisors, and in its EDX: virtual APICs in x2APIC mode (APM volume 3 §E.4.9).
const VIRTUALISATION: u32 = 0x8000_000a;
const X2AVIC: u32 = 1 << 18;

fn has_invariant_tsc(supported: &CpuId) -> bool {
    let leaf = supported.as_slice().iter().find(|entry| entry.function == 0x8000_0007);
    leaf.is_some_and(|entry| entry.edx & INVARIANT_TSC != 0)
}

/// Adapts an entry to the virtual CPU with APIC id `id`; the largest package has `package` of them.
fn adapt(entry: &mut kvm_cpuid_entry2, id: u32, cpus: &Cpus, package: u32) {
    let (core_shift, package_shift) = (cpus.core_shift(), cpus.package_shift());
    let cores_of_package = 1 << (package_shift - core_shift);
    match entry.function {
        1 => {
            let ids = (1u32 << package_shift).min(255);
            entry.ebx = entry.ebx & 0x0000_ffff | ids << 16 | id << 24;
            entry.ecx |= HYPERVISOR;
            if package > 1 {
                entry.edx |= MULTI_THREADED;
            } else {
                entry.edx &= !MULTI_THREADED;
            }
        }
        // Deterministic caches.
        4 => entry.eax = shared(entry.eax, cpus) | (cores_of_package - 1).min(63) << 26,
        0x8000_0001 => {
            entry.ecx =
                if package > 1 { entry.ecx | LEGACY_CORES } else { entry.ecx & !LEGACY_CORES };
        }
        0x8000_0008 => {
            entry.ecx = entry.ecx & !0xf0ff | (package - 1).min(255) | package_shift << 12;
        }
        // AMD caches, as leaf 4.
        0x8000_001d => entry.eax = shared(entry.eax, cpus),
        // AMD: extended APIC id; threads of a core less one, and the core's id; the package as the one
        // node that it has.
        0x8000_001e => {
            let core = (id & ((1 << package_shift) - 1)) >> core_shift;
            entry.eax = id;
            entry.ebx = ((1 << core_shift) - 1) << 8 | core & 0xff;
            entry.ecx = id >> package_shift & 0xff;
        }
        KVM_FEATURES if Controllers::of(cpus.id_limit()) == Controllers::Split => {
            entry.eax |= WIDE_DESTINATIONS;
        }
        _ => {}
    }
}

/// Register eax of a cache: how many ids share the last level, or one of those nearer to a core. It is a
/// power of two: Linux takes those whose ids are alike but for a remainder of it.
fn shared(eax: u32, cpus: &Cpus) -> u32 {
    let last_level = eax >> 5 & 7 >= 3;
    let shift = if last_level { cpus.cache_shift() } else { cpus.core_shift() };
    eax & 0x3fff | ((1 << shift) - 1) << 14
}

/// Leaf 0xb: how many bits of an id are below the next level, how many virtual CPUs the level has, and what
/// it is.
fn topology(number: u32, id: u32, (shift, logical, kind): (u32, u32, u32)) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: 0xb,
        index: number,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: logical,
        ecx: kind << 8 | number,
        edx: id,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::vcpu::cpus::tests::{on_nodes, placed};

    fn entry(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ..Default::default() }
    }

    fn all(count: u32) -> Cpus {
        Cpus::in_one_package(count)
    }

    fn find(features: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut entries = features.as_slice().iter();
        *entries.find(|e| e.function == function && e.index == index).expect("present")
    }

    #[test]
    fn without_places_there_is_one_socket_of_single_threaded_cores() {
        let host =
            CpuId::from_entries(&[entry(1), entry(0x8000_0008), entry(0x8000_001e)]).expect("few");
        let features = for_vcpu(&host, 2, &all(4));
        assert_eq!(find(&features, 1, 0).ebx >> 16, 2 << 8 | 4);
        assert_eq!(find(&features, 1, 0).ecx & HYPERVISOR, HYPERVISOR);
        let (thread, core) = (find(&features, 0xb, 0), find(&features, 0xb, 1));
        assert_eq!((thread.eax, thread.ebx, core.eax, core.ebx, core.edx), (0, 1, 2, 4, 2));
        assert_eq!(find(&features, 0x8000_0008, 0).ecx, 3 | 2 << 12);
        let amd = find(&features, 0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx, amd.ecx), (2, 2, 0));
    }

    #[test]
    fn packages_and_threads_are_told_where_there_are_places() {
        let leaves = [1, 4, 0x8000_0001, 0x8000_0008, 0x8000_001e];
        let host = CpuId::from_entries(&leaves.map(entry)).expect("few");
        // Two packages of three cores with two threads each; the last core of the second has one.
        let places: Vec<_> = (0..11).map(|at| (at / 6, 0, at / 2)).collect();
        let cpus = placed(&places);
        let last = *cpus.ids().last().expect("some");
        let features = for_vcpu(&host, last, &cpus);
        assert_eq!((last, find(&features, 1, 0).ebx >> 16), (12, 12 << 8 | 8));
        assert_eq!(find(&features, 1, 0).edx & MULTI_THREADED, MULTI_THREADED);
        assert_eq!(find(&features, 4, 0).eax >> 26, 3, "cores of a package less one");
        let (thread, core) = (find(&features, 0xb, 0), find(&features, 0xb, 1));
        assert_eq!((thread.eax, thread.ebx, thread.ecx), (1, 2, 0x100));
        assert_eq!((core.eax, core.ebx, core.ecx, core.edx), (3, 6, 0x201, 12));
        assert_eq!(find(&features, 0x8000_0001, 0).ecx, LEGACY_CORES);
        let vendor = kvm_cpuid_entry2 { ebx: INTEL, ..entry(0) };
        let intel = CpuId::from_entries(&[vendor, entry(0x8000_0001)]).expect("few");
        assert_eq!(find(&for_vcpu(&intel, last, &cpus), 0x8000_0001, 0).ecx, 0);
        assert_eq!(find(&features, 0x8000_0008, 0).ecx, 5 | 3 << 12);
        let amd = find(&features, 0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx, amd.ecx), (12, 1 << 8 | 2, 1));
        // One virtual CPU in each of two packages has nobody beside it.
        let apart = for_vcpu(&host, 1, &placed(&[(0, 0, 0), (1, 0, 0)]));
        assert_eq!(find(&apart, 1, 0).edx & MULTI_THREADED, 0);
    }

    #[test]
    fn the_last_cache_is_shared_by_its_own_and_the_others_by_threads_of_a_core() {
        let cache = |function, index, level: u32| kvm_cpuid_entry2 {
            index,
            eax: u32::MAX << 14 | level << 5 | 3,
            ..entry(function)
        };
        let leaves = [4, 0x8000_001d];
        let host = leaves.map(|leaf| [cache(leaf, 0, 2), cache(leaf, 1, 3)]);
        let host = CpuId::from_entries(host.as_flattened()).expect("few");
        let sharers = |cpus: &Cpus| {
            let features = for_vcpu(&host, 0, cpus);
            let sharers = |leaf, index| (find(&features, leaf, index).eax >> 14 & 0xfff) + 1;
            leaves.map(|leaf| (sharers(leaf, 0), sharers(leaf, 1)))
        };
        assert_eq!(sharers(&on_nodes([(0..4).collect(), (4..8).collect()])), [(1, 4); 2]);
        assert_eq!(sharers(&all(6)), [(1, 8); 2], "ids 0 to 7 have one place");
        let threads: Vec<_> = (0..16).map(|at| (0, at / 8, at / 2)).collect();
        assert_eq!(sharers(&placed(&threads)), [(2, 8); 2]);
        let features = for_vcpu(&host, 0, &all(6));
        assert_eq!(leaves.map(|leaf| find(&features, leaf, 1).eax >> 26), [7, 0]);
    }

    #[test]
    fn ids_past_eight_bits_are_whole_where_there_is_room() {
        let host = [entry(1), entry(0x8000_0008), entry(0x8000_001e), entry(KVM_FEATURES)];
        let host = CpuId::from_entries(&host).expect("few");
        let features = for_vcpu(&host, 287, &all(288));
        assert_eq!(find(&features, 1, 0).ebx >> 16, 0x1fff);
        let core = find(&features, 0xb, 1);
        assert_eq!((core.eax, core.ebx, core.edx), (9, 288, 287));
        assert_eq!(find(&features, 0x8000_0008, 0).ecx, 255 | 9 << 12);
        let amd = find(&features, 0x8000_001e, 0);
        assert_eq!((amd.eax, amd.ebx), (287, 31));
        assert_eq!(find(&features, KVM_FEATURES, 0).eax, WIDE_DESTINATIONS);
        assert_eq!(find(&for_vcpu(&host, 0, &all(254)), KVM_FEATURES, 0).eax, 0);
    }

    #[test]
    fn only_intel_tells_what_speculation_does_not_do() {
        let told = |vendor: u32| {
            let host = [
                kvm_cpuid_entry2 { ebx: vendor, ..entry(0) },
                kvm_cpuid_entry2 { edx: u32::MAX, ..entry(7) },
            ];
            let features = for_vcpu(&CpuId::from_entries(&host).expect("few"), 0, &all(1));
            find(&features, 7, 0).edx & ARCH_CAPABILITIES
        };
        let amd = u32::from_le_bytes(*b"Auth");
        assert_eq!([told(INTEL), told(amd)], [ARCH_CAPABILITIES, 0]);
    }

    #[test]
    fn the_deadline_timer_needs_a_steady_counter() {
        let deadline = kvm_cpuid_entry2 { ecx: TSC_DEADLINE, ..entry(1) };
        let steady = kvm_cpuid_entry2 { edx: INVARIANT_TSC, ..entry(0x8000_0007) };
        let drifting = CpuId::from_entries(&[deadline]).expect("few");
        assert_eq!(find(&for_vcpu(&drifting, 0, &all(1)), 1, 0).ecx & TSC_DEADLINE, 0);
        let invariant = CpuId::from_entries(&[deadline, steady]).expect("few");
        assert_eq!(find(&for_vcpu(&invariant, 0, &all(1)), 1, 0).ecx & TSC_DEADLINE, TSC_DEADLINE);
    }

    #[test]
    fn frequencies_are_told_of_a_steady_counter_beside_the_leaves_of_kvm() {
        let first = kvm_cpuid_entry2 { eax: KVM_FEATURES, ebx: KVM, ..entry(KVM_FIRST) };
        let steady = kvm_cpuid_entry2 { edx: INVARIANT_TSC, ..entry(0x8000_0007) };
        let told = |entries: &[_]| {
            let mut features = CpuId::from_entries(entries).expect("few");
            tell_frequency(&mut features, 2_450_000);
            let leaf = features.as_slice().iter().find(|e| e.function == FREQUENCIES);
            (find(&features, KVM_FIRST, 0).eax, leaf.map(|leaf| (leaf.eax, leaf.ebx)))
        };
        assert_eq!(told(&[first, steady]), (FREQUENCIES, Some((2_450_000, 1_000_000))));
        assert_eq!(told(&[first]), (KVM_FEATURES, None));
        let other = kvm_cpuid_entry2 { ebx: 1, ..first };
        assert_eq!(told(&[other, steady]), (KVM_FEATURES, None));
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
        let features = for_vcpu(&host, 0, &all(1));
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
        let vendor = kvm_cpuid_entry2 { ebx: INTEL, ..entry(0) };
        let shapes = [full(0x1d, 0), full(0x1d, 1), full(0x1e, 0)];
        let named = [&[vendor, full(1, 0), full(7, 0), full(7, 1)], &shapes[..]].concat();
        let with = |eax| {
            let state = kvm_cpuid_entry2 { eax, ..entry(EXTENDED_STATE) };
            let host = [&named[..], &[state]].concat();
            for_vcpu(&CpuId::from_entries(&host).expect("few"), 0, &all(1))
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
        assert_eq!(told(&for_vcpu(&none, 0, &all(1))), without);
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
        assert_eq!(find(&for_vcpu(&host, 0, &all(1)), 1, 0).edx & MULTI_THREADED, 0);
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
        let bits = |eax| {
            let leaf = kvm_cpuid_entry2 { eax, ..entry(0x8000_0008) };
            address_bits(&CpuId::from_entries(&[leaf]).expect("few"))
        };
        assert_eq!(
            [bits(0x30_3934), bits(0x34_3934), bits(0x3934), bits(0x2c_3034)],
            [48, 52, 48, 44]
        );
    }
}
