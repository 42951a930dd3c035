//! A time server that says the time of this machine. Source: RFC 4330 §4.

use std::{
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Result;

/// Seconds from 1900, where NTP begins, to 1970.
const NTP_TO_UNIX: u64 = 2_208_988_800;
/// Bytes of a message.
const MESSAGE: usize = 48;
/// Leap indicator 0, version 4, mode 4: a server's answer.
const ANSWER: u8 = 0b00_100_100;
/// From a reference clock, one hop away.
const STRATUM: u8 = 2;

/// Starts a server on the loopback interface that answers for as long as the process lives; returns its
/// port.
pub fn serve() -> Result<u16> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = socket.local_addr()?.port();
    thread::spawn(move || {
        let mut request = [0; MESSAGE];
        while let Ok((length, peer)) = socket.recv_from(&mut request) {
            if length == MESSAGE {
                // Who did not get it asks again.
                socket.send_to(&answer(&request), peer).ok();
            }
        }
    });
    Ok(port)
}

fn answer(request: &[u8; MESSAGE]) -> [u8; MESSAGE] {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = u128::from(now.as_secs() + NTP_TO_UNIX);
    let fraction = (u128::from(now.subsec_nanos()) << 32) / 1_000_000_000;
    let stamp = u64::try_from(seconds << 32 | fraction).unwrap_or(u64::MAX).to_be_bytes();
    let mut answer = [0; MESSAGE];
    (answer[0], answer[1]) = (ANSWER, STRATUM);
    // Originate, receive and transmit timestamps.
    answer[24..32].copy_from_slice(&request[40..48]);
    answer[32..40].copy_from_slice(&stamp);
    answer[40..48].copy_from_slice(&stamp);
    answer
}
