//! A server in setup mode takes the operator's keys from the medium, starts that medium's program from
//! then on, and refuses whatever is not signed or was altered. The TPM holds what was predicted. A program that
//! the installed disk altered does not start, and the node comes up from the other copy and mends it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Cursor,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use image::{
    Artifacts, authenticode,
    customise::{Changes, Lost, customise},
    disk::{Slice, esp, gpt::ALIGNMENT, gpt::BlockSize, layout},
    keys::{KeyFiles, Keys},
    media, uki,
};
use qemu_tests::harness::{
    host::{Firmware, Host, HostOptions, Medium, Uplink},
    scene::image_folder,
    tpm::Tpm,
};
use serde_json::{Value, json};

/// From power-on to the agent, with firmware that checks, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(240);
/// Sections of which one bit is flipped: the stub's, ours, and the last one.
const SECTIONS: [&str; 7] =
    [".text", ".rodata", ".osrel", ".cmdline", ".initrd", ".linux", ".pcrsig"];

/// Makes the operator's keys: one for firmware, one for programs, one for what the TPM measures.
fn keys(folder: &Path) -> Keys {
    for name in ["owner", "programs", "pcr"] {
        let key = format!("{name}.key");
        let subject = format!("/CN=Holdfast {name}");
        let arguments = ["req", "-new", "-x509", "-newkey", "rsa:2048", "-noenc", "-subj"];
        let output = Command::new("openssl")
            .current_dir(folder)
            .args(arguments)
            .args([&subject, "-keyout", &key, "-out", &format!("{name}.crt")])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let file = |name: &str| Some(folder.join(name));
    let files = KeyFiles {
        secure_boot_key: file("programs.key"),
        secure_boot_cert: file("programs.crt"),
        platform_key: file("owner.key"),
        platform_cert: file("owner.crt"),
        pcr_key: file("pcr.key"),
        ..KeyFiles::default()
    };
    files.read().unwrap()
}

/// Puts keys and a configuration that wants them enrolled, with more `sections`, into the ISO, in a folder of
/// its own.
fn signed_image(folder: &Path, sections: &str) -> (PathBuf, Value) {
    let key = "01".repeat(32);
    let config = format!(
        "version = 1\nname = \"sealed\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n\
         [secure_boot]\nenrol = \"setup-mode\"\n{sections}"
    );
    let image = folder.join("image");
    fs::create_dir(&image).unwrap();
    let changes = Changes {
        config,
        authority: Vec::new(),
        threshold: None,
        channel: None,
        keys: keys(folder),
        signatures: Lost::Refused,
    };
    let built = Artifacts::in_folder(&image_folder().unwrap()).iso;
    let said = customise(&built, &Artifacts::in_folder(&image).iso, &changes).unwrap();
    (image, said)
}

fn options(medium: Medium, tpm: &Tpm) -> HostOptions {
    HostOptions {
        medium,
        firmware: Firmware::SecureBoot,
        memory_mib: 1024,
        uplink: Uplink::None,
        arguments: tpm.arguments(),
        ..HostOptions::default()
    }
}

/// Writes a volume that firmware would start `program` from.
fn volume(path: &Path, program: &[u8]) {
    let mut bytes = vec![0; (program.len() + (2 << 20)).next_multiple_of(1 << 20)];
    esp::write(Cursor::new(&mut bytes), BlockSize::B512, program, &[esp::FALLBACK]).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Flips one bit in the middle of a section.
fn altered(program: &[u8], section: &str) -> Vec<u8> {
    let content = uki::section(program, section).unwrap();
    let at = program.windows(content.len()).position(|window| window == content).unwrap();
    let mut altered = program.to_vec();
    altered[at + content.len() / 2] ^= 0x10;
    altered
}

#[test]
fn keys_are_enrolled_and_then_nothing_but_the_signed_program_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (image, said) = signed_image(folder.path(), "");
    let measured = format!("measured={}", said["tpm"]["pcr11_sha256"]);
    let on = format!("event=trust secure_boot=on lockdown=\"confidentiality\" {measured}");
    let tpm = Tpm::start(&folder.path().join("tpm")).unwrap();
    let host_folder = folder.path().join("host");
    let mut host = Host::start(&image, &host_folder, &options(Medium::IsoCd, &tpm)).unwrap();
    let first = host.serial.wait("event=trust secure_boot=", UP).unwrap();
    assert!(first.contains("secure_boot=setup") && first.contains(&measured), "{first}");
    host.serial.wait("event=keys-enrolled from=\"sr0\"", UP).unwrap();
    let mark = host.serial.mark();
    host.qmp.execute("system_reset", json!({})).unwrap();
    let second = host.serial.wait_from(mark, "event=trust secure_boot=", UP).unwrap();
    assert!(second.contains(&on), "{second}");
    drop((host, tpm));

    // The same server, with programs beside the medium's that nobody signed as they are.
    let program = media::read_iso(&Artifacts::in_folder(&image).iso).unwrap();
    let mut programs: Vec<_> = SECTIONS.iter().map(|name| altered(&program, name)).collect();
    programs.push(authenticode::unsigned(&program).unwrap());
    let refused = programs.len();
    programs.push(program);
    let tpm = Tpm::start(&folder.path().join("tpm")).unwrap();
    let mut options = options(Medium::Network, &tpm);
    for (index, program) in programs.iter().enumerate() {
        let path = folder.path().join(format!("disk-{index}"));
        volume(&path, program);
        let drive = format!("if=none,id=d{index},format=raw,file={}", path.display());
        let device = format!("virtio-blk-pci,drive=d{index},bootindex={}", index + 1);
        options.arguments.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
    }
    // The stub takes words from SMBIOS, which a BMC may write. The TPM notices, and so does the node.
    let words = "type=11,value=io.systemd.stub.kernel-cmdline-extra=holdfast.words=others";
    options.arguments.extend(["-smbios".to_owned(), words.to_owned()]);
    let host = Host::start(&image, &host_folder, &options).unwrap();
    let third = host.serial.wait("event=trust secure_boot=", UP).unwrap();
    assert!(third.contains(&on), "{third}");
    host.serial.wait("event=trouble place=secure-boot reason=\"PCR 12 is not zero", UP).unwrap();
    let text = host.serial.text();
    let denied = text.lines().filter(|line| line.contains("Access Denied")).count();
    assert_eq!(denied, refused, "{text}");
}

/// Returns what the fallback path of a disk holds.
fn fallback(disk: &Path, length: usize) -> Vec<u8> {
    let file = File::options().read(true).write(true).open(disk).unwrap();
    let volume = Slice::new(file, ALIGNMENT, layout::ESP_BYTES);
    esp::read(volume, esp::FALLBACK, length as u64).unwrap()
}

/// Flips a bit of the kernel on the fallback path of a disk that has `program` there and in slot A.
fn alter_fallback(disk: &Path, program: &[u8]) {
    const SECTOR: usize = 512;
    let linux = uki::section(program, ".linux").unwrap();
    let within = program.windows(linux.len()).position(|window| window == linux).unwrap();
    let file = File::options().read(true).write(true).open(disk).unwrap();
    let mut begin = vec![0; 128 << 20];
    file.read_exact_at(&mut begin, 0).unwrap();
    let starts = (0..begin.len()).step_by(SECTOR);
    let starts: Vec<usize> =
        starts.filter(|at| begin[*at..].starts_with(&program[..SECTOR])).collect();
    assert_eq!(starts.len(), 2, "the two copies");
    let flip = |start: usize| {
        let at = (start + within + linux.len() / 2) as u64;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    };
    flip(starts[0]);
    if fallback(disk, program.len()) == program {
        flip(starts[0]);
        flip(starts[1]);
    }
    assert!(fallback(disk, program.len()) != program);
}

#[test]
fn a_program_that_the_disk_altered_does_not_start_and_its_copy_does() {
    let folder = tempfile::tempdir().unwrap();
    let sections = "[install]\nconfirm = \"unattended\"\n[install.disk]\nserial = \"INSTALL0\"\n";
    let (image, _) = signed_image(folder.path(), sections);
    let program = media::read_iso(&Artifacts::in_folder(&image).iso).unwrap();
    let disk = folder.path().join("disk.img");
    File::create(&disk).unwrap().set_len(2 << 30).unwrap();
    let (tpm_folder, host_folder) = (folder.path().join("tpm"), folder.path().join("host"));
    let tpm = Tpm::start(&tpm_folder).unwrap();
    let beside = options(Medium::IsoCdAndDisk(disk.clone()), &tpm);
    let host = Host::start(&image, &host_folder, &beside).unwrap();
    host.serial.wait("event=keys-enrolled from=\"sr0\"", UP).unwrap();
    host.serial.wait("event=installed disk=", UP).unwrap();
    let node = host.serial.wait("event=node id=", UP).unwrap();
    // From the disk, and then it has looked after its slots.
    host.serial.wait("event=trust secure_boot=on", UP).unwrap();
    host.serial.wait("event=update state=", UP).unwrap();
    drop((host, tpm));

    alter_fallback(&disk, &program);
    let tpm = Tpm::start(&tpm_folder).unwrap();
    let alone = options(Medium::InstalledDisk(disk.clone()), &tpm);
    let host = Host::start(&image, &host_folder, &alone).unwrap();
    host.serial.wait("event=trust secure_boot=on", UP).unwrap();
    let told = host.serial.wait("event=trouble place=update", UP).unwrap();
    assert!(
        told.contains("BOOTX64.EFI was altered on the disk and is mended by its copy"),
        "{told}"
    );
    host.serial.wait("event=update state=", UP).unwrap();
    let text = host.serial.text();
    assert!(text.contains("Access Denied"), "{text}");
    let id = node.split("id=").nth(1).unwrap().split_whitespace().next().unwrap();
    assert!(text.contains(&format!("event=node id={id}")), "{text}");
    assert!(!text.contains("event=ram-mode"), "{text}");
    drop(host);
    assert!(fallback(&disk, program.len()) == program, "it is not mended");
}
