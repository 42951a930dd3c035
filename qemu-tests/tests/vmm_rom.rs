//! The expansion ROM of an AMD GPU, which its driver has to find in the guest.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::host::HostOptions,
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(60);

/// Where the host and the guest find the device.
const HOST: &str = "0000:01:00.0";
const GUEST: &str = "/sys/bus/pci/devices/0000:01:00.0";

/// QEMU's `ati-vga`, a display by its class with a ROM of 64 KiB, says that it is AMD's.
#[test]
fn a_gpu_of_amds_has_its_rom_in_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let made = guest::make(folder.path()).unwrap();
    let host = HostOptions { devices: vec!["ati-vga".to_owned()], ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    let mut bed =
        Bed::start(folder.path(), BedOptions { files, host, ..BedOptions::default() }).unwrap();
    assert_eq!(bed.text(&format!("/sys/bus/pci/devices/{HOST}/vendor")).unwrap(), "0x1002");
    let path = bed.bind(HOST).unwrap();
    let mut plan = Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    plan.pass(HOST.parse().unwrap(), &path);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let mut read = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    assert_eq!(read(&format!("cat {GUEST}/vendor {GUEST}/class")), "0x1002\n0x030000");
    // Signature of an image (PCI Firmware Specification 3.3 §5.1), once the ROM is switched on.
    let start =
        format!("echo 1 > {GUEST}/enable; echo 1 > {GUEST}/rom; od -An -tx1 -N2 {GUEST}/rom");
    assert_eq!(read(&start), "55 aa");
    let switched_off = format!("echo 0 > {GUEST}/rom; od -An -tx1 -j48 -N1 {GUEST}/config");
    assert_eq!(read(&switched_off), "00");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
