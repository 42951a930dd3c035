//! The `holdfast` command in the hands of somebody who errs: what it says, its status, and what it leaves. No gateway
//! is needed for any of it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, reason = "a test")]

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Command, Output},
};

fn holdfast(folder: &Path, words: &[&OsStr]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.env_remove("HOLDFAST_KEY").env_remove("HOLDFAST_GATEWAY").current_dir(folder);
    command.args(words).output().unwrap()
}

/// Runs words that are all UTF-8.
fn said(folder: &Path, words: &str) -> (Option<i32>, String, String) {
    let words: Vec<&OsStr> = words.split(' ').map(OsStr::new).collect();
    let done = holdfast(folder, &words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (done.status.code(), text(&done.stdout), text(&done.stderr))
}

/// Names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn names_of_files_are_any_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let name = |bytes: &'static [u8]| OsStr::from_bytes(bytes);
    fs::write(folder.path().join(name(b"\xff.raw")), [7; 512]).unwrap();
    let import = [b"image", &b"import"[..], b"\xff.raw", b"--out", b"\xfe.raw"].map(name);
    let keygen = [b"--json", &b"keygen"[..], b"--out", b"\xfe.key"].map(name);
    for words in [&import[..], &keygen] {
        let done = holdfast(folder.path(), words);
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(String::from_utf8(done.stdout).unwrap().contains('\u{fffd}'));
    }
    assert_eq!(names(folder.path()).len(), 3);
}

#[test]
fn a_disk_that_firmware_starts_nothing_from_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = vec![0; 4096];
    fs::write(folder.path().join("bios"), &disk).unwrap();
    disk[510..512].copy_from_slice(b"\x55\xaa");
    disk[450] = 0xef;
    fs::write(folder.path().join("uefi"), &disk).unwrap();
    let (status, _, told) = said(folder.path(), "image import bios --out bios.raw");
    assert_eq!(status, Some(0));
    assert!(told.contains("bios.raw has no EFI system partition"), "{told}");
    let (status, _, told) = said(folder.path(), "image import uefi --out uefi.raw");
    assert_eq!((status, &*told), (Some(0), ""));
}

#[test]
fn a_foreign_disk_is_pushed_only_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("noble.img"), b"QFI\xfb\0\0\0\x03").unwrap();
    said(folder.path(), "keygen --out key");
    let (status, _, told) = said(folder.path(), "--key key --curl content push noble.img");
    assert_eq!(status, Some(1));
    assert!(told.contains("`holdfast image import 'noble.img' --out 'noble.raw'`"), "{told}");
    let (status, line, _) = said(folder.path(), "--key key --curl content push noble.img --as-is");
    assert!(status == Some(0) && line.contains("-T "), "{line}");
}

#[test]
fn an_import_that_fails_names_its_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("d.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    let (status, _, told) = said(folder.path(), "image import d.qcow2 --out d.raw");
    assert_eq!(status, Some(1));
    assert!(told.contains("cannot import d.qcow2: the qcow2 image"), "{told}");
    let (_, _, told) = said(folder.path(), "image import d.qcow2 --format raw --out d.qcow2");
    assert!(told.contains("create d.qcow2: it is there already"), "{told}");
    assert_eq!(names(folder.path()), ["d.qcow2"]);
}

const LEASE: &str = "--key a.key lease sign --node 0101010101010101010101010101010101010101010101010101010101010101 \
    --renter 0101010101010101010101010101010101010101010101010101010101010101 --duration 60";

