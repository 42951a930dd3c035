//! A UEFI disk image on a machine that mirrors a host of two sockets: Debian's stock firmware finds
//! both root complexes, places a device's 256 GiB behind the one that is not the first, and the tables
//! tell the kernel the same.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

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
use types::{
    topology::{Below, NumaNode, Port, RootComplex, Topology},
    units::Mebibytes,
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(300);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

/// The host's devices: one as large as a GPU, a small one.
const DEVICES: [&str; 2] = ["pci-testdev,membar=256G", "pci-testdev,membar=1M"];

fn bed(folder: &Path) -> Bed {
    let firmware = firmware::ovmf(Release::Bookworm).unwrap();
    let disk = firmware::grub_disk(folder).unwrap();
    let files = [("code.fd", firmware.code), ("variables.fd", firmware.variables), ("disk", disk)];
    let files = files.map(|(name, file)| (format!("guest/{name}"), file)).to_vec();
    let devices = DEVICES.map(str::to_owned).to_vec();
    let host = HostOptions { pace: Pace::Slow, devices, ..HostOptions::default() };
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

/// A machine of two nodes and root complexes: the small device is near the first, the large one near
/// the second.
fn plan(bed: &mut Bed) -> Plan {
    let mut plan = Plan::uefi(1, ("/guest/code.fd", "/guest/variables.fd"));
    plan.disk("/guest/disk");
    for address in ["0000:01:00.0", "0000:02:00.0"] {
        let path = bed.bind(address).unwrap();
        plan.pass(address.parse().unwrap(), &path);
    }
    let root = |node, index| RootComplex {
        node: Some(node),
        ports: vec![Port { registers: None, below: Below::Device { index } }],
    };
    plan.spec.topology = Some(Topology { roots: vec![root(0, 1), root(1, 0)] });
    let node = |id, vcpus, distances| NumaNode { id, vcpus, memory_mib: Mebibytes(256), distances };
    plan.spec.numa = vec![node(0, vec![0], vec![10, 20]), node(1, Vec::new(), vec![20, 10])];
    plan
}

#[test]
fn firmware_and_kernel_find_devices_behind_every_root_complex() {
    steadily(devices_behind_every_root);
}

fn devices_behind_every_root(folder: &Path) {
    let mut bed = bed(folder);
    let plan = plan(&mut bed);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, START_LIMIT).unwrap();
    let mut run = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    println!("{}", run("dmesg | grep -i 'pci\\|root bus'"));
    println!("{}", run("cat /proc/iomem /proc/ioports"));
    let roots = "cd /sys/devices; for root in pci0000:*; do echo ${root#*:}; \
                 cat $root/0000:*/0000:*/numa_node $root/0000:*/0000:*/device; done";
    assert_eq!(run(roots), "00\n0\n0x0005\n80\n1\n0x0005");
    // Where firmware put them: nothing was moved, and both can be switched on.
    let find = "large=$(echo /sys/devices/pci0000:80/0000:80:*/0000:*:00.0); \
                small=$(echo /sys/devices/pci0000:00/0000:00:*/0000:01:00.0)";
    run(find);
    assert_eq!(run("echo 1 > $large/enable && echo 1 > $small/enable && cat $large/enable"), "1");
    let size = "read first last flags <<END\n$(sed -n 3p $large/resource)\nEND";
    let _ = size;
    let range = run("sed -n 3p $large/resource | cut -d' ' -f1,2");
    let (first, last) = range.split_once(' ').unwrap();
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let (first, last) = (number(first), number(last));
    assert_eq!(last - first + 1, 256 << 30, "{range}");
    assert!(first.is_multiple_of(256 << 30) && first > 0, "{range}");
    let complaints =
        "dmesg | grep -i \"can't claim\\|no compatible bridge\\|failed to assign\\|conflict\"";
    assert_eq!(run(&format!("{complaints} || true")), "");
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
