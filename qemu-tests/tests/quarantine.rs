//! A device that falls off the bus while a renter has it. Its slot loses its power: every register reads all
//! ones, as with a GPU whose link is gone. No reset brings it back, so it is quarantined, and everybody can read why;
//! when it answers again, an operator has it offered.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::{Host, HostOptions},
    saboteur::Saboteur,
    scene::{self, GUEST_LIMIT, LeaseRequest, PushedGuest, Scene, image_folder},
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
/// How the node says that the first is quarantined.
const TOLD: &str = "event=device-quarantined address=0000:01:00.0 reason=";

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

/// A node whose first device falls, and what its renter starts.
struct Falling {
    scene: Scene,
    node: String,
    guest: PushedGuest,
}

impl Falling {
    /// Waits until a device is in a state; returns that.
    fn wait(&self, address: &str, is: &str, limit: Duration) -> Value {
        let there = |nodes: &Value| state(nodes, address)["is"] == is;
        state(&self.scene.cli.wait(&["nodes"], limit, there).unwrap(), address)
    }

    fn rent(&self, name: &str, devices: &[&str]) -> String {
        let request = LeaseRequest { name, node: &self.node, devices, ..LeaseRequest::default() };
        let (lease, id) = self.scene.lease(&request).unwrap();
        let cmdline = "console=ttyS0 quiet iomem=relaxed";
        self.scene.create_on(&lease, &self.guest, cmdline).unwrap();
        self.scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
        id
    }

    fn delete(&self, id: &str) {
        self.scene.renter().text(&["machines", "delete", id]).unwrap();
    }

    fn release(&self) {
        let operator = self.scene.cli.with_key(&self.scene.operator.file);
        operator.text(&["node", "release-device", &self.node, FALLEN]).unwrap();
    }
}

#[test]
fn a_device_that_falls_off_the_bus_is_quarantined_until_it_answers_again() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
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
    let guest = scene.push_guest(None).unwrap();
    let falling = Falling { scene, node, guest };
    falling.wait(FALLEN, "free", SOON);
    falls_under_a_guest(&falling, &mut host);
    comes_back(&falling, &mut host);
    is_looked_for(&falling, &mut host, &mut saboteur);
}

/// The guest goes on, and nobody gets the device after it.
fn falls_under_a_guest(falling: &Falling, host: &mut Host) {
    let id = falling.rent("falls", &[FALLEN, OTHER]);
    assert_eq!(falling.scene.ssh(&id, DRIVE).unwrap(), "works");
    slot::switch(&mut host.qmp, "rent1", Power::Off).unwrap();
    assert_eq!(falling.scene.ssh(&id, IDENTIFY).unwrap(), EDU, "the other device works");
    let mark = host.serial.mark();
    falling.delete(&id);
    falling.wait(OTHER, "free", RESET);
    let found = falling.wait(FALLEN, "quarantined", RESET);
    assert!(found["reason"].as_str().unwrap().contains("fell off the bus"), "{found}");
    host.serial.wait_from(mark, TOLD, SOON).unwrap();

    let devices = &[FALLEN];
    let request =
        LeaseRequest { name: "refused", node: &falling.node, devices, ..LeaseRequest::default() };
    let (lease, _) = falling.scene.lease(&request).unwrap();
    let refused = falling.scene.create_on(&lease, &falling.guest, "console=ttyS0");
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains(FALLEN) && refused.contains("quarantined"), "{refused}");
    let id = falling.rent("other", &[OTHER]);
    assert_eq!(falling.scene.ssh(&id, IDENTIFY).unwrap(), EDU);
    falling.delete(&id);
    falling.wait(OTHER, "free", RESET);
}

/// Whoever mended it has it offered again, and it works: without power it forgot where its memory was, so the
/// kernel configures it as a new one.
fn comes_back(falling: &Falling, host: &mut Host) {
    slot::switch(&mut host.qmp, "rent1", Power::On).unwrap();
    let mark = host.serial.mark();
    falling.release();
    falling.wait(FALLEN, "free", RESET);
    let reset = format!("event=device-reset address={FALLEN} by=slot");
    host.serial.wait_from(mark, &reset, SOON).unwrap();
}

/// One that the kernel has given up is told as that, and looked for.
fn is_looked_for(falling: &Falling, host: &mut Host, saboteur: &mut Saboteur) {
    let id = falling.rent("again", &[FALLEN]);
    assert_eq!(falling.scene.ssh(&id, DRIVE).unwrap(), "works");
    slot::switch(&mut host.qmp, "rent1", Power::Off).unwrap();
    let mark = host.serial.mark();
    falling.delete(&id);
    host.serial.wait_from(mark, TOLD, RESET).unwrap();
    let remove = format!("echo 1 > /proc/1/root/sys/bus/pci/devices/{FALLEN}/remove");
    saboteur.run(&remove, SOON).unwrap();
    let mark = host.serial.mark();
    falling.release();
    let absent = format!("{TOLD}\"{FALLEN} is not there any more");
    host.serial.wait_from(mark, &absent, RESET).unwrap();
    slot::switch(&mut host.qmp, "rent1", Power::On).unwrap();
    falling.release();
    falling.wait(FALLEN, "free", RESET);
    let id = falling.rent("found", &[FALLEN]);
    assert_eq!(falling.scene.ssh(&id, DRIVE).unwrap(), "works");
}
