//! Unmodified images start through Debian's stock UEFI firmware, and its variables outlive the
//! machine's restart.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, ensure};
use qemu_tests::{
    bed::{
        Bed, BedOptions, Plan,
        firmware::{self, Release},
        guest,
    },
    harness::host::HostOptions,
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(300);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);
/// QEMU 7.2 ends itself when a nested guest writes CR8, as edk2 does at the end of each interrupt,
/// while the next interrupt waits. Where time goes by instructions the next tick is never so near.
const STEADY: [&str; 2] = ["-icount", "shift=1,sleep=off"];
/// But QEMU that counts instructions stands still for ever in about one start of eight, 7.2 and 10.0
/// alike, so a start that fails is tried again this often. Each failure is printed.
const MORE_TRIES: u32 = 3;

const CODE: &str = "/guest/code.fd";
const VARIABLES: &str = "/guest/variables.fd";
const DISK: &str = "/guest/disk.img";

/// Does something with a newly started host until it succeeds, in a folder of its own each time.
fn steadily<T>(attempt: impl Fn(&Path) -> Result<T>) -> T {
    for _ in 0..MORE_TRIES {
        let folder = tempfile::tempdir().unwrap();
        match attempt(folder.path()) {
            Ok(done) => return done,
            Err(error) => println!("trying again: {error:#}"),
        }
    }
    attempt(tempfile::tempdir().unwrap().path()).unwrap()
}

/// A host that holds the firmware of a release, its variables, and a disk.
fn bed(folder: &Path, release: Release, disk: PathBuf) -> Result<Bed> {
    let firmware = firmware::ovmf(release)?;
    let files = [(CODE, firmware.code), (VARIABLES, firmware.variables), (DISK, disk)];
    let files = files.map(|(name, file)| (name.trim_start_matches('/').to_owned(), file));
    let arguments = STEADY.iter().map(|&word| word.to_owned()).collect();
    let host = HostOptions { arguments, ..HostOptions::default() };
    Bed::start(folder, BedOptions { files: files.to_vec(), host, ..BedOptions::default() })
}

fn plan() -> Plan {
    let mut plan = Plan::uefi(1, (CODE, VARIABLES));
    plan.disk(DISK);
    plan
}

/// What the guest tells of the machine's maker and identity.
const NAMED: &str = "Holdfast\n00000000-0000-0000-0000-000000000001\n";
/// Where it tells that.
const IDENTITY: &str = "cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_uuid";
/// A variable that the guest keeps: its attributes (non-volatile, at boot and at run time), then Z.
const VARIABLE: &str = "/sys/firmware/efi/efivars/Holdfast-9f2f1b64-6f2b-4d5e-9a3a-7f3f5f0c1d11";

/// Starts the machine up to where its guest takes commands.
fn start(bed: &mut Bed) -> Result<u32> {
    let machine = bed.launch(&plan())?;
    bed.wait_console(machine, guest::READY, START_LIMIT)?;
    Ok(machine)
}

/// Has the guest power off.
fn finish(bed: &mut Bed, machine: u32) -> Result<()> {
    bed.type_line(machine, "poweroff -f")?;
    let (status, log) = bed.wait_exit(machine, SOON)?;
    ensure!(status == 0, "the VMM ended with status {status}: {log}");
    Ok(())
}

/// Starts a machine from the disk that `make` makes, and returns what its guest tells of it.
fn told(release: Release, make: fn(&Path) -> Result<PathBuf>) -> [String; 2] {
    steadily(|folder| {
        let mut bed = bed(folder, release, make(folder)?)?;
        let machine = start(&mut bed)?;
        let identity = bed.run(machine, IDENTITY, SOON)?;
        let tables = bed.run(machine, "ls /sys/firmware/acpi/tables /sys/firmware/efi", SOON)?;
        finish(&mut bed, machine)?;
        Ok([identity, tables])
    })
}

fn is_ours([identity, tables]: [String; 2]) {
    assert_eq!(identity, NAMED);
    assert!(tables.contains("MCFG") && tables.contains("systab"), "{tables}");
}

#[test]
fn grub_starts_debian_and_variables_outlive_the_machine() {
    let [identity, kept] = steadily(|folder| {
        let mut bed = bed(folder, Release::Bookworm, firmware::grub_disk(folder)?)?;
        let machine = start(&mut bed)?;
        let identity = bed.run(machine, IDENTITY, SOON)?;
        let mount = "insmod /efivarfs.ko && mount -t efivarfs none /sys/firmware/efi/efivars";
        bed.run(machine, mount, SOON)?;
        bed.run(machine, &format!("printf '\\007\\000\\000\\000Z' > {VARIABLE}"), SOON)?;
        finish(&mut bed, machine)?;

        let machine = start(&mut bed)?;
        bed.run(machine, mount, SOON)?;
        let kept = bed.run(machine, &format!("tail -c 1 {VARIABLE}; echo"), SOON)?;
        finish(&mut bed, machine)?;
        Ok([identity, kept])
    });
    assert_eq!(identity, NAMED);
    assert_eq!(kept, "Z\n");
}

#[test]
fn grub_starts_debian_through_the_firmware_of_debian_13() {
    is_ours(told(Release::Trixie, firmware::grub_disk));
}

#[test]
fn systemd_boot_starts_a_unified_kernel_image_through_the_firmware_of_debian_13() {
    is_ours(told(Release::Trixie, firmware::systemd_boot_disk));
}

/// Starts Debian's installer from a read-only disk and waits until its own system runs.
fn installer_runs(release: Release) {
    steadily(|folder| {
        let mut bed = bed(folder, release, firmware::installer_iso(folder)?)?;
        let mut plan = plan();
        plan.spec.memory_mib.0 = 768;
        plan.spec.disks[0].read_only = true;
        let machine = bed.launch(&plan)?;
        bed.wait_console(machine, "Starting system log daemon", START_LIMIT)?;
        Ok(())
    });
}

#[test]
fn the_installer_starts_from_a_read_only_iso_through_the_firmware_of_debian_12() {
    installer_runs(Release::Bookworm);
}
