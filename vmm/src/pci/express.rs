//! PCI Express capability of a function that is no port: an endpoint within the root complex, or one at the
//! end of a link, below a port.
//! Source: PCI Express Base Specification 6.0 §7.5.3.
//!
//! | Offset     | Register              | Value here                                               |
//! |------------|-----------------------|----------------------------------------------------------|
//! | 0x02       | capabilities          | version 2; where the function is                         |
//! | 0x04       | device capabilities   | role-based errors; function-level reset, if there is one |
//! | 0x08       | device control        | the guest's to write; its reset reads as zero            |
//! | 0x0c, 0x12 | link                  | below a port 2.5 GT/s and one lane, none otherwise       |
//! | 0x24, 0x28 | device 2              | completion timeouts can be switched off                  |
//! | 0x2c, 0x30 | link 2                | below a port that one speed, which is aimed at           |

use super::{
    config::{ConfigError, ConfigSpace},
    port::Link,
};

/// The link of a function below a port.
pub const LINK: Link = Link { speed: 1, width: 1 };

const CAPABILITY: u8 = 0x10;
const SIZE: usize = 0x3c;
/// Capabilities: version 2 of an endpoint, and of a root complex integrated endpoint.
const ENDPOINT: u16 = 2;
const INTEGRATED: u16 = 9 << 4 | 2;
/// Device capabilities: role-based error reporting, which every function since 1.1 has to say; function-level
/// reset.
const ROLE_BASED: u32 = 1 << 15;
const RESET_CAPABLE: u32 = 1 << 28;
/// Device control: error reporting, relaxed order, payload and read request sizes, no snoop.
const DEVICE_CONTROL_WRITABLE: [u8; 2] = [0xff, 0x78];
/// Device control's second byte: the function is to reset itself.
const RESET: u8 = 1 << 7;
/// Device capabilities 2: completion timeouts can be switched off, which who makes requests has to
/// offer. The same bit of device control 2 does it.
const TIMEOUT_DISABLE: u8 = 1 << 4;
/// The link as capabilities and as status have it; as a vector of speeds, and as the one that is aimed at.
const LINK_FIELDS: u8 = LINK.width << 4 | LINK.speed;
const LINK_SPEEDS: u8 = 1 << LINK.speed;
const LINK_TARGET: u8 = LINK.speed;

/// Whether a function resets itself when it is asked to (PCIe 6.0 §6.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionReset {
    /// It does not.
    Absent,
    /// It does: who writes its configuration space looks for [`Express::asks_for_reset`].
    Offered,
}

/// The capability of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Express {
    at: u16,
}

impl Express {
    /// Adds it to a function of the root complex.
    pub fn add(config: &mut ConfigSpace, reset: FunctionReset) -> Result<Self, ConfigError> {
        let mut body = [0; SIZE - 2];
        let mut writable = body;
        let at = |register: usize| register - 2;
        let device = match reset {
            FunctionReset::Absent => ROLE_BASED,
            FunctionReset::Offered => ROLE_BASED | RESET_CAPABLE,
        };
        body[at(0x02)..at(0x04)].copy_from_slice(&INTEGRATED.to_le_bytes());
        body[at(0x04)..at(0x08)].copy_from_slice(&device.to_le_bytes());
        body[at(0x24)] = TIMEOUT_DISABLE;
        writable[at(0x08)..at(0x0a)].copy_from_slice(&DEVICE_CONTROL_WRITABLE);
        writable[at(0x28)] = TIMEOUT_DISABLE;
        let at = config.add_capability(CAPABILITY, &body, &writable)?;
        Ok(Self { at })
    }

    /// Makes the function say that it sits below a port, at the end of a link.
    pub fn set_below_port(self, config: &mut ConfigSpace) {
        config.set(self.at + 0x02, &ENDPOINT.to_le_bytes());
        config.set(self.at + 0x0c, &[LINK_FIELDS]);
        config.set(self.at + 0x12, &[LINK_FIELDS]);
        config.set(self.at + 0x2c, &[LINK_SPEEDS]);
        config.set(self.at + 0x30, &[LINK_TARGET]);
    }

