//! A guest that writes rubbish into every queue and every register of its devices harms nobody but
//! itself: its machine goes on or ends with a reason, the node and the machine beside it go on.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, process::Command, time::Duration};

use qemu_tests::harness::{
    guest,
    host::{HostOptions, Medium},
    kernels,
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene},
};

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);
/// How long the guest may write to what only the VMM stands behind.
const RUBBISH_LIMIT: Duration = Duration::from_secs(400);
/// How long it may write to the device that is passed through.
const REAL_LIMIT: Duration = Duration::from_secs(120);
/// Compiles the guest's program: static, so that it needs nothing but a kernel.
fn rubbish(folder: &Path) -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/rubbish.rs");
    let program = folder.join("rubbish");
    let status = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "-C", "opt-level=1", "-C", "strip=symbols"])
        .args(["-C", "target-feature=+crt-static", "-o"])
        .arg(&program)
        .arg(source)
        .status()
        .unwrap();
    assert!(status.success());
    std::fs::read(program).unwrap()
}

#[test]
fn rubbish_in_every_queue_and_register_harms_only_its_own_machine() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let rented = folder.path().join("rented");
    let medium = Medium::Kernel(String::new());
    let options = scene::with_rented_nvme(&rented, medium, "x").unwrap();
    let config = Some(scene.node_config("hostile", "[machines]\nvcpus = 2\n"));
    let (host, node) = scene.boot("hostile", HostOptions { config, ..options }).unwrap();
    let offers = |nodes: &serde_json::Value| scene::free_device(nodes, &node).is_some();
    let nodes = scene.cli.wait(&["nodes"], SOON, offers).unwrap();
    let device = scene::free_device(&nodes, &node).unwrap();

    let usual = guest::make(folder.path(), &scene.ssh.public, None).unwrap();
    let neighbour = scene.push_made(&usual).unwrap();
    let request = LeaseRequest { name: "beside", node: &node, ..LeaseRequest::default() };
    let (lease, beside) = scene.lease(&request).unwrap();
    scene.create(&lease, &neighbour).unwrap();
    scene.wait_for_console(&beside, "guest: ready", GUEST_LIMIT).unwrap();
    scene.ssh(&beside, "touch /run/before").unwrap();

    let program = rubbish(folder.path());
    let hostile = kernels::with_program(&usual, folder.path(), "guest-test", program).unwrap();
    let hostile = scene.push_made(&hostile).unwrap();
    let devices = [device.as_str()];
    let request = LeaseRequest { name: "hostile", devices: &devices, disk_mib: 64, ..request };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &hostile).unwrap();
    let exited = || {
        let text = host.serial.text();
        let mut lines = text.lines();
        lines
            .find(|line| line.contains("event=machine-exited") && line.contains(&id))
            .map(str::to_owned)
    };
    let console = scene.wait_for_console(&id, "rubbish: what is left is real", RUBBISH_LIMIT);
    assert!(console.is_ok() || exited().is_some(), "{console:?}");
    // What a real device writes into its own guest is that guest's loss: it may die of it in any way.
    let console = scene.wait_for_console(&id, "rubbish: done", REAL_LIMIT);
    let outcome = if console.is_ok() { "wrote everything and goes on" } else { "harmed itself" };
    println!("the hostile machine: {}", exited().as_deref().unwrap_or(outcome));

    scene.ssh(&beside, "test -e /run/before && echo there").unwrap();
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    host.serial.wait("event=device-reset", SOON).unwrap();
    scene.cli.wait(&["nodes"], SOON, offers).unwrap();
    assert!(!host.serial.text().contains("panicked"), "{}", host.serial.tail(80));
}
