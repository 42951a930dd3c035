//! Name servers in router advertisements, as the kernel passes them on.
#![no_main]

use std::time::Instant;

use agent::net::rdnss::NameServers;

libfuzzer_sys::fuzz_target!(|messages: &[u8]| {
    let mut servers = NameServers::default();
    servers.handle_messages(Instant::now(), messages);
    let _ = (servers.poll_timeout(), servers.on(2).count());
});
