//! A guest's kernel starts another one in its place, by kexec, while frames arrive: nothing of what devices
//! do for the first one may reach the memory of the second.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{fs, time::Duration};

use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest, network},
    harness::{guest as guests, host::HostOptions, kernels, pace::Pace},
};

/// How long a guest may take to its first command, or the second kernel to its end.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// How long a command may take.
const SOON: Duration = Duration::from_secs(120);

/// Loads the second kernel. Source: kexec_file_load(2), system call 320.
const LOAD: &str = r#"perl -e 'open(K, "<", "/second-kernel") or die $!; open(I, "<", "/second-initrd") or die $!; $line = "console=ttyS0 quiet\0"; syscall(320, fileno(K), fileno(I), length $line, $line, 0) == 0 or die $!'"#;
/// Starts it. Source: reboot(2), system call 169, `LINUX_REBOOT_CMD_KEXEC`.
const GO: &str = "perl -e 'syscall(169, 0xfee1dead, 672274793, 0x45584543, 0)'";
/// What the second kernel's system says of its card and its disk. It leaves time to read that.
const SECOND: &str = "#!/bin/sh\n\
    echo \"second: $(ip -4 -o addr show eth0 | grep -c 192.168.1.) $(md5sum < /dev/vda)\"\n\
    echo all-said; sleep 5; poweroff -f\n";
/// Has the host send frames to all on the wire, whether anybody answers or not.
const FRAMES: [&str; 6] = ["/bin/busybox", "ping", "-q", "-i", "0.002", "192.168.1.255"];

#[test]
fn a_kernel_starts_another_one_while_frames_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    [&first, &second].into_iter().for_each(|path| fs::create_dir(path).unwrap());
    let second = guests::make_with_perl(&second, SECOND).unwrap();
    let made = guest::make(&first).unwrap();
    let kernel = fs::read(&second.kernel).unwrap();
    let made = kernels::with_program(&made, &first, "second-kernel", kernel).unwrap();
    let initrd = fs::read(&second.initrd).unwrap();
    let made = kernels::with_program(&made, &first, "second-initrd", initrd).unwrap();
    let content: Vec<u8> = (0..4u32 << 20).flat_map(u32::to_le_bytes).collect();
    let disk = folder.path().join("disk");
    fs::write(&disk, &content).unwrap();

    let mut files = network::files().unwrap();
    files.push(("guest/kernel".to_owned(), made.kernel));
    files.push(("guest/initrd".to_owned(), made.initrd));
    files.push(("guest/disk".to_owned(), disk));
    let host = HostOptions { pace: Pace::SLOW, memory_mib: 3072, ..HostOptions::default() };
    let mut bed =
        Bed::start(folder.path(), BedOptions { files, host, ..BedOptions::default() }).unwrap();
    bed.network(1, 1).unwrap();
    let mut plan = Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    plan.spec.vcpus = 2;
    plan.spec.memory_mib = types::units::Mebibytes(768);
    plan.net(&network::ends(1).0, 1);
    plan.disk("/guest/disk");
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let before = bed.run(machine, "md5sum < /dev/vda", SOON).unwrap();
    bed.run(machine, LOAD, SOON).unwrap();
    bed.start_on_host(&FRAMES).unwrap();
    bed.type_line(machine, GO).unwrap();
    let console = bed.wait_console(machine, "all-said", GUEST_LIMIT).unwrap();
    assert!(console.contains(&format!("second: 1 {}", before.trim())), "{console}");
    let (status, log) = bed.wait_exit(machine, SOON).unwrap();
    assert_eq!(status, 0, "{log}");
}
