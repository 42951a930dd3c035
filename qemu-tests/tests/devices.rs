//! Devices of other kinds: one with registers to compute with, one whose memory is as large as a
//! GPU's, and a network card whose interrupts and DMA the guest's own driver uses.

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
fn registers_answer_and_256_gib_of_memory_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    let devices = vec!["edu".to_owned(), "pci-testdev,membar=256G".to_owned()];
    let options = HostOptions { devices, ..HostOptions::default() };
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
                 while read start end flags; do echo $((end - start + 1)) $((start % (1 << 38))); \
                 done < resource | grep ^274877906944";
    assert_eq!(scene.ssh(&id, large).unwrap().trim(), "274877906944 0", "size and alignment");
}

#[test]
fn the_guests_own_driver_uses_a_network_card() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    // The appliance's kernel has drivers for network cards built in.
    let kernel = scene::image_folder().unwrap().join("pxe/vmlinuz");
    let guest = Guest { kernel, ..guest };
    let arguments = ["-netdev".to_owned(), format!("user,id=card,net={USER_NETWORK}")].to_vec();
    let card = "e1000e,netdev=card,mac=52:54:00:12:34:99,romfile=".to_owned();
    let devices = vec![card, "edu".to_owned()];
    let options = HostOptions { devices, arguments, ..HostOptions::default() };
    let cmdline = "console=ttyS0 quiet rdinit=/bin/busybox -- sh /init";
    let (_host, id) = rent(&scene, options, &guest, cmdline);

    let talk = "card=$(basename $(dirname $(grep -l 52:54:00:12:34:99 /sys/class/net/*/address))); \
                ip link set $card up; udhcpc -i $card -q -n -t 10 -T 2 -s /bin/true >/dev/null 2>&1 \
                && echo leased; grep -c $card /proc/interrupts";
    let said = scene.ssh(&id, talk).unwrap();
    let mut lines = said.lines();
    assert_eq!(lines.next(), Some("leased"), "{said}");
    let vectors: u32 = lines.next().unwrap_or_default().trim().parse().unwrap();
    assert!(vectors >= 2, "MSI-X gives the card several vectors: {said}");
}
