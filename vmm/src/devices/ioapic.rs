//! The I/O APIC of machines whose processors have ids that eight bits do not hold: 24 pins, each of
//! which becomes a message to local APICs. KVM's own, which all other machines have, reaches ids up
//! to 254 only.
//! Source: Intel 82093AA datasheet (order number 290566-001) §3.1 (memory mapped registers), §3.2
//! (IOAPIC registers), §3.4 (interrupt delivery); Intel ICH9 datasheet §13.5.4 (EOI register, which
//! comes with version 0x20); Linux Documentation/virt/kvm/x86/cpuid.rst, KVM_FEATURE_MSI_EXT_DEST_ID
//! (destinations of 15 bits).
//!
//! | Offset | Access | Register                                                           |
//! |--------|--------|--------------------------------------------------------------------|
//! | 0x00   | r/w    | IOREGSEL: bits 7:0, index of the register that is in the window    |
//! | 0x10   | r/w    | IOWIN: that register                                               |
//! | 0x40   | w      | EOIR: bits 7:0, vector whose level-triggered interrupts have ended |
//!
//! | Index      | Access | Register                                                       |
//! |------------|--------|----------------------------------------------------------------|
//! | 0x00       | r/w    | IOAPICID: bits 27:24 identification                            |
//! | 0x01       | r      | IOAPICVER: bits 23:16 last pin, 7:0 version                    |
//! | 0x02       | r      | IOAPICARB: bits 27:24 as the identification                    |
//! | 0x10 + 2 n | r/w    | IOREDTBL of pin n, low half                                    |
//! | 0x11 + 2 n | r/w    | IOREDTBL of pin n, high half                                   |
//!
//! | Bits of IOREDTBL | Access | Meaning                                                   |
//! |------------------|--------|-----------------------------------------------------------|
//! | 7:0              | r/w    | vector                                                    |
//! | 10:8             | r/w    | delivery mode                                             |
//! | 11               | r/w    | destination mode: 1 logical                               |
//! | 12               | r      | delivery status: always 0, messages go at once            |
//! | 13               | r/w    | polarity: kept; pins are told whether they are asserted   |
//! | 14               | r      | remote IRR: a local APIC has taken the level              |
//! | 15               | r/w    | trigger mode: 1 level                                     |
//! | 16               | r/w    | masked                                                    |
//! | 55:49            | r/w    | destination, bits 14:8                                    |
//! | 63:56            | r/w    | destination, bits 7:0                                     |

use crate::irq::{Level, MsiMessage};

/// Bytes of its registers.
pub const LENGTH: u64 = 0x100;
/// Pins.
pub const PINS: u8 = 24;

const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const END: u64 = 0x40;

const IDENTITY: u8 = 0x00;
const VERSION: u8 = 0x01;
const ARBITRATION: u8 = 0x02;
const FIRST_ENTRY: u8 = 0x10;

/// Identification: bits 27:24.
const IDENTITY_BITS: u32 = 0x0f00_0000;
/// Last pin, and the version that has an EOI register.
const VERSION_VALUE: u32 = (PINS as u32 - 1) << 16 | 0x20;

const DELIVERY: u64 = 7 << 8;
/// Delivery modes that a local APIC acknowledges: fixed and lowest priority.
const LAST_ACKNOWLEDGED: u64 = 1 << 8;
const LOGICAL: u64 = 1 << 11;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// What a guest can write: not delivery status, not remote IRR, nothing reserved.
const WRITABLE: u64 = 0xfffe_0000_0001_afff;

/// Where messages to local APICs go (Intel SDM vol. 3A, "Message Address Register Format").
const MESSAGE_ADDRESS: u64 = 0xfee0_0000;
/// Level-triggered messages assert their level.
const ASSERT: u32 = 1 << 14;

/// What a write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing that others see.
    None,
    /// The entry of this pin is another one now: its route may be, and it may have something to
    /// send ([`IoApic::service`]).
    Entry(u8),
    /// The guest ends the level-triggered interrupts of this vector ([`IoApic::end`]).
    End(u8),
}

#[derive(Debug, Clone, Copy)]
struct Pin {
    entry: u64,
    level: Level,
    route: Option<MsiMessage>,
}

