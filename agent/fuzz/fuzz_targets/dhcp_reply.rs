//! What a network sends to the node's DHCP client, IPv4 header included. The transaction number
//! is the client's, so that the fuzzer need not guess it.
#![no_main]

use std::time::Instant;

use agent::net::{
    HardwareAddress,
    dhcp::{client::Client, frame},
};

libfuzzer_sys::fuzz_target!(|packet: &[u8]| {
    let Some((_, message)) = frame::unwrap(packet) else { return };
    let now = Instant::now();
    let mut client = Client::new(HardwareAddress([2, 0, 0, 0, 0, 1]), None, 1, now);
    let mut message = message.to_vec();
    for _ in 0..2 {
        let request = client.poll_transmit().map(|transmit| transmit.message);
        if let (Some(request), Some(xid)) = (request, message.get_mut(4..8)) {
            xid.copy_from_slice(&request[4..8]);
        }
        client.handle_message(now, &message);
    }
    let _ = (client.poll_event(), client.poll_timeout());
});
