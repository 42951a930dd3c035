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
    harness::{
        host::HostOptions,
        pace::{Pace, steadily},
    },
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(300);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

const CODE: &str = "/guest/code.fd";
const VARIABLES: &str = "/guest/variables.fd";
const DISK: &str = "/guest/disk.img";

/// A host that holds the firmware of a release, its variables, and a disk.
fn bed(folder: &Path, release: Release, disk: PathBuf) -> Bed {
    let firmware = firmware::ovmf(release).unwrap();
    let files = [(CODE, firmware.code), (VARIABLES, firmware.variables), (DISK, disk)];
    let files = files.map(|(name, file)| (name.trim_start_matches('/').to_owned(), file));
    let host = HostOptions { pace: Pace::Slow, ..HostOptions::default() };
    Bed::start(folder, BedOptions { files: files.to_vec(), host, ..BedOptions::default() }).unwrap()
}

fn plan() -> Plan {
    let mut plan = Plan::uefi(1, (CODE, VARIABLES));
    plan.disk(DISK);
    plan
}

/// What the guest tells of the machine's maker and identity.
const NAMED: &str = "Holdfast\n00000000-0000-0000-0000-000000000001\n";
/// A variable that the guest keeps: its attributes (non-volatile, at boot and at run time), then Z.
const VARIABLE: &str = "/sys/firmware/efi/efivars/Holdfast-9f2f1b64-6f2b-4d5e-9a3a-7f3f5f0c1d11";

/// Starts the machine up to where its guest takes commands.
fn start(bed: &mut Bed) -> u32 {
    let machine = bed.launch(&plan()).unwrap();
    bed.wait_console(machine, guest::READY, START_LIMIT).unwrap();
    machine
}

/// Has the guest power off.
fn finish(bed: &mut Bed, machine: u32) {
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}

/// Starts a machine from the disk that `make` makes, and hears from its guest who made it.
fn starts(folder: &Path, release: Release, make: fn(&Path) -> anyhow::Result<PathBuf>) {
    let disk = make(folder).unwrap();
    let mut bed = bed(folder, release, disk);
    let machine = start(&mut bed);
    let id = "cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_uuid";
    assert_eq!(bed.run(machine, id, SOON).unwrap(), NAMED);
    let tables = bed.run(machine, "ls /sys/firmware/acpi/tables /sys/firmware/efi", SOON).unwrap();
    assert!(tables.contains("MCFG") && tables.contains("systab"), "{tables}");
    finish(&mut bed, machine);
}

#[test]
fn grub_starts_debian_and_variables_outlive_the_machine() {
    steadily(variables_outlive_the_machine);
}

fn variables_outlive_the_machine(folder: &Path) {
    let disk = firmware::grub_disk(folder).unwrap();
    let mut bed = bed(folder, Release::Bookworm, disk);
    let machine = start(&mut bed);
    let id = "cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_uuid";
    assert_eq!(bed.run(machine, id, SOON).unwrap(), NAMED);
    let mount = "insmod /efivarfs.ko && mount -t efivarfs none /sys/firmware/efi/efivars";
    bed.run(machine, mount, SOON).unwrap();
    let keep = format!("printf '\\007\\000\\000\\000Z' > {VARIABLE}");
    bed.run(machine, &keep, SOON).unwrap();
    finish(&mut bed, machine);

    let machine = start(&mut bed);
    bed.run(machine, mount, SOON).unwrap();
    let kept = bed.run(machine, &format!("tail -c 1 {VARIABLE}; echo"), SOON).unwrap();
    assert_eq!(kept, "Z\n");
    finish(&mut bed, machine);
}

#[test]
fn grub_starts_debian_through_the_firmware_of_debian_13() {
    steadily(|folder| starts(folder, Release::Trixie, firmware::grub_disk));
}

#[test]
fn systemd_boot_starts_a_unified_kernel_image_through_the_firmware_of_debian_13() {
    steadily(|folder| starts(folder, Release::Trixie, firmware::systemd_boot_disk));
}

/// Starts Debian's installer from a read-only disk and waits until its own system runs.
fn installer_runs(folder: &Path, release: Release) {
    let disk = firmware::installer_iso(folder).unwrap();
    let mut bed = bed(folder, release, disk);
    let mut plan = plan();
    plan.spec.memory_mib.0 = 768;
    plan.spec.disks[0].read_only = true;
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, "Starting system log daemon", START_LIMIT).unwrap();
}

#[test]
fn the_installer_starts_from_a_read_only_iso_through_the_firmware_of_debian_12() {
    steadily(|folder| installer_runs(folder, Release::Bookworm));
}
