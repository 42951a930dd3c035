//! Type 9: the slots, one for each port that leads to a device.
//! Source: DSP0134 3.6.0 §7.10.
//!
//! | Offset | Bytes | Field                                                                |
//! |--------|-------|----------------------------------------------------------------------|
//! | 0x04   | 1     | designation                                                          |
//! | 0x05   | 1     | type: PCI Express (0xa5)                                             |
//! | 0x06   | 1     | width of its lanes, encoded                                          |
//! | 0x07   | 1     | 3 available, 4 in use                                                |
//! | 0x08   | 1     | length: unknown (2)                                                  |
//! | 0x09   | 2     | number, as in the port's slot register                               |
//! | 0x0b   | 2     | characteristics: bit 2 3.3 V, bit 9 hot-plug                         |
//! | 0x0d   | 2     | segment: 0                                                           |
//! | 0x0f   | 1, 1  | bus behind the port; device and function there: 0                    |
//! | 0x11   | 1, 1  | lanes; no other devices share them                                   |
//! | 0x13   | 1     | generation of PCI Express                                            |
//! | 0x14   | 1     | width of the slot, encoded                                           |
//! | 0x15   | 2, 1  | pitch and height: none                                               |

use super::Structures;
use crate::pci::port::Link;

const HANDLE_SLOT: u16 = 0x0900;
/// Most slots that are told: without firmware there is room for 8 KiB of structures.
const MAX_SLOTS: usize = 64;

/// One slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its number, its own in the machine.
    pub number: u16,
    /// Bus of the device in it.
    pub bus: u8,
    /// The fastest link of its port.
    pub link: Link,
    /// Whether there is a device.
    pub usage: Usage,
}

/// What a slot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Devices come and go; it starts empty.
    Spare,
    /// It has its device for good.
    Taken,
}

/// Adds the structures.
pub(super) fn add(slots: &[Slot], all: &mut Structures) {
    for (handle, slot) in (HANDLE_SLOT..).zip(slots.iter().take(MAX_SLOTS)) {
        let name = format!("Slot {}", slot.number);
        all.add(9, handle, &structure(slot), &[&name]);
    }
}

fn structure(slot: &Slot) -> [u8; 20] {
    let (usage, hot_plug) = match slot.usage {
        Usage::Spare => (3, 1 << 1),
        Usage::Taken => (4, 0),
    };
    let [number0, number1] = slot.number.to_le_bytes();
    let Link { speed, width } = slot.link;
    let lanes = lanes(width);
    [
        1,
        0xa5,
        lanes,
        usage,
        2,
        number0,
        number1,
        1 << 2,
        hot_plug,
        0,
        0,
        slot.bus,
        0,
        width,
        0,
        speed,
        lanes,
        0,
        0,
        0,
    ]
}

/// Encodes a number of lanes; what is not listed is unknown.
fn lanes(width: u8) -> u8 {
    match width {
        1 => 0x08,
        2 => 0x09,
        4 => 0x0a,
        8 => 0x0b,
        12 => 0x0c,
        16 => 0x0d,
        32 => 0x0e,
        _ => 0x02,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_told_field_by_field() {
        let link = Link { speed: 5, width: 16 };
        let slot = Slot { number: 0x102, bus: 0x81, link, usage: Usage::Taken };
        let expected = [1, 0xa5, 0x0d, 4, 2, 2, 1, 4, 0, 0, 0, 0x81, 0, 16, 0, 5, 0x0d, 0, 0, 0];
        assert_eq!(structure(&slot), expected);
        let spare = structure(&Slot { usage: Usage::Spare, ..slot });
        assert_eq!((spare[3], spare[8]), (3, 2));
    }

    #[test]
    fn no_more_are_told_than_there_is_room_for() {
        let link = Link { speed: 1, width: 3 };
        let slot = |number| Slot { number, bus: 1, link, usage: Usage::Spare };
        let slots: Vec<Slot> = (1..=255).map(slot).collect();
        let mut all = Structures::default();
        add(&slots, &mut all);
        let (one_digit, two_digits) = (24 + "Slot 1".len() + 2, 24 + "Slot 10".len() + 2);
        assert_eq!(all.0.len(), 9 * one_digit + 55 * two_digits);
        assert_eq!(all.0[6], 2, "three lanes have no code");
    }
}
