//! Unmodified images start through Debian's stock UEFI firmware, and its variables outlive the
//! machine's restart.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use qemu_tests::{
    bed::{
        Bed, BedOptions, Opened, Plan,
        firmware::{self, Release},
        guest,
    },
    harness::{
        host::HostOptions,
        pace::{Pace, steadily},
    },
};
use types::{
    topology::{Below, CpuPlace, NumaNode, Port, RootComplex, Topology},
    units::Mebibytes,
    vm::{DiskModel, PciWindows},
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(480);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

const CODE: &str = "/guest/code.fd";
const VARIABLES: &str = "/guest/variables.fd";
const DISK: &str = "/guest/disk.img";

/// Where the host has a configuration for Ignition.
const CONFIG: &str = "/run/config.ign";
const IGNITION: &[u8] = b"{\"ignition\":{\"version\":\"3.4.0\"}}\n";

/// Where a host lives, and how fast.
type Place<'a> = (&'a Path, Pace);

/// A host that holds the firmware of a release, its variables, and a disk.
fn bed(at: Place, release: Release, disk: PathBuf) -> Bed {
    bed_with(at, release, disk, HostOptions::default())
}

/// The same with more.
fn bed_with((folder, pace): Place, release: Release, disk: PathBuf, host: HostOptions) -> Bed {
    let firmware = firmware::ovmf(release).unwrap();
    let files = [(CODE, firmware.code), (VARIABLES, firmware.variables), (DISK, disk)];
    let files = files.map(|(name, file)| (name.trim_start_matches('/').to_owned(), file));
    let host = HostOptions { pace, ..host };
    Bed::start(folder, BedOptions { files: files.to_vec(), host, ..BedOptions::default() }).unwrap()
}

/// A machine with the firmware of a release, which is told of its PCI windows if it can take that.
fn plan(release: Release) -> Plan {
    let windows = match release {
        Release::Bookworm => PciWindows::Found,
        Release::Trixie => PciWindows::Told,
    };
    let mut plan = Plan::uefi(1, (CODE, VARIABLES), windows);
    plan.disk(DISK);
    plan
}

/// What the guest tells of the machine's maker and identity.
const NAMED: &str = "Holdfast\n00000000-0000-0000-0000-000000000001\n";
/// A variable that the guest keeps: its attributes (non-volatile, at boot and at run time), then Z.
const VARIABLE: &str = "/sys/firmware/efi/efivars/Holdfast-9f2f1b64-6f2b-4d5e-9a3a-7f3f5f0c1d11";

