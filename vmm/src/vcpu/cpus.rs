//! How the virtual CPUs are arranged, as the guest is told: which are threads of one core, share a
//! last-level cache, and are in one package. All of it follows from their APIC ids. Pure.
//! Source: Intel SDM vol. 3A "Hierarchical Mapping of Shared Resources", vol. 2A "CPUID" leaves 4
//! and 0xb; AMD APM vol. 3 appendix E, leaves 0x8000_0008, 0x8000_001d and 0x8000_001e.
//!
//! | Bits of an APIC id               | Number of               |
//! |----------------------------------|-------------------------|
//! | below `core_shift`               | the thread in its core  |
//! | from there below `cache_shift`   | the core at its cache   |
//! | from there below `package_shift` | the cache in its package|
//! | the rest                         | the package             |

use std::collections::{BTreeMap, BTreeSet};

use types::{topology::CpuPlace, vm::VmSpec};

/// The arrangement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus {
    /// APIC id of each virtual CPU, by its number. The first has 0, as the processor that starts has.
    ids: Vec<u32>,
    /// Bits of an id below the number of its core, of its last-level cache, and of its package.
    shifts: Shifts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shifts {
    core: u32,
    cache: u32,
    package: u32,
}

/// The way to a thread: the numbers of its package, cache, core and itself, each in what it is part of.
type Way = [usize; 4];

/// Numbers what `paths` lead through, each package, cache and core by when it comes first.
fn ways(paths: impl Iterator<Item = [u64; 3]>) -> Vec<Way> {
    let mut known: BTreeMap<Vec<u64>, Vec<u64>> = BTreeMap::new();
    let way = |(thread, [package, cache, core]): (u64, [u64; 3])| {
        let path = [package, cache, core, thread];
        [0, 1, 2, 3].map(|level| {
            let siblings = known.entry(path[..level].to_vec()).or_default();
            siblings.iter().position(|sibling| *sibling == path[level]).unwrap_or_else(|| {
                siblings.push(path[level]);
                siblings.len() - 1
            })
        })
    };
    (0..).zip(paths).map(way).collect()
}

impl Cpus {
    /// Arranges the virtual CPUs of `spec`, at least one.
    ///
    /// No cache spans two nodes, whatever the places say: Linux takes a topology in which one does for
    /// broken, and taints itself.
    pub fn of(spec: &VmSpec) -> Self {
        let node = |vcpu: u32| {
            let at = spec.numa.iter().position(|node| node.vcpus.contains(&vcpu));
            at.map_or(0, |at| at as u64 + 1)
        };
        let flat = |vcpu| CpuPlace { package: 0, cache: 0, core: vcpu };
        let places = spec.cpu_places.iter().copied().chain((0..).map(flat));
        let paths = (0..spec.vcpus).zip(places).map(|(vcpu, place)| {
            [place.package.into(), node(vcpu) << 32 | u64::from(place.cache), place.core.into()]
        });
        Self::arranged(&ways(paths))
    }

    /// Arranges `count` virtual CPUs as cores of one package that share a cache.
    pub fn in_one_package(count: u32) -> Self {
        Self::arranged(&ways((0..count).map(|core| [0, 0, core.into()])))
    }

    fn arranged(ways: &[Way]) -> Self {
        // As many bits as the largest number of the level needs.
        let width = |level: usize| {
            let most = ways.iter().map(|way| way[level]).max().unwrap_or(0);
            usize::BITS - most.leading_zeros()
        };
        let core = width(3);
        let cache = core + width(2);
        let package = cache + width(1);
        let id = |[of_package, of_cache, of_core, thread]: &Way| {
            let id = of_package << package | of_cache << cache | of_core << core | thread;
            u32::try_from(id).unwrap_or(u32::MAX)
        };
        Self { ids: ways.iter().map(id).collect(), shifts: Shifts { core, cache, package } }
    }

    /// Returns how many virtual CPUs there are.
    pub fn count(&self) -> u32 {
        u32::try_from(self.ids.len()).unwrap_or(u32::MAX)
    }

