//! A machine's life as its renter steers it, on a node that keeps its state on disk: followed,
//! stopped, started, restarted, renewed, across a reboot of the node, billed, deleted; another one's lease ends.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::Path,
    process::{Child, Stdio},
    time::{Duration, SystemTime},
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium},
    recording::Recording,
    scene::{self, GUEST_LIMIT, JOIN_LIMIT, LeaseRequest, PushedGuest, Scene},
    serial::{Echo, Serial},
};
use serde_json::Value;

/// How long the node may take to answer anything but a guest's start.
const SOON: Duration = Duration::from_secs(90);
/// The whole way down: every step of it has a deadline, and these are their sum.
const DOWN: Duration = Duration::from_secs(100);
/// A lease that ends while its machine runs, in seconds: long enough for the guest to be up before.
const BRIEF_S: u64 = 60;
/// What the guest writes to its disk.
const MARKER: &str = "written by the tenant";
/// What the guest does after it is ready: it counts aloud.
const COUNTING: &str =
    "#!/bin/sh\nn=0\nwhile true; do n=$((n+1)); echo \"count $n.\"; sleep 1; done\n";

struct Machine<'a> {
    scene: &'a Scene,
    id: String,
}

impl Machine<'_> {
    fn ask(&self, word: &str) {
        self.scene.renter().text(&["machines", word, &self.id]).unwrap();
    }

    fn wait_until(&self, state: &str) -> Value {
        let is = |machine: &Value| machine["state"] == state;
        self.scene.renter().wait(&["machines", "show", &self.id], GUEST_LIMIT, is).unwrap()
    }

    fn wait_until_ready(&self) {
        self.scene.wait_for_console(&self.id, "guest: ready", GUEST_LIMIT).unwrap();
    }

    fn run(&self, command: &str) -> String {
        self.scene.ssh(&self.id, command).unwrap()
    }

    fn disk_still_holds_the_marker(&self) {
        let read = self.run(&format!("head -c {} /dev/vda", MARKER.len()));
        assert_eq!(read.trim_end(), MARKER);
    }

    /// Follows the console, collecting it in a file of `folder`.
    fn follow(&self, folder: &Path) -> (Child, Serial) {
        let mut command = self.scene.renter().command(&["console", &self.id, "--follow"]).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        let collected = Serial::collect(output, &folder.join("followed.log"), Echo::Quiet).unwrap();
        (child, collected)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

#[test]
fn a_machine_lives_as_its_renter_wants_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let disk = folder.path().join("disk.img");
    let blank = scene::image_folder().unwrap().join("holdfast.img");
    std::fs::copy(&blank, &disk).unwrap();
    let record = folder.path().join("record");
    let mut recording = Recording::begin(&record, &disk, Some(&blank)).unwrap();
    let config = scene.node_config("lasting", "");
    let options = |disk| HostOptions {
        medium: Medium::Disk(disk),
        config: Some(config.clone()),
        ..HostOptions::default()
    };
    let recorded = HostOptions { recorded: Some(recording.log()), ..options(disk) };
    let (mut host, node) = scene.boot("lasting", recorded).unwrap();
    recording.installed().unwrap();
    recording.node(&node).unwrap();
    let guest = scene.push_guest(Some(COUNTING)).unwrap();
    let request = LeaseRequest {
        node: &node,
        start: Some(now()),
        disk_mib: 16,
        micro_per_second: 7,
        ..LeaseRequest::default()
    };
    let machine = create(&scene, &request, &guest);
    recording.machine(&machine.id, 1).unwrap();

    follow_while_it_counts(&machine, folder.path());
    machine.run(&format!("printf '{MARKER}' > /dev/vda; sync; touch /run/before"));
    stop_and_start(&machine, &host);
    restart(&machine);
    stop_while_it_sleeps(&machine, &host);
    renew(&machine, &request);
    recording.machine(&machine.id, 2).unwrap();
    reboot_the_node(&machine, &mut host);
    recording.leaving(&machine.id).unwrap();
    delete_and_check_the_bill(&machine, request.start.unwrap());
    recording.deleted(&machine.id).unwrap();
    expire(&LeaseRequest { start: None, ..request }, &scene, &guest, &mut recording);
    press_the_nodes_power_button(host);
    recording.boot(options).unwrap();
    recording.judge().unwrap();
}