#[test]
fn a_lease_that_cannot_be_written_leaves_nothing_and_replaces_no_device() {
    let folder = tempfile::tempdir().unwrap();
    let key = said(folder.path(), "keygen --out a.key").1;
    fs::create_dir(folder.path().join("out")).unwrap();
    let sign = |rest: &str| said(folder.path(), &[LEASE, rest].join(" "));
    assert_eq!(sign("--out out").0, Some(1));
    assert_eq!(names(folder.path()), ["a.key", "out"]);
    let (status, printed, _) = sign("--out /dev/stdout");
    assert_eq!(status, Some(0));
    assert!(printed.starts_with('{') && printed.ends_with("}\n"), "{printed}");
    let (status, _, told) = said(folder.path(), "lease show a.key");
    assert_eq!(status, Some(1));
    assert!(told.contains("a.key is no lease as `holdfast lease sign` writes it"), "{told}");
    // A lease of the past is signed as well as any, and counts nowhere.
    assert_eq!(sign("--start 1000 --out past.json").0, Some(0));
    let public = key.split_whitespace().last().unwrap();
    let checked = said(folder.path(), &format!("lease verify past.json --authority {public}"));
    assert!(
        checked.1.starts_with("signed by enough keys, but its end has passed\n"),
        "{checked:?}"
    );
    fs::write(folder.path().join("l.toml"), "version = 1\nserial = \"x\"\n").unwrap();
    let (_, _, told) = said(folder.path(), "--key a.key lease sign --from l.toml");
    let right = "l.toml does not say what a lease is to say: line 2, column 10: serial: found string \"x\"; a whole";
    assert!(told.contains(right), "{told}");
}

#[test]
fn what_this_computer_was_told_wrongly_is_no_unreachable_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let (status, _, told) =
        said(folder.path(), "--gateway https://127.0.0.1:1 --ca-file none nodes");
    assert_eq!(status, Some(1));
    assert!(told.contains("the authorities in none cannot be used"), "{told}");
    let (status, _, told) = said(folder.path(), "lease sign --duration 1h");
    assert_eq!(status, Some(2));
    assert!(told.contains("--duration <SECONDS>"), "{told}");
}

#[test]
fn what_is_missing_is_told_with_every_way_to_give_it() {
    let folder = tempfile::tempdir().unwrap();
    let told = |words: &str| said(folder.path(), words).2;
    let create = told("machines create --lease x");
    assert!(create.contains("--kernel") && create.contains("--firmware"), "{create}");
    let attach = told("machines attach 01010101010101010101010101010101");
    assert!(attach.contains("--disk") && attach.contains("--device"), "{attach}");
    assert!(told("node recovery-key").contains("--sealed"));
}

/// Answers every connection at a port of this computer with the same words.
fn answering(words: &'static [u8]) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            use std::io::{Read, Write};
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(words);
        }
    });
    url
}

#[test]
fn somebody_else_at_the_gateways_place_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let login = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>";
    let (status, _, told) = said(folder.path(), &format!("--gateway {} nodes", answering(login)));
    assert_eq!(status, Some(4));
    assert!(told.contains("it is no JSON") && told.contains("is this a gateway's URL?"), "{told}");
    let ssh = answering(b"SSH-2.0-OpenSSH_9.2\r\n");
    let (status, _, told) = said(folder.path(), &format!("--gateway {ssh} nodes"));
    assert_eq!(status, Some(4));
    assert!(told.contains("something else than a gateway answers there"), "{told}");
}

#[test]
fn an_import_has_more_pieces_open_than_the_soft_limit_allows() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("disk-flat.vmdk"), [7u8; 512]).unwrap();
    let extents = "RW 1 FLAT \"disk-flat.vmdk\" 0\n".repeat(100);
    let descriptor = format!("# Disk DescriptorFile\n{extents}");
    fs::write(folder.path().join("disk.vmdk"), descriptor).unwrap();
    let mut shell = Command::new("sh");
    shell.env_remove("HOLDFAST_KEY").env_remove("HOLDFAST_GATEWAY").current_dir(folder.path());
    shell.args(["-c", "ulimit -Sn 50 && exec \"$0\" image import disk.vmdk --out out"]);
    let done = shell.arg(env!("CARGO_BIN_EXE_holdfast")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(fs::read(folder.path().join("out")).unwrap(), [7u8; 51_200]);
}
