//! What a network sends to the node's DHCPv6 client. Transaction number and client identifier are
//! the client's, so that the fuzzer need not guess them: the input is a kind and options after them.
#![no_main]

use std::time::{Duration, Instant};

use agent::net::{
    HardwareAddress,
    dhcp6::client::{Client, Wanted},
};

libfuzzer_sys::fuzz_target!(|messages: Vec<Vec<u8>>| {
    let mut now = Instant::now();
    let all = Wanted { address: true, prefix: true };
    for wanted in [Wanted::ADDRESS, Wanted::CONFIGURATION, Wanted::PREFIX, all] {
        let mut client = Client::new(HardwareAddress([2, 0, 0, 0, 0, 1]), wanted, 1, now);
        for message in messages.iter().take(8) {
            let request = client.poll_transmit().unwrap_or_default();
            if let (Some((kind, options)), Some(own)) = (message.split_first(), request.get(1..18)) {
                client.handle_message(now, &[&[*kind], own, options].concat());
            }
            let _ = client.poll_event();
            now = client.poll_timeout().unwrap_or(now).min(now + Duration::from_secs(1 << 33));
            client.handle_timeout(now);
        }
    }
});
