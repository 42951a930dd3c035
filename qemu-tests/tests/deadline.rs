//! Leases end on time also when nobody is there to end them: the node's service hangs, and then it is dead
//! and cannot start again, because the node's disk is gone. Each machine's own process knows when its lease
//! ends, whatever the calendar says.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use qemu_tests::harness::{
    host::Host,
    saboteur::Saboteur,
    scene::{self, GUEST_LIMIT, JOIN_LIMIT, LeaseRequest, PushedGuest, Scene},
};
use serde_json::{Value, json};

/// How long the node may take to notice something, and to answer.
const SOON: Duration = Duration::from_secs(90);
/// How long the kernel may take to let go of a disk that leaves.
const UNPLUGGED: Duration = Duration::from_secs(60);
/// How late a machine may end: its process's margin, and what a busy emulator takes to say so.
const LATE_S: u64 = 12;
/// Between the power button and the end, in seconds: the node's default.
const GRACE_S: u64 = 10;
/// Long enough for a machine's process to start on a slow server.
const SHORT_S: u64 = 50;
/// The same, and for all that happens while the other machine ends.
const LONG_S: u64 = 130;
/// What is left of a lease that is renewed for the last time: the disk leaves meanwhile.
const LAST_S: u64 = 50;
/// A guest that is idle and takes no notice of its power button.
const DEAF: &str = "console=ttyS0 quiet rdinit=/bin/busybox -- sleep 1000000";

/// QEMU's arguments for a disk that can be pulled out, as servers' slots allow.
fn pluggable(disk: &Path) -> Vec<String> {
    let drive = format!("if=none,id=disk,format=raw,cache=unsafe,file={}", disk.display());
    let words = [
        // Slots are the kernel's own affair, not ACPI's.
        ["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"],
        ["-drive", &drive],
        ["-device", "pcie-root-port,id=diskport,chassis=20,slot=20"],
        ["-device", "nvme,id=disk0,drive=disk,serial=HOLDFAST0,bus=diskport"],
    ];
    words.concat().into_iter().map(str::to_owned).collect()
}

