//! Walks the capability lists of a configuration space that may hold anything.
//!
//! A walk ends at the end of the list, at a pointer that leads out of the space or back, and at
//! all-ones, which is what a device reads as that is no longer there.
//! Source: PCI Express Base Specification 6.0 §7.5.1.1.11 and §7.6.3.

/// Offset of the first extended capability.
pub const EXTENDED_START: u16 = 0x100;
/// Status register, and its bit that says that there is a list at all.
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// Offset of the pointer to the first capability.
pub const POINTER: usize = 0x34;
/// End of the type 0 header: no capability starts below.
const HEADER_END: u8 = 0x40;

/// One entry of the list in the first 256 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// Capability id.
    pub id: u8,
    /// Offset of its first byte (the id).
    pub offset: u8,
}

/// One entry of the list from 0x100 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtendedCapability {
    /// Capability id.
    pub id: u16,
    /// Offset of its header.
    pub offset: u16,
    /// Offset of the next one, 0 at the end, or where the walk ended.
    pub next: u16,
}

/// Returns the capabilities in list order.
pub fn walk(config: &[u8]) -> Vec<Capability> {
    let mut found: Vec<Capability> = Vec::new();
    if config.get(STATUS).is_none_or(|status| status & STATUS_CAPABILITIES == 0) {
        return found;
    }
    let mut pointer = config.get(POINTER).copied().unwrap_or(0);
    loop {
        // The two low bits are reserved and to be ignored.
        let offset = pointer & !3;
        let at = usize::from(offset);
        let (Some(id), Some(next)) = (config.get(at), config.get(at + 1)) else { break };
        let seen = found.iter().any(|capability| capability.offset == offset);
        if offset < HEADER_END || seen || *id == 0xff {
            break;
        }
        found.push(Capability { id: *id, offset });
        pointer = *next;
    }
    found
}

/// Returns the extended capabilities in list order.
pub fn walk_extended(config: &[u8]) -> Vec<ExtendedCapability> {
    let mut found: Vec<ExtendedCapability> = Vec::new();
    let mut offset = EXTENDED_START;
    loop {
        let header = dword(config, usize::from(offset));
        let seen = found.iter().any(|capability| capability.offset == offset);
        // All zeroes ends a list, all ones is nobody there.
        if header == 0 || header == u32::MAX || offset < EXTENDED_START || seen {
            break;
        }
        if let Some(previous) = found.last_mut() {
            previous.next = offset;
        }
        let [low, high, ..] = header.to_le_bytes();
        found.push(ExtendedCapability { id: u16::from_le_bytes([low, high]), offset, next: 0 });
        let [.., third, fourth] = header.to_le_bytes();
        offset = (u16::from_le_bytes([third, fourth]) >> 4) & !3;
    }
    found
}

/// Returns the bytes of a capability; `None` where that is not known.
/// Source: PCI Express Base Specification 6.0 §7.5.2 (power management), §7.5.3 (PCI Express), §7.7 (MSI, MSI-X),
/// §7.8.5 (enhanced allocation), §7.9.4 (vendor-specific); PCI Local Bus 3.0 appendix I (product data).
pub fn length(config: &[u8], capability: Capability) -> Option<usize> {
    let at = usize::from(capability.offset);
    let byte = |offset: usize| usize::from(config.get(at + offset).copied().unwrap_or(0));
    match capability.id {
        0x01 | 0x03 => Some(8),
        // MSI: a longer address, and a mask for each vector.
        0x05 => Some(10 + 4 * (byte(2) >> 7 & 1) + 10 * (byte(3) & 1)),
        0x09 => Some(byte(2).max(3)),
        0x10 => Some(0x3c),
        0x11 => Some(12),
        // Entries, each of which says how many dwords follow its first.
        0x14 => Some((0..byte(2) & 0x3f).fold(4, |end, _| end + 4 + 4 * (byte(end) & 7))),
        _ => None,
    }
}

