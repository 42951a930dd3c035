//! What the VMM offers beyond what the node asks of it, on the bed.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{path::Path, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::host::HostOptions,
};

/// How long a guest may take to its first command.
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(60);

/// The program as the image has it, in the cache of what was built.
const SHIPPED: &str = "programs/x86_64-unknown-linux-gnu/release/holdfast-vmm";
/// Its largest size in bytes.
const LARGEST: u64 = 4 << 20;
/// How much memory besides the guest's it may take, in KiB, with how many devices.
const MEMORY: [(usize, u64); 2] = [(1, 5 << 10), (8, 8 << 10)];

/// A host that holds the usual guest.
fn bed(folder: &Path, mut options: BedOptions) -> Bed {
    let made = guest::make(folder).unwrap();
    options.files.push(("guest/kernel".to_owned(), made.kernel));
    options.files.push(("guest/initrd".to_owned(), made.initrd));
    Bed::start(folder, options).unwrap()
}

fn plan(number: u8) -> Plan {
    Plan::linux(number, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet")
}

/// Answers one connection on a port of the guest's socket with what it got, in capitals.
const CAPITALS: &str = r#"perl -e 'socket(L, 40, 1, 0) or die $!; bind(L, pack("SSLLx4", 40, 0, 5000, 0xffffffff)) or die $!; listen(L, 1) or die $!; $| = 1; print "listening\n"; accept(C, L) or die $!; local $/; $got = <C>; print C uc $got; close C; print length $got, "\n"'"#;

#[test]
fn host_and_guest_talk_over_vsock() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path(), BedOptions::default());
    let mut plan = plan(1);
    plan.vsock(77);
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();

    bed.type_line(machine, CAPITALS).unwrap();
    bed.wait_console(machine, "listening", SOON).unwrap();
    let sent: Vec<u8> = b"holdfast ".iter().copied().cycle().take(200_000).collect();
    let received = bed.vsock(77, 5000, &sent).unwrap();
    assert_eq!(received.len(), sent.len());
    assert_eq!(received, sent.to_ascii_uppercase());
    bed.wait_console(machine, "200000", SOON).unwrap();

    // A port that nobody listens on refuses, and the guest goes on.
    let refusal = bed.vsock(77, 5001, b"").unwrap_err().to_string();
    assert!(refusal.contains("cannot connect to 77:5001"), "{refusal}");
    assert_eq!(bed.run(machine, "echo still here", SOON).unwrap(), "still here\n");

    bed.type_line(machine, "poweroff -f").unwrap();
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("the guest powered off"), "{log}");
}

#[test]
fn the_shipped_program_is_small_and_takes_little_memory() {
    let vmm = image::default_cache().join(SHIPPED);
    let size = std::fs::metadata(&vmm).expect("the image's programs: cargo xtask image").len();
    assert!(size <= LARGEST, "{} has {size} bytes", vmm.display());

    let folder = tempfile::tempdir().unwrap();
    let host = HostOptions { devices: vec!["edu".to_owned(); 8], ..HostOptions::default() };
    let options = BedOptions { host, vmm: Some(vmm), ..BedOptions::default() };
    let mut bed = bed(folder.path(), options);
    let addresses = (1..=8).map(|bus| format!("0000:{bus:02x}:00.0"));
    let paths: Vec<_> = addresses.map(|address| (bed.bind(&address).unwrap(), address)).collect();
    for (devices, most) in MEMORY {
        let mut plan = plan(1);
        for (path, address) in &paths[..devices] {
            plan.pass(address.parse().unwrap(), path);
        }
        let taken = bed.measure(&plan, &[guest::READY], GUEST_LIMIT).unwrap().resident_kib;
        println!("with {devices} devices: {taken} KiB");
        assert!((1..=most).contains(&taken), "{devices} devices: {taken} KiB");
    }
}