    /// Returns the APIC ids, by the numbers of the virtual CPUs.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the unique ids by which ACPI's tables name the virtual CPUs, by their numbers: places in the order of
    /// APIC ids, so that one whose APIC id has eight bits has such a unique id, too.
    pub fn uids(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.count()).collect();
        let id = |number: &u32| usize::try_from(*number).ok().and_then(|at| self.ids.get(at));
        order.sort_by_key(id);
        let mut uids = vec![0; self.ids.len()];
        for (uid, number) in (0..).zip(order) {
            if let Some(slot) = usize::try_from(number).ok().and_then(|at| uids.get_mut(at)) {
                *slot = uid;
            }
        }
        uids
    }

    /// Returns the lowest number that is above all APIC ids.
    pub fn id_limit(&self) -> u32 {
        self.ids.iter().max().map_or(0, |id| id.saturating_add(1))
    }

    /// Returns how many bits of an APIC id are below the number of the core.
    pub(super) fn core_shift(&self) -> u32 {
        self.shifts.core
    }

    /// Returns how many bits of an APIC id are below the number of the last-level cache.
    pub(super) fn cache_shift(&self) -> u32 {
        self.shifts.cache
    }

    /// Returns how many bits of an APIC id are below the number of the package.
    pub(super) fn package_shift(&self) -> u32 {
        self.shifts.package
    }

    /// Returns the numbers of the virtual CPUs of each core, core by core.
    pub fn cores(&self) -> Vec<Vec<u32>> {
        self.groups(self.shifts.core)
    }

    /// Returns the numbers of the virtual CPUs of each package.
    pub fn packages(&self) -> Vec<Vec<u32>> {
        self.groups(self.shifts.package)
    }

    /// Returns how many caches of a level these virtual CPUs have.
    pub(super) fn caches(&self, level: u8, numbers: &[u32]) -> usize {
        let shift = if level >= 3 { self.shifts.cache } else { self.shifts.core };
        let id = |number: &u32| usize::try_from(*number).ok().and_then(|at| self.ids.get(at));
        let there = numbers.iter().filter_map(id).map(|id| id.checked_shr(shift));
        there.collect::<BTreeSet<_>>().len()
    }

    /// Returns the numbers of those whose ids are the same from bit `shift` on, by these ids.
    fn groups(&self, shift: u32) -> Vec<Vec<u32>> {
        let above = |id: &u32| id.checked_shr(shift).unwrap_or(0);
        let there: BTreeSet<u32> = self.ids.iter().map(above).collect();
        let mut groups = vec![Vec::new(); there.len()];
        for (number, id) in (0u32..).zip(&self.ids) {
            let at = there.iter().position(|known| *known == above(id)).unwrap_or(0);
            groups[at].push(number);
        }
        groups
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use types::{topology::NumaNode, units::Mebibytes};

    use super::*;
    use crate::spec;

    /// Returns the arrangement of virtual CPUs at these places `(package, cache, core)`.
    pub(crate) fn placed(places: &[(u32, u32, u32)]) -> Cpus {
        let place = |(package, cache, core): &(u32, u32, u32)| CpuPlace {
            package: *package,
            cache: *cache,
            core: *core,
        };
        let vcpus = u32::try_from(places.len()).expect("few");
        let cpu_places = places.iter().map(place).collect();
        Cpus::of(&VmSpec { cpu_places, ..spec::tests::minimal(vcpus, 64) })
    }

    /// Returns the arrangement without places on nodes of these virtual CPUs.
    pub(crate) fn on_nodes<const N: usize>(nodes: [Vec<u32>; N]) -> Cpus {
        let vcpus = nodes.iter().flatten().count();
        let node =
            |vcpus| NumaNode { id: 0, vcpus, memory_mib: Mebibytes(0), distances: Vec::new() };
        let vcpus = u32::try_from(vcpus).expect("few");
        let numa = nodes.map(node).to_vec();
        Cpus::of(&VmSpec { numa, ..spec::tests::minimal(vcpus, 64) })
    }

    /// Returns how many caches of a level there are.
    fn caches(cpus: &Cpus, level: u8) -> usize {
        cpus.caches(level, &(0..cpus.count()).collect::<Vec<u32>>())
    }

    fn shifts(cpus: &Cpus) -> (u32, u32, u32) {
        (cpus.core_shift(), cpus.cache_shift(), cpus.package_shift())
    }

    #[test]
    fn without_places_all_are_cores_of_one_package() {
        for cpus in [Cpus::in_one_package(6), on_nodes([(0..6).collect(), Vec::new()])] {
            assert_eq!((cpus.ids(), shifts(&cpus)), (&[0, 1, 2, 3, 4, 5][..], (0, 3, 3)));
            assert_eq!((cpus.packages().len(), caches(&cpus, 3), caches(&cpus, 1)), (1, 1, 6));
        }
        let one = Cpus::in_one_package(1);
        assert_eq!((one.ids(), one.id_limit(), shifts(&one)), (&[0][..], 1, (0, 0, 0)));
        assert_eq!(Cpus::in_one_package(288).id_limit(), 288);
    }

    #[test]
    fn a_cache_stays_inside_a_node() {
        let even = on_nodes([(0..120).collect(), (120..240).collect()]);
        assert_eq!((shifts(&even), caches(&even, 3)), ((0, 7, 8), 2));
        assert_eq!((even.ids()[119], even.ids()[120], even.id_limit()), (119, 128, 248));
        let mixed = on_nodes([vec![0, 2], vec![1, 3]]);
        assert_eq!((mixed.ids(), caches(&mixed, 3)), (&[0, 2, 1, 3][..], 2));
        // Places that put one cache across two nodes.
        let node =
            |vcpus| NumaNode { id: 0, vcpus, memory_mib: Mebibytes(0), distances: Vec::new() };
        let place = CpuPlace { package: 0, cache: 7, core: 9 };
        let cpus = Cpus::of(&VmSpec {
            numa: vec![node(vec![0]), node(vec![1])],
            cpu_places: vec![place; 2],
            ..spec::tests::minimal(2, 64)
        });
        assert_eq!((caches(&cpus, 3), cpus.cores().len()), (2, 2));
    }

    #[test]
    fn ids_have_a_field_for_each_level() {
        // Two packages of two caches with three cores of two threads each, as hosts number them.
        let places: Vec<_> = (0..24).map(|at| (at / 12 * 4, at / 6, at / 2 * 2)).collect();
        let cpus = placed(&places);
        assert_eq!(shifts(&cpus), (1, 3, 4));
        assert_eq!(cpus.ids()[..7], [0, 1, 2, 3, 4, 5, 8]);
        assert_eq!((cpus.ids()[12], cpus.id_limit()), (16, 30));
        let packages = [(0..12).collect::<Vec<u32>>(), (12..24).collect()];
        assert_eq!(
            (cpus.packages(), caches(&cpus, 3), caches(&cpus, 2)),
            (packages.to_vec(), 4, 12)
        );
        assert_eq!(cpus.cores()[..2], [[0, 1], [2, 3]]);
    }

    #[test]
    fn unique_ids_follow_apic_ids() {
        let cpus = placed(&[(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2)]);
        assert_eq!((cpus.ids(), cpus.uids()), (&[0, 4, 1, 5, 2][..], vec![0, 3, 1, 4, 2]));
        assert_eq!(Cpus::in_one_package(3).uids(), [0, 1, 2]);
    }

    #[test]
    fn numbers_count_inside_what_they_are_part_of() {
        // The same core number behind two caches, and the same cache number in two packages.
        let cpus = placed(&[(1, 0, 5), (1, 3, 5), (0, 0, 5), (1, 0, 5)]);
        assert_eq!(cpus.ids(), [0, 2, 4, 1]);
        assert_eq!(cpus.cores(), [vec![0, 3], vec![1], vec![2]]);
        assert_eq!(cpus.packages(), [vec![0, 1, 3], vec![2]]);
    }
}
