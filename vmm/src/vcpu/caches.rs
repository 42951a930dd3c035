//! The caches that CPUID tells the guest of, summed up for its inventory.
//! Source: Intel SDM vol. 2A "CPUID" leaf 4; AMD APM vol. 3 appendix E, leaf 0x8000_001d: both have
//! the same registers.
//!
//! | Register | Bits         | Meaning                                                    |
//! |----------|--------------|------------------------------------------------------------|
//! | eax      | 4:0          | 0 no more, 1 data, 2 instructions, 3 unified               |
//! | eax      | 7:5          | level                                                      |
//! | eax      | 9            | fully associative                                          |
//! | ebx      | 11:0, 21:12, | bytes of a line, partitions, ways, each less one           |
//! |          | 31:22        |                                                            |
//! | ecx      |              | sets less one                                              |
//!
//! Processors of AMD without these tell three levels in leaves 0x8000_0005 and 0x8000_0006:
//!
//! | Register         | Bits         | Meaning                                            |
//! |------------------|--------------|----------------------------------------------------|
//! | 5 ecx, edx       | 31:24, 23:16 | data, instructions: KiB, ways (255 fully)          |
//! | 6 ecx            | 31:16, 15:12 | second level: KiB, ways by a code                  |
//! | 6 edx            | 31:18, 15:12 | third level: units of 512 KiB, ways by a code      |

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::Cpus;
use crate::{
    smbios::{Cache, CacheHolds, Processor},
    sys::kvm::Vm,
};

/// The leaves, of which a processor has one.
const LEAVES: [u32; 2] = [4, 0x8000_001d];
/// Leaves of AMD's older processors.
const FIRST_LEVEL: u32 = 0x8000_0005;
const LOWER_LEVELS: u32 = 0x8000_0006;
const FULLY_ASSOCIATIVE: u32 = 1 << 9;

/// Returns the packages of these virtual CPUs, with their caches by level.
pub fn processors(vm: &Vm, cpus: &Cpus) -> Vec<Processor> {
    let cores = cpus.cores();
    let processor = |package: &Vec<u32>| {
        let mine = cores.iter().filter(|core| core.iter().any(|vcpu| package.contains(vcpu)));
        let count = |number| u32::try_from(number).unwrap_or(u32::MAX);
        Processor {
            cores: count(mine.count()),
            threads: count(package.len()),
            caches: summed(vm.features(), (cpus, package)),
        }
    };
    cpus.packages().iter().map(processor).collect()
}

/// Some virtual CPUs of all.
type Part<'a> = (&'a Cpus, &'a [u32]);

/// Returns the caches of some virtual CPUs, by level.
fn summed(features: &CpuId, cpus: Part<'_>) -> Vec<Cache> {
    let told = LEAVES.map(|leaf| {
        let entries = features.as_slice().iter().filter(|entry| entry.function == leaf);
        entries.filter_map(|entry| one(entry, cpus)).collect::<Vec<Cache>>()
    });
    let told = told.into_iter().find(|caches| !caches.is_empty());
    let mut all: Vec<Cache> = Vec::new();
    for cache in told.unwrap_or_else(|| older(features, cpus)) {
        match all.iter_mut().find(|known| known.level == cache.level) {
            None => all.push(cache),
            Some(known) => {
                if cache.holds != known.holds {
                    known.holds = CacheHolds::Either;
                }
                known.bytes = known.bytes.saturating_add(cache.bytes);
                known.ways = known.ways.max(cache.ways);
            }
        }
    }
    all.sort_by_key(|cache| cache.level);
    all
}

/// Returns what the leaves of AMD's older processors tell.
fn older(features: &CpuId, cpus: Part<'_>) -> Vec<Cache> {
    let find = |leaf| features.as_slice().iter().find(|entry| entry.function == leaf);
    let cache = |level, kib: u32, ways, holds| {
        let bytes = (u64::from(kib) << 10).saturating_mul(instances(level, cpus));
        (kib > 0).then_some(Cache { level, bytes, ways, holds })
    };
    let first = find(FIRST_LEVEL).into_iter().flat_map(|leaf| {
        let parts = [(leaf.ecx, CacheHolds::Data), (leaf.edx, CacheHolds::Instructions)];
        parts.map(|(register, holds)| {
            let ways = register.to_le_bytes()[2];
            let ways = if ways == u8::MAX { 0 } else { ways };
            cache(1, register >> 24, u16::from(ways), holds)
        })
    });
    let lower = find(LOWER_LEVELS).into_iter().flat_map(|leaf| {
        let parts = [(2, leaf.ecx >> 16, leaf.ecx), (3, (leaf.edx >> 18) * 512, leaf.edx)];
        parts.map(|(level, kib, register)| {
            cache(level, kib, coded_ways(register >> 12 & 0xf)?, CacheHolds::Unified)
        })
    });
    first.chain(lower).flatten().collect()
}

/// Returns the ways that a code of leaf 0x8000_0006 stands for; 0 for fully associative, nothing for
/// a cache that is off.
fn coded_ways(code: u32) -> Option<u16> {
    let ways = [0, 1, 2, 3, 4, 6, 8, 0, 16, 0, 32, 48, 64, 96, 128, 0];
    let ways = *ways.get(usize::try_from(code).ok()?)?;
    (ways > 0 || code == 0xf).then_some(ways)
}

