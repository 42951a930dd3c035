//! A server in setup mode takes the operator's keys from the medium, starts that medium's program from
//! then on, and refuses whatever is not signed or was altered. The TPM holds what was predicted.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs,
    io::Cursor,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use image::{
    Artifacts, authenticode,
    customise::{Changes, Lost, customise},
    disk::{esp, gpt::BlockSize},
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
    };
    files.read().unwrap()
}

/// Puts keys and a configuration that wants them enrolled into the ISO, in a folder of its own.
fn signed_image(folder: &Path) -> (PathBuf, Value) {
    let key = "01".repeat(32);
    let config = format!(
        "version = 1\nname = \"sealed\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n\
         [secure_boot]\nenrol = \"setup-mode\"\n"
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
    let (image, said) = signed_image(folder.path());
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
    let host = Host::start(&image, &host_folder, &options).unwrap();
    let third = host.serial.wait("event=trust secure_boot=", UP).unwrap();
    assert!(third.contains(&on), "{third}");
    let text = host.serial.text();
    let denied = text.lines().filter(|line| line.contains("Access Denied")).count();
    assert_eq!(denied, refused, "{text}");
}
