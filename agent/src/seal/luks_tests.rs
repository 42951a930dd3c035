//! Tests of the header, with Debian's cryptsetup as the other reader.

use std::{
    fs,
    io::Write,
    process::{Command, Stdio},
};

use sha2::{Digest, Sha256};

use super::luks::{DATA_OFFSET, Header, HeaderError};
use types::disk_key::{DiskKey, KEY_BYTES};

const UUID: &str = "2c52ce2c-0e4f-4f54-9b5e-3f2f1f6f0001";

fn key() -> DiskKey {
    DiskKey::from_bytes(std::array::from_fn(|at| u8::try_from(at).expect("small") ^ 0x91))
}

/// A volume with a slot for each secret.
fn volume(secrets: &[&[u8]]) -> (Header, Vec<u8>) {
    let mut header = Header::new(UUID.to_owned(), &key()).expect("made");
    let mut bytes = vec![0; usize::try_from(DATA_OFFSET).expect("small") + (1 << 20)];
    for secret in secrets {
        let slot = header.add_slot(&key(), secret).expect("room");
        let at = usize::try_from(slot.offset).expect("small");
        bytes[at..at + slot.bytes.len()].copy_from_slice(&slot.bytes);
    }
    write(&header, &mut bytes);
    (header, bytes)
}

fn write(header: &Header, bytes: &mut [u8]) {
    let [first, second] = header.copies().expect("short");
    bytes[..first.len()].copy_from_slice(&first);
    bytes[first.len()..2 * first.len()].copy_from_slice(&second);
}

fn area<'a>(header: &Header, bytes: &'a [u8], slot: u32) -> &'a [u8] {
    let (offset, length) = header.area_of(slot).expect("a slot");
    &bytes[usize::try_from(offset).expect("small")..][..usize::try_from(length).expect("small")]
}

/// Whether cryptsetup opens the volume; `None` where there is none.
fn cryptsetup(bytes: &[u8], arguments: &[&str], secret: &[u8]) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("volume");
    fs::write(&path, bytes).expect("written");
    let mut command = Command::new("cryptsetup");
    run(command.args(arguments).arg(&path), secret)
}

/// Runs cryptsetup with `secret` as its input; `None` where there is none.
fn run(command: &mut Command, secret: &[u8]) -> Option<String> {
    let child = command
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        println!("skipped: headers that cryptsetup reads: cryptsetup is not installed");
        return None;
    };
    let mut input = child.stdin.take().expect("piped");
    input.write_all(secret).expect("written");
    drop(input);
    let output = child.wait_with_output().expect("it ran");
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    Some(format!("{} {text}{said}", output.status.code().unwrap_or(-1)))
}

const TRY: &[&str] = &["open", "--test-passphrase", "--type", "luks2", "--key-file", "-"];

#[test]
fn each_secret_opens_its_slot_and_no_other() {
    let (header, bytes) = volume(&[b"first", b"second"]);
    let read = Header::read(&bytes).expect("whole");
    assert_eq!(read, header);
    assert_eq!(read.slots(), [0, 1]);
    assert_eq!(read.open(1, area(&read, &bytes, 1), b"second").expect("open"), key());
    let wrong = read.open(0, area(&read, &bytes, 0), b"second");
    assert!(matches!(wrong, Err(HeaderError::Wrong)), "{wrong:?}");
}

#[test]
fn cryptsetup_opens_what_was_made_here() {
    let (_, bytes) = volume(&[b"first", b"second"]);
    let Some(said) = cryptsetup(&bytes, TRY, b"second") else { return };
    assert!(said.starts_with('0'), "{said}");
    let said = cryptsetup(&bytes, TRY, b"third").expect("as before");
    assert!(said.starts_with('2'), "{said}");
    let said = cryptsetup(&bytes, &["luksDump"], b"").expect("as before");
    assert!(said.contains(UUID) && said.contains("sector: 4096 [bytes]"), "{said}");
    let dump = ["luksDump", "--dump-volume-key", "--batch-mode", "--key-file", "-"];
    let said = cryptsetup(&bytes, &dump, b"first").expect("as before");
    let digits: String = said.chars().filter(|c| c.is_ascii_hexdigit()).collect();
    assert!(digits.contains(&types::hex::encode(key().as_bytes())[..32]), "{said}");
}

