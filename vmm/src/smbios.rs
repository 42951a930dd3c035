//! SMBIOS: who made the machine and what it has, for inventories in the guest.
//! Source: DMTF DSP0134 3.6.0 §5.2.2 (entry point, 64-bit), §6.1 (structures), §7 (types).
//!
//! | Offset | Bytes | Field of the entry point                       |
//! |--------|-------|------------------------------------------------|
//! | 0      | 5     | "_SM3_"                                        |
//! | 5      | 1     | checksum of all 24 bytes                       |
//! | 6      | 1     | its length, 24                                 |
//! | 7      | 3     | version: major, minor, revision of the text    |
//! | 10     | 1     | revision of the entry point, 1                 |
//! | 12     | 4     | most bytes of the structures                   |
//! | 16     | 8     | address of the structures                      |

mod caches;
mod slots;

pub use caches::{Cache, Holds as CacheHolds};
pub use slots::{Slot, Usage};
use types::ids::MachineId;

/// Bytes of the entry point.
pub const ENTRY_POINT: usize = 24;
const VERSION: [u8; 3] = [3, 6, 0];

const MAKER: &str = "Holdfast";
const PRODUCT: &str = "Holdfast virtual machine";
/// Handles: one structure of each type, but for processors, caches, slots and memory, which count from
/// their own.
const HANDLE_PROCESSOR: u16 = 0x4000;
const HANDLE_CHASSIS: u16 = 0x0300;
const HANDLE_ARRAY: u16 = 0x1000;
const HANDLE_MODULE: u16 = 0x1100;
const HANDLE_MAPPED: u16 = 0x1300;
/// Stands for a structure that is not there.
const NO_HANDLE: u16 = 0xffff;
/// Largest memory that a module tells; more is told as several.
const MODULE_MIB: u64 = 1 << 20;
/// From this size on, in MiB, a module tells its size in the extended field.
const EXTENDED_MIB: u64 = 0x7fff;

/// What is described.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Becomes the UUID and the serial number.
    pub id: MachineId,
    /// Pieces of RAM: (address, length).
    pub ram: Vec<(u64, u64)>,
    /// The machine starts from UEFI.
    pub firmware: Firmware,
    /// Packages of virtual CPUs.
    pub processors: Vec<Processor>,
    /// Slots of its ports.
    pub slots: Vec<Slot>,
}

/// What is in one socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processor {
    /// Its cores.
    pub cores: u32,
    /// Their threads, all together: virtual CPUs.
    pub threads: u32,
    /// Caches, one for each level.
    pub caches: Vec<Cache>,
}

/// What starts the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// Nothing: a kernel is loaded directly.
    None,
    /// UEFI.
    Uefi,
}

/// Structures, one after the other.
#[derive(Default)]
struct Structures(Vec<u8>);

impl Structures {
    /// Adds a structure: its formatted part behind the header, then its strings.
    fn add(&mut self, kind: u8, handle: u16, body: &[u8], strings: &[&str]) {
        let length = u8::try_from(body.len() + 4).unwrap_or(u8::MAX);
        self.0.extend([kind, length]);
        self.0.extend(handle.to_le_bytes());
        self.0.extend(body);
        for string in strings {
            self.0.extend(string.as_bytes());
            self.0.push(0);
        }
        if strings.is_empty() {
            self.0.push(0);
        }
        self.0.push(0);
    }
}

/// Builds all structures.
pub fn structures(machine: &Machine) -> Vec<u8> {
    let mut all = Structures::default();
    let id = machine.id.to_string();
    all.add(0, 0, &bios(machine.firmware), &[MAKER, env!("CARGO_PKG_VERSION"), "01/01/2026"]);
    let mut system = vec![1, 2, 0, 3];
    system.extend(uuid(machine.id));
    // Wake-up by the power switch.
    system.extend([6, 0, 0]);
    all.add(1, 0x0100, &system, &[MAKER, PRODUCT, &id]);
    // Type "other", no lock; state and security unknown; no heights, cords or elements.
    let chassis = [1, 1, 0, 0, 0, 3, 3, 3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    all.add(3, HANDLE_CHASSIS, &chassis, &[MAKER]);
    for (number, processor) in (0u16..).zip(&machine.processors) {
        let caches = caches::add(number, &processor.caches, &mut all);
        let (body, socket) = (structure(processor, caches), format!("CPU {number}"));
        all.add(4, HANDLE_PROCESSOR + number, &body, &[&socket, MAKER]);
    }
    slots::add(&machine.slots, &mut all);
    memory(machine, &mut all);
    // System boot information: no error.
    all.add(32, 0x2000, &[0; 7], &[]);
    all.add(127, 0x7f00, &[], &[]);
    all.0
}

/// Builds the entry point for `length` bytes of structures at `address`.
pub fn entry_point(address: u64, length: usize) -> [u8; ENTRY_POINT] {
    let mut bytes = [0; ENTRY_POINT];
    bytes[..5].copy_from_slice(b"_SM3_");
    bytes[6] = 24;
    bytes[7..10].copy_from_slice(&VERSION);
    bytes[10] = 1;
    bytes[12..16].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    bytes[16..24].copy_from_slice(&address.to_le_bytes());
    bytes[5] = 0u8.wrapping_sub(bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte)));
    bytes
}