fn create<'a>(scene: &'a Scene, request: &LeaseRequest<'_>, guest: &PushedGuest) -> Machine<'a> {
    let (lease, id) = scene.lease(request).unwrap();
    scene.create(&lease, guest).unwrap();
    let machine = Machine { scene, id };
    machine.wait_until_ready();
    machine
}

/// Lines come while the guest writes them, not when it is done.
fn follow_while_it_counts(machine: &Machine<'_>, folder: &Path) {
    let (mut follower, followed) = machine.follow(folder);
    followed.wait("guest: ready", SOON).unwrap();
    let first = followed.wait("count ", SOON).unwrap();
    let first: u64 = first.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
    followed.wait(&format!("count {}.", first + 5), SOON).unwrap();
    follower.kill().unwrap();
    follower.wait().unwrap();
}

fn stop_and_start(machine: &Machine<'_>, host: &Host) {
    let mark = host.serial.mark();
    machine.ask("stop");
    host.serial.wait_from(mark, "event=machine-button", SOON).unwrap();
    let stopped = machine.wait_until("stopped");
    assert!(stopped["detail"].as_str().unwrap().contains("powered off"), "{stopped:#}");
    assert!(!host.serial.text()[mark..].contains("event=machine-forced"));
    machine.ask("start");
    machine.wait_until("running");
    machine.wait_until_ready();
    machine.disk_still_holds_the_marker();
    machine.run("test ! -e /run/before && touch /run/before");
}

fn restart(machine: &Machine<'_>) {
    machine.ask("restart");
    let limit = std::time::Instant::now() + GUEST_LIMIT;
    let again = || machine.scene.ssh(&machine.id, "test ! -e /run/before").is_ok();
    while !again() {
        assert!(std::time::Instant::now() < limit, "the guest did not start anew");
    }
    machine.disk_still_holds_the_marker();
}

/// A guest that sleeps is shown so. Its stop wakes it, and then it ends by itself, in its grace.
fn stop_while_it_sleeps(machine: &Machine<'_>, host: &Host) {
    machine.run("(sleep 1; echo freeze > /sys/power/state) < /dev/null > /dev/null 2>&1 &");
    let sleeps =
        |shown: &Value| shown["detail"].as_str().is_some_and(|said| said.contains("sleeps"));
    let show = ["machines", "show", &machine.id];
    let shown = machine.scene.renter().wait(&show, SOON, sleeps).unwrap();
    assert_eq!(shown["state"], "running", "{shown:#}");
    let mark = host.serial.mark();
    machine.ask("stop");
    let stopped = machine.wait_until("stopped");
    assert!(stopped["detail"].as_str().unwrap().contains("powered off"), "{stopped:#}");
    let log = &host.serial.text()[mark..];
    assert!(log.contains("event=machine-button") && !log.contains("event=machine-forced"), "{log}");
    machine.ask("start");
    machine.wait_until("running");
    machine.wait_until_ready();
    machine.disk_still_holds_the_marker();
}

fn renew(machine: &Machine<'_>, first: &LeaseRequest<'_>) {
    let scene = machine.scene;
    let ask = |request: &LeaseRequest<'_>| {
        let (lease, _) = scene.lease(&LeaseRequest { id: Some(&machine.id), ..*request }).unwrap();
        let lease = lease.to_str().unwrap();
        scene.renter().json(&["machines", "renew", &machine.id, "--lease", lease])
    };
    let longer = LeaseRequest { name: "renewed", seconds: 7200, serial: 2, ..*first };
    let renewed = ask(&longer).unwrap();
    assert_eq!(renewed["end"], first.start.unwrap() + 7200);
    assert_eq!(renewed["serial"], 2);
    let refused = |request| format!("{:#}", ask(&request).unwrap_err());
    let said = refused(LeaseRequest { name: "again", ..longer });
    assert!(said.contains("serial 2; expected more than 2"), "{said}");
    let said = refused(LeaseRequest { name: "larger", memory_mib: 500, serial: 3, ..longer });
    assert!(said.contains("shape differs"), "{said}");
    let said = refused(LeaseRequest { name: "shorter", seconds: 1800, serial: 3, ..longer });
    assert!(said.contains("before the"), "{said}");
}