#[test]
fn one_whole_copy_is_enough_and_the_newer_counts() {
    let (mut header, bytes) = volume(&[b"first"]);
    let half = Header::bytes() / 2;
    let damaged = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        bytes
    };
    for at in [0, 9, 100, 300, 450, 4100, half, half + 9, half + 450, half + 4100] {
        assert_eq!(Header::read(&damaged(at)).expect("the other copy"), header, "byte {at}");
    }
    let mut both = damaged(4100);
    both[half + 4100] ^= 1;
    let refusal = Header::read(&both).expect_err("damaged").to_string();
    assert!(refusal.contains("checksum"), "{refusal}");
    assert!(Header::is_at(&both));
    // A change that was cut short after its first copy, the second one.
    header.add_token(serde_json::json!({"type": "holdfast-test", "keyslots": ["0"]}));
    let [_, second] = header.copies().expect("short");
    let mut cut = bytes.clone();
    cut[half..2 * half].copy_from_slice(&second);
    assert_eq!(Header::read(&cut).expect("whole"), header);
}

#[test]
fn what_is_removed_opens_nothing() {
    let (mut header, mut bytes) = volume(&[b"first", b"second"]);
    header.add_token(serde_json::json!({"type": "holdfast-test", "keyslots": ["0"]}));
    assert_eq!(header.tokens("holdfast-test").len(), 1);
    header.remove_slot(0).expect("it is there");
    assert_eq!(header.tokens("holdfast-test").len(), 0);
    write(&header, &mut bytes);
    let read = Header::read(&bytes).expect("whole");
    assert_eq!(read.slots(), [1]);
    if let Some(said) = cryptsetup(&bytes, TRY, b"first") {
        assert!(said.starts_with('2'), "{said}");
        let said = cryptsetup(&bytes, TRY, b"second").expect("as before");
        assert!(said.starts_with('0'), "{said}");
    }
}

