//! The whole path: a lease that two of three authority keys signed starts a machine with a
//! passed-through device, its renter logs in, and it survives the death of the node's agent. The next
//! renter of the device, a drive, finds nothing on it, and a power cut makes nothing on it the node's. Leases that
//! do not count start nothing.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
    time::Duration,
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    scene::{self, GUEST_LIMIT, LeaseRequest, Scene, image_folder},
};

/// What the rented disk starts with.
const MARKER: &str = "this block lies on the rented NVMe disk";
/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);

/// From power-on to what an agent does first.
const UP: Duration = Duration::from_secs(240);

/// Returns a host with an NVMe disk to rent and none of its own.
fn host(scene: &Scene, medium: Medium) -> HostOptions {
    let options = scene::with_rented_nvme(&scene.folder.join("rented"), medium, MARKER).unwrap();
    HostOptions { uplink: Uplink::User, ..options }
}

#[test]
fn a_machine_with_a_device_outlives_the_agent_and_gives_the_device_back_erased() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let options = host(&scene, Medium::IsoCd);
    let (host, node) = scene.boot("renting", options.clone()).unwrap();
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
    drop(host);
    a_power_cut_makes_a_renters_disk_nobodys(&scene, &device, options);
}

/// The node keeps everything in memory, and a renter may call his partitions what he likes.
fn a_power_cut_makes_a_renters_disk_nobodys(scene: &Scene, device: &str, options: HostOptions) {
    let (image, drive) = (image_folder().unwrap(), scene.folder.join("rented/rented.img"));
    fs::copy(image.join("holdfast.img"), &drive).unwrap();
    assert!(!begins_with_zeros(&drive));
    let config = Some(scene.node_config("renting", ""));
    let options = HostOptions { config, ..options };
    let host = Host::start(&image, &scene.folder.join("renting"), &options).unwrap();
    // Firmware remembers whose drive it is before anybody looks at it.
    let left = host.serial.wait("event=ram-mode path=/state", UP).unwrap();
    assert!(left.contains("no partition is named holdfast-state"), "{left}");
    host.serial.wait(&format!("event=drive-erased address={device}"), UP).unwrap();
    assert!(begins_with_zeros(&drive));
    assert!(!host.serial.text().contains("is called holdfast-"), "{}", host.serial.text());
    drop(host);

    // It was erased: firmware has nothing to remember any more.
    let host = Host::start(&image, &scene.folder.join("renting"), &options).unwrap();
    let offered = format!("event=device address={device}");
    let offered = host.serial.wait(&offered, UP).unwrap();
    assert!(offered.contains("state=\"free\""), "{offered}");
    host.serial.wait("event=offered devices_free=1", UP).unwrap();
    assert!(!host.serial.text().contains("event=drive-eras"), "{}", host.serial.text());
}

fn begins_with_zeros(drive: &Path) -> bool {
    let mut bytes = Vec::new();
    File::open(drive).unwrap().take(4 << 20).read_to_end(&mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn leases_that_do_not_count_start_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let options = host(&scene, Medium::Kernel(String::new()));
    let (host, node) = scene.boot("refusing", options).unwrap();
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
