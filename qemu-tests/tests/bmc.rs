//! A provider who is nowhere near the server sees it through its BMC: on the serial port that this one
//! carries over the network, and by a watchdog that resets what nothing else can.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Write,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use qemu_tests::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    scene::image_folder,
    serial::{Echo, Serial},
};

/// From power-on to the installer's question, on a busy machine that emulates everything.
const UP: Duration = Duration::from_secs(150);
/// Bytes of a disk that could be installed on.
const DISK: u64 = 3 << 30;

/// Firmware's word for the second serial port at 115,200 bits per second, behind the table's header. Source:
/// "Serial Port Console Redirection Table", revision 2.
fn console_table() -> Vec<u8> {
    let mut table = vec![0; 44];
    table[4..6].copy_from_slice(&[1, 8]);
    table[8..10].copy_from_slice(&0x2f8_u16.to_le_bytes());
    table[22] = 7;
    table
}

/// A server with a BMC whose serial line is the second port.
fn arguments(folder: &Path) -> Vec<String> {
    let table = folder.join("spcr");
    fs::write(&table, console_table()).unwrap();
    let table = format!("sig=SPCR,rev=2,data={}", table.display());
    let line =
        format!("socket,id=bmc,server=on,wait=off,path={}", folder.join("bmc.sock").display());
    let line = ["-chardev", &line, "-device", "isa-serial,chardev=bmc,index=1"];
    let bmc = ["-device", "ipmi-bmc-sim,id=sim", "-device", "isa-ipmi-kcs,bmc=sim"];
    let words = [&["-acpitable", table.as_str()][..], &line, &bmc].concat();
    words.into_iter().map(str::to_owned).collect()
}

#[test]
fn the_installer_asks_there_and_its_watchdog_is_armed() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.img");
    File::create(&disk).unwrap().set_len(DISK).unwrap();
    let key = "01".repeat(32);
    let authority = format!("[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
    let options = HostOptions {
        medium: Medium::IsoCdBeforeDisk(disk),
        memory_mib: 1024,
        uplink: Uplink::None,
        config: Some(format!("version = 1\nname = \"remote\"\n{authority}[install]\n")),
        arguments: arguments(folder.path()),
        ..HostOptions::default()
    };
    let host = Host::start(&image_folder().unwrap(), folder.path(), &options).unwrap();
    let mut person = UnixStream::connect(folder.path().join("bmc.sock")).unwrap();
    let copy = folder.path().join("bmc.log");
    let line = Serial::collect(person.try_clone().unwrap(), &copy, Echo::Quiet).unwrap();

    line.wait("Type INSTALL0 and Enter to install", UP).unwrap();
    person.write_all(b"no\r").unwrap();
    host.serial.wait("event=not-installed", UP).unwrap();
    line.wait("event=not-installed", UP).unwrap();
    let seen = line.text();
    for words in ["event=serial-line port=ttyS1 speed=115200", "event=init-ready", "event=node id="]
    {
        assert!(seen.contains(words), "{words}: {seen}");
    }
    host.serial.wait("event=watchdog-armed device=\"IPMI\" timeout_s=60", UP).unwrap();
}