/// Returns how many caches of a level there are, as the guest is told.
fn instances(level: u8, cpus: Part<'_>) -> u64 {
    let (all, some) = cpus;
    all.caches(level, some) as u64
}

/// Returns what one entry tells.
fn one(entry: &kvm_cpuid_entry2, cpus: Part<'_>) -> Option<Cache> {
    let holds = match entry.eax & 0x1f {
        1 => CacheHolds::Data,
        2 => CacheHolds::Instructions,
        3 => CacheHolds::Unified,
        _ => return None,
    };
    let level = (entry.eax >> 5 & 7).to_le_bytes()[0];
    let part = |shift: u32, mask: u32| u64::from(entry.ebx >> shift & mask) + 1;
    let ways = part(22, 0x3ff);
    let each = part(0, 0xfff) * part(12, 0x3ff) * ways;
    let bytes = each.saturating_mul(u64::from(entry.ecx) + 1);
    let bytes = bytes.saturating_mul(instances(level, cpus));
    let fully = entry.eax & FULLY_ASSOCIATIVE != 0;
    let ways = if fully { 0 } else { u16::try_from(ways).unwrap_or(u16::MAX) };
    Some(Cache { level, bytes, ways, holds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::cpus::tests::{on_nodes, placed};

    /// A cache of 64-byte lines, as both leaves tell it.
    fn entry(function: u32, eax: u32, ways: u32, sets: u32) -> kvm_cpuid_entry2 {
        let ebx = (ways - 1) << 22 | 63;
        kvm_cpuid_entry2 { function, eax, ebx, ecx: sets - 1, ..Default::default() }
    }

    /// Returns the caches of `count` virtual CPUs in one package.
    fn told_of(host: &CpuId, count: u32) -> Vec<Cache> {
        let numbers: Vec<u32> = (0..count).collect();
        summed(host, (&Cpus::in_one_package(count), &numbers))
    }

    #[test]
    fn private_caches_count_for_each_processor_and_the_last_level_once() {
        let host = [
            entry(4, 1 << 5 | 1, 12, 64),
            entry(4, 1 << 5 | 2, 8, 64),
            entry(4, 2 << 5 | 3, 16, 2048),
            entry(4, 3 << 5 | 3, 15, 65536),
            entry(4, 0, 1, 1),
        ];
        let told = told_of(&CpuId::from_entries(&host).expect("few"), 8);
        let cache = |level, bytes, ways, holds| Cache { level, bytes, ways, holds };
        assert_eq!(
            told,
            [
                cache(1, (8 * (48 + 32)) << 10, 12, CacheHolds::Either),
                cache(2, (8 * 2048) << 10, 16, CacheHolds::Unified),
                cache(3, 60 << 20, 15, CacheHolds::Unified),
            ]
        );
    }

    #[test]
    fn the_last_level_counts_for_each_group_that_shares_one() {
        let host =
            [entry(0x8000_001d, 2 << 5 | 3, 8, 2048), entry(0x8000_001d, 3 << 5 | 3, 16, 32768)];
        let host = CpuId::from_entries(&host).expect("few");
        let bytes = |cpus: &Cpus| {
            let package = &cpus.packages()[0];
            summed(&host, (cpus, package)).iter().map(|cache| cache.bytes).collect::<Vec<u64>>()
        };
        assert_eq!(bytes(&on_nodes([vec![0, 1], vec![2, 3]])), [4 << 20, 64 << 20]);
        // Two threads of a core share what is nearer, too.
        assert_eq!(bytes(&placed(&[(0, 0, 0), (0, 0, 0), (1, 0, 0)])), [1 << 20, 32 << 20]);
    }

    #[test]
    fn amds_leaf_counts_where_intels_is_empty() {
        let host = [entry(4, 0, 1, 1), entry(0x8000_001d, 1 << 9 | 1 << 5 | 1, 8, 64)];
        let told = told_of(&CpuId::from_entries(&host).expect("few"), 1);
        let data = Cache { level: 1, bytes: 32 << 10, ways: 0, holds: CacheHolds::Data };
        assert_eq!(told, [data]);
        assert!(told_of(&CpuId::from_entries(&[]).expect("none"), 1).is_empty());
    }

    #[test]
    fn older_processors_of_amd_have_leaves_of_their_own() {
        let leaf =
            |function, ecx, edx| kvm_cpuid_entry2 { function, ecx, edx, ..Default::default() };
        // As QEMU's processor without a model has them.
        let host = [
            leaf(FIRST_LEVEL, 64 << 24 | 2 << 16 | 0x140, 64 << 24 | 2 << 16 | 0x140),
            leaf(LOWER_LEVELS, 512 << 16 | 8 << 12 | 0x140, 32 << 18 | 8 << 12 | 0x140),
        ];
        let told = told_of(&CpuId::from_entries(&host).expect("few"), 2);
        let cache = |level, bytes, ways, holds| Cache { level, bytes, ways, holds };
        assert_eq!(
            told,
            [
                cache(1, 256 << 10, 2, CacheHolds::Either),
                cache(2, 1 << 20, 16, CacheHolds::Unified),
                cache(3, 16 << 20, 16, CacheHolds::Unified),
            ]
        );
        assert_eq!([0, 9, 0xf].map(coded_ways), [None, None, Some(0)]);
        let off = [leaf(LOWER_LEVELS, 512 << 16, 0)];
        assert!(told_of(&CpuId::from_entries(&off).expect("few"), 1).is_empty());
    }
}
