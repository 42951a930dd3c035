//! What servers do to their nodes: a clock that is years off, a network that goes and comes, a disk that
//! does not answer any more. The node stays in reach, says what is wrong, refuses what it cannot keep,
//! and is well when the fault is over.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    host::{HostOptions, Link, Medium, TEST_MACHINE},
    ntp,
    scene::{self, JOIN_LIMIT, LeaseRequest, Scene},
};
use serde_json::Value;

/// How long the node may take to answer, and to notice.
const SOON: Duration = Duration::from_secs(120);

fn shows<'a>(nodes: &'a Value, node: &str) -> Option<&'a Value> {
    nodes.as_array()?.iter().find(|entry| entry["node"] == node)
}

#[test]
fn a_clock_ten_years_ahead_and_a_network_that_goes_and_comes() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let server = format!("[time]\nntp = [\"{TEST_MACHINE}:{}\"]\n", ntp::serve().unwrap());
    let options = HostOptions {
        medium: Medium::Kernel(String::new()),
        memory_mib: 1024,
        config: Some(scene.node_config("ahead", &server)),
        rtc: Some("base=2036-11-22T00:00:00".to_owned()),
        ..HostOptions::default()
    };
    // A gateway lists no node that lives in another year.
    let (mut host, node) = scene.boot("ahead", options).unwrap();

    host.set_link(Link::Down).unwrap();
    let gone = |nodes: &Value| shows(nodes, &node).is_none();
    scene.cli.wait(&["nodes"], SOON, gone).unwrap();
    host.set_link(Link::Up).unwrap();
    let there = |nodes: &Value| shows(nodes, &node).is_some();
    scene.cli.wait(&["nodes"], SOON, there).unwrap();
}

/// A disk that is served by a process of its own, and is gone with it.
struct Served(Child);

impl Served {
    fn start(file: &Path, socket: &Path) -> Self {
        let child = Command::new("qemu-nbd")
            .args(["--persistent", "--format=raw", "--cache=unsafe", "-k"])
            .args([socket, file])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while !socket.exists() {
            assert!(begin.elapsed() < SOON, "qemu-nbd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self(child)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_disk_that_does_not_answer_any_more() {
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::start(folder.path()).unwrap();
    let disk = folder.path().join("disk.img");
    std::fs::copy(scene::image_folder().unwrap().join("holdfast.img"), &disk).unwrap();
    let socket = folder.path().join("disk.sock");
    let served = Served::start(&disk, &socket);
    // QEMU's name for what is served there.
    let medium = Medium::Disk(PathBuf::from(format!("nbd:unix:{}", socket.display())));
    let options = HostOptions { medium, memory_mib: 1024, ..HostOptions::default() };
    let (mut host, node) = scene.boot("lame", options.clone()).unwrap();
    let guest = scene.push_guest(None).unwrap();

    let mark = host.serial.mark();
    drop(served);
    std::fs::remove_file(&socket).ok();
    host.serial.wait_from(mark, "event=trouble place=store", SOON).unwrap();
    let request = LeaseRequest { node: &node, memory_mib: 64, ..LeaseRequest::default() };
    let (lease, _) = scene.lease(&request).unwrap();
    let refused = format!("{:#}", scene.create(&lease, &guest).unwrap_err());
    assert!(refused.contains("the store failed"), "{refused}");
    assert!(shows(&scene.cli.json(&["nodes"]).unwrap(), &node).is_some(), "out of reach");
    host.press_ctrl_alt_del().unwrap();
    host.serial.wait_from(mark, "event=shutdown-done", SOON).unwrap();
    drop(host);

    // The disk is back, and so is the node.
    let _served = Served::start(&disk, &socket);
    let (host, again) = scene.boot("lame", options).unwrap();
    assert_eq!(again, node);
    host.serial.wait("event=agent-ready", JOIN_LIMIT).unwrap();
    assert!(!host.serial.text().contains("event=ram-mode"), "{}", host.serial.text());
}