/// The registers and the pins.
#[derive(Debug, Clone)]
pub struct IoApic {
    select: u8,
    identity: u32,
    pins: [Pin; PINS as usize],
}

impl Default for IoApic {
    /// As after a reset: everything is masked.
    fn default() -> Self {
        let pin = Pin { entry: MASKED, level: Level::Low, route: None };
        Self { select: 0, identity: 0, pins: [pin; PINS as usize] }
    }
}

impl IoApic {
    /// Answers a read at `offset`. Registers have 32 bits; a longer access finds zeros behind them,
    /// and what is no register reads as zeros.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            SELECT => u32::from(self.select),
            WINDOW => self.register(),
            _ => 0,
        };
        data.fill(0);
        data.iter_mut().zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
    }

    /// Takes a write at `offset`. A shorter access than 32 bits writes zeros to the rest.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let mut bytes = [0; 4];
        bytes.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        match offset {
            SELECT => self.select = bytes[0],
            WINDOW => return self.write_register(u32::from_le_bytes(bytes)),
            END => return Effect::End(bytes[0]),
            _ => {}
        }
        Effect::None
    }

    /// Asserts a pin or takes that back. Returns the message to send, if that makes one: at each
    /// edge, or while a level is there that no local APIC has taken yet.
    #[must_use]
    pub fn set_level(&mut self, pin: u8, level: Level) -> Option<MsiMessage> {
        let state = self.pins.get_mut(usize::from(pin))?;
        let before = std::mem::replace(&mut state.level, level);
        if state.entry & LEVEL != 0 {
            return self.service(pin);
        }
        let rises = (before, level) == (Level::Low, Level::High);
        // The edge of a masked pin is lost (§3.2.4, "Interrupt Mask").
        (rises && state.entry & MASKED == 0).then(|| message(state.entry))
    }

    /// Returns the message of a level-triggered pin that is asserted and that no local APIC has
    /// taken, and counts it as taken.
    #[must_use]
    pub fn service(&mut self, pin: u8) -> Option<MsiMessage> {
        let state = self.pins.get_mut(usize::from(pin))?;
        let waits = state.entry & (LEVEL | MASKED | REMOTE_IRR) == LEVEL;
        if !waits || state.level == Level::Low {
            return None;
        }
        if state.entry & DELIVERY <= LAST_ACKNOWLEDGED {
            state.entry |= REMOTE_IRR;
        }
        Some(message(state.entry))
    }

    /// A local APIC has ended the interrupts of `vector`. Returns the pins whose level it had
    /// taken; they may have something to send again ([`Self::service`]).
    pub fn end(&mut self, vector: u8) -> Vec<u8> {
        let mut ended = Vec::new();
        for (pin, state) in (0..PINS).zip(&mut self.pins) {
            let taken = state.entry & (LEVEL | REMOTE_IRR) == LEVEL | REMOTE_IRR;
            if taken && state.entry.to_le_bytes()[0] == vector {
                state.entry &= !REMOTE_IRR;
                ended.push(pin);
            }
        }
        ended
    }

    /// Returns the message that a pin sends. It stays when the pin is masked: an interrupt may still
    /// be in service, and its end has to be seen. `None` until the pin was unmasked for the first
    /// time.
    pub fn route(&self, pin: u8) -> Option<MsiMessage> {
        self.pins.get(usize::from(pin))?.route
    }

    fn register(&self) -> u32 {
        match self.select {
            IDENTITY | ARBITRATION => self.identity,
            VERSION => VERSION_VALUE,
            _ => match self.selected() {
                Some((pin, half)) => half.of(self.pins[pin].entry),
                None => 0,
            },
        }
    }

    fn write_register(&mut self, value: u32) -> Effect {
        if self.select == IDENTITY {
            self.identity = value & IDENTITY_BITS;
        }
        let Some((pin, half)) = self.selected() else { return Effect::None };
        let state = &mut self.pins[pin];
        let written = half.replaced(state.entry, value) & WRITABLE;
        // Nobody ends what is triggered by edges.
        let taken = if written & LEVEL == 0 { 0 } else { state.entry & REMOTE_IRR };
        state.entry = written | taken;
        if state.entry & MASKED == 0 {
            state.route = Some(message(state.entry));
        }
        u8::try_from(pin).map_or(Effect::None, Effect::Entry)
    }

    /// Returns the pin whose entry is in the window, and the half of it.
    fn selected(&self) -> Option<(usize, Half)> {
        let index = self.select.checked_sub(FIRST_ENTRY)?;
        let half = if index.is_multiple_of(2) { Half::Low } else { Half::High };
        Some((usize::from(index / 2), half)).filter(|(pin, _)| *pin < self.pins.len())
    }
}

