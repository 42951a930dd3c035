//! A real server on the internet side of a host: it echoes datagrams, greets connections, and
//! remembers which probes reached it.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{IpAddr, TcpListener, UdpSocket},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};

/// What stands in front of a probe's name in what it sends, and behind it.
const NAME_STARTS: &str = "probe-is-";
const NAME_ENDS: char = ';';
/// Ports tried until one is free for TCP and UDP.
const ATTEMPTS: u32 = 20;
/// How long a connection may keep its request to itself.
const REQUEST_LIMIT: Duration = Duration::from_secs(1);

/// A running server; its threads end with the process.
#[derive(Debug)]
pub struct Outside {
    /// Its port, for TCP and UDP.
    pub port: u16,
    probes: Arc<Mutex<BTreeSet<String>>>,
}

impl Outside {
    /// Starts a server at `address`.
    pub fn start(address: IpAddr) -> Result<Self> {
        let (listener, socket) = (0..ATTEMPTS)
            .find_map(|_| same_port(address).ok())
            .with_context(|| format!("no port of {address} is free for both TCP and UDP"))?;
        let port = socket.local_addr()?.port();
        let probes = Arc::new(Mutex::new(BTreeSet::new()));
        let seen = Arc::clone(&probes);
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                // Whoever went away needs no answer.
                let _ = socket.send_to(&buffer[..length], peer);
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let name = text.split_once(NAME_STARTS).and_then(|(_, rest)| {
                    rest.split_once(NAME_ENDS).map(|(name, _)| name.to_owned())
                });
                seen.lock().unwrap_or_else(PoisonError::into_inner).extend(name);
            }
        });
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                // A request that is not read would turn the answer into a reset.
                let _ = stream.set_read_timeout(Some(REQUEST_LIMIT));
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(b"hello from outside\n");
            }
        });
        Ok(Self { port, probes })
    }

    /// Returns the names of the probes that came.
    pub fn probes(&self) -> Vec<String> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

fn same_port(address: IpAddr) -> std::io::Result<(TcpListener, UdpSocket)> {
    let listener = TcpListener::bind((address, 0))?;
    let socket = UdpSocket::bind((address, listener.local_addr()?.port()))?;
    Ok((listener, socket))
}
