//! Devices that need something other than the rules say.

/// What is done differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The capability with this id is hidden.
    HideCapability(u8),
    /// The MSI-X table is told to be where the device has nothing, though its pages hold only it.
    MoveTable,
}

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Quirk {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// What is done.
    pub effect: Effect,
    /// How it is known that it must be done.
    pub evidence: &'static str,
}

const QUIRKS: &[Quirk] = &[Quirk {
    vendor: 0x10ec,
    device: 0x8168,
    effect: Effect::HideCapability(super::config::MSIX),
    evidence: "BAR 2 has a second way (offsets 0x70 and 0x74) to the MSI-X table, by which \
                   drivers write messages that would never be routed: QEMU hw/vfio/pci-quirks.c, \
                   \"RTL8168 devices have a backdoor\". MSI works.",
}];

/// Returns the rows of a device.
pub fn of(vendor: u16, device: u16) -> Vec<&'static Quirk> {
    QUIRKS.iter().filter(|row| (row.vendor, row.device) == (vendor, device)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_rows_has_no_quirks() {
        assert_eq!(of(0x8086, 0x5845), Vec::<&Quirk>::new());
    }

    #[test]
    fn the_second_way_to_the_table_is_known() {
        let effects: Vec<Effect> = of(0x10ec, 0x8168).iter().map(|row| row.effect).collect();
        assert_eq!(effects, [Effect::HideCapability(super::super::config::MSIX)]);
    }
}
