//! Unmodified images start through Debian's stock UEFI firmware, and its variables outlive the
//! machine's restart.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use qemu_tests::{
    bed::{
        Bed, BedOptions, Plan,
        firmware::{self, Release},
        guest,
    },
    harness::host::HostOptions,
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(600);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);
/// QEMU 7.2 ends itself when a nested guest writes CR8, as edk2 does at the end of each interrupt,
/// while the next interrupt waits. Where time goes by instructions the next tick is never so near.
const STEADY: [&str; 2] = ["-icount", "shift=3,sleep=off"];

const CODE: &str = "/guest/code.fd";
const VARIABLES: &str = "/guest/variables.fd";
const DISK: &str = "/guest/disk.img";

/// A host that holds the firmware of a release, its variables, and a disk.
fn bed(folder: &Path, release: Release, disk: PathBuf) -> Bed {
    let firmware = firmware::ovmf(release).unwrap();
    let files = [(CODE, firmware.code), (VARIABLES, firmware.variables), (DISK, disk)];
    let files = files.map(|(name, file)| (name.trim_start_matches('/').to_owned(), file));
    let arguments = STEADY.iter().map(|&word| word.to_owned()).collect();
    let host = HostOptions { arguments, ..HostOptions::default() };
    Bed::start(folder, BedOptions { files: files.to_vec(), host, ..BedOptions::default() }).unwrap()
}

fn plan() -> Plan {
    let mut plan = Plan::uefi(1, (CODE, VARIABLES));
    plan.disk(DISK);
    plan
}

/// Starts the machine and ends it once its guest has said what it is.
fn starts(bed: &mut Bed) -> String {
    let machine = bed.launch(&plan()).unwrap();
    bed.wait_console(machine, guest::READY, START_LIMIT).unwrap();
    let vendor = bed.run(machine, "cat /sys/class/dmi/id/sys_vendor", SOON).unwrap();
    let uuid = bed.run(machine, "cat /sys/class/dmi/id/product_uuid", SOON).unwrap();
    let tables = bed.run(machine, "ls /sys/firmware/acpi/tables /sys/firmware/efi", SOON).unwrap();
    assert!(tables.contains("MCFG") && tables.contains("systab"), "{tables}");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
    format!("{vendor}{uuid}")
}

const NAMED: &str = "Holdfast\n00000000-0000-0000-0000-000000000001\n";

#[test]
fn grub_starts_debian_through_the_firmware_of_debian_12() {
    let folder = tempfile::tempdir().unwrap();
    let disk = firmware::grub_disk(folder.path()).unwrap();
    let mut bed = bed(folder.path(), Release::Bookworm, disk);
    assert_eq!(starts(&mut bed), NAMED);
}
