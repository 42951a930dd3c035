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
    vm::{Passthrough, PassthroughDevice, VfioInterface, exit},
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

    let apart = plan(&mut bed, 1, VfioInterface::Cdev);
    assert_eq!(copies(&mut bed, &apart).0, ["0x00000000", "0x00000000"]);

    let mut groups = plan(&mut bed, 2, VfioInterface::Group);
    assert_eq!(copies(&mut bed, &groups).0, ["0x00000000", "0x00000000"]);
    groups.spec.passthrough.as_mut().unwrap().peer_to_peer = true;
    assert_eq!(copies(&mut bed, &groups).0, ["0xCAFE0001", "0xBABE0002"]);
}

#[test]
fn a_kernel_that_cannot_share_bars_by_iommufd_is_told_of() {
    let config = qemu_tests::harness::scene::image_folder().unwrap().join("kernel.config");
    let shares = std::fs::read_to_string(config).unwrap().contains("CONFIG_VFIO_PCI_DMABUF=y");
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path());
    let mut plan = plan(&mut bed, 1, VfioInterface::Cdev);
    plan.spec.passthrough.as_mut().unwrap().peer_to_peer = true;
    if shares {
        // The kernel exports BARs and then does not map them: nothing arrives, and that is told.
        let (copied, log) = copies(&mut bed, &plan);
        assert_eq!(copied, ["0x00000000", "0x00000000"]);
        assert!(log.contains("other devices cannot be given it"), "{log}");
        return;
    }
    let machine = bed.launch(&plan).unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, exit::REFUSED, "{log}");
    assert!(log.contains("CONFIG_PCI_P2PDMA"), "{log}");
}
