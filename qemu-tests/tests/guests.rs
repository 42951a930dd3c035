//! Guests other than the usual one: an ELF kernel that starts by PVH, Debian's kernel for any
//! machine, a machine with several CPUs; and what the guest's kernel has to complain about.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    guest::{self, Guest},
    host::{Host, HostOptions},
    kernels,
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene},
};

/// How long anything but a guest's start may take.
const SOON: Duration = Duration::from_secs(90);

/// What the guest prints of itself once it is up: its complaints, one per line.
const COMPLAINTS: &str = "#!/bin/busybox sh\n\
    dmesg -r | grep -E '^<[0-4]>' | sed 's/^/complaint: /'\n\
    echo 'complaints: end'\n";

/// Complaints of Debian's kernel that this machine may cause, and why each is right.
const ALLOWED: &[(&str, &str)] = &[
    ("APIC calibration not consistent with PM-Timer", "an emulated host runs the guest in bursts"),
    ("APIC delta adjusted to PM-Timer", "the same"),
    ("hrtimer: interrupt took ", "the same, on a slow machine"),
    ("clocksource: Long readout interval", "the same"),
    (" hogged CPU for ", "the same"),
    ("kvm_intel: VMX not supported", "the appliance's kernel looks for it; machines do not nest"),
    ("kvm_amd: SVM not supported", "the same"),
    ("ipmi_si: Unable to find", "the appliance's kernel looks for a board's controller"),
];

/// A scene, and the scene's usual guest, not uploaded.
fn scene(folder: &tempfile::TempDir, script: Option<&str>) -> (Scene, Guest) {
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, script).unwrap();
    (scene, guest)
}

/// Rents a machine for `guest` and waits for its console to show `pattern`.
fn console_of(scene: &Scene, node: &str, guest: &Guest, pattern: &str) -> (String, String) {
    let pushed = scene.push_made(guest).unwrap();
    let (lease, id) = scene.lease(&LeaseRequest { node, ..LeaseRequest::default() }).unwrap();
    scene.create(&lease, &pushed).unwrap();
    let console = scene.wait_for_console(&id, pattern, GUEST_LIMIT).unwrap();
    (console, id)
}

fn boot(scene: &Scene, name: &str) -> (Host, String) {
    scene.boot(name, HostOptions::default()).unwrap()
}

#[test]
fn an_elf_kernel_starts_by_pvh_and_nothing_of_the_machine_is_complained_of() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, guest) = scene(&folder, Some(COMPLAINTS));
    let (_host, node) = boot(&scene, "pvh");
    let guest = kernels::as_elf(&guest, folder.path()).unwrap();
    assert_eq!(&std::fs::read(&guest.kernel).unwrap()[..4], b"\x7fELF");
    let (console, _) = console_of(&scene, &node, &guest, "complaints: end");
    assert!(console.contains("guest: ready"), "{console}");
    assert_eq!(complaints(&console), Vec::<&str>::new());
}

#[test]
fn debians_generic_kernel_starts_and_complains_of_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, guest) = scene(&folder, Some(COMPLAINTS));
    let (_host, node) = boot(&scene, "generic");
    let guest = kernels::as_generic(&guest, folder.path()).unwrap();
    let (console, id) = console_of(&scene, &node, &guest, "complaints: end");
    assert_eq!(complaints(&console), Vec::<&str>::new());
    let release = scene.ssh(&id, "uname -r").unwrap();
    assert!(release.contains("amd64") && !release.contains("cloud"), "{release}");
}

/// A host of two packages, each with a core of two threads.
const PACKAGES: [&str; 2] = ["-smp", "4,sockets=2,cores=1,threads=2,maxcpus=4"];
/// Prints where each processor of a guest is: package, threads of its core, all of the package.
const TOPOLOGY: &str = "for cpu in /sys/devices/system/cpu/cpu[0-9]*; do cd $cpu/topology\n\
    echo \"topology: ${cpu##*/} $(cat physical_package_id core_cpus_list package_cpus_list | tr '\\n' ' ')\"\n\
    done\n";

