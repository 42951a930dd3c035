//! Devices of other kinds: one with registers to compute with, one whose memory is as large as a
//! GPU's, a network card and a SATA controller whose interrupts and DMA the guest's drivers use.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    guest::{self, Guest},
    host::{Host, HostOptions, USER_NETWORK},
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene},
};

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);

/// Addresses of devices behind the root ports of the harness, in their order.
const FIRST: &str = "0000:01:00.0";
const SECOND: &str = "0000:02:00.0";

/// Rents the first two devices of a host that has `devices` and starts `guest` with them.
fn rent(scene: &Scene, options: HostOptions, guest: &Guest, cmdline: &str) -> (Host, String) {
    // What these devices are says nothing to a node: they are rented because they are listed. A network
    // card is the host's own until the uplink is named.
    let listed = format!(
        "[network]\ninterface = \"eth0\"\n\n[machines]\ndevices = [\"{FIRST}\", \"{SECOND}\"]\n"
    );
    let config = Some(scene.node_config("odd", &listed));
    let (host, node) = scene.boot("odd", HostOptions { config, ..options }).unwrap();
    let devices = [FIRST, SECOND];
    let offered = |nodes: &serde_json::Value| {
        let states = nodes[0]["devices"].as_array().cloned().unwrap_or_default();
        let free = |name: &&str| {
            states.iter().any(|d| d["address"] == **name && d["state"]["is"] == "free")
        };
        devices.iter().all(free)
    };
    scene.cli.wait(&["nodes"], SOON, offered).unwrap();
    let request = LeaseRequest { node: &node, devices: &devices, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create_on(&lease, &scene.push_made(guest).unwrap(), cmdline).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    (host, id)
}

#[test]
fn registers_answer_and_512_gib_of_memory_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    // The lower one of two would have QEMU's own reservation below 1 TiB in it (AMD's HyperTransport).
    let huge = "pci-testdev,membar=512G";
    let devices = ["edu", huge, huge].map(str::to_owned).to_vec();
    // As wide as servers' processors at least: in QEMU's 40 bits there is no room for it beside memory.
    let arguments = ["-cpu", "max,-erms,phys-bits=46"].map(str::to_owned).to_vec();
    let options = HostOptions { devices, arguments, ..HostOptions::default() };
    let (_host, id) = rent(&scene, options, &guest, "console=ttyS0 quiet iomem=relaxed");

    // QEMU docs/specs/edu: the factorial of what is written at 8 is read there when bit 0 of the
    // status at 0x20 is clear again.
    let edu = "cd $(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device)); echo 1 > enable; \
               bar=$(head -n 1 resource | cut -d' ' -f1); devmem $((bar)) 32; \
               devmem $((bar + 8)) 32 5; \
               while [ $(( $(devmem $((bar + 32)) 32) & 1 )) = 1 ]; do :; done; \
               devmem $((bar + 8)) 32";
    let said = scene.ssh(&id, edu).unwrap();
    assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["0x010000ED", "0x00000078"]);

    let large = "cd $(dirname $(grep -l 0x0005 /sys/bus/pci/devices/*/device)); \
                 while read start end flags; do echo $((end - start + 1)) $((start % (1 << 39))); \
                 done < resource | grep ^549755813888";
    assert_eq!(scene.ssh(&id, large).unwrap().trim(), "549755813888 0", "size and alignment");
}

/// What the disk behind the SATA controller starts with.
const MARKER: &str = "this block lies behind a SATA controller";

/// Rents a network card and a SATA controller to a guest whose drivers are built in, with `words`
/// on its command line; lets it use both, and returns its lines of /proc/interrupts about them.
fn drive_card_and_disk(words: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    // The appliance's kernel has drivers for network cards and disks built in.
    let kernel = scene::image_folder().unwrap().join("pxe/vmlinuz");
    let guest = Guest { kernel, ..guest };
    let disk = folder.path().join("disk.img");
    let mut content = MARKER.as_bytes().to_vec();
    content.resize(16 << 20, 0);
    std::fs::write(&disk, content).unwrap();
    let arguments = [
        "-netdev",
        &format!("user,id=card,net={USER_NETWORK}"),
        "-drive",
        &format!("if=none,id=disk,format=raw,file={}", disk.display()),
        "-device",
        "ide-hd,drive=disk,bus=sata.0",
    ];
    let arguments = arguments.map(str::to_owned).to_vec();
    let card = "e1000e,netdev=card,mac=52:54:00:12:34:99,romfile=".to_owned();
    let devices = vec![card, "ich9-ahci,id=sata".to_owned()];
    let options = HostOptions { devices, arguments, ..HostOptions::default() };
    let cmdline = format!("console=ttyS0 quiet {words} rdinit=/bin/busybox -- sh /init");
    let (_host, id) = rent(&scene, options, &guest, &cmdline);

    let disk = scene.ssh(&id, &format!("head -c {} /dev/sda", MARKER.len())).unwrap();
    assert_eq!(disk, MARKER);
    let talk = "card=$(basename $(dirname $(grep -l 52:54:00:12:34:99 /sys/class/net/*/address))); \
                ip link set $card up; udhcpc -i $card -q -n -t 10 -T 2 -s /bin/true >/dev/null 2>&1 \
                && echo leased; grep -E \"$card|ahci\" /proc/interrupts";
    let said = scene.ssh(&id, talk).unwrap();
    said.strip_prefix("leased\n").expect(&said).to_owned()
}

/// Returns how many of the lines name the kind of interrupt and the driver.
fn count(lines: &str, kind: &str, driver: &str) -> usize {
    lines.lines().filter(|line| line.contains(kind) && line.contains(driver)).count()
}

#[test]
fn the_guests_own_drivers_get_messages_as_interrupts() {
    let lines = drive_card_and_disk("");
    // The controller has MSI only, the card MSI-X with a vector for each direction and one more.
    assert_eq!(count(&lines, "MSI", "ahci"), 1, "{lines}");
    assert!(count(&lines, "MSI", "eth") >= 3, "{lines}");
}

#[test]
fn the_guests_own_drivers_get_wires_as_interrupts() {
    let lines = drive_card_and_disk("pci=nomsi");
    assert!(count(&lines, "IO-APIC", "ahci") >= 1, "{lines}");
    assert_eq!(count(&lines, "IO-APIC", "eth"), 1, "{lines}");
    assert_eq!(count(&lines, "MSI", ""), 0, "{lines}");
}