fn pull_out_the_disk(host: &mut Host) {
    let deadline = Instant::now() + UNPLUGGED;
    host.qmp.execute("device_del", json!({ "id": "disk0" })).unwrap();
    let path = json!({ "path": "/machine/peripheral" });
    let there = |listed: &Value| listed.as_array().unwrap().iter().any(|p| p["name"] == "disk0");
    while there(&host.qmp.execute("qom-list", path.clone()).unwrap()) {
        assert!(Instant::now() < deadline, "the disk does not leave:\n{}", host.serial.tail(40));
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A machine that runs.
struct Machine {
    id: String,
    process: String,
    /// When its lease began, and when it ends.
    start: u64,
    end: u64,
}

struct Node {
    scene: Scene,
    name: String,
    host: Host,
    saboteur: Saboteur,
    guest: PushedGuest,
}

impl Node {
    fn start(folder: &Path) -> Self {
        let scene = Scene::start(folder).unwrap();
        let image = scene::image_folder().unwrap();
        let disk = folder.join("disk.img");
        std::fs::copy(image.join("holdfast.img"), &disk).unwrap();
        let files = folder.join("orphaned");
        let medium = Saboteur::medium(&image, &files).unwrap();
        let mut options = scene::with_rented_nvme(&folder.join("rented"), medium, "x").unwrap();
        options.arguments.extend(pluggable(&disk));
        options.arguments.extend(Saboteur::arguments(&files));
        // One CPU carries them all here.
        options.config = Some(scene.node_config("orphaned", "[machines]\nvcpus = 4\n"));
        let (host, name) = scene.boot("orphaned", options).unwrap();
        let saboteur = Saboteur::connect(&files).unwrap();
        let guest = scene.push_guest(None).unwrap();
        Self { scene, name, host, saboteur, guest }
    }

    fn device(&self) -> String {
        let free = |nodes: &Value| scene::free_device(nodes, &self.name).is_some();
        let nodes = self.scene.cli.wait(&["nodes"], SOON, free).unwrap();
        scene::free_device(&nodes, &self.name).unwrap()
    }

    /// Has a drive erased whose renter deleted nothing: that its lease is over says one clock alone, so it
    /// waits, and here an operator has the last word.
    fn give_back(&self, device: &str) {
        let waits = |nodes: &Value| {
            let all = nodes.as_array().into_iter().flatten();
            let mut devices = all.flat_map(|node| node["devices"].as_array().into_iter().flatten());
            let state = devices.find(|known| known["address"] == device).map(|it| &it["state"]);
            let reason = state.and_then(|state| state["reason"].as_str()).unwrap_or_default();
            reason.contains("what its last renter wrote") && reason.contains("two sources of time")
        };
        self.scene.cli.wait(&["nodes"], SOON, waits).unwrap();
        let operator = self.scene.cli.with_key(&self.scene.operator.file);
        let mark = self.host.serial.mark();
        operator.text(&["node", "release-device", &self.name, device]).unwrap();
        let erased = format!("event=drive-erased address={device}");
        self.host.serial.wait_from(mark, &erased, SOON).unwrap();
    }

    /// Makes a machine that runs from now on for so many seconds.
    fn create(&self, request: &LeaseRequest<'_>, cmdline: &str) -> Machine {
        let start = now();
        let request = LeaseRequest { node: &self.name, start: Some(start), ..*request };
        let (lease, id) = self.scene.lease(&request).unwrap();
        self.scene.create_on(&lease, &self.guest, cmdline).unwrap();
        let started = format!("event=machine-started machine={id} pid=");
        let line = self.host.serial.wait(&started, GUEST_LIMIT).unwrap();
        let process = line.split(&started).nth(1).unwrap().split(' ').next().unwrap().to_owned();
        Machine { id, process, start, end: start + request.seconds }
    }

    /// Returns the seconds that the machine's process was told it has left, as told after `mark`.
    fn told(&self, machine: &Machine, mark: usize) -> u64 {
        let told = format!("event=machine-deadline machine={} left_s=", machine.id);
        let line = self.host.serial.wait_from(mark, &told, SOON).unwrap();
        line.split(&told).nth(1).unwrap().trim().parse().unwrap()
    }

    fn renew(&self, machine: &mut Machine, end: u64) {
        let request = LeaseRequest {
            name: "renewed",
            node: &self.name,
            id: Some(&machine.id),
            serial: 2,
            start: Some(machine.start),
            seconds: end - machine.start,
            ..LeaseRequest::default()
        };
        let (lease, _) = self.scene.lease(&request).unwrap();
        let lease = lease.to_str().unwrap();
        let ask = ["machines", "renew", &machine.id, "--lease", lease];
        let renewed = self.scene.renter().json(&ask).unwrap();
        assert_eq!(renewed["end"], end);
        machine.end = end;
    }

    fn runs(&mut self, machine: &Machine) -> bool {
        self.saboteur.run(&format!("kill -0 {}", machine.process), SOON).is_ok()
    }

    /// Waits until the machine's process is gone, which is when its lease ends.
    fn wait_until_gone(&mut self, machine: &Machine) {
        while self.runs(machine) {
            assert!(
                now() < machine.end + LATE_S,
                "it runs past its end:\n{}",
                self.host.serial.tail(60)
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits until the machine's process has said `words` on its way out; returns when.
    fn hear(&self, machine: &Machine, words: &str) -> u64 {
        let said = format!("vmm {}: holdfast-vmm: {words}", machine.id);
        let left_s = (machine.end + LATE_S).saturating_sub(now());
        self.host.serial.wait(&said, Duration::from_secs(left_s)).unwrap();
        now()
    }
}

#[test]
fn leases_end_on_time_without_anybody_to_end_them() {
    let folder = tempfile::tempdir().unwrap();
    let begin = Instant::now();
    let mut node = Node::start(folder.path());
    println!("the node is up after {:?}", begin.elapsed());
    let lasting = LeaseRequest { name: "lasting", seconds: LONG_S, ..LeaseRequest::default() };
    let mut lasting = node.create(&lasting, "console=ttyS0 quiet");
    let told = node.told(&lasting, 0);
    assert!(told <= LONG_S + 2, "{told}");

    the_service_hangs_while_a_lease_ends(&mut node, &lasting);
    println!("a lease ended without the service after {:?}", begin.elapsed());
    the_service_is_gone_for_good(&mut node, &mut lasting);
    println!("another one ended after {:?}", begin.elapsed());
}

/// The machine's guest takes no notice, so it is ended. The next service finds that its lease is over, and
/// takes back what it had, as at any other end.
fn the_service_hangs_while_a_lease_ends(node: &mut Node, lasting: &Machine) {
    let device = node.device();
    let devices = [device.as_str()];
    let request = LeaseRequest {
        name: "held-up",
        seconds: SHORT_S,
        devices: &devices,
        ..LeaseRequest::default()
    };
    let machine = node.create(&request, DEAF);
    node.told(&machine, 0);
    node.saboteur.run("kill -STOP $(pidof agent)", SOON).unwrap();
    let mark = node.host.serial.mark();
    let asked = node.hear(&machine, "the deadline is near");
    assert!(asked + GRACE_S >= machine.end, "asked at {asked}, {} is its end", machine.end);
    let ended = node.hear(&machine, "its deadline passed");
    assert!(ended >= machine.end, "at {ended}, before {}", machine.end);
    node.wait_until_gone(&machine);
    assert!(node.runs(lasting), "{}", node.host.serial.tail(60));
    let nobody = &node.host.serial.text()[mark..];
    assert!(!nobody.contains("event=machine-"), "the service did it:\n{nobody}");

    node.saboteur.run("kill -9 $(pidof agent)", SOON).unwrap();
    let adopted = format!("event=machine-adopted machine={}", lasting.id);
    node.host.serial.wait_from(mark, &adopted, SOON).unwrap();
    node.told(lasting, mark);
    let over = format!("event=machine-ended machine={}", machine.id);
    node.host.serial.wait_from(mark, &over, SOON).unwrap();
    let reset = format!("event=device-reset address={device}");
    node.host.serial.wait_from(mark, &reset, SOON).unwrap();
    node.give_back(&device);
    assert_eq!(node.device(), device);
    let retained = |shown: &Value| shown["state"] == "retained";
    let show = ["machines", "show", &machine.id];
    let shown = node.scene.renter().wait(&show, JOIN_LIMIT, retained).unwrap();
    let detail = shown["detail"].as_str().unwrap();
    assert!(detail.contains("ended by itself at its lease's end"), "{shown:#}");
}

/// Its disk is gone, so it cannot start again, and the calendar is ten years ahead. The machine runs to the
/// end of its renewed lease and no longer.
fn the_service_is_gone_for_good(node: &mut Node, lasting: &mut Machine) {
    let mark = node.host.serial.mark();
    node.renew(lasting, (lasting.end + 10).max(now() + LAST_S));
    let left_s = lasting.end - now();
    let told = node.told(lasting, mark);
    assert!(told.abs_diff(left_s) < 10, "{told}, and {left_s} are left");
    pull_out_the_disk(&mut node.host);
    node.host.serial.wait_from(mark, "event=trouble place=disk", SOON).unwrap();
    node.saboteur.run("kill -9 $(pidof agent)", SOON).unwrap();
    node.host.serial.wait_from(mark, "event=agent-exited status=signal-9", SOON).unwrap();
    let orphan = format!("{} in ", lasting.id);
    let shown = node.host.serial.wait_from(mark, "event=trouble place=orphans", SOON).unwrap();
    assert!(shown.contains(&orphan) && shown.contains("nothing new is accepted"), "{shown}");
    node.saboteur.run("date -s '2036-11-01 00:00:00'", SOON).unwrap();
    assert!(node.runs(lasting), "{}", node.host.serial.tail(60));
    let asked = node.hear(lasting, "the deadline is near");
    assert!(asked + GRACE_S >= lasting.end, "asked at {asked}, {} is its end", lasting.end);
    // This guest goes when it is asked to; if it is slow, it goes all the same.
    node.wait_until_gone(lasting);
    let later = &node.host.serial.text()[mark..];
    assert!(!later.contains("event=agent-ready"), "the service was there:\n{later}");
}