#[test]
fn the_appliances_own_kernel_starts_as_a_guest_too_on_threads_and_packages_as_the_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let script = COMPLAINTS.replacen('\n', &format!("\n{TOPOLOGY}"), 1);
    let (scene, guest) = scene(&folder, Some(&script));
    let arguments = PACKAGES.map(str::to_owned).to_vec();
    let host = HostOptions { arguments, ..HostOptions::default() };
    let (_host, node) = scene.boot("own", host).unwrap();
    let kernel = scene::image_folder().unwrap().join("pxe/vmlinuz");
    let pushed = scene.push_made(&Guest { kernel, ..guest }).unwrap();
    let request = LeaseRequest { node: &node, vcpus: 3, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    // This kernel starts no scripts.
    let cmdline = "console=ttyS0 quiet rdinit=/bin/busybox -- sh /init";
    scene.create_on(&lease, &pushed, cmdline).unwrap();
    let console = scene.wait_for_console(&id, "complaints: end", GUEST_LIMIT).unwrap();
    assert!(console.contains("-holdfast, 3 cpus"), "{console}");
    // Its driver for Intel's LPC bridges looks for a watchdog and GPIO, which ours does not have; and a list
    // of the processors that come up goes on without a level of its own.
    let expected = |line: &&str| {
        line.ends_with("lpc_ich 0000:00:1f.0: No MFD cells added") || line.ends_with("]  #1")
    };
    let rest: Vec<&str> = complaints(&console).into_iter().filter(|l| !expected(l)).collect();
    assert_eq!(rest, Vec::<&str>::new());
    // The host's second package whole, and a thread of its first, whose core has most of its own work.
    let topology = console.lines().filter_map(|line| line.trim().strip_prefix("topology: "));
    let topology: Vec<&str> = topology.map(str::trim).collect();
    assert_eq!(topology, ["cpu0 0 0-1 0-1", "cpu1 0 0-1 0-1", "cpu2 1 2 2"]);
}

#[test]
fn four_cpus_are_four_cores_of_one_socket_where_the_node_offers_as_many() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, guest) = scene(&folder, None);
    let (host, node) = boot(&scene, "one");
    let pushed = scene.push_made(&guest).unwrap();
    let request = LeaseRequest { node: &node, vcpus: 4, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    let refusal = format!("{:#}", scene.create(&lease, &pushed).unwrap_err());
    assert!(refusal.contains("4 virtual CPUs") && refusal.contains('1'), "{refusal}");
    drop(host);
    let config = Some(scene.node_config("four", "[machines]\nvcpus = 4\n"));
    let options = HostOptions { config, ..HostOptions::default() };
    let (_host, node) = scene.boot("four", options).unwrap();
    let request = LeaseRequest { name: "four", node: &node, ..request };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &pushed).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    let topology = "cd /sys/devices/system/cpu; cat online; cd cpu3/topology; \
                    cat physical_package_id core_id core_cpus_list package_cpus_list";
    assert_eq!(scene.ssh(&id, topology).unwrap(), "0-3\n0\n3\n3\n0-3\n");
    // Its network card has a pair of queues for each of them.
    let queues = "ls -1 /sys/class/net/eth0/queues | grep -c rx";
    assert_eq!(scene.ssh(&id, queues).unwrap(), "4\n");
}

#[test]
fn devices_with_the_largest_interrupt_tables_fit_together() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, guest) = scene(&folder, None);
    let disk = |number: usize| {
        let file = folder.path().join(format!("disk-{number}.img"));
        std::fs::write(&file, vec![0; 16 << 20]).unwrap();
        let device = format!("nvme,drive=disk{number},serial=DISK{number},msix_qsize=2048");
        let drive = format!("if=none,id=disk{number},format=raw,file={}", file.display());
        (device, ["-drive".to_owned(), drive])
    };
    let (devices, drives): (Vec<_>, Vec<_>) = (0..3).map(disk).unzip();
    let arguments = drives.concat();
    let options = HostOptions { devices, arguments, ..HostOptions::default() };
    let (_host, node) = scene.boot("tables", options).unwrap();
    let offers = |nodes: &serde_json::Value| scene::free_device(nodes, &node).is_some();
    scene.cli.wait(&["nodes"], SOON, offers).unwrap();
    let devices = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"];
    let request = LeaseRequest { node: &node, devices: &devices, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &scene.push_made(&guest).unwrap()).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    let written = "for disk in nvme0n1 nvme1n1 nvme2n1; do echo there > /dev/$disk; sync; \
                   head -c 5 /dev/$disk; done";
    assert_eq!(scene.ssh(&id, written).unwrap(), "there".repeat(3));
}

#[test]
fn a_file_that_is_no_kernel_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (scene, guest) = scene(&folder, None);
    let (host, node) = boot(&scene, "no-kernel");
    let kernel = folder.path().join("no-kernel.txt");
    std::fs::write(&kernel, "this is no kernel\n".repeat(1000)).unwrap();
    let pushed = scene.push_made(&Guest { kernel, ..guest }).unwrap();
    let (lease, id) =
        scene.lease(&LeaseRequest { node: &node, ..LeaseRequest::default() }).unwrap();
    scene.create(&lease, &pushed).unwrap();
    let failed = |machine: &serde_json::Value| machine.to_string().contains("kernel");
    let shown = scene.renter().wait(&["machines", "show", &id], SOON, failed);
    assert!(shown.is_ok(), "{shown:?}\n{}", host.serial.tail(20));
}

/// Returns the kernel's warnings and errors on `console` that nothing excuses.
fn complaints(console: &str) -> Vec<&str> {
    let lines = console.lines().filter_map(|line| line.split("complaint: ").nth(1));
    lines.filter(|line| !ALLOWED.iter().any(|(allowed, _)| line.contains(allowed))).collect()
}