#[test]
fn what_is_encrypted_here_is_what_cryptsetup_decrypts() {
    let (_, mut bytes) = volume(&[b"first"]);
    let start = usize::try_from(DATA_OFFSET).expect("small");
    let plain: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let mut sealed = plain.clone();
    types::disk_key::SectorCipher::new(&key()).in_large_units().encrypt(0, &mut sealed);
    bytes[start..].copy_from_slice(&sealed);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("volume");
    fs::write(&path, &bytes).expect("written");
    let secret = folder.path().join("secret");
    fs::write(&secret, b"first").expect("written");
    // Takes the encryption away in place, without a mapping.
    let header = folder.path().join("header");
    let output = Command::new("cryptsetup")
        .args(["reencrypt", "--decrypt", "--batch-mode", "--force-offline-reencrypt", "--key-file"])
        .arg(&secret)
        .arg("--header")
        .arg(&header)
        .arg(&path)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output();
    let Ok(output) = output else {
        println!("skipped: data that cryptsetup decrypts: cryptsetup is not installed");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let decrypted = fs::read(&path).expect("read");
    assert!(decrypted[..plain.len()] == plain, "cryptsetup decrypts something else");
}

#[test]
fn foreign_headers_are_refused_with_what_they_say() {
    let (_, bytes) = volume(&[b"first"]);
    let mut old = bytes.clone();
    for at in [0, Header::bytes() / 2] {
        old[at + 7] = 1;
    }
    let refusal = Header::read(&old).expect_err("LUKS1").to_string();
    assert!(refusal.contains("version 1"), "{refusal}");
    assert!(!Header::is_at(&[0; KEY_BYTES]));
    assert!(Header::read(&[]).is_err());
}

/// Other tools' slots, tokens, labels and whatever else they write are theirs, and stay.
#[test]
fn what_others_wrote_into_the_header_stays_and_locks_nothing() {
    let (mut header, mut bytes) = volume(&[b"first", b"second"]);
    header.remove_slot(0).expect("it is there");
    header.add_token(serde_json::json!({"type": "holdfast-test", "keyslots": ["1"]}));
    write(&header, &mut bytes);
    let folder = tempfile::tempdir().expect("a folder");
    let (path, more) = (folder.path().join("volume"), folder.path().join("more"));
    fs::write(&path, &bytes).expect("written");
    fs::write(&more, b"somebody's passphrase").expect("written");
    let setup = |arguments: &[&str], secret: &[u8]| {
        let said = run(Command::new("cryptsetup").args(arguments).arg(&path), secret)?;
        assert!(said.starts_with('0'), "{arguments:?}: {said}");
        Some(())
    };
    let cheap = ["--pbkdf", "argon2id", "--pbkdf-memory", "32", "--pbkdf-force-iterations", "4"];
    let mut add = Command::new("cryptsetup");
    add.args(["luksAddKey", "--batch-mode", "--key-file", "-"]).args(cheap).arg(&path).arg(&more);
    let Some(said) = run(&mut add, b"second") else { return };
    assert!(said.starts_with('0'), "{said}");
    setup(&["config", "--label", "somebody's"], b"").expect("as before");
    setup(&["config", "--priority", "prefer", "--key-slot", "0"], b"").expect("as before");
    let mut bytes = fs::read(&path).expect("read");
    let mut read = Header::read(&bytes).expect("understood");
    assert_eq!(read.slots(), [0, 1]);
    assert_eq!(read.open(1, area(&read, &bytes, 1), b"second").expect("ours opens"), key());
    let theirs = read.open(0, area(&read, &bytes, 0), b"somebody's passphrase");
    assert!(theirs.expect_err("not read here").to_string().contains("argon2id"));
    // Sealing anew: a slot more, and our earlier one goes.
    let slot = read.add_slot(&key(), b"third").expect("room");
    let at = usize::try_from(slot.offset).expect("small");
    bytes[at..at + slot.bytes.len()].copy_from_slice(&slot.bytes);
    read.remove_slot(1).expect("it is there");
    write(&read, &mut bytes);
    fs::write(&path, &bytes).expect("written");
    for secret in [&b"somebody's passphrase"[..], b"third"] {
        setup(TRY, secret).expect("as before");
    }
    let said = cryptsetup(&bytes, &["luksDump"], b"").expect("as before");
    assert!(said.contains("somebody's") && said.contains("Priority:   preferred"), "{said}");
    let read = Header::read(&bytes).expect("understood");
    assert_eq!(
        read.open(slot.slot, area(&read, &bytes, slot.slot), b"third").expect("open"),
        key()
    );
}

#[test]
fn areas_are_taken_from_what_no_slot_has() {
    let (mut header, _) = volume(&[b"first", b"second", b"third"]);
    let offset = |header: &Header, slot: u32| header.area_of(slot).expect("a slot").0;
    let (first, third) = (offset(&header, 0), offset(&header, 2));
    header.remove_slot(0).expect("it is there");
    header.remove_slot(1).expect("it is there");
    assert_eq!(header.add_slot(&key(), b"fourth").expect("room").offset, first);
    assert!(header.add_slot(&key(), b"fifth").expect("room").offset < third);
    assert!(header.add_slot(&key(), b"sixth").expect("room").offset > third);
}

/// Returns the volume with another document in both copies of its header.
fn with_document(bytes: &[u8], change: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
    let half = Header::bytes() / 2;
    let mut bytes = bytes.to_vec();
    for start in [0, half] {
        let copy = &mut bytes[start..start + half];
        let end = copy[4096..].iter().position(|byte| *byte == 0).expect("an end");
        let mut document = serde_json::from_slice(&copy[4096..4096 + end]).expect("a document");
        change(&mut document);
        let text = serde_json::to_vec(&document).expect("text");
        copy[4096..].fill(0);
        copy[4096..4096 + text.len()].copy_from_slice(&text);
        copy[448..512].fill(0);
        let sum = Sha256::digest(&*copy);
        copy[448..480].copy_from_slice(&sum);
    }
    bytes
}

#[test]
fn requirements_are_refused_and_other_new_things_kept() {
    let (_, bytes) = volume(&[b"first"]);
    let wanting = with_document(&bytes, |document| {
        document["config"]["requirements"] = serde_json::json!({"mandatory": ["something-new"]});
    });
    let refusal = Header::read(&wanting).expect_err("it cannot be met").to_string();
    assert!(refusal.contains("something-new"), "{refusal}");
    let more = with_document(&bytes, |document| {
        document["config"]["requirements"] = serde_json::json!({"mandatory": []});
        document["config"]["flags"] = serde_json::json!(["allow-discards"]);
        for part in ["/keyslots/0", "/segments/0", "/digests/0", ""] {
            document.pointer_mut(part).expect("there")["new"] = serde_json::json!({"a": 1});
        }
    });
    let mut written = more.clone();
    write(&Header::read(&more).expect("understood"), &mut written);
    let documents = [more, written].map(|bytes| {
        let text = bytes[4096..].split(|byte| *byte == 0).next().expect("text").to_vec();
        serde_json::from_slice::<serde_json::Value>(&text).expect("a document")
    });
    assert_eq!(documents[0], documents[1]);
}
