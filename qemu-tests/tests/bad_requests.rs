//! Mistakes and attacks of renters, all on one node: each is refused with the words that a person
//! needs, and the node goes on to serve a good lease.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use qemu_tests::harness::{
    guest,
    host::Medium,
    scene::{self, GUEST_LIMIT, LeaseRequest, PushedGuest, Scene},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);

/// One node, and a guest that could run on it.
struct Setting {
    scene: Scene,
    node: String,
    guest: PushedGuest,
    device: String,
    kernel: PathBuf,
}

impl Setting {
    /// Asks for a machine and returns the refusal.
    fn refusal(&self, lease: &Path) -> String {
        format!("{:#}", self.scene.create(lease, &self.guest).unwrap_err())
    }

    fn lease(&self, request: &LeaseRequest<'_>) -> (PathBuf, String) {
        self.scene.lease(&LeaseRequest { node: &self.node, ..*request }).unwrap()
    }

    /// Mints a lease and returns how the machine that it asks for is refused.
    fn refused(&self, request: &LeaseRequest<'_>) -> String {
        let (lease, _) = self.lease(request);
        self.refusal(&lease)
    }

    /// Asks for a machine that cannot start, returns what is shown of it, and deletes it.
    fn failed(&self, name: &str, guest: &PushedGuest) -> String {
        let (lease, id) = self.lease(&LeaseRequest { name, ..LeaseRequest::default() });
        self.scene.create_with(&lease, guest, &[]).unwrap();
        let renter = self.scene.renter();
        let failed = |machine: &Value| machine["state"] == "failed";
        let shown = renter.wait(&["machines", "show", &id], SOON, failed).unwrap();
        self.delete(&id);
        shown["detail"].as_str().unwrap().to_owned()
    }

