//! A wire between a guest and the bed's host: a tap with addresses, and `wire` at both ends.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use image::cpio::{self, Entry, Kind};

use super::{Bed, with_libraries};
use crate::harness::{guest::Guest, packages, programs::program};

/// The program of the host that opens taps.
pub const TAP: &str = "/tap";
/// The port that `wire` listens on at the host.
pub const PORT: u16 = 7000;

/// Where the host and its guest have `wire`, with the libraries that the build's machine has.
const WIRE: &str = "wire.d";
/// The dynamic loader.
const LOADER: &str = "ld-linux-x86-64.so.2";
const BUSYBOX: &str = "bin/busybox";
/// How long a server may take to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// Returns the files of a host that is going to have such a wire.
pub fn files() -> Result<Vec<(String, PathBuf)>> {
    let mut all = with_libraries(TAP.trim_start_matches('/'), &program("examples/tap")?)?;
    all.push((BUSYBOX.to_owned(), packages::guest_root()?.join(BUSYBOX)));
    all.extend(wire()?);
    Ok(all)
}

/// Returns the same guest with the command `wire`.
pub fn with_wire(guest: &Guest, folder: &Path) -> Result<Guest> {
    let mut entries = cpio::read(&fs::read(&guest.initrd)?)?;
    entries.push(Entry { name: WIRE.to_owned(), mode: 0o755, kind: Kind::Directory });
    for (name, path) in wire()? {
        entries.push(Entry { name, mode: 0o755, kind: Kind::File(fs::read(path)?) });
    }
    let script =
        format!("#!/bin/sh\nexec /{WIRE}/{LOADER} --library-path /{WIRE} /{WIRE}/wire \"$@\"\n");
    let kind = Kind::File(script.into_bytes());
    entries.push(Entry { name: "usr/bin/wire".to_owned(), mode: 0o755, kind });
    let initrd = folder.join("wire-initrd");
    fs::write(&initrd, cpio::write(&entries)?)?;
    Ok(Guest { initrd, ..guest.clone() })
}

/// `wire` and its libraries, all in one folder.
fn wire() -> Result<Vec<(String, PathBuf)>> {
    let all = with_libraries("wire", &program("wire")?)?;
    all.into_iter()
        .map(|(name, path)| {
            let file = Path::new(&name).file_name().context("a library without a name")?;
            Ok((format!("{WIRE}/{}", file.to_string_lossy()), path))
        })
        .collect()
}

/// Returns the name of a network's tap and the host's address there.
pub fn ends(number: u8) -> (String, String) {
    (format!("bed{number}"), format!("192.168.{number}.1"))
}

impl Bed {
    /// Makes the tap of network `number` with that many queues, gives the host its address there, and has it
    /// give the guest one by DHCP and answer `wire`.
    pub fn network(&mut self, number: u8, queues: u32) -> Result<()> {
        let busybox = format!("/{BUSYBOX}");
        let (name, host) = ends(number);
        self.run_on_host(&[TAP, &name, &queues.to_string()])?;
        self.run_on_host(&[&busybox, "ifconfig", &name, &host, "netmask", "255.255.255.0", "up"])?;
        let (config, leases) = (format!("/run/{name}.conf"), format!("/run/{name}.leases"));
        self.write(&leases, b"")?;
        let network = host.trim_end_matches('1');
        let text = format!(
            "start {network}2\nend {network}9\ninterface {name}\nlease_file {leases}\n\
             pidfile /run/{name}.pid\noption subnet 255.255.255.0\n"
        );
        self.write(&config, text.as_bytes())?;
        self.start_on_host(&[&busybox, "udhcpd", "-f", &config])?;
        let (loader, folder) = (format!("/{WIRE}/{LOADER}"), format!("/{WIRE}"));
        let (program, port) = (format!("/{WIRE}/wire"), PORT.to_string());
        self.serve(&[&loader, "--library-path", &folder, &program, "serve", &port], PORT)
    }

    /// Starts a program of the host that answers on a port of TCP's, by IPv4, unless somebody does already.
    pub fn serve(&mut self, words: &[&str], port: u16) -> Result<()> {
        if self.is_listening(port)? {
            return Ok(());
        }
        self.start_on_host(words)?;
        let deadline = Instant::now() + LISTEN_LIMIT;
        while !self.is_listening(port)? {
            if Instant::now() > deadline {
                bail!("nobody listens on port {port} of the host");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn is_listening(&mut self, port: u16) -> Result<bool> {
        let local = format!("00000000:{port:04X} 00000000:0000 0A");
        Ok(self.text("/proc/net/tcp")?.contains(&local))
    }
}
