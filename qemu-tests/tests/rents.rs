//! The whole path: a lease that two of three authority keys signed starts a machine with a
//! passed-through device, its renter logs in, and it survives the death of the node's agent. The next
//! renter of the device, a drive, finds nothing on it. Leases that do not count start nothing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use qemu_tests::harness::{
    host::{HostOptions, Medium, Uplink},
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene},
};

/// What the rented disk starts with.
const MARKER: &str = "this block lies on the rented NVMe disk";
/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);

/// Returns a host that boots the PXE set and has an NVMe disk to rent.
fn host(scene: &Scene) -> HostOptions {
    let folder = scene.folder.join("rented");
    let options = scene::with_rented_nvme(&folder, Medium::Kernel(String::new()), MARKER).unwrap();
    HostOptions { uplink: Uplink::User, ..options }
}

#[test]
fn a_machine_with_a_device_outlives_the_agent_and_gives_the_device_back_erased() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let (host, node) = scene.boot("renting", host(&scene)).unwrap();
    let offers = |nodes: &serde_json::Value| scene::free_device(nodes, &node).is_some();
    let nodes = scene.cli.wait(&["nodes"], SOON, offers).unwrap();
    let device = scene::free_device(&nodes, &node).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let devices = [device.as_str()];
    let request = LeaseRequest { node: &node, devices: &devices, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &guest).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    let sandbox = host.serial.wait("event=machine-sandbox", SOON).unwrap();
    assert!(sandbox.contains("cap_eff=0 no_new_privs=1 seccomp=2 root_entries=0"), "{sandbox}");
    let read = scene.ssh(&id, "head -c 39 /dev/nvme0n1").unwrap();
    assert!(read.contains(MARKER), "{read}");

    // The guest counts its own uptime: it must not start anew when the agent dies.
    scene.ssh(&id, "touch /run/before").unwrap();
    let mark = host.serial.mark();
    let operator = scene.cli.with_key(&scene.operator.file);
    operator.text(&["node", "restart-agent", &node]).unwrap();
    host.serial.wait_from(mark, "event=agent-exited", SOON).unwrap();
    host.serial.wait_from(mark, "event=machine-adopted", SOON).unwrap();
    scene.renter().wait(&["machines", "show", &id], SOON, |_| true).unwrap();
    scene.ssh(&id, "test -e /run/before").unwrap();

    let write = "echo a secret > /run/secret; dd if=/run/secret of=/dev/nvme0n1 bs=512 seek=16384 \
                 conv=sync,fsync 2>/dev/null";
    scene.ssh(&id, write).unwrap();
    scene.renter().text(&["machines", "delete", &id]).unwrap();
    host.serial.wait_from(mark, "event=drive-erasing", SOON).unwrap();
    let erased = host.serial.wait_from(mark, "event=drive-erased", SOON).unwrap();
    assert!(erased.contains(&device) && erased.contains("how=format-"), "{erased}");
    host.serial.wait_from(mark, "event=device-reset", SOON).unwrap();
    scene.cli.wait(&["nodes"], SOON, offers).unwrap();

    let next = LeaseRequest { name: "next", node: &node, devices: &devices, ..request };
    let (lease, next) = scene.lease(&next).unwrap();
    scene.create(&lease, &guest).unwrap();
    scene.wait_for_console(&next, "guest: ready", GUEST_LIMIT).unwrap();
    let left = scene.ssh(&next, "tr -d '\\0' < /dev/nvme0n1 | wc -c").unwrap();
    assert_eq!(
        left.trim(),
        "0",
        "bytes of the first renter and of the provider that the next one reads"
    );
}

#[test]
fn leases_that_do_not_count_start_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let (host, node) = scene.boot("refusing", host(&scene)).unwrap();
    let request = LeaseRequest { node: &node, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    let text = std::fs::read_to_string(&lease).unwrap();
    let mut envelope: serde_json::Value = serde_json::from_str(&text).unwrap();
    envelope["signatures"].as_array_mut().unwrap().pop();
    std::fs::write(&lease, envelope.to_string()).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let refusal = format!("{:#}", scene.create(&lease, &guest).unwrap_err());
    assert!(refusal.contains("signature"), "{refusal}");
    assert!(!host.serial.text().contains("event=machine-accepted"));
}
