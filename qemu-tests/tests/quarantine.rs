//! A device that falls off the bus while a renter has it. Its slot loses its power: every register reads all
//! ones, as with a GPU whose link is gone. No reset brings it back, so it is quarantined, and everybody can read why;
//! when it answers again, an operator has it offered.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    guest,
    host::HostOptions,
    saboteur::Saboteur,
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene, image_folder},
    slot::{self, Power},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);
/// How long the kernel and the node may try to bring a device back: each of three resets waits for more than a
/// minute (`RESET_LIMIT` of the agent), and one more when the device is closed.
const RESET: Duration = Duration::from_secs(400);

/// Addresses of devices behind the root ports of the harness, in their order.
const FALLEN: &str = "0000:01:00.0";
const OTHER: &str = "0000:02:00.0";

/// Reads the first register of the other device, an `edu`, where the guest has it.
const IDENTIFY: &str = "for device in $(grep -l 0x11e8 /sys/bus/pci/devices/*/device); do \
    cd $(dirname $device); echo 1 > enable; bar=$(head -n 1 resource | cut -d' ' -f1); devmem $((bar)) 32; done";
const EDU: &str = "0x010000ED\n";
/// Writes to the drive and reads what it has.
const DRIVE: &str = "printf works > /dev/nvme0n1; sync; head -c 5 /dev/nvme0n1";

/// Returns the state of a device, as everybody is told it.
fn state(nodes: &Value, address: &str) -> Value {
    let devices = nodes[0]["devices"].as_array().cloned().unwrap_or_default();
    let found = devices.into_iter().find(|device| device["address"] == address);
    found.map(|device| device["state"].clone()).unwrap_or_default()
}

#[test]
fn a_device_that_falls_off_the_bus_is_quarantined_until_it_answers_again() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let guest = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    let listed = format!("[machines]\ndevices = [\"{FALLEN}\", \"{OTHER}\"]\n");
    let config = Some(scene.node_config("falls", &listed));
    let (drive, arguments) = scene::rented_nvme(&folder.path().join("rented"), "").unwrap();
    let devices = vec![drive, "edu".to_owned()];
    let files = folder.path().join("falls");
    let medium = Saboteur::medium(&image_folder().unwrap(), &files).unwrap();
    let arguments = [arguments, Saboteur::arguments(&files)].concat();
    let options = HostOptions { config, devices, arguments, medium, ..HostOptions::default() };
    let (mut host, node) = scene.boot("falls", options).unwrap();
    let mut saboteur = Saboteur::connect(&files).unwrap();
    let wait = |address: &str, is: &str, limit| {
        let there = |nodes: &Value| state(nodes, address)["is"] == is;
        state(&scene.cli.wait(&["nodes"], limit, there).unwrap(), address)
    };
    wait(FALLEN, "free", SOON);
    let guest = scene.push_made(&guest).unwrap();
    let rent = |name, devices: &[&str]| {
        let request = LeaseRequest { name, node: &node, devices, ..LeaseRequest::default() };
        let (lease, id) = scene.lease(&request).unwrap();
        let cmdline = "console=ttyS0 quiet iomem=relaxed";
        scene.create_on(&lease, &guest, cmdline).unwrap();
        scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
        id
    };
    let id = rent("falls", &[FALLEN, OTHER]);
    assert_eq!(scene.ssh(&id, DRIVE).unwrap(), "works");
    slot::switch(&mut host.qmp, "rent1", Power::Off).unwrap();
    // The guest goes on, and its other device works.
    assert_eq!(scene.ssh(&id, IDENTIFY).unwrap(), EDU);
    let mark = host.serial.mark();
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    wait(OTHER, "free", RESET);
    let found = wait(FALLEN, "quarantined", RESET);
    assert!(found["reason"].as_str().unwrap().contains("fell off the bus"), "{found}");
    let told = format!("event=device-quarantined address={FALLEN} reason=");
    host.serial.wait_from(mark, &told, SOON).unwrap();

    // Nobody gets it, and the other one is rented as before.
    let request = LeaseRequest {
        name: "refused",
        node: &node,
        devices: &[FALLEN],
        ..LeaseRequest::default()
    };
    let (lease, _) = scene.lease(&request).unwrap();
    let refused = scene.create_on(&lease, &guest, "console=ttyS0").unwrap_err().to_string();
    assert!(refused.contains(FALLEN) && refused.contains("quarantined"), "{refused}");
    let id = rent("other", &[OTHER]);
    assert_eq!(scene.ssh(&id, IDENTIFY).unwrap(), EDU);
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    wait(OTHER, "free", RESET);

    // Whoever mended it has it offered again, and it works: without power it forgot where its memory was, so
    // the kernel configures it as a new one.
    slot::switch(&mut host.qmp, "rent1", Power::On).unwrap();
    let operator = scene.cli.with_key(&scene.operator.file);
    let release = || operator.text(&["node", "release-device", &node, FALLEN]).unwrap();
    let mark = host.serial.mark();
    release();
    wait(FALLEN, "free", RESET);
    let reset = format!("event=device-reset address={FALLEN} by=slot");
    host.serial.wait_from(mark, &reset, SOON).unwrap();
    let id = rent("again", &[FALLEN]);
    assert_eq!(scene.ssh(&id, DRIVE).unwrap(), "works");

    // One that the kernel has given up is told as that, and looked for.
    slot::switch(&mut host.qmp, "rent1", Power::Off).unwrap();
    let mark = host.serial.mark();
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    host.serial.wait_from(mark, &told, RESET).unwrap();
    let remove = format!("echo 1 > /proc/1/root/sys/bus/pci/devices/{FALLEN}/remove");
    saboteur.run(&remove, SOON).unwrap();
    let mark = host.serial.mark();
    release();
    let absent = format!("{told}\"{FALLEN} is not there any more");
    host.serial.wait_from(mark, &absent, RESET).unwrap();
    slot::switch(&mut host.qmp, "rent1", Power::On).unwrap();
    release();
    wait(FALLEN, "free", RESET);
    let id = rent("found", &[FALLEN]);
    assert_eq!(scene.ssh(&id, DRIVE).unwrap(), "works");
}
