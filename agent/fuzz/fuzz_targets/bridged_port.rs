//! What passes the tap of a bridged guest: bindings hold few addresses, and none that is nobody's.
#![no_main]

use std::time::Instant;

use agent::net::{
    HardwareAddress,
    machines::bridged::bindings::{Bindings, MAX_ADDRESSES, Way},
};

libfuzzer_sys::fuzz_target!(|frames: Vec<(bool, Vec<u8>)>| {
    let mut now = Instant::now();
    let mut bindings = Bindings::new(HardwareAddress([2, 0, 0, 0, 0, 1]), None, Vec::new());
    for (sent, frame) in frames.iter().take(64) {
        let way = if *sent { Way::FromGuest } else { Way::ToGuest };
        bindings.handle_frame(now, way, frame);
        let before = bindings.asked_for().len();
        bindings.handle_use(frame);
        assert_eq!(bindings.asked_for().len(), before);
        now = bindings.poll_timeout().unwrap_or(now);
        bindings.handle_timeout(now, |_| false);
        bindings.poll_probe(now);
        bindings.poll_refusal();
        let known = bindings.asked_for();
        assert!(known.len() <= MAX_ADDRESSES);
        assert!(known.iter().all(|a| !a.is_multicast() && !a.is_unspecified()));
        assert!(bindings.leased().is_none_or(|leased| !leased.address.is_multicast()));
    }
});
