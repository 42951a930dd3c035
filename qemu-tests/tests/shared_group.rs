//! Devices that share an IOMMU group: a group that holds something the host needs is rented to
//! nobody, and the node says what holds it; any other is rented whole or not at all.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, path::Path, time::Duration};

use qemu_tests::harness::{
    host::{HostOptions, USER_NETWORK, Uplink},
    scene::{GUEST_LIMIT, LeaseRequest, Scene},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);

/// A host with two slots of two functions each, none of them with ACS: the first holds an NVMe
/// disk and the host's only network card, the second two NVMe disks.
fn host(folder: &Path) -> HostOptions {
    fs::create_dir_all(folder).unwrap();
    let mut arguments = Vec::new();
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    for name in ["beside", "left", "right"] {
        let path = folder.join(name);
        fs::write(&path, vec![0u8; 16 << 20]).unwrap();
        add("-drive", format!("if=none,id={name},format=raw,file={}", path.display()));
    }
    add("-netdev", format!("user,id=net0,net={USER_NETWORK}"));
    let devices = [
        "pcie-root-port,id=held,chassis=20,slot=20",
        "nvme,drive=beside,serial=BESIDE,bus=held,addr=0.0,multifunction=on",
        "virtio-net-pci,id=uplink,netdev=net0,romfile=,bus=held,addr=0.1",
        "pcie-root-port,id=pair,chassis=21,slot=21",
        "nvme,drive=left,serial=LEFT,bus=pair,addr=0.0,multifunction=on",
        "nvme,drive=right,serial=RIGHT,bus=pair,addr=0.1",
    ];
    devices.iter().for_each(|device| add("-device", (*device).to_owned()));
    HostOptions { uplink: Uplink::None, arguments, ..HostOptions::default() }
}

/// Returns the addresses of `node`'s NVMe disks in this state, lowest first.
fn disks(nodes: &Value, node: &str, state: &str) -> Vec<String> {
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    let found = nodes.iter().find(|entry| entry["node"] == node);
    let devices = found.and_then(|found| found["devices"].as_array()).cloned().unwrap_or_default();
    let wanted = devices.iter().filter(|d| d["class"] == 0x01_08_02 && d["state"]["is"] == state);
    wanted.filter_map(|device| Some(device["address"].as_str()?.to_owned())).collect()
}

#[test]
fn groups_are_rented_whole_and_never_with_what_the_host_needs() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let (host, node) = scene.boot("grouped", host(&folder.path().join("disks"))).unwrap();
    let offered = |nodes: &Value| disks(nodes, &node, "free").len() == 2;
    let nodes = scene.cli.wait(&["nodes"], SOON, offered).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let refusal = |name: &str, devices: &[&str]| {
        let request = LeaseRequest { name, node: &node, devices, ..LeaseRequest::default() };
        let (lease, _) = scene.lease(&request).unwrap();
        format!("{:#}", scene.create(&lease, &guest).unwrap_err())
    };

    // The disk beside the network card: refused, with what holds its group, everywhere.
    let held = disks(&nodes, &node, "refused");
    let [beside] = &held[..] else { panic!("{nodes:#}") };
    let uplink = beside.replace(".0", ".1");
    let said = host.serial.wait(&format!("event=device address={beside}"), SOON).unwrap();
    assert!(said.contains("stays with the host") && said.contains(&uplink), "{said}");
    let shown = scene.cli.text(&["node", "show", &node]).unwrap();
    assert!(shown.contains("stays with the host") && shown.contains("uplink"), "{shown}");
    let said = refusal("held", &[beside]);
    assert!(said.contains(&uplink) && said.contains("uplink"), "{said}");

    // Two disks of one group: one alone is refused by the name of the other, both are rented.
    let pair = disks(&nodes, &node, "free");
    let [left, right] = &pair[..] else { panic!("{nodes:#}") };
    let said = refusal("half", &[left]);
    assert!(said.contains(right) && said.contains("must name both"), "{said}");
    let devices = [left.as_str(), right.as_str()];
    let request = LeaseRequest { node: &node, devices: &devices, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &guest).unwrap();
    let console = scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    assert_eq!(console.matches("driver nvme").count(), 2, "{console}");
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    scene.cli.wait(&["nodes"], SOON, offered).unwrap();
}
