//! A renter's own disk image: converted, uploaded, started by its boot loader through UEFI firmware,
//! with a seed that tells it who its owner is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{process::Command, time::Duration};

use qemu_tests::{
    bed::{firmware, guest},
    harness::{
        host::HostOptions,
        scene::{LeaseRequest, Scene},
    },
};

/// How long firmware, boot loader and kernel may take together under two layers of emulation.
const START_LIMIT: Duration = Duration::from_secs(600);

#[test]
fn a_qcow2_image_starts_by_its_own_boot_loader() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start_slow(folder.path()).unwrap();
    let (_host, node) = scene.boot("uefi", HostOptions::default()).unwrap();
    let raw = firmware::grub_disk(folder.path()).unwrap();
    let (qcow2, imported) = (folder.path().join("image.qcow2"), folder.path().join("image.raw"));
    let converted = Command::new("qemu-img")
        .args(["convert", "-O", "qcow2"])
        .args([&raw, &qcow2])
        .status()
        .unwrap();
    assert!(converted.success());
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
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
    let made =
        ["machines", "create", "--lease", &lease, "--disk-image", digest, "--firmware", "uefi"];
    scene.renter().json(&[&made[..], &["--hostname", "web-1"]].concat()).unwrap();
    scene.wait_for_console(&id, guest::READY, START_LIMIT).unwrap();
}
