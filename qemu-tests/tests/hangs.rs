//! A start that hangs before init arms the watchdogs ends by itself: the kernel's own watchdog, which
//! feeds itself for only so long, restarts the server, and firmware starts the slot before.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, time::Duration};

use image::{
    Artifacts,
    cpio::{self, Entry, Kind},
};
use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    scene::image_folder,
};

/// From power-on to the kernel's first program, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(120);
/// The kernel's patience and what its watchdog waits then, in seconds; three minutes and one otherwise.
const PATIENCE: &str = "watchdog.open_timeout=12 softdog.soft_margin=12";

/// A program that sleeps for ever: pause(), and again.
/// Source: the System V ABI, chapters 4 and 5 (ELF; one segment to load, which is the whole file).
fn sleeper() -> Vec<u8> {
    const ADDRESS: u64 = 0x40_0000;
    const HEAD: u64 = 0x78;
    const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let size = HEAD + CODE.len() as u64;
    [
        &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &[2_u16, 62].map(u16::to_le_bytes).concat(),
        &1_u32.to_le_bytes(),
        &[ADDRESS + HEAD, 0x40, 0].map(u64::to_le_bytes).concat(),
        &0_u32.to_le_bytes(),
        &[0x40_u16, 0x38, 1, 0x40, 0, 0].map(u16::to_le_bytes).concat(),
        &[1_u32, 5].map(u32::to_le_bytes).concat(),
        &[0, ADDRESS, ADDRESS, size, size, 0x1000].map(u64::to_le_bytes).concat(),
        &CODE,
    ]
    .concat()
}

#[test]
fn a_start_without_a_living_init_ends_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let image = image_folder().unwrap();
    let entry = |name: &str, mode, kind| Entry { name: name.to_owned(), mode, kind };
    let init = Kind::File(sleeper());
    let initrd = folder.path().join("initrd");
    fs::write(&initrd, cpio::write(&[entry("init", 0o755, init)]).unwrap()).unwrap();
    let words = fs::read_to_string(Artifacts::in_folder(&image).cmdline).unwrap();
    // What the release says, but for the length of the wait.
    assert!(words.contains("softdog.soft_active_on_boot=1"), "{words}");
    let options = HostOptions {
        medium: Medium::Own {
            kernel: image.join("pxe/vmlinuz"),
            initrd,
            cmdline: format!("{} {PATIENCE} loglevel=7", words.trim()),
        },
        memory_mib: 512,
        uplink: Uplink::None,
        ..HostOptions::default()
    };
    let host = Host::start(&image, folder.path(), &options).unwrap();
    let serial = &host.serial;
    serial.wait("Run /init as init process", UP).unwrap();
    let mark = serial.mark();
    serial.wait_from(mark, "Initiating system reboot", UP).unwrap();
    serial.wait_from(mark, "Run /init as init process", UP).unwrap();
}
