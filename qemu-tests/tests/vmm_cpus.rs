//! Machines with more virtual CPUs than eight bits name: an unmodified kernel starts one whose id is
//! above 255 and has all three kinds of interrupt go there; and lines of PCI devices, which the host's
//! kernel cannot serve there by itself, arrive and end.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::Path, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::{host::HostOptions, pace::Pace},
};
use types::{topology::CpuPlace, units::Mebibytes};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

/// The disk of the host's controller that a guest gets.
const CONTENT: &[u8; 16] = b"behind-the-line ";
const CONTENT_BLOCKS: usize = 2048;

/// A host with an NVMe controller, and the usual guest.
fn bed(folder: &Path) -> Bed {
    let made = guest::make(folder).unwrap();
    let disk = folder.join("controller.img");
    fs::write(&disk, CONTENT.repeat(CONTENT_BLOCKS * 512 / CONTENT.len())).unwrap();
    let arguments = [
        "-device",
        "pcie-root-port,id=line,chassis=40,slot=40",
        "-drive",
        &format!("file={},if=none,id=content,format=raw,readonly=on", disk.display()),
        "-device",
        "nvme,serial=line,drive=content,bus=line",
    ];
    let arguments = arguments.map(str::to_owned).to_vec();
    // Guests give each processor ten seconds to come up, which an emulator that is busy may not have.
    let pace = Pace::SLOW;
    let host = HostOptions { arguments, memory_mib: 2048, pace, ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

fn plan(number: u8, vcpus: u32, words: &str) -> Plan {
    // One CPU comes up with the kernel; more take an emulator minutes.
    let words = format!("console=ttyS0 quiet maxcpus=1 {words}");
    let mut plan = Plan::linux(number, ("/guest/kernel", "/guest/initrd"), &words);
    plan.spec.vcpus = vcpus;
    // A kernel keeps areas for each processor that may come: its compression alone takes twice 128 KiB
    // (Linux, `crypto/scompress.c`), 72 MiB of 288. In 256 MiB one did not get that far.
    plan.spec.memory_mib = Mebibytes(512);
    plan
}

fn end(bed: &mut Bed, machine: u32) {
    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("the guest powered off"), "{log}");
}

/// Finds the interrupt that `$2` names and moves it to CPU 287; `count` is how often it came there.
/// Columns of the kernel's table are of CPUs that are online.
const MOVE: &str = "irq() { grep \"$1\" /proc/interrupts | head -n 1 | cut -d: -f1 | tr -d ' '; }; \
     count() { grep \"$1\" /proc/interrupts | head -n 1 | awk '{ print $3 }'; }; \
     move() { echo 287 > /proc/irq/$(irq \"$1\")/smp_affinity_list; }";

#[test]
fn a_processor_above_255_runs_and_takes_interrupts() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path());
    // Two packages of 144 cores: the second begins with APIC id 256.
    let mut packages = plan(1, 288, "");
    let place = |vcpu| CpuPlace { package: vcpu / 144, cache: 0, core: vcpu };
    packages.spec.cpu_places = (0..288).map(place).collect();
    let machine = bed.launch(&packages).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let mut run = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    assert_eq!(run("cat /sys/devices/system/cpu/present"), "0-287");
    // A kernel waits ten seconds for a processor; an emulator that is late needs another start.
    let start = "echo 1 > /sys/devices/system/cpu/cpu287/online";
    let said = run(&format!("for i in 1 2 3 4; do {start} && break; done"));
    println!("{said}");
    assert_eq!(run("cat /sys/devices/system/cpu/online"), "0,287");
    assert_eq!(run("grep ^apicid /proc/cpuinfo | tr -s '\\t ' ' '"), "apicid : 0\napicid : 399");
    println!("{}", run("cat /proc/interrupts"));
    run(MOVE);
    // A message of a device: entropy. What is under way when it moves still goes to where it went.
    run("move virtio0-input && for i in 1 2 3 4; do head -c 64 /dev/hwrng | wc -c; done");
    assert!(run("count virtio0-input").parse::<u32>().unwrap() > 0);
    // An edge of the I/O APIC: each key typed into the console.
    run("move ttyS0");
    run("echo typed");
    assert!(run("count ttyS0").parse::<u32>().unwrap() > 0);
    // A level of the I/O APIC, which has to end before it comes again: the power button.
    // Nobody powers off then.
    run("move acpi; killall dd; true");
    for _ in 0..3 {
        let press = bed.call(machine, ("POST", "/v1/power"), r#"{"action":"button"}"#).unwrap();
        assert_eq!(press.status, 202);
        bed.run(machine, "sleep 1", SOON).unwrap();
    }
    let pressed = bed.run(machine, "count acpi", SOON).unwrap();
    assert!(pressed.trim().parse::<u32>().unwrap() > 1, "{pressed}");
    end(&mut bed, machine);

    // Without messages: virtio and a passed-through controller share nothing but the pins.
    let controller = controller(&mut bed);
    let path = bed.bind(&controller).unwrap();
    let mut plan = plan(2, 256, "pci=nomsi");
    plan.pass(controller.parse().unwrap(), &path);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let mut run = |command: &str| bed.run(machine, command, SOON).unwrap().trim().to_owned();
    println!("{}", run("cat /proc/interrupts"));
    assert_eq!(run("for i in 1 2 3 4; do head -c 64 /dev/hwrng | wc -c; done"), "64\n64\n64\n64");
    let content = format!("dd if=/dev/nvme0n1 bs=64k count=16 2>/dev/null | grep -c '{0}'", "line");
    assert_ne!(run(&content), "0");
    assert!(run("grep nvme /proc/interrupts").contains("IO-APIC"));
    end(&mut bed, machine);
}

/// The host's NVMe controller.
fn controller(bed: &mut Bed) -> String {
    let all = bed.list("/sys/bus/pci/devices").unwrap();
    let mut found = all.into_iter().filter(|name| {
        bed.text(&format!("/sys/bus/pci/devices/{name}/class")).unwrap() == "0x010802"
    });
    found.next().unwrap()
}