/// Ctrl-alt-del on the node's keyboard: it goes down in bounded steps, its machine first, and comes
/// back with everything.
fn reboot_the_node(machine: &Machine<'_>, host: &mut Host) {
    let mark = host.serial.mark();
    host.press_ctrl_alt_del().unwrap();
    let wait = |pattern: &str, limit| host.serial.wait_from(mark, pattern, limit).unwrap();
    let said = wait("event=shutdown ", SOON);
    assert!(said.contains("action=reboot because=ctrl-alt-del"), "{said}");
    wait("event=machine-button", SOON);
    wait("event=machine-exited", DOWN);
    let said = wait("event=shutdown-done", DOWN);
    assert!(said.contains("unmounted=true"), "{said}");
    wait("event=mounts-verified", JOIN_LIMIT);
    wait("event=machine-started", JOIN_LIMIT + GUEST_LIMIT);
    machine.wait_until("running");
    machine.wait_until_ready();
    machine.disk_still_holds_the_marker();
    let shown = machine.scene.renter().json(&["machines", "show", &machine.id]).unwrap();
    assert_eq!(shown["serial"], 2, "{shown:#}");
}

/// The receipts outlive the machine, count each second once and none in which it did not run.
fn delete_and_check_the_bill(machine: &Machine<'_>, since: u64) {
    let renter = machine.scene.renter();
    machine.ask("delete");
    let gone = |machines: &Value| machines.as_array().is_some_and(Vec::is_empty);
    renter.wait(&["machines", "list"], SOON, gone).unwrap();
    let file = |name: &str| machine.scene.folder.join(name).to_str().unwrap().to_owned();
    let leases = [file("lease-machine.json"), file("lease-renewed.json")];
    let ask = ["receipts", &machine.id, "--lease", &leases[0], "--lease", &leases[1]];
    let bill = renter.json(&ask).unwrap();
    assert_eq!(bill["checked"], "signatures, node, price and sums");
    let receipts: Vec<&Value> =
        bill["receipts"].as_array().unwrap().iter().map(|signed| &signed["receipt"]).collect();
    let sum = |field: &str| receipts.iter().filter_map(|r| r[field].as_u64()).sum::<u64>();
    assert!(receipts.iter().any(|receipt| receipt["serial"] == 1), "{bill:#}");
    assert!(receipts.iter().any(|receipt| receipt["serial"] == 2), "{bill:#}");
    assert!((20..now() - since).contains(&sum("running_s")), "{bill:#}");
    assert_eq!(sum("micro"), 7 * sum("running_s"));
    let stranger = machine.scene.cli.with_key(&machine.scene.operator.file);
    let said = format!("{:#}", stranger.text(&["receipts", &machine.id]).unwrap_err());
    assert!(said.contains("knows no lease") && said.contains("of your key"), "{said}");
    println!("{}", renter.text(&ask).unwrap());
}

/// A lease that nobody renews ends, and is told so.
fn expire(
    request: &LeaseRequest<'_>,
    scene: &Scene,
    guest: &PushedGuest,
    recording: &mut Recording,
) {
    let request = LeaseRequest { name: "brief", seconds: BRIEF_S, ..*request };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, guest).unwrap();
    recording.machine(&id, 1).unwrap();
    let machine = Machine { scene, id };
    machine.wait_until_ready();
    machine.wait_until("retained");
    recording.expired(&machine.id).unwrap();
}

fn press_the_nodes_power_button(mut host: Host) {
    let mark = host.serial.mark();
    host.press_power_button().unwrap();
    let said = host.serial.wait_from(mark, "event=shutdown-done", DOWN).unwrap();
    assert!(said.contains("action=power-off"), "{said}");
    host.wait_for_end(SOON).unwrap();
}