/// Starts the machine up to where its guest takes commands.
fn start(bed: &mut Bed, plan: &Plan) -> u32 {
    let machine = bed.launch(plan).unwrap();
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
fn starts(
    (folder, pace): Place,
    (release, model): (Release, DiskModel),
    make: fn(&Path) -> anyhow::Result<PathBuf>,
) {
    let disk = make(folder).unwrap();
    let mut bed = bed((folder, pace), release, disk);
    bed.write(CONFIG, IGNITION).unwrap();
    let mut plan = plan(release);
    plan.spec.disks[0].model = model;
    plan.spec.ignition_fd = Some(plan.open(Opened::Read { path: CONFIG.to_owned() }));
    let machine = start(&mut bed, &plan);
    let id = "cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_uuid";
    assert_eq!(bed.run(machine, id, SOON).unwrap(), NAMED);
    let tables = bed.run(machine, "ls /sys/firmware/acpi/tables /sys/firmware/efi", SOON).unwrap();
    assert!(tables.contains("MCFG") && tables.contains("systab"), "{tables}");
    // Systems that ask ACPI where the console is find the serial port: I/O space, eight bits, 0x3f8.
    let spcr = "od -An -tx1 -j40 -N6 /sys/firmware/acpi/tables/SPCR";
    assert_eq!(bed.run(machine, spcr, SOON).unwrap().trim(), "01 08 00 01 f8 03");
    // Where Ignition looks for its configuration, by the driver that it loads for that.
    let files = "/sys/firmware/qemu_fw_cfg/by_name/opt";
    let read = format!("cat {files}/com.coreos/config/raw {files}/org.flatcar-linux/config/raw");
    let told = bed.run(machine, &read, SOON).unwrap();
    assert_eq!(told.as_bytes(), [IGNITION, IGNITION].concat());
    finish(&mut bed, machine);
}

#[test]
fn grub_starts_debian_and_variables_outlive_the_machine() {
    steadily(variables_outlive_the_machine);
}

fn variables_outlive_the_machine(folder: &Path, pace: Pace) {
    let disk = firmware::grub_disk(folder).unwrap();
    let mut bed = bed((folder, pace), Release::Bookworm, disk);
    let plan = plan(Release::Bookworm);
    let machine = start(&mut bed, &plan);
    let id = "cat /sys/class/dmi/id/sys_vendor /sys/class/dmi/id/product_uuid";
    assert_eq!(bed.run(machine, id, SOON).unwrap(), NAMED);
    let mount = "insmod /efivarfs.ko && mount -t efivarfs none /sys/firmware/efi/efivars";
    bed.run(machine, mount, SOON).unwrap();
    let keep = format!("printf '\\007\\000\\000\\000Z' > {VARIABLE}");
    bed.run(machine, &keep, SOON).unwrap();
    finish(&mut bed, machine);

    let machine = start(&mut bed, &plan);
    bed.run(machine, mount, SOON).unwrap();
    let kept = bed.run(machine, &format!("tail -c 1 {VARIABLE}; echo"), SOON).unwrap();
    assert_eq!(kept, "Z\n");
    finish(&mut bed, machine);
}

#[test]
fn a_shutdown_by_firmware_that_started_from_an_nvme_disk_powers_the_machine_off() {
    steadily(|folder, pace| {
        let disk = firmware::shutdown_disk(folder).unwrap();
        let mut bed = bed((folder, pace), Release::Bookworm, disk);
        let mut plan = plan(Release::Bookworm);
        plan.spec.disks[0].model = DiskModel::Nvme;
        let machine = bed.launch(&plan).unwrap();
        let (status, log) = bed.wait_exit(machine, START_LIMIT).unwrap();
        assert_eq!(status, 0, "{log}");
        assert!(log.contains("the guest powered off"), "{log}");
    });
}

#[test]
fn grub_starts_debian_from_an_nvme_disk_through_the_firmware_of_debian_13() {
    let how = (Release::Trixie, DiskModel::Nvme);
    steadily(|folder, pace| starts((folder, pace), how, firmware::grub_disk));
}

#[test]
fn systemd_boot_starts_a_unified_kernel_image_through_the_firmware_of_debian_13() {
    let how = (Release::Trixie, DiskModel::VirtioBlk);
    steadily(|folder, pace| starts((folder, pace), how, firmware::systemd_boot_disk));
}

#[test]
fn systemd_boot_starts_a_unified_kernel_image_from_an_nvme_disk_through_the_firmware_of_debian_12()
{
    let how = (Release::Bookworm, DiskModel::Nvme);
    steadily(|folder, pace| starts((folder, pace), how, firmware::systemd_boot_disk));
}

/// Addresses of devices behind the root ports of the harness, in their order.
const DEVICES: [&str; 2] = ["0000:01:00.0", "0000:02:00.0"];

/// Two root complexes, each near a node and with a device: one with registers to compute with, the
/// other with as much memory as a GPU.
fn two_root_complexes(folder: &Path, pace: Pace) {
    let disk = firmware::grub_disk(folder).unwrap();
    let devices = vec!["pci-testdev,membar=256G".to_owned(), "edu".to_owned()];
    let host = HostOptions { devices, ..HostOptions::default() };
    let mut bed = bed_with((folder, pace), Release::Trixie, disk, host);
    let mut plan = plan(Release::Trixie);
    let mut roots = Vec::new();
    for (index, address) in (0u32..).zip(DEVICES) {
        let path = bed.bind(address).unwrap();
        plan.pass(address.parse().unwrap(), &path);
        let port = Port { registers: None, below: Below::Device { index } };
        roots.push(RootComplex { node: Some(index), ports: vec![port] });
    }
    plan.spec.topology = Some(Topology { roots });
    let node = |id, vcpus, distances| NumaNode { id, vcpus, memory_mib: Mebibytes(256), distances };
    plan.spec.numa = vec![node(0, vec![0, 1, 2], vec![10, 21]), node(1, vec![3], vec![21, 10])];
    // Three cores in the first package, which leaves a gap between APIC ids, and one in the second.
    let place = |(package, core)| CpuPlace { package, cache: 0, core };
    plan.spec.vcpus = 4;
    plan.spec.cpu_places = [(0, 0), (0, 1), (0, 2), (1, 0)].map(place).to_vec();
    let machine = start(&mut bed, &plan);
    let mut read = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();

    let ids =
        "grep ^apicid /proc/cpuinfo | cut -d: -f2; cat /sys/devices/system/node/node*/cpulist";
    assert_eq!(read(ids), "0\n 1\n 2\n 4\n0-2\n3");
    // Package, its processors, and those of the last-level cache.
    let packages = "for cpu in 0 3; do cd /sys/devices/system/cpu/cpu$cpu; echo $(cat \
                    topology/physical_package_id topology/package_cpus_list cache/index3/shared_cpu_list); \
                    done; cat /proc/sys/kernel/tainted";
    assert_eq!(read(packages), "0 0-2 0-2\n1 3 3\n0");

    assert_eq!(read("cd /sys/devices; echo pci*"), "pci0000:00 pci0000:80");
    let find = |vendor_and_device: &str| {
        format!(
            "cd /sys/devices/pci*/*/$(grep -l {vendor_and_device} /sys/bus/pci/devices/*/uevent \
                 | cut -d/ -f6); echo $(pwd | cut -d/ -f4) $(cat numa_node)"
        )
    };
    assert_eq!(read(&find("1B36:0005")), "pci0000:00 0");
    // Size and alignment.
    let large = "while read start end flags; do echo $((end - start + 1)) $((start % (1 << 38))); \
                 done < resource | grep ^274877906944";
    assert_eq!(read(large), "274877906944 0");
    assert_eq!(read(&find("1234:11E8")), "pci0000:80 1");
    // QEMU docs/specs/edu: the factorial of what is written at 8 is read there.
    let edu = "echo 1 > enable; bar=$(head -n 1 resource | cut -d' ' -f1); devmem $((bar)) 32; \
               devmem $((bar + 8)) 32 5; while [ $(( $(devmem $((bar + 32)) 32) & 1 )) = 1 ]; do :; \
               done; devmem $((bar + 8)) 32";
    assert_eq!(read(edu), "0x010000ED\n0x00000078");
    // The firmware placed all of them, and where ACPI says that it may: nothing was left to do.
    let moved =
        "dmesg | grep -E 'BAR [0-5]: assigned|no space for|failed to assign|can.t claim'; true";
    assert_eq!(read(moved), "");
    // One for each of them, also where an id is missing before.
    let nmi = r#"{"action":"nmi"}"#;
    assert_eq!(bed.call(machine, ("POST", "/v1/power"), nmi).unwrap().status, 202);
    // The kernel says that it knows no reason, between lines of ours.
    let count = "sleep 1; awk '/NMI:/ { print $2, $3, $4, $5 }' /proc/interrupts";
    let counted = bed.run(machine, count, SOON).unwrap();
    assert_eq!(counted.trim().lines().last(), Some("1 1 1 1"), "{counted}");
    finish(&mut bed, machine);
}

#[test]
fn firmware_of_debian_13_places_bars_below_each_root_complex() {
    steadily(two_root_complexes);
}

/// Starts Debian's installer from a read-only disk and waits until its own system runs.
fn installer_runs((folder, pace): Place, release: Release) {
    let disk = firmware::installer_iso(folder).unwrap();
    let mut bed = bed((folder, pace), release, disk);
    let mut plan = plan(release);
    plan.spec.memory_mib.0 = 768;
    plan.spec.disks[0].read_only = true;
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, "Starting system log daemon", START_LIMIT).unwrap();
}

#[test]
fn the_installer_starts_from_a_read_only_iso_through_the_firmware_of_debian_12() {
    steadily(|folder, pace| installer_runs((folder, pace), Release::Bookworm));
}

#[test]
fn the_installer_starts_from_a_read_only_iso_through_the_firmware_of_debian_13() {
    steadily(|folder, pace| installer_runs((folder, pace), Release::Trixie));
}
