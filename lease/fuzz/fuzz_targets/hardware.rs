//! What renters choose of hardware, `[shape, hardware]`, and what they attach: what passes the checks
//! stays within the lease, and names a file in one folder.

#![no_main]

use lease::hardware::{Attach, Hardware};
use types::node::MachineShape;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok((shape, hardware)) = serde_json::from_slice::<(MachineShape, Hardware)>(bytes)
        && hardware.check(&shape).is_ok()
    {
        assert!(hardware.own_disk(&shape) <= shape.disk_mib);
        let later = hardware.plugged_later.len();
        assert!(hardware.cold_devices(&shape).len() + later <= shape.devices.len());
    }
    if let Ok(wanted) = serde_json::from_slice::<Attach>(bytes)
        && wanted.check().is_ok()
    {
        let id = wanted.id();
        assert!(!id.is_empty() && !id.contains('/') && !id.starts_with(".."));
        assert!(id.len() <= 20);
    }
});