/// The UUID as §7.2.1 wants it: the first three fields little-endian.
pub fn uuid(id: MachineId) -> [u8; 16] {
    let mut bytes = *id.as_bytes();
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}

/// Type 0, behind the header.
fn bios(firmware: Firmware) -> [u8; 22] {
    let mut body = [0; 22];
    // Strings: vendor, version, release date; no segment, 64 KiB.
    (body[0], body[1], body[4]) = (1, 2, 3);
    // Characteristics: the others are not supported.
    body[6] = 1 << 3;
    // Extension byte 2: a virtual machine, and UEFI if it is there.
    body[15] = 1 << 4 | if firmware == Firmware::Uefi { 1 << 3 } else { 0 };
    // Releases of firmware and embedded controller: none; extended ROM size: none.
    body[16..20].fill(0xff);
    body
}

/// Type 4, behind the header: a socket with its CPUs, and the handles of its caches (§7.5).
fn structure(processor: &Processor, caches: [u16; 3]) -> [u8; 46] {
    let mut body = [0; 46];
    let small = |count: u32| u8::try_from(count).unwrap_or(u8::MAX);
    let Processor { cores, threads, .. } = *processor;
    // Socket; a central processor of another family than the listed; maker.
    (body[0], body[1], body[2], body[3]) = (1, 3, 1, 2);
    // Socket populated, CPU enabled; no upgrade.
    (body[20], body[21]) = (1 << 6 | 1, 6);
    for (at, handle) in (22..).step_by(2).zip(caches) {
        body[at..at + 2].copy_from_slice(&handle.to_le_bytes());
    }
    // Cores, those that are on, threads; as far as eight bits go.
    (body[31], body[32], body[33]) = (small(cores), small(cores), small(threads));
    // 64-bit; several cores, several threads for one of them; virtual execution stays unknown.
    body[34] = 1 << 2 | u8::from(cores > 1) << 3 | u8::from(threads > cores) << 4;
    // Family 2, then the counts in sixteen bits.
    body[36] = 1;
    for (at, count) in (38..).step_by(2).zip([cores, cores, threads]) {
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        body[at..at + 2].copy_from_slice(&count.to_le_bytes());
    }
    body
}

/// Types 16, 17 and 19: the array, its modules, and where it is mapped.
fn memory(machine: &Machine, all: &mut Structures) {
    let total: u64 = machine.ram.iter().map(|(_, length)| length).sum();
    let total_mib = total >> 20;
    let modules = total_mib.div_ceil(MODULE_MIB).max(1);
    let count = u16::try_from(modules).unwrap_or(u16::MAX);
    // On the system board, for system memory, multi-bit ECC as the host's; size in bytes below.
    let mut array = vec![3, 3, 6];
    array.extend(0x8000_0000u32.to_le_bytes());
    array.extend(0xfffeu16.to_le_bytes());
    array.extend(count.to_le_bytes());
    array.extend(total.to_le_bytes());
    all.add(16, HANDLE_ARRAY, &array, &[]);
    for number in 0..count {
        let before = u64::from(number) * MODULE_MIB;
        let size = total_mib.saturating_sub(before).min(MODULE_MIB);
        let label = format!("DIMM {number}");
        all.add(17, HANDLE_MODULE + number, &module(size), &[&label, MAKER]);
    }
    for (number, (address, length)) in (0u16..).zip(&machine.ram) {
        // The 64-bit fields count: the others say so.
        let mut mapped = [0xff; 8].to_vec();
        mapped.extend(HANDLE_ARRAY.to_le_bytes());
        mapped.push(1);
        mapped.extend(address.to_le_bytes());
        mapped.extend((address + (length - 1)).to_le_bytes());
        all.add(19, HANDLE_MAPPED + number, &mapped, &[]);
    }
}

