//! The link of a device, as its own registers tell it.
//! Source: PCI Express Base Specification 6.0 §7.5.3.6 and §7.5.3.8; §9.3.5 of virtual functions.

use super::capabilities;
use crate::pci::port::{Link, LinkState};

/// PCI Express capability, and its link capabilities and status.
const EXPRESS: u8 = 0x10;
const LINK_CAPABILITIES: usize = 0x0c;
const LINK_STATUS: usize = 0x12;

/// Returns the link of a device; a conventional one shows the slowest there is.
pub(super) fn of(snapshot: &[u8]) -> LinkState {
    let found = capabilities::walk(snapshot).into_iter().find(|found| found.id == EXPRESS);
    let told = |register| {
        let fields = found
            .as_ref()
            .map_or(0, |found| capabilities::word(snapshot, usize::from(found.offset) + register));
        [fields & 0xf, fields >> 4 & 0x3f].map(|field| field.to_le_bytes()[0])
    };
    let link =
        |[speed, width]: [u8; 2]| Link { speed: speed.clamp(1, 6), width: width.clamp(1, 32) };
    let most = link(told(LINK_CAPABILITIES));
    // A virtual function says of its link only what it can be: its status is that of its physical function.
    let now = match told(LINK_STATUS) {
        [_, 0] => most,
        status => link(status),
    };
    // A device that says less of what it can be than of what it is can be that.
    let most = Link { speed: most.speed.max(now.speed), width: most.width.max(now.width) };
    LinkState { most, now }
}
