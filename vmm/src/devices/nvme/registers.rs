//! The controller's registers, without what they do.
//! Source: NVMe 1.4 §3.1 "Register Definition", figures 68 to 85.
//!
//! | Offset | Bytes | Register | Access     | Here                                            |
//! |--------|-------|----------|------------|-------------------------------------------------|
//! | 0x00   | 8     | CAP      | read       | [`CAPABILITIES`]                                |
//! | 0x08   | 4     | VS       | read       | 1.4.0                                           |
//! | 0x0c   | 4     | INTMS    | write sets | masks the pin; no part of MSI-X                 |
//! | 0x10   | 4     | INTMC    | write clears | likewise                                      |
//! | 0x14   | 4     | CC       | read/write | [`Control`]                                     |
//! | 0x1c   | 4     | CSTS     | read       | ready, fatal, shutdown                          |
//! | 0x20   | 4     | NSSR     |            | not offered, 0                                  |
//! | 0x24   | 4     | AQA      | read/write | admin queue sizes, 12 bits each                 |
//! | 0x28   | 8     | ASQ      | read/write | admin submission queue, on a page               |
//! | 0x30   | 8     | ACQ      | read/write | admin completion queue, on a page               |
//! | 0x38   |       | others   |            | not offered, 0                                  |

use super::queue::Place;

/// Most entries of an I/O queue; CAP.MQES is one less.
pub const MAX_ENTRIES: u32 = 1024;
/// Time a driver waits for ready to change, in units of 500 ms: as much as the field holds. Ready goes when what is
/// under way has ended, and on a busy host a flush alone can take longer than half a minute; Linux gives up the
/// disk of a controller that takes longer than this (drivers/nvme/host/core.c, `nvme_wait_ready`).
const TIMEOUT: u64 = 0xff;

/// CAP: entries (15:0), contiguous queues only (16), timeout (31:24), doorbells next to each other
/// (35:32 = 0), the NVM command set (37), memory pages of 4 KiB only (51:48 and 55:52 = 0).
pub const CAPABILITIES: u64 = (MAX_ENTRIES as u64 - 1) | 1 << 16 | TIMEOUT << 24 | 1 << 37;
/// VS: 1.4.0.
pub const VERSION: u32 = 0x0001_0400;

const INTMS: u64 = 0x0c;
const INTMC: u64 = 0x10;
const CC: u64 = 0x14;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;

/// Bits of CC that are defined: EN, CSS, MPS, AMS, SHN, IOSQES, IOCQES.
const CC_WRITABLE: u32 = 0x00ff_fff1;
/// Each admin queue size has 12 bits.
const AQA_WRITABLE: u32 = 0x0fff_0fff;
/// Queues begin on a page.
const BASE_WRITABLE: u64 = !0xfff;

/// CSTS.RDY.
pub const READY: u32 = 1 << 0;
/// CSTS.CFS.
pub const FATAL: u32 = 1 << 1;
/// CSTS.SHST: shutting down.
pub const SHUTDOWN_BUSY: u32 = 1 << 2;
/// CSTS.SHST: shut down.
pub const SHUTDOWN_DONE: u32 = 2 << 2;

/// Controller configuration (CC).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Control(u32);

impl Control {
    /// Returns whether the controller is switched on (EN).
    pub fn enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns whether the driver announces a shutdown (SHN).
    pub fn shutdown(self) -> bool {
        matches!(self.0 >> 14 & 3, 1 | 2)
    }

    /// Returns whether the controller can work like this: NVM command set, 4 KiB pages, round
    /// robin, and sizes of queue entries that are unset or right.
    pub fn possible(self) -> bool {
        let fields = self.0 >> 4 & 0x3ff;
        let (sqes, cqes) = (self.0 >> 16 & 0xf, self.0 >> 20 & 0xf);
        fields == 0 && matches!(sqes, 0 | 6) && matches!(cqes, 0 | 4)
    }

