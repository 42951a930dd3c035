//! The two functions by which firmware and drivers know Intel's q35 chipset: the host bridge, which
//! says where enhanced configuration space is, and the LPC bridge, which says where power
//! management is.
//! Source: Intel 3 Series Express Chipset Family datasheet (316966) §5.1 (ESMRAMC), §5.1.16 (PCIEXBAR); Intel ICH9
//! datasheet (316972) §13.1 (LPC interface).
//!
//! | Function | Offset       | Register                                                     |
//! |----------|--------------|--------------------------------------------------------------|
//! | 00:00.0  | 0x60         | PCIEXBAR: bit 0 on, 2:1 size (0: 256 buses), 35:28 base      |
//! | 00:00.0  | 0x9e         | ESMRAMC: zero, there is no memory for system management      |
//! | 00:1f.0  | 0x04         | command: it always decodes and masters; fixed                |
//! | 00:1f.0  | 0x40         | PMBASE: ports of power management; fixed                     |
//! | 00:1f.0  | 0x44         | ACPI_CNTL: bit 7 power management decodes; fixed             |
//! | 00:1f.0  | 0x60, 0x68   | PIRQ routing to the PICs: kept, no line is wired there       |
//! | 00:1f.0  | 0xf0         | RCBA: bit 0 on, 31:14 base; kept, no register is there       |

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::{
    config::{COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY, ConfigSpace, Identity},
    function::{Bar, PciFunction},
};
use crate::{devices::power, layout};

const PCIEXBAR: u16 = 0x60;
const PCIEXBAR_ON: u64 = 1;
/// Bits 2:1: how many buses. Anything but zero would be fewer than 256.
const PCIEXBAR_SIZE: u64 = 0b110;
/// Address bits of a window of 256 MiB; the chipset has 36.
const PCIEXBAR_BASE: u64 = 0xf_f000_0000;
const ESMRAMC: u16 = 0x9e;
const PMBASE: u16 = 0x40;
const ACPI_CONTROL: u16 = 0x44;
const ACPI_ON: u8 = 1 << 7;
/// A PIRQ line that goes nowhere: bit 7.
const PIRQ_OFF: [u8; 4] = [0x80; 4];

/// Slot of the LPC bridge, where Intel's chipsets have it.
pub const LPC_SLOT: u8 = 31;

const LPC_IDENTITY: Identity = Identity {
    vendor: 0x8086,
    device: 0x2918,
    class: 0x06_01_00,
    revision: 2,
    subsystem_vendor: 0,
    subsystem: 0,
};
const HOST_IDENTITY: Identity = Identity {
    vendor: 0x8086,
    device: 0x29c0,
    class: 0x06_00_00,
    revision: 0,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// Where enhanced configuration space is now: shared by the register and by who decodes addresses.
#[derive(Debug, Clone)]
pub struct Ecam(Arc<AtomicU64>);

impl Default for Ecam {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(layout::ECAM)))
    }
}

impl Ecam {
    /// Nowhere: no address is 2^64 - 1 minus 256 MiB or more.
    const OFF: u64 = u64::MAX;

    /// Returns how far into it `address` lies, if it does.
    pub fn offset(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.0.load(Ordering::Relaxed))?;
        (offset < layout::ECAM_SIZE).then_some(offset)
    }

    /// Returns its address; where it was at power-on while it is switched off.
    pub fn base(&self) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            Self::OFF => layout::ECAM,
            base => base,
        }
    }

    fn place(&self, register: u64) {
        let on = register & PCIEXBAR_ON != 0 && register & PCIEXBAR_SIZE == 0;
        let base = if on { register & PCIEXBAR_BASE } else { Self::OFF };
        self.0.store(base, Ordering::Relaxed);
    }
}

/// Hears who asks for memory for system management.
pub trait SmramWatch: Send + Sync {
    /// The guest reads ESMRAMC.
    fn asked(&self);
}

/// The host bridge.
pub struct HostBridge {
    config: ConfigSpace,
    ecam: Ecam,
    watch: Option<Arc<dyn SmramWatch>>,
}

impl HostBridge {
    /// Makes the bridge; its register moves `ecam`.
    pub fn new(ecam: Ecam) -> Self {
        let mut config = ConfigSpace::new(HOST_IDENTITY);
        config.set(PCIEXBAR, &(ecam.base() | PCIEXBAR_ON).to_le_bytes());
        config.allow_write(PCIEXBAR, &(PCIEXBAR_BASE | PCIEXBAR_SIZE | PCIEXBAR_ON).to_le_bytes());
        Self { config, ecam, watch: None }
    }

