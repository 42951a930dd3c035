//! Runs fuzz cases of the I/O APIC: a guest that writes registers, devices that move lines, local
//! APICs that end interrupts; beside it a model that knows for each pin only what is owed.

use vmm::{
    devices::ioapic::{Effect, IoApic, PINS},
    irq::{Level, MsiMessage},
};

/// Steps that one case can make.
const STEPS: usize = 4096;
/// Bits of an entry's low half.
const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;

#[derive(Clone, Copy, Default)]
struct Owed {
    /// A local APIC has the level and has not ended it.
    taken: bool,
    asserted: bool,
}

/// | Byte of 6 | Meaning                                                          |
/// |-----------|------------------------------------------------------------------|
/// | 0         | what: write a register, write at an offset, line up, line down, end |
/// | 1         | index of the register, offset, pin or vector                     |
/// | 2..6      | value; of writes at offsets, as many bytes as bits 7:5 of byte 0 say |
pub(crate) fn ioapic(bytes: &[u8]) {
    let mut chip = IoApic::default();
    let mut owed = [Owed::default(); PINS as usize];
    for step in bytes.chunks_exact(6).take(STEPS) {
        let (what, at) = (step[0] & 0x1f, step[1]);
        let effect = match what % 5 {
            0 => {
                assert_eq!(chip.write(0, &[at]), Effect::None);
                chip.write(0x10, &step[2..6])
            }
            1 => {
                let length = usize::from(step[0] >> 5).min(4);
                let mut read = [0xaa; 8];
                chip.read(at.into(), &mut read[..length]);
                assert_eq!(read[length..], [0xaa; 8][length..], "more was read than asked for");
                chip.write(at.into(), &step[2..2 + length])
            }
            2 | 3 => {
                let level = if what % 5 == 2 { Level::High } else { Level::Low };
                let message = chip.set_level(at, level);
                if let Some(state) = owed.get_mut(usize::from(at)) {
                    let rose = !state.asserted && level == Level::High;
                    state.asserted = level == Level::High;
                    settle(&mut chip, &mut owed, at, (message, rose));
                } else {
                    assert_eq!(message, None, "a pin that is not there sends");
                }
                continue;
            }
            _ => Effect::End(at),
        };
        match effect {
            Effect::None => {}
            Effect::Entry(pin) => {
                if low(&mut chip, pin) & LEVEL == 0 {
                    owed[usize::from(pin)].taken = false;
                }
                let message = chip.service(pin);
                settle(&mut chip, &mut owed, pin, (message, false));
            }
            Effect::End(vector) => end(&mut chip, &mut owed, vector),
        }
    }
}

/// Checks what a pin sent, if anything: whether it was due, and whether it is what the entry says.
fn settle(chip: &mut IoApic, owed: &mut [Owed], pin: u8, sent: (Option<MsiMessage>, bool)) {
    let (message, rose) = sent;
    let (entry, state) = (low(chip, pin), &mut owed[usize::from(pin)]);
    let open = entry & MASKED == 0;
    let due = if entry & LEVEL == 0 { rose } else { state.asserted && !state.taken };
    assert_eq!(message.is_some(), due && open, "pin {pin} with entry {entry:#x}");
    let Some(message) = message else { return };
    assert_eq!(Some(message), chip.route(pin), "sent otherwise than routed");
    assert_eq!(message.address & !0xf_ffe4, 0xfee0_0000, "no address of local APICs");
    assert_eq!(message.data & 0x7ff, entry & 0x7ff, "another vector or mode");
    assert_eq!(message.data & LEVEL, entry & LEVEL, "another trigger mode");
    // Fixed and lowest priority are acknowledged.
    state.taken = entry & LEVEL != 0 && entry >> 8 & 7 <= 1;
}

fn end(chip: &mut IoApic, owed: &mut [Owed], vector: u8) {
    let ended = chip.end(vector);
    for pin in 0..PINS {
        let entry = low(chip, pin);
        let mine = owed[usize::from(pin)].taken && entry & 0xff == u32::from(vector);
        assert_eq!(ended.contains(&pin), mine, "pin {pin} with entry {entry:#x}");
        if mine {
            owed[usize::from(pin)].taken = false;
            let message = chip.service(pin);
            settle(chip, owed, pin, (message, false));
        }
    }
}

fn low(chip: &mut IoApic, pin: u8) -> u32 {
    let mut before = [0; 1];
    chip.read(0, &mut before);
    chip.write(0, &[0x10 + 2 * pin]);
    let mut bytes = [0; 4];
    chip.read(0x10, &mut bytes);
    chip.write(0, &before);
    u32::from_le_bytes(bytes)
}
