//! A renter's own disk image: converted, uploaded, started by its boot loader through UEFI firmware,
//! with a seed that tells it who its owner is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, process::Command, time::Duration};

use qemu_tests::{
    bed::{firmware, guest},
    harness::{
        host::HostOptions,
        pace::{Pace, steadily},
        packages,
        scene::{LeaseRequest, Scene},
    },
};
use serde_json::{Value, json};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(480);
/// A renter's key, and a program for the first start.
const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 \"me\": [x] # y";
const USER_DATA: &str = "#cloud-config\nruncmd:\n  - [touch, /run/started]\n";

#[test]
fn a_qcow2_image_starts_by_its_own_boot_loader() {
    steadily(qcow2_starts);
}

fn qcow2_starts(folder: &Path, pace: Pace) {
    let scene = Scene::start_paced(folder, pace).unwrap();
    let (_host, node) = scene.boot("uefi", HostOptions::default()).unwrap();
    let raw = firmware::grub_disk(folder).unwrap();
    let (qcow2, imported) = (folder.join("image.qcow2"), folder.join("image.raw"));
    let converted = Command::new("qemu-img")
        .args(["convert", "-O", "qcow2"])
        .args([&raw, &qcow2])
        .status()
        .unwrap();
    assert!(converted.success());
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    scene.cli.text(&["image", "import", &path(&qcow2), "-o", &path(&imported)]).unwrap();

    let devices = [];
    let request = LeaseRequest {
        node: &node,
        devices: &devices,
        memory_mib: 512,
        disk_mib: 256,
        ..LeaseRequest::default()
    };
    let (lease, id) = scene.lease(&request).unwrap();
    let lease = path(&lease);
    let pushed =
        scene.renter().json(&["content", "push", &path(&imported), "--lease", &lease]).unwrap();
    let digest = pushed["content"].as_str().unwrap();
    let (keys, user_data) = (folder.join("keys"), folder.join("user-data"));
    std::fs::write(&keys, format!("{KEY}\n")).unwrap();
    std::fs::write(&user_data, USER_DATA).unwrap();
    let (keys, user_data) = (path(&keys), path(&user_data));
    let made =
        ["machines", "create", "--lease", &lease, "--disk-image", digest, "--firmware", "uefi"];
    let seed = ["--hostname", "web-1", "--ssh-key", &keys, "--user-data", &user_data];
    scene.renter().json(&[&made[..], &seed].concat()).unwrap();
    let console = scene.wait_for_console(&id, guest::READY, START_LIMIT).unwrap();
    let told = console.lines().find_map(|line| line.trim_end().strip_prefix(guest::SEED));
    let told = what_cloud_init_reads(folder, told.unwrap());
    let expected = json!({
        "label": "cidata", "found": true, "instance": id, "hostname": "web-1", "keys": [KEY],
        "user_data": USER_DATA,
    });
    assert_eq!(told, expected);
}

/// Has Debian's cloud-init read a seed, in base64 and compressed.
fn what_cloud_init_reads(folder: &Path, seed: &str) -> Value {
    let modules = packages::cloud_init().unwrap();
    let read = Command::new("python3")
        .args(["-S", "-c", include_str!("../guest/read_seed.py")])
        .args([folder.as_os_str(), seed.as_ref()])
        .env("PYTHONPATH", modules)
        .output()
        .unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    serde_json::from_slice(&read.stdout).unwrap()
}
