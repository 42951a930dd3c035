//! pvpanic: the guest says that its system has failed.
//! Source: QEMU docs/specs/pvpanic.rst, "ISA Interface", "ACPI Interface" and "Bit Definition".
//!
//! | Port  | Access | Meaning                          |
//! |-------|--------|----------------------------------|
//! | 0x505 | read   | events that this device knows    |
//! | 0x505 | write  | events that happened, as a mask  |
//!
//! | Bit | Event                                                       |
//! |-----|-------------------------------------------------------------|
//! | 0   | the guest panicked and does nothing more                    |
//! | 1   | the guest panicked and its own crash kernel takes over      |

/// The port.
pub const PORT: u16 = 0x505;
/// ACPI hardware id of the device.
pub const HARDWARE_ID: &str = "QEMU0001";

const PANICKED: u8 = 1 << 0;
const CRASH_KERNEL: u8 = 1 << 1;

/// What a write says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// Nothing that this device knows.
    Nothing,
    /// The guest panicked.
    Panicked,
    /// The guest panicked and its crash kernel takes over.
    CrashKernel,
}

/// Reads the port.
pub fn read() -> u8 {
    PANICKED | CRASH_KERNEL
}

/// Writes the port. Where both bits are set the panic counts: nothing comes after it.
pub fn write(value: u8) -> Report {
    if value & PANICKED != 0 {
        Report::Panicked
    } else if value & CRASH_KERNEL != 0 {
        Report::CrashKernel
    } else {
        Report::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_events_are_known_and_told_apart() {
        assert_eq!(read(), 0b11);
        assert_eq!(write(1), Report::Panicked);
        assert_eq!(write(2), Report::CrashKernel);
        assert_eq!(write(3), Report::Panicked);
    }

    #[test]
    fn unknown_bits_mean_nothing() {
        assert_eq!(write(0xfc), Report::Nothing);
        assert_eq!(write(0xfd), Report::Panicked);
    }
}