    /// Deletes a machine and waits until it is gone.
    fn delete(&self, id: &str) {
        let renter = self.scene.renter();
        renter.text(&["machines", "delete", id]).unwrap();
        let gone = |machines: &Value| machines.as_array().is_some_and(Vec::is_empty);
        renter.wait(&["machines", "list"], SOON, gone).unwrap();
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

/// Rewrites an envelope's file.
fn rewrite(lease: &Path, change: impl FnOnce(&mut Value)) {
    let mut envelope = serde_json::from_slice(&fs::read(lease).unwrap()).unwrap();
    change(&mut envelope);
    fs::write(lease, envelope.to_string()).unwrap();
}

/// Doubles the memory that a lease grants, and leaves its signatures as they are.
fn grant_more(envelope: &mut Value) {
    let payload = STANDARD.decode(envelope["payload"].as_str().unwrap()).unwrap();
    let payload = String::from_utf8(payload).unwrap();
    let altered = payload.replace("\"memory_mib\":384", "\"memory_mib\":768");
    assert_ne!(altered, payload);
    envelope["payload"] = STANDARD.encode(altered).into();
}

#[test]
fn each_is_refused_by_name_and_the_node_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let rented = folder.path().join("rented");
    let options = scene::with_rented_nvme(&rented, Medium::Kernel(String::new()), "x").unwrap();
    let (host, node) = scene.boot("patient", options).unwrap();
    let offers = |nodes: &Value| scene::free_device(nodes, &node).is_some();
    let nodes = scene.cli.wait(&["nodes"], SOON, offers).unwrap();
    let device = scene::free_device(&nodes, &node).unwrap();
    let guest = scene.push_guest(None).unwrap();
    let kernel = guest::make(folder.path(), &scene.ssh.public, None).unwrap().kernel;
    let setting = Setting { scene, node, guest, device, kernel };

    leases_that_do_not_count(&setting);
    leases_of_another_time(&setting);
    more_than_there_is(&setting);
    content_that_cannot_start(&setting);
    let started = host.serial.text().contains("event=machine-started");
    assert!(!started, "something of all this was started");
    a_good_lease_and_its_device(&setting);
}

fn leases_that_do_not_count(setting: &Setting) {
    let (altered, _) = setting.lease(&LeaseRequest { name: "altered", ..LeaseRequest::default() });
    rewrite(&altered, grant_more);
    let said = setting.refusal(&altered);
    assert!(said.contains("0 of 1 valid signatures") && said.contains("does not verify"), "{said}");

    let scene = &setting.scene;
    let (stranger, _) = setting.lease(&LeaseRequest { name: "odd", ..LeaseRequest::default() });
    rewrite(&stranger, |envelope| envelope["signatures"] = Value::Array(Vec::new()));
    let file = stranger.to_str().unwrap();
    let add = ["lease", "sign", "--add", file, "--out", file];
    scene.cli.with_key(&scene.operator.file).text(&add).unwrap();
    scene.renter().text(&add).unwrap();
    let said = setting.refusal(&stranger);
    assert!(said.contains(&scene.renter.public), "{said}");
    assert!(said.contains("is not a key of the authority"), "{said}");

    let elsewhere = &scene.operator.public;
    let request = LeaseRequest { name: "elsewhere", node: elsewhere, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    let said = setting.refusal(&lease);
    assert!(said.contains("node") && said.contains(elsewhere), "{said}");
}

fn leases_of_another_time(setting: &Setting) {
    let past = LeaseRequest {
        name: "past",
        start: Some(now() - 100),
        seconds: 40,
        ..LeaseRequest::default()
    };
    let said = setting.refused(&past);
    assert!(said.contains("the lease ended") && said.contains("s ago"), "{said}");

    // A lease that has not begun is good; its machine waits.
    let start = Some(now() + 1000);
    let future = LeaseRequest { name: "future", start, ..LeaseRequest::default() };
    let (lease, id) = setting.lease(&future);
    let made = setting.scene.create(&lease, &setting.guest).unwrap();
    assert_eq!(made["state"], "pending", "{made:#}");
    let said = format!("{:#}", setting.scene.renter().text(&["console", &id]).unwrap_err());
    assert!(said.contains("does not run"), "{said}");
    // Nor can a lease of another node take its place.
    let elsewhere = &setting.scene.operator.public;
    let moved = LeaseRequest { name: "moved", node: elsewhere, id: Some(&id), serial: 2, ..future };
    let (lease, _) = setting.scene.lease(&moved).unwrap();
    let renew = ["machines", "renew", &id, "--lease", lease.to_str().unwrap()];
    let said = format!("{:#}", setting.scene.renter().text(&renew).unwrap_err());
    assert!(said.contains("the lease is for node") && said.contains(&setting.node), "{said}");
    setting.delete(&id);
}

fn more_than_there_is(setting: &Setting) {
    let ask = |request| setting.refused(&request);
    let said = ask(LeaseRequest { name: "cpus", vcpus: 64, ..LeaseRequest::default() });
    assert!(said.contains("64 virtual CPUs") && said.contains("1 are free"), "{said}");
    let said = ask(LeaseRequest { name: "ram", memory_mib: 999_999, ..LeaseRequest::default() });
    assert!(said.contains("999999 MiB of memory") && said.contains("are free"), "{said}");
    let said = ask(LeaseRequest { name: "disk", disk_mib: 999_999, ..LeaseRequest::default() });
    assert!(said.contains("999999 MiB of disk") && said.contains("are free"), "{said}");
    let devices = ["0000:7f:00.0"];
    let said = ask(LeaseRequest { name: "device", devices: &devices, ..LeaseRequest::default() });
    assert!(said.contains("this node has no device 0000:7f:00.0"), "{said}");
}

fn content_that_cannot_start(setting: &Setting) {
    let scene = &setting.scene;
    let with_kernel = |kernel: String| PushedGuest { kernel, ..setting.guest.clone() };
    let noise: Vec<u8> =
        (0..100_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let noise = with_kernel(scene.push("noise", &noise).unwrap());
    let said = setting.failed("noise", &noise);
    assert!(said.contains("is no kernel: neither a bzImage nor an ELF vmlinux"), "{said}");

    let whole = fs::read(&setting.kernel).unwrap();
    let short = with_kernel(scene.push("short", &whole[..whole.len() / 2]).unwrap());
    let said = setting.failed("short", &short);
    assert!(said.contains("cut short"), "{said}");

    let absent = "ab".repeat(32);
    let (lease, _) = setting.lease(&LeaseRequest { name: "absent", ..LeaseRequest::default() });
    let said = format!("{:#}", scene.create(&lease, &with_kernel(absent.clone())).unwrap_err());
    assert!(said.contains(&absent) && said.contains("upload it first"), "{said}");

    let large = scene.push("large", &vec![7; 2 << 20]).unwrap();
    let disk = ["--disk", large.as_str()];
    let little = LeaseRequest { name: "large", disk_mib: 1, ..LeaseRequest::default() };
    let (lease, _) = setting.lease(&little);
    let said = format!("{:#}", scene.create_with(&lease, &setting.guest, &disk).unwrap_err());
    assert!(said.contains("2097152 bytes") && said.contains("grants 1 MiB of disk"), "{said}");
    let (lease, _) = setting.lease(&LeaseRequest { name: "none", ..LeaseRequest::default() });
    let said = format!("{:#}", scene.create_with(&lease, &setting.guest, &disk).unwrap_err());
    assert!(said.contains("the lease grants no disk"), "{said}");
}

fn a_good_lease_and_its_device(setting: &Setting) {
    let scene = &setting.scene;
    let devices = [setting.device.as_str()];
    let good = LeaseRequest { name: "good", devices: &devices, ..LeaseRequest::default() };
    let (lease, id) = setting.lease(&good);
    scene.create(&lease, &setting.guest).unwrap();
    scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT).unwrap();
    let said = setting.refused(&LeaseRequest { name: "second", ..good });
    assert!(said.contains(&setting.device) && said.contains("leased to machine"), "{said}");
    scene.ssh(&id, "head -c 1 /dev/nvme0n1").unwrap();
}
