//! The last stage of a build, with small inputs and the real tools: what comes out is the same
//! twice, holds what it should, and another program reads it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

mod fixture;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use image::assemble::{Artifacts, assemble};
use image::root::{self, Deviation};
use image::{Silent, cpio, media, tools, uki};

/// Whether the tools are there; says so when they are not.
fn have_tools() -> bool {
    let wanted = ["mkfs.erofs", "fsck.erofs", "mke2fs", "xorriso"];
    let missing: Vec<_> = tools::missing()
        .into_iter()
        .filter(|requirement| wanted.contains(&requirement.probe))
        .map(|requirement| requirement.package)
        .collect();
    if !missing.is_empty() {
        println!("skipped: this machine lacks {missing:?}");
    }
    missing.is_empty()
}

fn build(folder: &Path) -> Artifacts {
    let programs = folder.join("programs");
    let output = folder.join("image");
    fs::create_dir(&programs).unwrap();
    fs::create_dir(&output).unwrap();
    assemble(&fixture::inputs(&programs), &output, &Silent).unwrap()
}

#[test]
fn two_builds_are_byte_identical() {
    if !have_tools() {
        return;
    }
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (one, two) = (build(one.path()), build(two.path()));
    let sums = |artifacts: &Artifacts| fs::read_to_string(&artifacts.sums).unwrap();
    assert_eq!(sums(&one), sums(&two));
    assert_eq!(sums(&one).lines().count(), 12);
}

#[test]
fn the_image_holds_its_parts() {
    if !have_tools() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let artifacts = build(folder.path());
    let image = fs::read(&artifacts.uki).unwrap();
    let text = |name| String::from_utf8(uki::section(&image, name).unwrap()).unwrap();
    assert_eq!(text(".cmdline"), "rootfstype=ramfs console=ttyS0");
    assert_eq!(text(".uname"), "7.3.4-holdfast");
    assert!(text(".osrel").contains("BUILD_ID=0123456789abcdef\n"));
    assert_eq!(uki::section(&image, ".linux"), Some(vec![0x5a; 300_000]));
    assert_eq!(media::read_iso(&artifacts.iso).unwrap(), image);
    assert_eq!(fs::read(artifacts.pxe.join("holdfast.efi")).unwrap(), image);
    let names: Vec<_> = cpio::read(&uki::section(&image, ".initrd").unwrap())
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    assert_eq!(names, ["init", "root.erofs"]);
}

#[test]
fn the_partitions_are_file_systems_that_their_own_checkers_accept() {
    if !have_tools() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let artifacts = build(folder.path());
    let disk = fs::File::open(&artifacts.disk).unwrap();
    let table = gpt::GptConfig::new().writable(false).open_from_device(disk).unwrap();
    let starts: BTreeMap<_, _> =
        table.partitions().values().map(|p| (p.name.clone(), p.first_lba * 512)).collect();
    for name in ["holdfast-state", "holdfast-data"] {
        let status = Command::new("e2fsck")
            .args(["-f", "-n"])
            .arg(format!("{}?offset={}", artifacts.disk.display(), starts[name]))
            .output()
            .unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    }
}

#[test]
fn the_bill_of_materials_names_every_file() {
    if !have_tools() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let artifacts = build(folder.path());
    let text = fs::read_to_string(&artifacts.sbom).unwrap();
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let names: Vec<_> = document["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["fileName"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "./etc/os-release",
            "./usr/bin/agent",
            "./usr/bin/dashboard",
            "./usr/bin/e2fsck",
            "./usr/bin/holdfast-vmm",
            "./usr/share/holdfast/empty-data",
            "./usr/share/holdfast/empty-state",
            "./usr/share/ovmf/OVMF_CODE_4M.fd",
            "./usr/share/ovmf/OVMF_VARS_4M.fd",
            "./init",
            "./root.erofs"
        ]
    );
}

#[test]
fn a_smuggled_shell_is_found() {
    if !have_tools() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("tree");
    fs::create_dir_all(&tree).unwrap();
    fs::copy("/bin/sh", tree.join("sh")).unwrap();
    let image = folder.path().join("root.erofs");
    root::pack(&tree, &image).unwrap();
    let unpacked = folder.path().join("unpacked");
    root::unpack(&image, &unpacked).unwrap();
    let found = root::observe(&unpacked).unwrap();
    assert_eq!(root::compare(&BTreeMap::new(), &found), [Deviation::Unlisted("/sh".to_owned())]);
}
