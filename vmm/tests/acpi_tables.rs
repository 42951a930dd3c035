//! Intel's ACPI compiler reads our tables back without a warning. Source: iasl(1).

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, process::Command};

use vmm::acpi::{Platform, tables};

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
    let platform = Platform {
        vcpus: 4,
        mmio64: 1 << 38,
        mmio64_size: 1 << 38,
        ecam: vmm::layout::ECAM,
        firmware: None,
    };
    let tables = tables(&platform).unwrap();
    // The root pointer is not a table that iasl reads.
    for table in &tables[1..] {
        let name = String::from_utf8_lossy(&table.bytes[..4]).into_owned();
        let file = format!("{name}.aml");
        fs::write(folder.path().join(&file), &table.bytes).unwrap();
        let said = iasl(folder.path(), &["-d", &file]);
        assert!(!said.contains("Error") && !said.contains("Warning"), "{name}: {said}");
    }
    let said = iasl(folder.path(), &["-we", "DSDT.dsl"]);
    assert!(said.contains("0 Errors, 0 Warnings"), "{said}");
}
