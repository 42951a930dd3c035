//! What a renter does to a running guest from outside, through gateway and node: pauses it, reads
//! its memory, asks what happened and what was counted, and hears its last words when it is off.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, process::Command, time::Duration};

use qemu_tests::harness::{
    host::HostOptions,
    scene::{GUEST_LIMIT, LeaseRequest, Scene},
};
use serde_json::Value;

/// How long anything but a guest's start may take.
const SOON: Duration = Duration::from_secs(90);
/// What the guest does after it is ready: it counts aloud.
const COUNTING: &str =
    "#!/bin/sh\nn=0\nwhile true; do n=$((n+1)); echo \"count $n.\"; sleep 1; done\n";

struct Machine<'a> {
    scene: &'a Scene,
    id: String,
}

impl Machine<'_> {
    fn ask(&self, words: &[&str]) -> Value {
        let (command, rest) = words.split_first().unwrap();
        let all = [&["machines", command, &self.id], rest].concat();
        self.scene.renter().json(&all).unwrap()
    }

    fn console(&self, more: &[&str]) -> String {
        self.scene.renter().text(&[&["console", &self.id], more].concat()).unwrap()
    }

    fn wait_until(&self, state: &str) {
        let is = |machine: &Value| machine["state"] == state;
        self.scene.renter().wait(&["machines", "show", &self.id], GUEST_LIMIT, is).unwrap();
    }
}

#[test]
fn a_renter_looks_into_a_machine_and_hears_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let (_host, node) = scene.boot("watched", HostOptions::default()).unwrap();
    let guest = scene.push_guest(Some(COUNTING)).unwrap();
    let request = LeaseRequest { node: &node, disk_mib: 16, ..LeaseRequest::default() };
    let (lease, id) = scene.lease(&request).unwrap();
    scene.create(&lease, &guest).unwrap();
    let machine = Machine { scene: &scene, id };
    scene.wait_for_console(&machine.id, "count 3.", GUEST_LIMIT).unwrap();

    stand_still(&machine, folder.path(), u64::from(request.memory_mib));
    what_happened_is_told(&machine);
    its_last_words_stay(&machine);
}

fn stand_still(machine: &Machine<'_>, folder: &Path, memory_mib: u64) {
    let paused = machine.ask(&["pause"]);
    assert!(paused["detail"].as_str().unwrap().contains("waits"), "{paused:#}");
    let before = machine.console(&[]);
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(machine.console(&[]), before);
    let file = folder.join("core");
    let dump = machine.ask(&["dump", "--out", file.to_str().unwrap()]);
    let length = std::fs::metadata(&file).unwrap().len();
    assert_eq!(dump["bytes"], length);
    // The guest's kernel at least, and not what the guest never touched.
    assert!(((8 << 20)..(memory_mib << 20)).contains(&length), "{length}");
    let Ok(read) = Command::new("readelf").arg("-hlnW").arg(&file).output() else {
        println!("skipped: readelf on a machine's dump: there is no readelf");
        return;
    };
    let text = String::from_utf8_lossy(&read.stdout);
    assert!(text.contains("Core file") && text.contains("NT_PRSTATUS"), "{text}");
    let sizes = text.lines().filter(|line| line.trim_start().starts_with("LOAD "));
    let size = |line: &str| line.split_whitespace().nth(5).map(str::to_owned);
    let sizes = sizes.map(|line| size(line).unwrap());
    let memory: u64 = sizes.map(|hex| u64::from_str_radix(&hex[2..], 16).unwrap()).sum();
    assert_eq!(memory, memory_mib << 20);
    // The guest's kernel has told where its VMCOREINFO is: without that, drgn reads no dump.
    assert!(text.contains("VMCOREINFO"), "{text}");
    let resumed = machine.ask(&["resume"]);
    assert_eq!(resumed["detail"], "", "{resumed:#}");
    let count = |text: &str| text.matches("count ").count();
    let next = format!("count {}.", count(&before) + 2);
    machine.scene.wait_for_console(&machine.id, &next, SOON).unwrap();
}

fn what_happened_is_told(machine: &Machine<'_>) {
    let events = machine.ask(&["events"]);
    let kinds: Vec<&str> =
        events["events"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["started", "paused", "dumped", "resumed"]);
    let counters = machine.ask(&["counters"]);
    let names: Vec<&Value> =
        counters["devices"].as_array().unwrap().iter().map(|device| &device["name"]).collect();
    assert_eq!(names, ["blk0", "rng0"]);
    let show = ["machines", "counters", &machine.id, "--prometheus"];
    let text = machine.scene.renter().text(&show).unwrap();
    assert!(text.contains("# TYPE holdfast_vm_vcpu_exits_total counter"), "{text}");
}

fn its_last_words_stay(machine: &Machine<'_>) {
    let last = machine.console(&[]);
    machine.ask(&["stop"]);
    machine.wait_until("stopped");
    let off = machine.console(&[]);
    assert!(off.contains(last.trim_end()), "{off}");
    machine.ask(&["start"]);
    machine.wait_until("running");
    assert_eq!(machine.console(&["--previous"]), off);
}
