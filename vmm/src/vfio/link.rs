//! The link of a device, as its own registers tell it.
//! Source: PCI Express Base Specification 6.0 §7.5.3.6 and §7.5.3.8.

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
        let [speed, width] = [fields & 0xf, fields >> 4 & 0x3f].map(|field| field.to_le_bytes()[0]);
        Link { speed: speed.clamp(1, 6), width: width.clamp(1, 32) }
    };
    let (most, now) = (told(LINK_CAPABILITIES), told(LINK_STATUS));
    // A device that says less of what it can be than of what it is can be that.
    let most = Link { speed: most.speed.max(now.speed), width: most.width.max(now.width) };
    LinkState { most, now }
}
