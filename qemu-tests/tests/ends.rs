//! A lease ends on time with nobody there to say so: the node is cut off from every network and
//! still stops the machine and takes the device back.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::{HostOptions, Link, Medium},
    scene::{self, GUEST_LIMIT, LeaseRequest, PushedGuest, Scene},
};

/// Long enough for the VMM to start on a slow machine.
const LEASE_S: u64 = 45;
/// Less than content takes that is kept waiting.
const WAITING_S: u64 = 15;

#[test]
fn with_the_network_cut() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let rented = folder.path().join("rented");
    let options = scene::with_rented_nvme(&rented, Medium::Kernel(String::new()), "x").unwrap();
    let (mut host, node) = scene.boot("cut-off", options).unwrap();
    let offers = |nodes: &serde_json::Value| scene::free_device(nodes, &node).is_some();
    let nodes = scene.cli.wait(&["nodes"], Duration::from_secs(90), offers).unwrap();
    let device = scene::free_device(&nodes, &node).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let devices = [device.as_str()];
    let seconds = LEASE_S;
    let request =
        LeaseRequest { node: &node, devices: &devices, seconds, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    scene.create(&lease, &guest).unwrap();
    host.serial.wait("event=machine-started", GUEST_LIMIT).unwrap();
    host.set_link(Link::Down).unwrap();
    let limit = Duration::from_secs(LEASE_S + 90);
    let ended = host.serial.wait("event=machine-ended", limit).unwrap();
    assert!(ended.contains("late_s=0") || ended.contains("late_s=1"), "{ended}");
    host.serial.wait("event=device-reset", limit).unwrap();
}

#[test]
fn while_whoever_has_its_content_keeps_it_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let medium = Medium::Kernel(String::new());
    let (host, node) =
        scene.boot("waiting", HostOptions { medium, ..HostOptions::default() }).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let initrd = scene.push("much", &vec![7; 64 << 20]).unwrap();
    let seconds = WAITING_S;
    let request = LeaseRequest { node: &node, seconds, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    scene.create(&lease, &PushedGuest { initrd, ..guest }).unwrap();
    // It sends a little every few seconds, so that neither the stream nor the link to it is given up.
    let ended = (0..30).find_map(|_| {
        scene.gateway.freeze().unwrap();
        let ended = host.serial.wait("event=machine-ended", Duration::from_secs(4));
        scene.gateway.thaw().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        ended.ok()
    });
    let ended = ended.expect("the machine ends within two minutes");
    assert!(ended.contains("late_s=0") || ended.contains("late_s=1"), "{ended}");
    assert!(!host.serial.text().contains("event=machine-started"), "its content came");
}

#[test]
fn across_a_power_cut_with_the_clock_set_back_a_year() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let disk = folder.path().join("disk.img");
    std::fs::copy(scene::image_folder().unwrap().join("holdfast.img"), &disk).unwrap();
    let options = HostOptions { medium: Medium::Disk(disk), ..HostOptions::default() };
    let (host, node) = scene.boot("persistent", options.clone()).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let request = LeaseRequest { node: &node, seconds: LEASE_S, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    scene.create(&lease, &guest).unwrap();
    host.serial.wait("event=machine-started", GUEST_LIMIT).unwrap();
    std::thread::sleep(Duration::from_secs(10));
    host.cut_power().unwrap();

    let rtc = Some("base=2025-11-21T00:00:00".to_owned());
    let (host, again) = scene.boot("persistent", HostOptions { rtc, ..options }).unwrap();
    assert_eq!(node, again, "the node keeps its key");
    host.serial.wait("event=machine-ended", Duration::from_secs(LEASE_S + 90)).unwrap();
}
