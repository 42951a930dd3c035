//! `holdfast-update` ends with the status that its documentation says, and says what failed.

#[allow(dead_code, reason = "these tests use a part of it")]
mod fixture;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use fixture::{Mirror, root};
use serde_json::{Value, json};
use update::shell::Store;

/// A folder with a mirror and a store.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(version: u64, targets: Value) -> Self {
        let bench = Self { folder: tempfile::tempdir().expect("a folder") };
        fs::create_dir(bench.path("metadata")).expect("a folder");
        fs::create_dir(bench.path("targets")).expect("a folder");
        fs::write(bench.path("root.json"), root(1, 2)).expect("a file");
        bench.publish(version, targets);
        bench
    }

    fn publish(&self, version: u64, targets: Value) {
        let mut mirror = Mirror::default();
        mirror.release(version, &[("targets", targets, 4)], 2);
        for (name, bytes) in mirror.0 {
            fs::write(self.path("metadata").join(name), bytes).expect("a file");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        self.run_at(&format!("file://{}", self.path("metadata").display()), arguments)
    }

    fn run_at(&self, metadata: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let done = Command::new(env!("CARGO_BIN_EXE_holdfast-update"))
            .arg("--root")
            .arg(self.path("root.json"))
            .args(["--metadata-url", metadata])
            .arg("--targets-url")
            .arg(format!("file://{}", self.path("targets").display()))
            .arg("--store")
            .arg(self.path("store"))
            .args(arguments)
            .output()
            .expect("holdfast-update runs");
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    }
}

fn empty() -> Value {
    json!({"targets": {}})
}

fn target(length: u64) -> Value {
    json!({"targets": {"file": {"length": length, "hashes": {"sha256": "00".repeat(32)}}}})
}

#[track_caller]
fn check(found: (Option<i32>, String), status: i32, says: &str) {
    assert!(found.0 == Some(status) && found.1.contains(says), "not {status} {says:?}: {found:?}");
}

#[test]
fn good_ends_and_wrong_command_lines() {
    let bench = Bench::new(1, empty());
    check(bench.run(&["refresh"]), 0, "");
    check(bench.run(&["get"]), 2, "NAME");
    check(bench.run_at("ftp://a.example", &["refresh"]), 5, "not an https, http or file URL");
    check(
        bench.run_at("http://127.0.0.1:1", &["refresh"]),
        5,
        "cannot connect to 127.0.0.1, port 1",
    );
}

#[test]
fn local_files() {
    let bench = Bench::new(1, empty());
    fs::write(bench.path("store"), "in the way").expect("a file");
    check(bench.run(&["refresh"]), 3, "cannot open");
    fs::remove_file(bench.path("store")).expect("a file");
    let held = Store::open(&bench.path("store")).expect("a store");
    check(bench.run(&["refresh"]), 4, "another process");
    drop(held);
    fs::remove_file(bench.path("root.json")).expect("a file");
    check(bench.run(&["refresh"]), 3, "root.json");
}

#[test]
fn refused_metadata() {
    let bench = Bench::new(2, empty());
    check(bench.run(&["refresh"]), 0, "");
    bench.publish(1, empty());
    check(bench.run(&["refresh"]), 8, "timestamp.json goes back from version 2 to 1");
    bench.publish(3, json!({"targets": {}, "expires": "2020-01-01T00:00:00Z"}));
    check(bench.run(&["refresh"]), 9, "targets.json expired on 2020-01-01T00:00:00Z");
    fs::write(bench.path("metadata/3.targets.json"), "{}").expect("a file");
    check(
        bench.run(&["refresh"]),
        7,
        "targets.json cannot be read: signatures: expected this field",
    );
    fs::remove_file(bench.path("metadata/3.targets.json")).expect("a file");
    check(bench.run(&["refresh"]), 6, "targets.json is not there");
    fs::write(bench.path("metadata/timestamp.json"), vec![b' '; 20_000]).expect("a file");
    check(bench.run(&["refresh"]), 12, "more than 16384 bytes");
}

#[test]
fn refused_targets() {
    let bench = Bench::new(1, target(4));
    check(bench.run(&["get", "other"]), 10, "\"other\"");
    check(bench.run(&["get", "file"]), 6, "no file for target \"file\"");
    let name = format!("targets/{}.file", "00".repeat(32));
    let into = bench.path("into");
    fs::create_dir(&into).expect("a folder");
    let get = ["get", "--into", into.to_str().expect("UTF-8"), "file"];
    let places = [("long", "abcde", "longer than"), ("short", "abc", "ends after 3 of the 4")];
    let found = places.map(|(_, content, says)| {
        fs::write(bench.path(&name), content).expect("a file");
        (bench.run(&get), says)
    });
    for (found, says) in found {
        check(found, 11, says);
    }
    fs::write(bench.path(&name), "abcd").expect("a file");
    check(bench.run(&get), 11, "SHA-256");
    assert!(!Path::new(&into).join("file").exists());
    bench.publish(2, target(1 << 60));
    check(bench.run(&get), 12, "more than");
}

#[test]
fn a_torn_write_is_not_a_file_of_the_store() {
    let bench = Bench::new(1, empty());
    check(bench.run(&["refresh"]), 0, "");
    fs::write(bench.path("store/.unfinished"), "{\"signatures\":[").expect("a file");
    bench.publish(2, empty());
    check(bench.run(&["refresh"]), 0, "");
    let stored = fs::read(bench.path("store/timestamp.json")).expect("the timestamp");
    let published = fs::read(bench.path("metadata/timestamp.json")).expect("the timestamp");
    assert_eq!(stored, published);
}

#[test]
fn a_reader_that_has_enough_ends_a_list_without_a_word() {
    let bench = Bench::new(1, target(9));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let metadata = format!("file://{}", bench.path("metadata").display());
    let done = Command::new(env!("CARGO_BIN_EXE_holdfast-update"))
        .arg("--root")
        .arg(bench.path("root.json"))
        .args(["--metadata-url", &metadata, "--store"])
        .arg(bench.path("store"))
        .arg("list")
        .stdout(writer)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .expect("holdfast-update runs");
    assert_eq!((done.status.code(), &*done.stderr), (Some(141), &b""[..]));
}

#[test]
fn a_folder_that_is_not_there_is_told_before_anything_is_fetched() {
    let bench = Bench::new(1, json!({}));
    let none = bench.path("none").display().to_string();
    let (status, said) = bench.run(&["get", "--into", &none, "file"]);
    assert_eq!(status, Some(3));
    assert!(said.contains("/none is no folder: make it, or name one with --into"), "{said}");
    assert!(!bench.path("store").exists());
    // Help calls the program by its name.
    let done = Command::new(env!("CARGO_BIN_EXE_holdfast-update")).arg("list").output();
    let done = done.expect("holdfast-update runs");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2));
    assert!(said.contains("Usage: holdfast-update"), "{said}");
}
