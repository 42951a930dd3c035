//! Runs one fuzz case: a hostile device's configuration space, and a hostile guest's writes to it.
//!
//! | Bytes   | Meaning                                                             |
//! |---------|---------------------------------------------------------------------|
//! | 0       | bit 0: 4096 bytes of configuration space, else 256; bit 1: the      |
//! |         | MSI-X table is moved; bit 2: a clique, the one in bits 7:4; bit 3: |
//! |         | an expansion ROM                                                    |
//! | 1..7    | sizes of BARs: 0 for none, else the exponent of two, modulo 63      |
//! | 7..10   | vectors by pin, MSI, MSI-X, in units of 16                          |
//! | 10..    | configuration space, then zeroes up to its size                     |
//! | then    | writes of 7 bytes: offset (2, little endian), length, data (4)      |

use vmm::pci::function::BarKind;
use vmm::vfio::{
    capabilities,
    config::{ConfigFilter, Facts},
    quirks::{Effect, Quirk},
};

/// The table is moved whatever lies around it.
static MOVES: Quirk =
    Quirk { vendor: 0, device: 0, effect: Effect::MoveTable, evidence: "this case" };

const HEADER: usize = 10;
const WRITE: usize = 7;

/// Decodes and runs a case. Panics when the filter lets something through that it must not.
pub(crate) fn run(bytes: &[u8]) {
    let Some((header, rest)) = bytes.split_at_checked(HEADER) else { return };
    let size = if header[0] & 1 == 0 { 256 } else { 4096 };
    let mut snapshot = vec![0; size];
    let given = rest.len().min(size);
    snapshot[..given].copy_from_slice(&rest[..given]);
    let bar = |at: usize| if header[at] == 0 { 0 } else { 1u64 << (header[at] % 63) };
    let vectors = |at: usize| u32::from(header[at]) * 16;
    let facts = Facts {
        snapshot: &snapshot,
        bar_sizes: [bar(1), bar(2), bar(3), bar(4), bar(5), bar(6)],
        rom_size: if header[0] & 8 == 0 { 0 } else { 0x2_0000 },
        vectors: [vectors(7), vectors(8), vectors(9)],
        quirks: if header[0] & 2 == 0 { &[] } else { &[&MOVES] },
        clique: (header[0] & 4 != 0).then_some(header[0] >> 4),
    };
    let Ok(mut filter) = ConfigFilter::new(&facts) else { return };
    let decode = filter.initial_command(0);
    for write in rest[given..].chunks_exact(WRITE) {
        let offset = u16::from_le_bytes([write[0], write[1]]) & 0xfff;
        let length = 1 << (write[2] % 3);
        filter.write(offset, &write[3..3 + length], |at, run| {
            let end = at as usize + run.len();
            assert!(at >= offset && end <= offset as usize + length, "outside of what was written");
            assert!(end <= 0x10 || at >= 0x28, "a BAR register reached the device");
            assert!(end <= 0x30 || at >= 0x34, "the ROM's register reached the device");
            if at == 4 {
                let kept = u16::from(run[0]) & 3;
                assert_eq!(kept, decode & 3, "the device's decoding was changed");
            }
        });
    }
    for bar in filter.bars() {
        assert!(bar.address.is_multiple_of(bar.size), "a BAR lies askew");
    }
    let _ = (filter.msi(), filter.msix());
    let mut taken = [false; 7];
    for bar in filter.bars() {
        let wide = matches!(bar.kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
        for register in 0..1 + usize::from(wide) {
            let register = &mut taken[usize::from(bar.index) + register];
            assert!(!*register, "two BARs have one register");
            *register = true;
        }
    }
    if let Some(table) = filter.msix_layout() {
        let bars = filter.bars();
        let bar = bars.iter().find(|bar| bar.index == table.bar).expect("the table has a BAR");
        assert!(table.table + 16 * u64::from(table.vectors) <= bar.size, "the table is cut off");
        let own = facts.bar_sizes[usize::from(table.bar)];
        let moved = table.device_end < own.max(1) || table.table >= own;
        assert!(!moved || table.table >= table.device_end, "a moved table hides registers");
    }
    let mut seen = snapshot.clone();
    filter.read(0, &mut seen);
    let hidden = [0x0e, 0x0f, 0x10, 0x13, 0x15, 0x1b, 0x24];
    for capability in capabilities::walk_extended(&seen) {
        assert!(!hidden.contains(&capability.id), "capability {:#x} shows", capability.id);
    }
}
