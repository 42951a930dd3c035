//! Checks of the image that was last built: in `$HOLDFAST_IMAGE`, or in `target/image`. Without one
//! these tests say so and pass; `cargo xtask test` builds one first.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use image::manifest::{Content, Manifest};
use image::{Artifacts, cpio, media, root, uki};

fn built() -> Option<Artifacts> {
    let folder = std::env::var_os("HOLDFAST_IMAGE").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/image"),
        PathBuf::from,
    );
    let artifacts = Artifacts::in_folder(&folder);
    if artifacts.sums.is_file() {
        return Some(artifacts);
    }
    println!("skipped: no image in {}; run `cargo xtask image`", folder.display());
    None
}

#[test]
fn nothing_is_in_the_root_that_the_manifest_does_not_name() {
    let Some(artifacts) = built() else { return };
    let manifest = Manifest::parse(include_str!("../../rootfs/manifest.toml")).unwrap();
    let image = fs::read(&artifacts.uki).unwrap();
    let entries: BTreeMap<_, _> = cpio::read(&uki::section(&image, ".initrd").unwrap())
        .unwrap()
        .into_iter()
        .map(|entry| (format!("/{}", entry.name), entry.kind))
        .collect();
    assert!(entries.keys().eq(manifest.initramfs.keys()));
    let Some(cpio::Kind::File(erofs)) = entries.get("/root.erofs") else {
        panic!("the initramfs has no root.erofs")
    };
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("root.erofs");
    fs::write(&packed, erofs).unwrap();
    let unpacked = folder.path().join("unpacked");
    root::unpack(&packed, &unpacked).unwrap();
    let found = root::observe(&unpacked).unwrap();
    // A file that someone may bake in is allowed, not required.
    let mut listed = manifest.root.clone();
    listed.retain(|path, node| {
        !matches!(node.content, Content::Baked(_)) || found.contains_key(path)
    });
    assert_eq!(root::compare(&listed, &found), []);
    assert!(found.values().all(|file| file.mode & 0o6000 == 0));
}

#[test]
fn the_iso_is_small_and_boots_the_same_file() {
    let Some(artifacts) = built() else { return };
    assert!(fs::metadata(&artifacts.iso).unwrap().len() <= media::ISO_LIMIT);
    let image = fs::read(&artifacts.uki).unwrap();
    assert_eq!(media::read_iso(&artifacts.iso).unwrap(), image);
}

#[test]
fn the_check_sums_hold() {
    let Some(artifacts) = built() else { return };
    let output = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet"])
        .arg(&artifacts.sums)
        .current_dir(&artifacts.folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn the_kernel_loads_no_modules_and_is_locked_down() {
    let Some(artifacts) = built() else { return };
    let text = fs::read_to_string(&artifacts.kernel_config).unwrap();
    let config = image::kconfig::parse_config(&text);
    assert_eq!(config.get("MODULES"), None);
    assert_eq!(config.get("SYSFB_SIMPLEFB"), None);
    assert_eq!(config.get("LOCK_DOWN_KERNEL_FORCE_CONFIDENTIALITY"), Some(&"y"));
}
