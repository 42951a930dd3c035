//! Intel's ACPI compiler reads our tables back without a warning. Source: iasl(1).

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, process::Command};

use vmm::{
    acpi::{Platform, Root, tables},
    machine::numa::Node,
    pci::port::Windows,
};

/// Two root complexes, each near a node with two processors and memory in pieces.
fn platform() -> Platform {
    let root = |number: u8| {
        let (base, high) = (0xc000_0000 + (u32::from(number) << 28), 1 << (38 + number));
        let windows = Windows {
            io: (number == 0).then_some((0x1000, 0xffff)),
            memory: Some((base, base + 0xfff_ffff)),
            prefetchable: Some((high, 2 * high - 1)),
        };
        let first = 128 * number;
        Root { buses: (first, first + 127), apertures: windows.into(), node: Some(number.into()) }
    };
    let node = |id: u32| Node {
        id,
        vcpus: vec![id, id + 2],
        memory: vec![(u64::from(id) << 31, 1 << 30), (u64::from(id + 4) << 32, 1 << 32)],
        distances: if id == 0 { vec![10, 21] } else { vec![21, 10] },
    };
    let (roots, nodes) = (vec![root(0), root(1)], vec![node(0), node(1)]);
    Platform { cpus: vmm::vcpu::Cpus::in_one_package(4), roots, nodes, ecam: vmm::layout::ECAM }
}

/// Disassembles a table and, for AML, compiles the result again.
fn iasl(folder: &std::path::Path, arguments: &[&str]) -> String {
    let output = Command::new("iasl").args(arguments).current_dir(folder).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn iasl_reads_every_table_without_a_warning() {
    if Command::new("iasl").arg("-v").output().is_err() {
        println!("skipped: ACPI tables read by iasl: iasl is not installed (acpica-tools)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let tables = tables(&platform());
    // The root pointer is not a table that iasl reads.
    for table in &tables[1..] {
        let name = String::from_utf8_lossy(&table.bytes[..4]).into_owned();
        let file = format!("{name}.aml");
        fs::write(folder.path().join(&file), &table.bytes).unwrap();
        let said = iasl(folder.path(), &["-d", &file]);
        assert!(!said.contains("Error") && !said.contains("Warning"), "{name}: {said}");
    }
    // The clock with CMOS memory, where every PC has it.
    let source = fs::read_to_string(folder.path().join("DSDT.dsl")).unwrap();
    let clock = source.split("Device (RTC)").nth(1).unwrap().split("Device (").next().unwrap();
    for what in ["\"PNP0B00\"", "0x0070,", "IRQNoFlags", "{8}"] {
        assert!(clock.contains(what), "{what}: {clock}");
    }
    let said = iasl(folder.path(), &["-we", "DSDT.dsl"]);
    assert!(said.contains("0 Errors, 0 Warnings"), "{said}");
}