    /// Returns whether submission queue entries have 64 bytes (IOSQES).
    pub fn submission_size_set(self) -> bool {
        self.0 >> 16 & 0xf == 6
    }

    /// Returns whether completion queue entries have 16 bytes (IOCQES).
    pub fn completion_size_set(self) -> bool {
        self.0 >> 20 & 0xf == 4
    }

    /// Returns the register.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns what `bits` say.
    pub fn from_bits(bits: u32) -> Self {
        Self(bits & CC_WRITABLE)
    }
}

/// What a write asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// CC changed from the first to the second.
    Control(Control, Control),
    /// The mask of interrupts was written.
    Mask,
}

/// The registers that a driver can write.
#[derive(Debug, Clone, Default)]
pub struct Registers {
    mask: u32,
    control: Control,
    admin_sizes: u32,
    admin_submissions: u64,
    admin_completions: u64,
}

impl Registers {
    /// Returns CC.
    pub fn control(&self) -> Control {
        self.control
    }

    /// Returns which vectors are masked: the bits that INTMS has set, and INTMC not cleared.
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Returns the admin submission and completion queues as AQA, ASQ and ACQ name them.
    pub fn admin_queues(&self) -> (Place, Place) {
        let entries = |sizes: u32| (sizes & 0xfff) + 1;
        let place = |base, sizes| Place { base, entries: entries(sizes) };
        (
            place(self.admin_submissions, self.admin_sizes),
            place(self.admin_completions, self.admin_sizes >> 16),
        )
    }

    /// Reads `data.len()` bytes at `offset`, with CSTS as given.
    pub fn read(&self, offset: u64, data: &mut [u8], status: u32) {
        for (index, byte) in (0u64..).zip(data.iter_mut()) {
            let at = offset.saturating_add(index);
            let word = self.word(at & !7, status).to_le_bytes();
            *byte = word[usize::try_from(at & 7).unwrap_or(0)];
        }
    }

    /// Returns the eight bytes at `at`.
    fn word(&self, at: u64, status: u32) -> u64 {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        match at {
            0x00 => CAPABILITIES,
            0x08 => pair(VERSION, self.mask),
            0x10 => pair(self.mask, self.control.0),
            0x18 => pair(0, status),
            0x20 => pair(0, self.admin_sizes),
            0x28 => self.admin_submissions,
            0x30 => self.admin_completions,
            _ => 0,
        }
    }

    /// Writes 4 or 8 bytes at a multiple of 4; other accesses are undefined (§3.1) and ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let (words, rest) = data.as_chunks::<4>();
        if !offset.is_multiple_of(4) || !rest.is_empty() {
            return Effect::None;
        }
        let mut effect = Effect::None;
        for (index, word) in (0u64..).zip(words) {
            let at = offset.saturating_add(4 * index);
            match self.write_word(at, u32::from_le_bytes(*word)) {
                Effect::None => {}
                some @ (Effect::Control(..) | Effect::Mask) => effect = some,
            }
        }
        effect
    }

    fn write_word(&mut self, at: u64, value: u32) -> Effect {
        match at {
            INTMS => {
                self.mask |= value;
                return Effect::Mask;
            }
            INTMC => {
                self.mask &= !value;
                return Effect::Mask;
            }
            CC => {
                let before = self.control;
                self.control = Control::from_bits(value);
                // A reset leaves the places of the admin queues alone (§3.1.5).
                if before.enabled() && !self.control.enabled() {
                    self.mask = 0;
                }
                return Effect::Control(before, self.control);
            }
            AQA => self.admin_sizes = value & AQA_WRITABLE,
            ASQ => set_low(&mut self.admin_submissions, value),
            0x2c => set_high(&mut self.admin_submissions, value),
            ACQ => set_low(&mut self.admin_completions, value),
            0x34 => set_high(&mut self.admin_completions, value),
            // Read-only: CAP, VS, CSTS; and what is not offered.
            _ => {}
        }
        Effect::None
    }
}

