//! A node's broadcast: what it offers. Whatever it says, it is listed under its own name and for
//! a bounded time.

#![no_main]

use gateway::directory::Directory;
use libfuzzer_sys::fuzz_target;
use types::{ids::NodeId, node::Offer, units::UnixSeconds};

fuzz_target!(|json: &[u8]| {
    let Ok(offer) = serde_json::from_slice::<Offer>(json) else { return };
    let (mut directory, now) = (Directory::default(), UnixSeconds(1_000_000));
    let sender = NodeId::from_bytes([1; 32]);
    if directory.handle_offer(now, sender, offer).is_ok() {
        assert!(directory.offer(now, sender).is_some());
    }
    assert!(directory.offers(now.plus(600)).is_empty());
});