#[derive(Clone, Copy)]
enum Half {
    Low,
    High,
}

impl Half {
    fn shift(self) -> u32 {
        match self {
            Self::Low => 0,
            Self::High => 32,
        }
    }

    fn of(self, entry: u64) -> u32 {
        let [a, b, c, d, ..] = (entry >> self.shift()).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    fn replaced(self, entry: u64, value: u32) -> u64 {
        entry & !(u64::from(u32::MAX) << self.shift()) | u64::from(value) << self.shift()
    }
}

/// The message of an entry, as a device would write it: the destination's low eight bits are in
/// bits 19:12 of the address, the other seven in bits 11:5.
fn message(entry: u64) -> MsiMessage {
    let low = entry >> 56;
    let high = entry >> 49 & 0x7f;
    let logical = u64::from(entry & LOGICAL != 0);
    let [vector, mode, ..] = entry.to_le_bytes();
    let trigger = if entry & LEVEL == 0 { 0 } else { 1 << 15 | ASSERT };
    MsiMessage {
        address: MESSAGE_ADDRESS | low << 12 | high << 5 | logical << 2,
        data: u32::from(vector) | u32::from(mode & 7) << 8 | trigger,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes half of a pin's entry: `index` is that of the register.
    fn write(chip: &mut IoApic, index: u8, value: u32) -> Effect {
        assert_eq!(chip.write(SELECT, &[index]), Effect::None);
        chip.write(WINDOW, &value.to_le_bytes())
    }

    fn read(chip: &mut IoApic, index: u8) -> u32 {
        chip.write(SELECT, &[index, 0, 0, 0]);
        let mut bytes = [0xff; 4];
        chip.read(WINDOW, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// A chip whose pin 3 sends vector 0x41, with these bits besides, to `destination`.
    fn programmed(bits: u32, destination: u32) -> IoApic {
        let mut chip = IoApic::default();
        let high = (destination & 0xff) << 24 | (destination >> 8) << 17;
        assert_eq!(write(&mut chip, 0x17, high), Effect::Entry(3));
        assert_eq!(write(&mut chip, 0x16, 0x41 | bits), Effect::Entry(3));
        chip
    }

    const LEVEL_BIT: u32 = 1 << 15;
    const MASK_BIT: u32 = 1 << 16;
    const REMOTE_BIT: u32 = 1 << 14;

    #[test]
    fn registers_read_as_the_datasheet_says() {
        let mut chip = IoApic::default();
        assert_eq!(read(&mut chip, 1), 0x0017_0020);
        assert_eq!(write(&mut chip, 0, 0xffff_ffff), Effect::None);
        assert_eq!((read(&mut chip, 0), read(&mut chip, 2)), (0x0f00_0000, 0x0f00_0000));
        assert_eq!(write(&mut chip, 1, 0), Effect::None);
        assert_eq!(read(&mut chip, 1), 0x0017_0020);
        assert_eq!((read(&mut chip, 0x10), read(&mut chip, 0x3e)), (MASK_BIT, MASK_BIT));
        assert_eq!((read(&mut chip, 0x40), read(&mut chip, 0xff)), (0, 0));
        let mut select = [0; 8];
        chip.read(SELECT, &mut select);
        assert_eq!(select, [0xff, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(write(&mut chip, 0x40, 0), Effect::None);
    }

    #[test]
    fn status_and_reserved_bits_cannot_be_written() {
        let mut chip = IoApic::default();
        write(&mut chip, 0x16, 0xffff_ffff);
        write(&mut chip, 0x17, 0xffff_ffff);
        assert_eq!((read(&mut chip, 0x16), read(&mut chip, 0x17)), (0x1_afff, 0xfffe_0000));
    }

    #[test]
    fn an_edge_is_sent_once_and_lost_when_masked() {
        let mut chip = programmed(0, 2);
        let message = MsiMessage { address: 0xfee0_2000, data: 0x41 };
        assert_eq!(chip.set_level(3, Level::High), Some(message));
        assert_eq!(chip.set_level(3, Level::High), None);
        assert_eq!(chip.set_level(3, Level::Low), None);
        write(&mut chip, 0x16, 0x41 | MASK_BIT);
        assert_eq!(chip.set_level(3, Level::High), None);
        write(&mut chip, 0x16, 0x41);
        assert_eq!((chip.service(3), chip.set_level(3, Level::High)), (None, None));
        assert_eq!(read(&mut chip, 0x16) & REMOTE_BIT, 0);
    }

    #[test]
    fn a_level_is_sent_again_after_each_end_while_it_is_there() {
        let mut chip = programmed(LEVEL_BIT, 0);
        let message = MsiMessage { address: 0xfee0_0000, data: 0xc041 };
        assert_eq!(chip.set_level(3, Level::High), Some(message));
        assert_eq!(read(&mut chip, 0x16) & REMOTE_BIT, REMOTE_BIT);
        assert_eq!((chip.set_level(3, Level::High), chip.service(3)), (None, None));
        assert!(chip.end(0x40).is_empty());
        assert_eq!(chip.end(0x41), [3]);
        assert_eq!(chip.service(3), Some(message));
        assert_eq!(chip.set_level(3, Level::Low), None);
        assert_eq!((chip.end(0x41), chip.service(3)), (vec![3], None));
        assert_eq!(chip.write(END, &[0x41]), Effect::End(0x41));
    }

    #[test]
    fn a_masked_level_waits_for_its_pin() {
        let mut chip = programmed(LEVEL_BIT | MASK_BIT, 0);
        assert_eq!((chip.route(3), chip.set_level(3, Level::High)), (None, None));
        assert_eq!(write(&mut chip, 0x16, 0x41 | LEVEL_BIT), Effect::Entry(3));
        assert!(chip.route(3).is_some() && chip.service(3).is_some());
        // Masked while it is in service: its end is still seen, and nothing is sent.
        write(&mut chip, 0x16, 0x41 | LEVEL_BIT | MASK_BIT);
        assert!(chip.route(3).is_some());
        assert_eq!((chip.end(0x41), chip.service(3)), (vec![3], None));
    }

    #[test]
    fn edges_forget_what_a_level_had_taken() {
        let mut chip = programmed(LEVEL_BIT, 0);
        assert!(chip.set_level(3, Level::High).is_some());
        write(&mut chip, 0x16, 0x41 | MASK_BIT);
        write(&mut chip, 0x16, 0x41 | LEVEL_BIT);
        assert!(chip.service(3).is_some());
    }

    #[test]
    fn what_no_local_apic_acknowledges_is_not_waited_for() {
        // Delivery mode 4 is an NMI.
        let mut chip = programmed(LEVEL_BIT | 4 << 8, 0);
        assert!(chip.set_level(3, Level::High).is_some());
        assert_eq!(read(&mut chip, 0x16) & REMOTE_BIT, 0);
        assert!(chip.end(0x41).is_empty());
    }

    #[test]
    fn destinations_have_fifteen_bits() {
        let chip = programmed(0, 0x7f21);
        let message = chip.route(3).expect("unmasked");
        assert_eq!(message.address, 0xfee2_1fe0);
        let logical = programmed(1 << 11 | 1 << 8, 287).route(3).expect("unmasked");
        assert_eq!(logical, MsiMessage { address: 0xfee1_f024, data: 0x141 });
    }

    #[test]
    fn pins_and_offsets_that_are_not_there_do_nothing() {
        let mut chip = IoApic::default();
        assert_eq!((chip.set_level(PINS, Level::High), chip.service(200)), (None, None));
        assert_eq!(chip.route(PINS), None);
        assert_eq!(chip.write(0x20, &[0xff; 4]), Effect::None);
        let mut data = [0xff; 4];
        chip.read(0x40, &mut data);
        assert_eq!(data, [0; 4]);
    }
}