fn set_low(register: &mut u64, value: u32) {
    *register = (*register & !0xffff_ffff | u64::from(value)) & BASE_WRITABLE;
}

fn set_high(register: &mut u64, value: u32) {
    *register = *register & 0xffff_ffff | u64::from(value) << 32;
}

const _: () = assert!(MAX_ENTRIES <= 65536);

#[cfg(test)]
mod tests {
    use super::*;

    const CSTS: u64 = 0x1c;

    fn read(registers: &Registers, offset: u64, length: usize) -> u64 {
        let mut bytes = [0; 8];
        registers.read(offset, &mut bytes[..length], READY | SHUTDOWN_DONE);
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn read_only_registers_tell_what_the_controller_can() {
        let mut registers = Registers::default();
        for offset in [0x00, 0x04, 0x08, CSTS, 0x20, 0x38, 0xffc] {
            assert_eq!(registers.write(offset, &[0xff; 4]), Effect::None);
        }
        assert_eq!(read(&registers, 0, 8), CAPABILITIES);
        assert_eq!(read(&registers, 3, 1), 0xff, "CAP.TO");
        assert_eq!(read(&registers, 4, 4), CAPABILITIES >> 32);
        assert_eq!(read(&registers, 8, 4), 0x0001_0400);
        assert_eq!(read(&registers, CSTS, 4), 9);
        assert_eq!(read(&registers, 0x20, 4), 0);
        assert_eq!(read(&registers, 0x38, 8), 0);
        assert_eq!(read(&registers, u64::MAX, 8), 0);
    }

    #[test]
    fn queue_addresses_keep_their_page_in_halves_and_whole() {
        let mut registers = Registers::default();
        registers.write(AQA, &0xf01f_f03fu32.to_le_bytes());
        registers.write(ASQ, &0x1_2345_6fffu64.to_le_bytes());
        registers.write(ACQ + 4, &2u32.to_le_bytes());
        registers.write(ACQ, &0x5fffu32.to_le_bytes());
        let (submissions, completions) = registers.admin_queues();
        assert_eq!(submissions, Place { base: 0x1_2345_6000, entries: 0x40 });
        assert_eq!(completions, Place { base: 0x2_0000_5000, entries: 0x20 });
        assert_eq!(read(&registers, AQA, 4), 0x001f_003f);
        assert_eq!(read(&registers, ASQ, 8), 0x1_2345_6000);
        assert_eq!(read(&registers, ACQ + 4, 4), 2);
    }

    #[test]
    fn the_mask_is_set_and_cleared_by_ones() {
        let mut registers = Registers::default();
        registers.write(INTMS, &0b1101u32.to_le_bytes());
        registers.write(INTMC, &0b0101u32.to_le_bytes());
        assert_eq!((read(&registers, INTMS, 4), read(&registers, INTMC, 4)), (8, 8));
    }

    #[test]
    fn control_tells_what_changed_and_drops_reserved_bits() {
        let mut registers = Registers::default();
        let on = Control(0x0046_0001);
        let effect = registers.write(CC, &0xff46_000fu32.to_le_bytes());
        assert_eq!(effect, Effect::Control(Control(0), on));
        assert!(on.enabled() && on.possible() && on.submission_size_set());
        assert!(on.completion_size_set() && !on.shutdown());
        assert_eq!(registers.write(CC, &[1, 2]), Effect::None);
        assert_eq!(registers.write(CC + 1, &[1, 2, 3, 4]), Effect::None);
        assert_eq!(read(&registers, CC, 4), 0x0046_0001);
    }

    #[test]
    fn impossible_settings_are_seen() {
        let bad =
            [0x11, 0x81, 0x801, 0x0045_0001, 0x0056_0001].map(|bits| Control(bits).possible());
        assert_eq!(bad, [false; 5]);
        assert_eq!(
            [0x4000, 0x8000, 0xc000].map(|bits| Control(bits).shutdown()),
            [true, true, false]
        );
    }
}
