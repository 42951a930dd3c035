//! A renter chooses a machine's hardware and attaches disks and devices while it runs, within what
//! the lease grants; the machine says where on its node it is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::HostOptions,
    scene::{GUEST_LIMIT, LeaseRequest, Scene},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(120);
/// The device that comes later, by QEMU docs/specs/edu.
const EDU: &str = "0000:01:00.0";

/// Waits until what is attached under a name is in a state.
fn wait_for(scene: &Scene, id: &str, name: &str, state: &str) {
    let fits = |all: &Value| {
        let found = all["devices"].as_array().into_iter().flatten().find(|d| d["id"] == *name);
        found.map_or(state == "gone", |device| device["state"] == *state)
    };
    scene.renter().wait(&["machines", "devices", id], SOON, fits).unwrap();
}

#[test]
fn disks_and_devices_come_and_go_within_the_lease() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let listed = format!("[machines]\ndevices = [\"{EDU}\"]\n");
    let config = Some(scene.node_config("attaches", &listed));
    let options = HostOptions { config, devices: vec!["edu".to_owned()], ..HostOptions::default() };
    let (_host, node) = scene.boot("attaches", options).unwrap();
    let offered = |nodes: &Value| {
        let all = nodes[0]["devices"].as_array().into_iter().flatten();
        all.into_iter().any(|d| d["address"] == EDU && d["state"]["is"] == "free")
    };
    scene.cli.wait(&["nodes"], SOON, offered).unwrap();
    let request =
        LeaseRequest { node: &node, devices: &[EDU], disk_mib: 64, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let chosen =
        ["--disk-model", "nvme", "--own-disk-mib", "32", "--spare-ports", "1", "--later", EDU];
    scene.create_with(&lease, &guest, &chosen).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    let renter = scene.renter();
    let attach = |more: &[&str]| {
        let words = ["machines", "attach", &id].iter().chain(more).copied().collect::<Vec<_>>();
        renter.output(&words).unwrap()
    };
    let refused = |more: &[&str], why: &str| {
        let said = String::from_utf8_lossy(&attach(more).stderr).into_owned();
        assert!(said.contains(why), "{said}");
    };

    // The one virtual CPU has the one CPU of the host, and the guest's disk is what was chosen.
    let shown = renter.json(&["machines", "show", &id]).unwrap();
    assert_eq!(shown["placement"]["cpus"], serde_json::json!([0]), "{shown}");
    assert_eq!(scene.ssh(&id, "cat /sys/block/nvme0n1/size").unwrap().trim(), "65536");
    assert_eq!(
        scene.ssh(&id, "ls /sys/bus/pci/devices/*/device | xargs grep -l 0x11e8; true").unwrap(),
        ""
    );

    refused(&["--disk", "data", "--size-mib", "33"], "32 MiB of the lease's disk space are left");
    refused(&["--disk", "data"], "a new one needs size_mib");
    refused(&["--device", "0000:02:00.0"], "not one of the lease's devices");
    assert!(attach(&["--disk", "data", "--size-mib", "32"]).status.success());
    wait_for(&scene, &id, "data", "attached");
    refused(&["--disk", "more", "--size-mib", "1"], "1 spare ports for disks and all are in use");
    let write = "while [ ! -b /dev/vda ]; do sleep 1; done; echo kept > /dev/vda; sync; \
                 cat /sys/block/vda/serial /sys/block/vda/size";
    assert_eq!(
        scene.ssh(&id, write).unwrap().split_whitespace().collect::<Vec<_>>(),
        ["data", "65536"]
    );

    assert!(attach(&["--device", EDU]).status.success());
    wait_for(&scene, &id, EDU, "attached");
    let find = "while ! d=$(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device)); do sleep 1; done; \
                cat $d/vendor";
    assert_eq!(scene.ssh(&id, find).unwrap().trim(), "0x1234");

    for name in ["data", EDU] {
        renter.json(&["machines", "detach", &id, name]).unwrap();
    }
    wait_for(&scene, &id, "data", "detached");
    wait_for(&scene, &id, EDU, "gone");
    assert_eq!(scene.ssh(&id, "ls /dev/vda 2>/dev/null; true").unwrap(), "");

    // What was on the disk is there when it comes back, also as a disk of the other kind.
    assert!(attach(&["--disk", "data", "--model", "nvme"]).status.success());
    wait_for(&scene, &id, "data", "attached");
    let read = "while [ ! -b /dev/nvme1n1 ]; do sleep 1; done; head -c 4 /dev/nvme1n1";
    assert_eq!(scene.ssh(&id, read).unwrap(), "kept");
    renter.json(&["machines", "detach", &id, "data", "--pull"]).unwrap();
    wait_for(&scene, &id, "data", "detached");
    renter.json(&["machines", "detach", &id, "data", "--erase"]).unwrap();
    wait_for(&scene, &id, "data", "gone");
}