/// Returns the bytes of an extended capability that is hidden from guests; `None` where that is not known. What lies
/// between capabilities can be registers of the device's own, which its driver needs.
/// Source: PCI Express Base Specification 6.0 §7.8.8 (ARI), §7.8.7 and §7.8.6 (resizable BAR), §7.8.9 (PASID), §10.5.1
/// (ATS), §10.5.2 (page request), §9.3.3 (SR-IOV).
pub fn extended_length(config: &[u8], capability: ExtendedCapability) -> Option<usize> {
    match capability.id {
        0x0e | 0x0f | 0x1b => Some(8),
        0x10 => Some(0x40),
        0x13 => Some(16),
        0x15 | 0x24 => {
            // Bits 7:5 of the first control register: how many BARs have registers, 8 bytes for each.
            let bars = dword(config, usize::from(capability.offset) + 8) >> 5 & 7;
            Some(4 + 8 * bars as usize)
        }
        _ => None,
    }
}

/// Reads a little-endian dword; bytes beyond the end are all ones, as the bus answers.
pub(super) fn dword(config: &[u8], at: usize) -> u32 {
    let byte = |index: usize| config.get(at + index).copied().unwrap_or(0xff);
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// Reads a little-endian word; bytes beyond the end are all ones.
pub(super) fn word(config: &[u8], at: usize) -> u16 {
    let byte = |index: usize| config.get(at + index).copied().unwrap_or(0xff);
    u16::from_le_bytes([byte(0), byte(1)])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(bytes: &[(usize, u8)]) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[STATUS] = STATUS_CAPABILITIES;
        for (at, value) in bytes {
            config[*at] = *value;
        }
        config
    }

    #[test]
    fn a_list_is_read_in_its_order() {
        let config =
            config(&[(0x34, 0x80), (0x80, 0x10), (0x81, 0x40), (0x40, 0x05), (0x41, 0x00)]);
        let expected =
            [Capability { id: 0x10, offset: 0x80 }, Capability { id: 0x05, offset: 0x40 }];
        assert_eq!(walk(&config), expected);
    }

    #[test]
    fn a_loop_ends_the_walk() {
        let config = config(&[(0x34, 0x40), (0x40, 0x01), (0x41, 0x40)]);
        assert_eq!(walk(&config), [Capability { id: 1, offset: 0x40 }]);
    }

    #[test]
    fn a_pointer_into_the_header_ends_the_walk() {
        assert_eq!(walk(&config(&[(0x34, 0x10), (0x10, 0x05)])), []);
    }

    #[test]
    fn without_the_status_bit_there_is_no_list() {
        let mut config = config(&[(0x34, 0x40), (0x40, 0x05)]);
        config[STATUS] = 0;
        assert_eq!(walk(&config), []);
    }

    #[test]
    fn a_device_that_is_gone_has_no_capabilities() {
        assert_eq!(walk(&[0xff; 4096]), []);
        assert_eq!(walk_extended(&[0xff; 4096]), []);
    }

    #[test]
    fn capabilities_end_where_their_registers_do() {
        // MSI with a long address and masks; enhanced allocation of two entries, of three and of five dwords.
        let config =
            config(&[(0x42, 0x80), (0x43, 0x01), (0x62, 2), (0x64, 0x02), (0x70, 0xf4), (0x92, 9)]);
        let length = |id, offset| length(&config, Capability { id, offset });
        assert_eq!((length(0x05, 0x40), length(0x05, 0x50)), (Some(24), Some(10)));
        assert_eq!((length(0x14, 0x60), length(0x09, 0x90)), (Some(36), Some(9)));
        assert_eq!((length(0x11, 0xfc), length(0x0d, 0x40)), (Some(12), None));
    }

    #[test]
    fn a_conventional_device_has_no_extended_capabilities() {
        assert_eq!(walk_extended(&[0; 256]), []);
    }

    #[test]
    fn an_extended_loop_ends_the_walk() {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&0x2001_0001_u32.to_le_bytes());
        config[0x200..0x204].copy_from_slice(&0x1001_0015_u32.to_le_bytes());
        let expected = [
            ExtendedCapability { id: 1, offset: 0x100, next: 0x200 },
            ExtendedCapability { id: 0x15, offset: 0x200, next: 0 },
        ];
        assert_eq!(walk_extended(&config), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..4097)) {
            prop_assert!(walk(&bytes).len() <= 48);
            prop_assert!(walk_extended(&bytes).len() <= 960);
        }
    }
}
