//! A virtual function (SR-IOV) of a physical one that the host keeps.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, process::Command, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::{host::HostOptions, tools::Tool},
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(60);

/// An NVMe controller with one virtual one, behind a port of its own. Both reach the same namespace.
const CONTROLLER: [&str; 8] = [
    "-device",
    "pcie-root-port,id=split,chassis=40,slot=40",
    "-device",
    "nvme-subsys,id=both",
    "-device",
    "nvme,id=physical,serial=physical,subsys=both,bus=split,sriov_max_vfs=1,sriov_vq_flexible=2,sriov_vi_flexible=1",
    "-device",
    "nvme-ns,drive=content,bus=physical,shared=on",
];
/// Length of the namespace.
const NAMESPACE: u64 = 1 << 20;
/// What lies at its start, and what the guest writes there: a block of 512 bytes of each.
const BEFORE: u8 = b'h';
const AFTER: u8 = b'g';

/// Where the host has the program that tells the physical controller what is the virtual one's.
const TOOL: &str = "nvme-cli";
/// Its words: resources that the physical one gives up (NVMe 1.4 §5.22: type, action, number), once it is reset, and
/// those of the virtual one, that is switched on then.
const GIVE_UP: [&str; 2] = ["-c 0 -r 1 -a 1 -n 0", "-c 0 -r 0 -a 1 -n 0"];
const TAKE: [&str; 3] = ["-c 1 -r 1 -a 8 -n 1", "-c 1 -r 0 -a 8 -n 2", "-c 1 -r 0 -a 9 -n 0"];

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

/// Runs the program with these words for the physical controller.
fn manage(bed: &mut Bed, tool: &Tool, command: &str, words: &str) {
    let mut all = tool.words(TOOL);
    all.extend([command, "/dev/nvme0"].map(str::to_owned));
    all.extend(words.split_whitespace().map(str::to_owned));
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    println!("{}", bed.run_on_host(&all).unwrap());
}

#[test]
fn a_virtual_function_is_a_whole_device_to_its_guest() {
    if !emulated() {
        println!("skipped: virtual functions: this QEMU emulates no device that has any");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let made = guest::make(folder.path()).unwrap();
    let content = folder.path().join("content");
    let mut bytes = vec![BEFORE; 512];
    bytes.resize(usize::try_from(NAMESPACE).unwrap(), 0);
    fs::write(&content, bytes).unwrap();
    let drive = format!("if=none,id=content,format=raw,file={}", content.display());
    let arguments = [&["-drive", &drive][..], &CONTROLLER].concat();
    let arguments = arguments.into_iter().map(str::to_owned).collect();
    let host = HostOptions { arguments, ..HostOptions::default() };
    let tool = Tool::nvme().unwrap();
    let mut files = tool.whole(TOOL).unwrap();
    files.extend([
        ("guest/kernel".to_owned(), made.kernel),
        ("guest/initrd".to_owned(), made.initrd),
    ]);
    let mut bed =
        Bed::start(folder.path(), BedOptions { files, host, ..BedOptions::default() }).unwrap();
    let physical = controllers(&mut bed);
    assert_eq!(physical.len(), 1, "{physical:?}");
    GIVE_UP.iter().for_each(|words| manage(&mut bed, &tool, "virt-mgmt", words));
    manage(&mut bed, &tool, "reset", "");
    let switch = format!("/sys/bus/pci/devices/{}", physical[0]);
    bed.write(&format!("{switch}/sriov_drivers_autoprobe"), b"0").unwrap();
    bed.write(&format!("{switch}/sriov_numvfs"), b"1").unwrap();
    TAKE.iter().for_each(|words| manage(&mut bed, &tool, "virt-mgmt", words));
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
    assert_eq!(read(&format!("cat {GUEST}/class")), "0x010802");
    let pin = format!("dd if={GUEST}/config bs=1 skip=61 count=1 2>/dev/null | od -An -tx1");
    assert_eq!(read(&pin), "00");
    // Its driver, its queues, its messages, and its access to the guest's memory: all of it works.
    let first =
        "dd if=/dev/nvme0n1 bs=512 count=1 2>/dev/null | tr -d '\\n' | fold -w 1 | sort | uniq -c";
    assert_eq!(read(first), format!("512 {}", char::from(BEFORE)));
    let after = char::from(AFTER);
    let write = format!(
        "head -c 512 /dev/zero | tr '\\0' {after} | dd of=/dev/nvme0n1 bs=512 conv=fsync 2>/dev/null; \
         grep -c nvme0q /proc/interrupts"
    );
    assert_ne!(read(&write), "0", "interrupts of the function");
    assert_eq!(fs::read(&content).unwrap()[..513], [&[AFTER; 512][..], &[0]].concat());

    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
