//! What hosts on an uplink send by ARP: only the node's own addresses are lost or shared, and to nobody that is
//! the node itself.
#![no_main]

use std::{collections::BTreeMap, net::Ipv4Addr, time::Instant};

use agent::net::{
    HardwareAddress,
    conflict::{Claim, Claims, Finding, Guard},
};

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
const SECOND: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 2]);

libfuzzer_sys::fuzz_target!(|packets: Vec<Vec<u8>>| {
    let given = (Ipv4Addr::new(192, 0, 2, 7), Claim::Given);
    let kept = (Ipv4Addr::new(192, 0, 2, 8), Claim::Kept);
    let addresses = BTreeMap::from([given, kept]);
    let mut now = Instant::now();
    let mut guard = Guard::new(Claims { hardware: MAC, own: vec![SECOND], addresses }, now);
    for packet in packets.iter().take(64) {
        guard.handle_packet(now, packet);
        while let Some((address, finding)) = guard.poll_finding() {
            match finding {
                Finding::Lost(other) => {
                    assert!(address == given.0 && other != MAC && other != SECOND)
                }
                Finding::Shared(other) => {
                    assert!(address == kept.0 && other != MAC && other != SECOND)
                }
                Finding::Alone => assert_eq!(address, kept.0),
            }
        }
        let mut frames = 0;
        while guard.poll_transmit().is_some() {
            frames += 1;
        }
        assert!(frames <= 4);
        now = guard.poll_timeout().unwrap_or(now).max(now);
        guard.handle_timeout(now);
    }
});
