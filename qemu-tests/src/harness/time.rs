//! Time servers for hosts, which can fall silent. Source: RFC 5905, section 7.3.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Result;

use super::host::TEST_MACHINE;

/// From 1900 to 1970, in seconds.
const NTP_TO_UNIX: u128 = 2_208_988_800;
const NANOS: u128 = 1_000_000_000;
/// Leap: none. Version 4, mode 4: a server.
const ANSWER: u8 = 0b00_100_100;
/// As servers that ask a radio clock's.
const STRATUM: u8 = 2;

/// Two servers that tell this machine's time on its loopback interface.
pub struct TimeServers {
    ports: [u16; 2],
    silent: Arc<AtomicBool>,
}

impl TimeServers {
    /// Starts them; their threads end with the process.
    pub fn start() -> Result<Self> {
        let silent = Arc::new(AtomicBool::new(false));
        let start = || -> Result<u16> {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            let port = socket.local_addr()?.port();
            let silent = Arc::clone(&silent);
            std::thread::spawn(move || serve(&socket, &silent));
            Ok(port)
        };
        Ok(Self { ports: [start()?, start()?], silent })
    }

    /// Returns the section of a configuration by which a host asks them.
    pub fn section(&self) -> String {
        let [first, second] = self.ports.map(|port| format!("\"{TEST_MACHINE}:{port}\""));
        format!("[time]\nntp = [{first}, {second}]\n")
    }

    /// Returns the section by which it asks one of them.
    pub fn section_of_one(&self) -> String {
        format!("[time]\nntp = [\"{TEST_MACHINE}:{}\"]\n", self.ports[0])
    }

    /// Has them answer nobody.
    pub fn go_silent(&self) {
        self.silent.store(true, Ordering::SeqCst);
    }

    /// Has them answer again.
    pub fn answer_again(&self) {
        self.silent.store(false, Ordering::SeqCst);
    }
}

fn serve(socket: &UdpSocket, silent: &AtomicBool) {
    let mut request = [0; 48];
    while let Ok((_, peer)) = socket.recv_from(&mut request) {
        if silent.load(Ordering::SeqCst) {
            continue;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamp = ((since.as_nanos() + NTP_TO_UNIX * NANOS) << 32) / NANOS;
        let stamp = &stamp.to_be_bytes()[8..];
        let mut answer = [0; 48];
        (answer[0], answer[1]) = (ANSWER, STRATUM);
        answer[24..32].copy_from_slice(&request[40..48]);
        answer[32..40].copy_from_slice(stamp);
        answer[40..48].copy_from_slice(stamp);
        // Whoever went away needs no answer.
        let _ = socket.send_to(&answer, peer);
    }
}