/// Type 17, behind the header: `mib` of RAM.
fn module(mib: u64) -> [u8; 88] {
    let mut body = [0; 88];
    body[..2].copy_from_slice(&HANDLE_ARRAY.to_le_bytes());
    // No error information; widths unknown.
    body[2..4].copy_from_slice(&0xfffeu16.to_le_bytes());
    body[4..8].fill(0xff);
    let plain = if mib >= EXTENDED_MIB { EXTENDED_MIB } else { mib };
    body[8..10].copy_from_slice(&plain.to_le_bytes()[..2]);
    // DIMM; label; RAM of an unknown kind.
    (body[10], body[12], body[14]) = (9, 1, 7);
    body[15] = 1 << 1;
    body[19] = 2;
    if plain == EXTENDED_MIB {
        body[24..28].copy_from_slice(&mib.to_le_bytes()[..4]);
    }
    // Of unknown technology, used as volatile memory, and all of it is that; speeds unknown.
    (body[36], body[37]) = (2, 1 << 3);
    body[56..64].copy_from_slice(&(mib << 20).to_le_bytes());
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(ram: Vec<(u64, u64)>) -> Machine {
        let id = MachineId::from_bytes(std::array::from_fn(|at| at.to_le_bytes()[0]));
        let processors = vec![Processor { cores: 300, threads: 300, caches: Vec::new() }];
        Machine { id, processors, ram, firmware: Firmware::Uefi, slots: Vec::new() }
    }

    /// Walks the structures as §6.1 says: (type, formatted part, strings).
    fn parse(bytes: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let (mut at, mut found) = (0, Vec::new());
        while at < bytes.len() {
            let end = at + usize::from(bytes[at + 1]);
            let length = bytes[end..].windows(2).position(|pair| pair == [0, 0]).expect("an end");
            let text = String::from_utf8(bytes[end..end + length].to_vec()).expect("text");
            let strings = text.split('\0').filter(|s| !s.is_empty()).map(str::to_owned).collect();
            found.push((bytes[at], bytes[at..end].to_vec(), strings));
            at = end + length + 2;
        }
        found
    }

    #[test]
    fn structures_can_be_walked_and_are_as_long_as_their_types_say() {
        let found = parse(&structures(&machine(vec![(0, 2 << 30), (4 << 30, 6 << 30)])));
        let kinds: Vec<(u8, usize)> = found.iter().map(|(kind, b, _)| (*kind, b.len())).collect();
        let expected =
            [(0, 26), (1, 27), (3, 22), (4, 50), (16, 23), (17, 92), (19, 31), (19, 31), (32, 11)];
        assert_eq!(kinds[..9], expected);
        assert_eq!(kinds[9..], [(127, 4)]);
    }

    #[test]
    fn the_machine_is_named() {
        let found = parse(&structures(&machine(vec![(0, 1 << 30)])));
        let (_, system, strings) = &found[1];
        assert_eq!(system[8..18], [3, 2, 1, 0, 5, 4, 7, 6, 8, 9]);
        assert_eq!(strings[1..], [PRODUCT, "000102030405060708090a0b0c0d0e0f"]);
        let (_, processor, _) = &found[3];
        assert_eq!((processor[35], processor[42..44].to_vec()), (255, vec![0x2c, 1]));
    }

    #[test]
    fn each_processor_names_its_caches_and_slots_follow() {
        let cache = Cache { level: 3, bytes: 1 << 25, ways: 16, holds: CacheHolds::Unified };
        let link = crate::pci::port::Link { speed: 5, width: 16 };
        let slot = Slot { number: 1, bus: 1, link, usage: Usage::Taken };
        let processor = Processor { cores: 3, threads: 6, caches: vec![cache] };
        let processors = vec![processor.clone(), processor];
        let machine = Machine { processors, slots: vec![slot], ..machine(vec![(0, 1 << 30)]) };
        let found = parse(&structures(&machine));
        let kinds: Vec<(u8, usize)> = found.iter().map(|(kind, b, _)| (*kind, b.len())).collect();
        assert_eq!(kinds[3..8], [(7, 27), (4, 50), (7, 27), (4, 50), (9, 24)]);
        for at in [3, 5] {
            let (handle, processor) = (&found[at].1[2..4], &found[at + 1].1);
            assert_eq!((&processor[26..30], &processor[30..32]), (&[0xff; 4][..], handle));
            assert_eq!(processor[35..39], [3, 3, 6, 1 << 2 | 1 << 3 | 1 << 4]);
            assert_eq!(processor[42..48], [3, 0, 3, 0, 6, 0]);
        }
        assert_ne!(found[3].1[2..4], found[5].1[2..4]);
        assert_eq!(found[6].2[0], "CPU 1");
    }

    #[test]
    fn memory_is_told_in_modules() {
        let found = parse(&structures(&machine(vec![(4 << 30, 3 << 40)])));
        let modules: Vec<_> = found.iter().filter(|(kind, ..)| *kind == 17).collect();
        assert_eq!(modules.len(), 3);
        assert_eq!(modules[0].1[12..14], [0xff, 0x7f]);
        assert_eq!(modules[0].1[28..32], (1u32 << 20).to_le_bytes());
        let small = parse(&structures(&machine(vec![(0, 512 << 20)])));
        assert_eq!(small[5].1[12..14], 512u16.to_le_bytes());
        assert_eq!(small[5].1[60..68], (512u64 << 20).to_le_bytes());
    }

    #[test]
    fn the_entry_point_sums_to_zero() {
        let bytes = entry_point(0xf_e020, 0x123);
        assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(
            (bytes[12..14].to_vec(), bytes[16..19].to_vec()),
            (vec![0x23, 1], vec![0x20, 0xe0, 0x0f])
        );
    }
}
