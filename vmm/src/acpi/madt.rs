//! Interrupt controllers (MADT): a local APIC for each processor, and the I/O APIC.
//! Source: ACPI 6.5 §5.2.12, §5.2.12.2 (local APIC), §5.2.12.3 (I/O APIC), §5.2.12.12 (local x2APIC).

use acpi_tables::sdt::Sdt;

use super::{OEM, OEM_REVISION, OEM_TABLE, affinity::FIRST_X2APIC};
use crate::{layout, sys::kvm::Controllers, vcpu::Cpus};

/// Revision of the table: that of ACPI 6.5, as the fixed description's is.
const REVISION: u8 = 6;
/// Flags: there are the two PICs of a PC.
const PCAT_COMPAT: u32 = 1;
/// Structure types, with their lengths: local APIC, I/O APIC, local x2APIC.
const LOCAL_APIC: [u8; 2] = [0, 8];
const IO_APIC: [u8; 2] = [1, 12];
const LOCAL_X2APIC: [u8; 2] = [9, 16];
/// Flags of a processor: it can be used.
const ENABLED: u32 = 1;

pub(super) fn build(cpus: &Cpus) -> Vec<u8> {
    let mut table = Sdt::new(*b"APIC", 36, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&layout::LOCAL_APIC.to_le_bytes());
    let flags = match Controllers::of(cpus.id_limit()) {
        Controllers::Kernel => PCAT_COMPAT,
        Controllers::Split => 0,
    };
    table.append_slice(&flags.to_le_bytes());
    for (uid, id) in cpus.uids().into_iter().zip(cpus.ids()) {
        table.append_slice(&processor(uid, *id));
    }
    // Where processors leave no id, the I/O APIC has that of one: nothing is sent to I/O APICs.
    let id = u8::try_from(cpus.id_limit()).unwrap_or(0);
    let mut entry = IO_APIC.to_vec();
    entry.extend([id, 0]);
    entry.extend(layout::IO_APIC.to_le_bytes());
    entry.extend(0u32.to_le_bytes());
    table.append_slice(&entry);
    table.as_slice().to_vec()
}

/// The processor with unique id `uid` and APIC id `id`.
fn processor(uid: u32, id: u32) -> Vec<u8> {
    match (u8::try_from(uid), u8::try_from(id)) {
        (Ok(uid), Ok(small)) if id < FIRST_X2APIC => {
            let mut entry = LOCAL_APIC.to_vec();
            entry.extend([uid, small]);
            entry.extend(ENABLED.to_le_bytes());
            entry
        }
        _ => {
            let mut entry = LOCAL_X2APIC.to_vec();
            entry.extend([0; 2]);
            [id, ENABLED, uid].iter().for_each(|field| entry.extend(field.to_le_bytes()));
            entry
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::tests::placed;

    #[test]
    fn a_few_processors_have_the_structures_of_a_pc() {
        let table = build(&Cpus::in_one_package(2));
        assert_eq!(table[8], 6);
        assert_eq!(table[36..44], [0, 0, 0xe0, 0xfe, 1, 0, 0, 0]);
        assert_eq!(table[44..60], [0, 8, 0, 0, 1, 0, 0, 0, 0, 8, 1, 1, 1, 0, 0, 0]);
        assert_eq!(table[60..], [1, 12, 2, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]);
    }

    #[test]
    fn from_the_255th_on_processors_have_the_structure_of_x2apics() {
        let table = build(&Cpus::in_one_package(257));
        assert_eq!(table[40..44], [0; 4]);
        let behind = &table[44 + 255 * 8..];
        assert_eq!(behind[..16], [9, 16, 0, 0, 255, 0, 0, 0, 1, 0, 0, 0, 255, 0, 0, 0]);
        assert_eq!(behind[16..32], [9, 16, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(behind[32..36], [1, 12, 0, 0]);
    }

    #[test]
    fn ids_are_those_of_the_arrangement() {
        let table = build(&placed(&[(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (1, 0, 1)]));
        let told: Vec<_> = table[44..84].chunks(8).map(|entry| [entry[2], entry[3]]).collect();
        assert_eq!(told, [[0, 0], [1, 1], [2, 2], [3, 4], [4, 5]]);
        assert_eq!(table[84..87], [1, 12, 6], "the I/O APIC is behind them");
    }

    /// Linux passes over an x2APIC with an id of eight bits where there are local APICs.
    #[test]
    fn every_id_of_eight_bits_is_a_local_apics_however_processors_are_numbered() {
        let places: Vec<_> = (0..300).map(|at| (at % 2, 0, at)).collect();
        let cpus = placed(&places);
        let mut table = &build(&cpus)[44..];
        let mut told = Vec::new();
        while table[0] != IO_APIC[0] {
            let wide = table[0] == LOCAL_X2APIC[0];
            let id = u32::from_le_bytes(table[4..8].try_into().expect("four bytes"));
            let id = if wide { id } else { table[3].into() };
            assert_eq!(wide, id >= FIRST_X2APIC, "{id}");
            told.push(id);
            table = &table[usize::from(table[1])..];
        }
        assert_eq!(told, cpus.ids());
    }
}