    /// Tells `watch` who asks for memory for system management.
    #[must_use]
    pub fn watched(self, watch: Option<Arc<dyn SmramWatch>>) -> Self {
        Self { watch, ..self }
    }
}

impl PciFunction for HostBridge {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        let after = ESMRAMC.checked_sub(offset).map(usize::from);
        if let Some(watch) = self.watch.as_ref().filter(|_| after.is_some_and(|at| at < data.len()))
        {
            watch.asked();
        }
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
        let length = u16::try_from(data.len()).unwrap_or(u16::MAX);
        if offset < PCIEXBAR + 8 && offset.saturating_add(length) > PCIEXBAR {
            let mut register = [0; 8];
            self.config.read(PCIEXBAR, &mut register);
            self.ecam.place(u64::from_le_bytes(register));
        }
    }

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn place_bar(&mut self, _index: u8, _address: u64) {}

    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
}

/// The LPC bridge. Its registers mean nothing to us once they are told.
pub struct LpcBridge {
    config: ConfigSpace,
}

impl Default for LpcBridge {
    fn default() -> Self {
        let mut config = ConfigSpace::new(LPC_IDENTITY);
        let command = COMMAND_IO | COMMAND_MEMORY | COMMAND_MASTER;
        config.set(0x04, &command.to_le_bytes());
        config.allow_write(0x04, &[0, 0]);
        // Bit 0: the base is one of I/O ports.
        config.set(PMBASE, &(u32::from(power::PM_BASE) | 1).to_le_bytes());
        config.set(ACPI_CONTROL, &[ACPI_ON]);
        for lines in [0x60, 0x68] {
            config.set(lines, &PIRQ_OFF);
            config.allow_write(lines, &[0x8f; 4]);
        }
        config.allow_write(0xf0, &0xffff_c001u32.to_le_bytes());
        Self { config }
    }
}

impl PciFunction for LpcBridge {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
    }

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn place_bar(&mut self, _index: u8, _address: u64) {}

    fn read_bar(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_space_goes_where_the_register_says() {
        let ecam = Ecam::default();
        let mut bridge = HostBridge::new(ecam.clone());
        let mut data = [0; 4];
        bridge.read_config(PCIEXBAR, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0xe000_0001);
        assert_eq!(ecam.offset(layout::ECAM + 7), Some(7));
        bridge.write_config(PCIEXBAR, &[0; 4]);
        assert_eq!((ecam.offset(layout::ECAM), ecam.base()), (None, layout::ECAM));
        bridge.write_config(PCIEXBAR + 4, &[0; 4]);
        bridge.write_config(PCIEXBAR, &0xb000_0001u32.to_le_bytes());
        assert_eq!((ecam.offset(0xb000_1000), ecam.offset(layout::ECAM)), (Some(0x1000), None));
        assert_eq!(ecam.offset(0xbfff_ffff), Some(0xfff_ffff));
        assert_eq!(ecam.offset(0xc000_0000), None);
    }

    #[test]
    fn power_management_is_where_the_bridge_says() {
        let mut bridge = LpcBridge::default();
        let mut data = [0; 4];
        bridge.write_config(PMBASE, &[0xff; 4]);
        bridge.read_config(PMBASE, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0x601);
        bridge.read_config(ACPI_CONTROL, &mut data);
        assert_eq!(data[0], ACPI_ON);
        bridge.write_config(4, &[0, 0]);
        bridge.read_config(4, &mut data);
        assert_eq!(data[..2], [7, 0]);
        bridge.read_config(8, &mut data);
        assert_eq!(u32::from_le_bytes(data) >> 8, 0x06_01_00);
    }

    #[test]
    fn interrupt_routing_and_the_root_complex_base_are_kept() {
        let mut bridge = LpcBridge::default();
        let mut data = [0; 4];
        bridge.read_config(0x68, &mut data);
        assert_eq!(data, PIRQ_OFF);
        bridge.write_config(0x60, &[0x0a, 0xff, 0, 0]);
        bridge.read_config(0x60, &mut data);
        assert_eq!(data, [0x0a, 0x8f, 0, 0]);
        bridge.write_config(0xf0, &0xfed1_c001u32.to_le_bytes());
        bridge.read_config(0xf0, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0xfed1_c001);
    }
}
