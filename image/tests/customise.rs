//! Finished images with another configuration: what changes, what does not, and what is refused. The
//! images are those that were last built; without one these tests say so and pass.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;

use image::customise::{Changes, CustomiseError, Lost, customise};
use image::keys::{KeyFiles, Keys};
use image::program::{Parts, Signatures};
use image::{Artifacts, authenticode, cpio, media, pcr, uki};

/// A key of a lease authority.
const AUTHORITY: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

fn built() -> Option<Artifacts> {
    let folder = std::env::var_os("HOLDFAST_IMAGE").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/image"),
        PathBuf::from,
    );
    let artifacts = Artifacts::in_folder(&folder);
    if artifacts.measurements.is_file() {
        return Some(artifacts);
    }
    println!("skipped: customised images: no image in {}", folder.display());
    None
}

fn config(name: &str) -> String {
    let key = "01".repeat(32);
    format!("version = 1\nname = \"{name}\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n")
}

fn changes(config: String) -> Changes {
    Changes {
        config,
        authority: Vec::new(),
        threshold: None,
        channel: None,
        keys: Keys::default(),
        signatures: Lost::Refused,
    }
}

/// Runs the program by a shell; `$0` is it, `$1` an image, `$2` a configuration, `$3` a folder.
fn shell(script: &str, built: &Artifacts, folder: &Path) -> std::process::Output {
    let document = folder.join("holdfast.toml");
    fs::write(&document, config("n")).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_image")]).arg(&built.uki);
    command.arg(&document).arg(folder).output().unwrap()
}

#[test]
fn a_reader_that_has_had_enough_is_no_panic() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let make = "\"$0\" customise \"$1\" -o \"$3/new.efi\" --config \"$2\"";
    // The pipe's reader is gone before anything is written.
    let script = format!("{{ sleep 0.2; {make}; echo status $? >&2; }} | true");
    let told = shell(&script, &built, folder.path());
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("status 141") && !told.contains("panicked"), "{told}");
    assert!(folder.path().join("new.efi").is_file());
    let told = shell(&format!("{make} > /dev/full"), &built, folder.path());
    assert_eq!(told.status.code(), Some(1));
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("cannot write to standard output"), "{told}");
}

#[test]
fn a_disk_that_is_full_is_left_as_it_was() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Writing past the limit fails as on a full disk, once the signal is ignored (setrlimit(2)).
    let script = "trap '' XFSZ; ulimit -f 1000; exec \"$0\" customise \"$1\" -o \"$3/new.efi\" --config \"$2\"";
    let told = shell(script, &built, folder.path());
    assert_eq!(told.status.code(), Some(1));
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("cannot write") && told.contains("new.efi.partial"), "{told}");
    let left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["holdfast.toml"]);
}

/// Makes keys for everything.
fn keys(folder: &Path) -> Keys {
    let run = |arguments: &[&str]| {
        let output = Command::new("openssl").current_dir(folder).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run(&["genrsa", "-out", "k", "2048"]);
    run(&["req", "-new", "-x509", "-subj", "/CN=ours", "-key", "k", "-out", "c"]);
    let files = KeyFiles {
        secure_boot_key: Some(folder.join("k")),
        secure_boot_cert: Some(folder.join("c")),
        pcr_key: Some(folder.join("k")),
        ..KeyFiles::default()
    };
    files.read().unwrap()
}

fn document(program: &[u8]) -> Option<String> {
    let entries = cpio::read(&uki::section(program, ".initrd").unwrap()).unwrap();
    entries.into_iter().find_map(|entry| match entry.kind {
        cpio::Kind::File(data) if entry.name == "customised/holdfast.toml" => {
            Some(String::from_utf8(data).unwrap())
        }
        cpio::Kind::File(_) | cpio::Kind::Directory => None,
    })
}

#[test]
fn an_iso_gets_a_configuration_and_keeps_everything_else() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [one, two, direct] = ["one.iso", "two.iso", "direct.iso"].map(|n| folder.path().join(n));
    customise(&built.iso, &one, &changes(config("one"))).unwrap();
    let program = media::read_iso(&one).unwrap();
    assert_eq!(document(&program), Some(config("one")));
    let [old, new] = [&fs::read(&built.uki).unwrap(), &program].map(|p| Parts::of(p).unwrap());
    assert_eq!(Parts { initrd: Vec::new(), ..old }, Parts { initrd: Vec::new(), ..new });

    // Once more, and it is as if there had been one change.
    let said = customise(&one, &two, &changes(config("two"))).unwrap();
    customise(&built.iso, &direct, &changes(config("two"))).unwrap();
    assert!(fs::read(&two).unwrap() == fs::read(&direct).unwrap());
    let (before, after) = (fs::read(&built.iso).unwrap(), fs::read(&two).unwrap());
    assert_eq!(before.len(), after.len());
    // The file system of the CD comes first; what changed lies in the partition behind it.
    assert!(before[..64 << 10] == after[..64 << 10]);
    let register = pcr::predict(&media::read_iso(&two).unwrap()).unwrap();
    let register: String = register.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(said["tpm"]["pcr11_sha256"], register);
}

