//! A virtual function (SR-IOV) of a physical one that the host keeps.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{process::Command, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::host::HostOptions,
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(60);

/// An NVMe controller with one virtual one, behind a port of its own.
const CONTROLLER: [&str; 6] = [
    "-device",
    "pcie-root-port,id=split,chassis=40,slot=40",
    "-device",
    "nvme-subsys,id=both",
    "-device",
    "nvme,serial=physical,subsys=both,bus=split,sriov_max_vfs=1,sriov_vq_flexible=2,sriov_vi_flexible=1",
];

/// Where the guest finds the device.
const GUEST: &str = "/sys/bus/pci/devices/0000:01:00.0";

/// Whether this QEMU's NVMe controller has virtual functions; QEMU 7.2 is the first.
fn emulated() -> bool {
    let help = Command::new("qemu-system-x86_64").args(["-device", "nvme,help"]).output();
    help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("sriov_max_vfs"))
}

/// Returns the functions of the host whose class is that of an NVMe controller.
fn controllers(bed: &mut Bed) -> Vec<String> {
    let all = bed.list("/sys/bus/pci/devices").unwrap();
    let mut class =
        |name: &String| bed.text(&format!("/sys/bus/pci/devices/{name}/class")).unwrap();
    all.into_iter()
        .map(|name| (class(&name), name))
        .filter(|(class, _)| class == "0x010802")
        .map(|(_, name)| name)
        .collect()
}

#[test]
fn a_virtual_function_is_a_whole_device_to_its_guest() {
    if !emulated() {
        println!("skipped: virtual functions: this QEMU emulates no device that has any");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let made = guest::make(folder.path()).unwrap();
    let arguments = CONTROLLER.map(str::to_owned).to_vec();
    let host = HostOptions { arguments, ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    let mut bed =
        Bed::start(folder.path(), BedOptions { files, host, ..BedOptions::default() }).unwrap();
    let physical = controllers(&mut bed);
    assert_eq!(physical.len(), 1, "{physical:?}");
    let switch = format!("/sys/bus/pci/devices/{}", physical[0]);
    bed.write(&format!("{switch}/sriov_drivers_autoprobe"), b"0").unwrap();
    bed.write(&format!("{switch}/sriov_numvfs"), b"1").unwrap();
    let both = controllers(&mut bed);
    let function = both.iter().find(|name| !physical.contains(name)).unwrap().clone();

    let path = bed.bind(&function).unwrap();
    let mut plan = Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    plan.pass(function.parse().unwrap(), &path);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let mut read = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    // Its own registers read as ones here; what the guest sees is the physical function's.
    assert_eq!(read(&format!("cat {GUEST}/vendor {GUEST}/device")), "0x1b36\n0x0010");
    assert_eq!(read(&format!("cat {GUEST}/class {GUEST}/irq")), "0x010802\n0");
    let pin = format!("dd if={GUEST}/config bs=1 skip=61 count=1 2>/dev/null | od -An -tx1");
    assert_eq!(read(&pin), "00");
    // A controller that the physical one has not switched on answers with zeroes, never with ones,
    // but for its status (CSTS), which is fatal.
    let bar = format!("echo 1 > {GUEST}/enable; bar=$(head -n 1 {GUEST}/resource | cut -d' ' -f1)");
    read(&bar);
    assert_eq!(read("devmem $((bar)) 32; devmem $((bar + 0x1c)) 32"), "0x00000000\n0x00000002");

    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
