//! What a guest sends to its DHCP server.
#![no_main]

use agent::net::{HardwareAddress, Ipv4Prefix, dhcp::server::GuestLease};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let lease = GuestLease {
        hardware: HardwareAddress([2, 0, 0, 0, 0, 1]),
        address: Ipv4Prefix::new([10, 77, 0, 2].into(), 16).expect("a length"),
        gateway: [10, 77, 0, 1].into(),
        dns: vec![[192, 0, 2, 53].into()],
        mtu: 1500,
    };
    let _ = lease.answer(bytes);
});
