//! A renter chooses a machine's hardware and attaches disks and devices while it runs, within what
//! the lease grants; the machine says where on its node it is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::{Host, HostOptions},
    scene::{GUEST_LIMIT, LeaseRequest, Scene},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(120);
/// The device that comes later: where the harness puts the first one of a host.
const LATER: &str = "0000:01:00.0";

/// How often a card and a disk come and go.
const ROUNDS: usize = 12;

/// Waits until what is attached under a name is in a state.
fn wait_for(scene: &Scene, id: &str, name: &str, state: &str) {
    let fits = |all: &Value| {
        let found = all["devices"].as_array().into_iter().flatten().find(|d| d["id"] == *name);
        found.map_or(state == "gone", |device| device["state"] == *state)
    };
    scene.renter().wait(&["machines", "devices", id], SOON, fits).unwrap();
}

/// Starts a machine with half of its disk space, one spare port, and a device that comes later.
fn rent(scene: &Scene, device: &str, arguments: &[&str]) -> (Host, String) {
    // A network card is the host's own until the uplink is named.
    let listed =
        format!("[network]\ninterface = \"eth0\"\n\n[machines]\ndevices = [\"{LATER}\"]\n");
    let config = Some(scene.node_config("attaches", &listed));
    let options = HostOptions {
        config,
        devices: vec![device.to_owned()],
        arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        ..HostOptions::default()
    };
    let (host, node) = scene.boot("attaches", options).unwrap();
    let offered = |nodes: &Value| {
        let mut all = nodes[0]["devices"].as_array().into_iter().flatten();
        all.any(|d| d["address"] == LATER && d["state"]["is"] == "free")
    };
    scene.cli.wait(&["nodes"], SOON, offered).unwrap();
    let request =
        LeaseRequest { node: &node, devices: &[LATER], disk_mib: 64, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let chosen =
        ["--disk-model", "nvme", "--own-disk-mib", "32", "--spare-ports", "1", "--later", LATER];
    scene.create_with(&lease, &guest, &chosen).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    (host, id)
}

/// Attaches something; an error is what the command said.
fn attach(scene: &Scene, id: &str, more: &[&str]) -> Result<(), String> {
    let words: Vec<&str> = ["machines", "attach", id].iter().chain(more).copied().collect();
    let output = scene.renter().output(&words).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

fn detach(scene: &Scene, id: &str, words: &[&str]) {
    let words: Vec<&str> = ["machines", "detach", id].iter().chain(words).copied().collect();
    scene.renter().json(&words).unwrap();
}

#[test]
fn disks_and_devices_come_and_go_within_the_lease() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let (_host, id) = rent(&scene, "edu", &[]);
    let refused = |more: &[&str], why: &str| {
        let said = attach(&scene, &id, more).unwrap_err();
        assert!(said.contains(why), "{said}");
    };
    let ssh = |command: &str| scene.ssh(&id, command).unwrap();

    // The one virtual CPU has the one CPU of the host, and the guest's disk is what was chosen.
    let shown = scene.renter().json(&["machines", "show", &id]).unwrap();
    assert_eq!(shown["placement"]["cpus"], serde_json::json!([0]), "{shown}");
    assert_eq!(ssh("cat /sys/block/nvme0n1/size").trim(), "65536");
    assert_eq!(ssh("grep -l 0x11e8 /sys/bus/pci/devices/*/device; true"), "");

    refused(&["--disk", "data", "--size-mib", "33"], "32 MiB of the lease's disk space are left");
    refused(&["--disk", "data"], "a new one needs size_mib");
    refused(&["--device", "0000:02:00.0"], "not one of the lease's devices");
    attach(&scene, &id, &["--disk", "data", "--size-mib", "32"]).unwrap();
    wait_for(&scene, &id, "data", "attached");
    refused(&["--disk", "more", "--size-mib", "1"], "1 spare ports for disks and all are in use");
    let write = "while [ ! -b /dev/vda ]; do sleep 1; done; echo kept > /dev/vda; sync; \
                 cat /sys/block/vda/serial; echo; cat /sys/block/vda/size";
    assert_eq!(ssh(write).split_whitespace().collect::<Vec<_>>(), ["data", "65536"]);

    attach(&scene, &id, &["--device", LATER]).unwrap();
    wait_for(&scene, &id, LATER, "attached");
    let find = "while ! grep -l 0x11e8 /sys/bus/pci/devices/*/device; do sleep 1; done";
    assert!(ssh(find).contains("/device"));
    detach(&scene, &id, &["data"]);
    detach(&scene, &id, &[LATER]);
    wait_for(&scene, &id, "data", "detached");
    wait_for(&scene, &id, LATER, "gone");
    assert_eq!(ssh("ls /dev/vda 2>/dev/null; true"), "");

    // What was on the disk is there when it comes back, also as a disk of the other kind.
    attach(&scene, &id, &["--disk", "data", "--model", "nvme"]).unwrap();
    wait_for(&scene, &id, "data", "attached");
    let read = "while [ ! -b /dev/nvme1n1 ]; do sleep 1; done; head -c 4 /dev/nvme1n1";
    assert_eq!(ssh(read), "kept");
    // Wanted again before the guest has let go of it: it goes, and comes back.
    detach(&scene, &id, &["data"]);
    attach(&scene, &id, &["--disk", "data", "--model", "nvme"]).unwrap();
    wait_for(&scene, &id, "data", "attached");
    assert_eq!(ssh(read), "kept");
    detach(&scene, &id, &["data", "--pull"]);
    wait_for(&scene, &id, "data", "detached");
    detach(&scene, &id, &["data", "--erase"]);
    wait_for(&scene, &id, "data", "gone");
}

/// The node's own service, its accounts and the machine's process take it twelve times in a row: no port,
/// slot or share of the lease is lost on the way.
#[test]
fn a_card_and_a_disk_come_and_go_twelve_times() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let card = ["-netdev", "user,id=card"];
    let (_host, id) = rent(&scene, "e1000e,netdev=card,romfile=", &card);
    let ssh = |command: &str| scene.ssh(&id, command).unwrap();
    let shown = |words: &[&str]| {
        let words: Vec<&str> =
            ["machines"].iter().chain(words).chain(&[id.as_str()]).copied().collect();
        scene.renter().json(&words).unwrap()
    };
    let counted = || {
        let counters = shown(&["counters"]);
        let devices = counters["devices"].as_array().unwrap().clone();
        devices.iter().map(|device| device["name"].clone()).collect::<Vec<Value>>()
    };
    let functions = "ls /sys/bus/pci/devices; ls /sys/bus/pci/slots";
    let (before, devices) = (ssh(functions), counted());
    let mut places = Vec::new();
    for round in 0..ROUNDS {
        attach(&scene, &id, &["--device", LATER]).unwrap();
        let size: &[&str] = if round == 0 { &["--size-mib", "32"] } else { &[] };
        attach(&scene, &id, &[&["--disk", "data"], size].concat()).unwrap();
        wait_for(&scene, &id, LATER, "attached");
        wait_for(&scene, &id, "data", "attached");
        // The disk has what the round before left on it.
        let find = format!(
            "while [ ! -b /dev/vda ]; do sleep 1; done; head -n 1 /dev/vda | tr -d '\\0'; \
             echo {round} | dd of=/dev/vda conv=fsync 2> /dev/null; \
             while ! grep -l 0x10d3 /sys/bus/pci/devices/*/device; do sleep 1; done"
        );
        let found = ssh(&find);
        let words: Vec<&str> = found.split_whitespace().collect();
        let expected = round.checked_sub(1).map(|last| last.to_string());
        assert_eq!(words[..words.len() - 1], expected.iter().collect::<Vec<_>>()[..], "{round}");
        places.push(words[words.len() - 1].to_owned());
        detach(&scene, &id, &[LATER]);
        detach(&scene, &id, &["data"]);
        wait_for(&scene, &id, LATER, "gone");
        wait_for(&scene, &id, "data", "detached");
        let gone = format!("while [ -e /dev/vda ]; do sleep 1; done; {functions}");
        assert_eq!(ssh(&gone), before, "round {round}");
        assert_eq!(counted(), devices, "round {round}");
    }
    assert!(places.iter().all(|place| *place == places[0]), "{places:?}");
    assert_eq!(shown(&["devices"])["devices"].as_array().unwrap().len(), 1, "the disk is kept");
    detach(&scene, &id, &["data", "--erase"]);
    wait_for(&scene, &id, "data", "gone");
}