#[test]
fn what_was_signed_is_signed_again_or_refused() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [signed, again] = ["signed.efi", "again.efi"].map(|name| folder.path().join(name));
    let with_keys = Changes { keys: keys(folder.path()), ..changes(config("signed")) };
    let said = customise(&built.uki, &signed, &with_keys).unwrap();
    let signatures = Signatures::of(&fs::read(&signed).unwrap()).unwrap();
    assert_eq!(signatures, Signatures { secure_boot: true, measurements: true });
    let program = fs::read(&signed).unwrap();
    let policy: serde_json::Value =
        serde_json::from_slice(&uki::section(&program, ".pcrsig").unwrap()).unwrap();
    assert_eq!(policy["sha256"][0]["pol"], said["tpm"]["policy_sha256"]);
    assert_eq!(policy["sha256"][0]["pkfp"], said["tpm"]["key_sha256"]);

    let refused = customise(&signed, &again, &changes(config("x"))).unwrap_err();
    assert!(matches!(refused, CustomiseError::NeedsKey { .. }), "{refused}");
    assert!(!again.exists());
    let half = Keys { pcr: None, ..keys(folder.path()) };
    let refused = customise(&signed, &again, &Changes { keys: half, ..changes(config("x")) });
    assert!(matches!(refused, Err(CustomiseError::NeedsPcrKey { .. })));
    customise(&signed, &again, &Changes { signatures: Lost::Dropped, ..changes(config("x")) })
        .unwrap();
    let none = Signatures { secure_boot: false, measurements: false };
    assert_eq!(Signatures::of(&fs::read(&again).unwrap()).unwrap(), none);
}

#[test]
fn the_authority_is_replaced_and_mistakes_are_named() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to.efi");
    let keys = vec![AUTHORITY.to_owned(), "03".repeat(32)];
    let other = Changes { authority: keys, threshold: Some(2), ..changes(config("n")) };
    customise(&built.uki, &to, &other).unwrap();
    let document = document(&fs::read(&to).unwrap()).unwrap();
    let spec = types::config::NodeSpec::parse(document.as_bytes()).unwrap();
    assert_eq!((spec.authority.threshold, spec.authority.keys.len()), (2, 2));
    assert_eq!(spec.authority.keys[0].to_string(), AUTHORITY);

    let wrong = |changes: Changes| customise(&built.uki, &to, &changes).unwrap_err().to_string();
    let typo = wrong(changes("version = 1\nnmae = \"n\"\n".to_owned()));
    assert!(typo.contains("nmae"), "{typo}");
    let nowhere = wrong(Changes { channel: Some("beta".to_owned()), ..changes(config("n")) });
    assert!(nowhere.contains("[updates]"), "{nowhere}");
    let many = wrong(Changes { threshold: Some(9), ..changes(config("n")) });
    assert!(many.contains("threshold"), "{many}");
}

#[test]
fn what_is_not_understood_is_refused() {
    let Some(built) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let refused = |bytes: &[u8]| {
        fs::write(&from, bytes).unwrap();
        let refusal = customise(&from, &to, &changes(config("n"))).unwrap_err();
        assert!(!to.exists());
        refusal
    };
    assert!(matches!(refused(b""), CustomiseError::NotImage { .. }));
    assert!(matches!(refused(&[7; 100_000]), CustomiseError::NotImage { .. }));
    assert!(matches!(refused(b"MZ rubbish"), CustomiseError::Program { .. }));

    // Bytes that belong to no section would be lost.
    let program = fs::read(&built.uki).unwrap();
    let text = uki::section(&program, ".cmdline").unwrap();
    let at = program.windows(text.len()).position(|window| window == text).unwrap();
    let mut altered = program.clone();
    altered[at + text.len()] = 1;
    let refusal = refused(&altered);
    assert!(matches!(refusal, CustomiseError::Program { .. }), "{refusal}");
    assert!(matches!(refused(&program[..program.len() / 2]), CustomiseError::Program { .. }));
}

#[test]
fn no_damage_to_headers_makes_it_panic_or_take_a_damaged_program_for_a_good_one() {
    let Some(built) = built() else { return };
    let parts = Parts::of(&fs::read(&built.uki).unwrap()).unwrap();
    let small = Parts { kernel: vec![9; 5000], initrd: vec![7; 3000], ..parts };
    let program = small.finish(&Keys::default(), 0).unwrap().bytes;
    assert_eq!(Parts::of(&program).unwrap(), small);
    let table = program.windows(6).position(|window| window == b".osrel").unwrap();
    proptest!(ProptestConfig::with_cases(500), |(at in 0..table + 400, value: u8, cut in 0..9_u8)| {
        let mut damaged = program.clone();
        let same = damaged[at] == value;
        damaged[at] = value;
        if cut == 0 {
            damaged.truncate(at);
        }
        if let Ok(found) = Parts::of(&damaged) {
            // What comes to the same bytes again is a program with other headers. Nobody else looks at
            // the checksum, which is made anew.
            let again = found.finish(&Keys::default(), 0).unwrap().bytes;
            prop_assert!(same || again == authenticode::unsigned(&damaged).unwrap());
        }
    });
}
