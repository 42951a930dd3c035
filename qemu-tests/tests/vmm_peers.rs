//! Devices of one machine that reach each other: by either of the kernel's interfaces, and only
//! when the specification says so.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Opened, Plan, guest},
    harness::host::HostOptions,
};
use types::{
    node::Bdf,
    vm::{Passthrough, PassthroughDevice, VfioInterface},
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(60);

/// The device that copies, and the one with memory in its BAR 2.
const DEVICES: [&str; 2] = ["0000:01:00.0", "0000:02:00.0"];

/// In the guest: switches the devices on, the first as a bus master, and finds their registers.
const PREPARE: [&str; 5] = [
    "cd /sys/bus/pci/devices; echo 1 > 0000:01:00.0/enable; echo 1 > 0000:02:00.0/enable",
    r"printf '\006' | dd of=0000:01:00.0/config bs=1 seek=4 conv=notrunc 2>/dev/null",
    "edu=$(head -n 1 0000:01:00.0/resource | cut -d' ' -f1)",
    "mem=$(sed -n 3p 0000:02:00.0/resource | cut -d' ' -f1)",
    "put() { devmem $((edu + $1)) 64 $2; }",
];
/// In the guest: has the first device (QEMU docs/specs/edu.rst: source at 0x80, destination at 0x88,
/// length at 0x90, order at 0x98; its own buffer at 0x40000) fetch what is at the start of the
/// other's memory and put it 256 bytes further on; prints what is there then.
const COPY: [&str; 4] = [
    "put 128 $((mem)); put 136 0x40000; put 144 4; put 152 1; sleep 1",
    "put 128 0x40000; put 136 $((mem + 256))",
    "put 144 4; put 152 3; sleep 1",
    "devmem $((mem + 256)) 32",
];
/// In the guest: the other device is reset, and its BAR is where it was.
const RESET: &str = "echo 1 > 0000:02:00.0/reset";

fn bed(folder: &Path) -> Bed {
    let made = guest::make(folder).unwrap();
    let devices = vec![
        "edu,dma_mask=0xffffffffffffffff".to_owned(),
        "ivshmem-plain,memdev=shared".to_owned(),
    ];
    let arguments = ["-object", "memory-backend-ram,size=4M,id=shared"].map(str::to_owned).to_vec();
    let host = HostOptions { devices, arguments, ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

fn plan(bed: &mut Bed, number: u8, interface: VfioInterface) -> Plan {
    let kernel = ("/guest/kernel", "/guest/initrd");
    let mut plan = Plan::linux(number, kernel, "console=ttyS0 quiet iomem=relaxed");
    let iommu = match interface {
        VfioInterface::Cdev => "/dev/iommu",
        VfioInterface::Group => "/dev/vfio/vfio",
    };
    let iommu_fd = plan.open(Opened::Write { path: iommu.to_owned() });
    let mut devices = Vec::new();
    for name in DEVICES {
        let address: Bdf = name.parse().unwrap();
        let cdev = bed.bind(name).unwrap();
        let path = match interface {
            VfioInterface::Cdev => cdev,
            VfioInterface::Group => group(bed, name),
        };
        let cdev_fd = plan.open(Opened::Write { path });
        devices.push(PassthroughDevice { address, cdev_fd, p2p_clique: None });
    }
    plan.spec.passthrough = Some(Passthrough { interface, iommu_fd, peer_to_peer: false, devices });
    plan
}

/// Returns the path of a device's group.
fn group(bed: &mut Bed, name: &str) -> String {
    let groups = bed.list("/sys/kernel/iommu_groups").unwrap();
    let folder = |group: &str| format!("/sys/kernel/iommu_groups/{group}/devices");
    let holds = |group: &&String| {
        bed.list(&folder(group)).is_ok_and(|devices| devices.iter().any(|device| device == name))
    };
    format!("/dev/vfio/{}", groups.iter().find(holds).unwrap())
}

/// Starts a guest, has it copy, and copy again after a reset, and ends it. Returns what arrived, and
/// what the VMM said.
fn copies(bed: &mut Bed, plan: &Plan) -> ([String; 2], String) {
    let machine = bed.launch(plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    run(bed, machine, &PREPARE);
    // This device's memory keeps what an earlier guest left.
    bed.run(machine, "devmem $((mem + 256)) 32 0", SOON).unwrap();
    bed.run(machine, "devmem $((mem)) 32 0xcafe0001", SOON).unwrap();
    let before = run(bed, machine, &COPY);
    bed.run(machine, RESET, SOON).unwrap();
    bed.run(machine, "devmem $((mem)) 32 0xbabe0002", SOON).unwrap();
    let after = run(bed, machine, &COPY);
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
    ([before, after], log)
}

/// Runs commands and returns what the last one says.
fn run(bed: &mut Bed, machine: u32, commands: &[&str]) -> String {
    let output = commands.iter().map(|command| bed.run(machine, command, SOON).unwrap()).last();
    output.unwrap_or_default().trim().to_owned()
}

#[test]
fn devices_reach_each_other_only_when_they_are_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path());
    for (number, interface) in [(1, VfioInterface::Cdev), (2, VfioInterface::Group)] {
        let mut plan = plan(&mut bed, number, interface);
        assert_eq!(copies(&mut bed, &plan).0, ["0x00000000", "0x00000000"], "{interface:?}");
        plan.spec.passthrough.as_mut().unwrap().peer_to_peer = true;
        let (copied, log) = copies(&mut bed, &plan);
        assert_eq!(copied, ["0xCAFE0001", "0xBABE0002"], "{interface:?}: {log}");
        assert!(!log.contains("cannot"), "{interface:?}: {log}");
    }
}