    /// Returns whether a write to configuration space asks the function to reset itself.
    pub fn asks_for_reset(self, offset: u16, data: &[u8]) -> bool {
        let control = usize::from(self.at + 0x09).checked_sub(usize::from(offset));
        control.and_then(|at| data.get(at)).is_some_and(|byte| byte & RESET != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::config::Identity;

    /// Where the first capability goes.
    const AT: u16 = 0x40;

    fn config(reset: FunctionReset) -> (ConfigSpace, Express) {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            device: 0x1042,
            class: 0x01_80_00,
            revision: 1,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        });
        let express = Express::add(&mut config, reset).expect("room");
        (config, express)
    }

    fn word(config: &ConfigSpace, register: u16) -> u32 {
        let half = |at| u32::from(config.read_u16(AT + at));
        half(register) | half(register + 2) << 16
    }

    #[test]
    fn in_the_root_complex_it_has_no_link() {
        let (config, _) = config(FunctionReset::Absent);
        assert_eq!(word(&config, 0x00), 0x0092_0010);
        assert_eq!((word(&config, 0x04), word(&config, 0x08)), (0x8000, 0));
        assert_eq!((word(&config, 0x0c), word(&config, 0x10)), (0, 0));
        assert_eq!((word(&config, 0x24), word(&config, 0x28)), (0x10, 0));
        assert_eq!((word(&config, 0x2c), word(&config, 0x30)), (0, 0));
    }

    #[test]
    fn below_a_port_it_is_an_endpoint_with_a_link() {
        let (mut config, express) = config(FunctionReset::Absent);
        express.set_below_port(&mut config);
        assert_eq!(word(&config, 0x00), 0x0002_0010);
        assert_eq!((word(&config, 0x0c), word(&config, 0x10)), (0x11, 0x11 << 16));
        assert_eq!((word(&config, 0x2c), word(&config, 0x30)), (0b10, 1));
    }

    /// What an emulated function says of its link is what the port above says (PCIe 6.0 §7.5.3.8).
    #[test]
    fn both_ends_of_the_link_say_the_same() {
        let (mut config, express) = config(FunctionReset::Absent);
        express.set_below_port(&mut config);
        let port = LINK.fixed().registers();
        assert_eq!(word(&config, 0x0c), port.link_capabilities);
        assert_eq!(word(&config, 0x10) >> 16, u32::from(port.link_status));
        assert_eq!(word(&config, 0x2c), port.link_capabilities2);
        assert_eq!(word(&config, 0x30), u32::from(port.link_control2));
    }

    #[test]
    fn the_guest_writes_the_controls_and_nothing_else() {
        let (mut config, express) = config(FunctionReset::Offered);
        express.set_below_port(&mut config);
        let before: Vec<u32> = (0..0x3c).step_by(4).map(|at| word(&config, at)).collect();
        config.write(AT + 2, &[0xff; 0x3a]);
        let after: Vec<u32> = (0..0x3c).step_by(4).map(|at| word(&config, at)).collect();
        let changed: Vec<(usize, u32)> = after
            .iter()
            .zip(&before)
            .enumerate()
            .filter(|(_, (after, before))| after != before)
            .map(|(at, (after, before))| (4 * at, after ^ before))
            .collect();
        assert_eq!(changed, [(0x08, 0x78ff), (0x28, 0x10)]);
    }

    #[test]
    fn a_reset_is_asked_for_by_one_bit() {
        let (config, express) = config(FunctionReset::Offered);
        assert_eq!(word(&config, 0x04), 0x1000_8000);
        assert!(express.asks_for_reset(AT + 8, &[0, 0x80]));
        assert!(express.asks_for_reset(AT + 9, &[0x80]));
        assert!(!express.asks_for_reset(AT + 8, &[0x80, 0x7f]));
        assert!(!express.asks_for_reset(AT + 8, &[0x80]));
        assert!(!express.asks_for_reset(AT + 10, &[0x80, 0x80]));
    }
}
