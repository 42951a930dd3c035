//! Power and reset: the ACPI PM1 registers, the reset control register and the keyboard
//! controller's reset line.
//! Source: ACPI 6.5 §4.8.3.1 (PM1 event), §4.8.3.2 (PM1 control), §4.8.3.3 (PM timer), §4.8.3.6
//! (reset register); Intel ICH9 datasheet §13.7.5 (0xcf9), §13.7.3 (0x92).
//!
//! | Port        | Access | Register                                       |
//! |-------------|--------|------------------------------------------------|
//! | 0x600..602  | r/w1c  | PM1 status: bit 0 timer carry, 8 power button  |
//! | 0x602..604  | r/w    | PM1 enable: the same bits, and bits 5 global lock, 10 clock |
//! | 0x604..606  | r/w    | PM1 control: bit 0 SCI on, 12:10 type, 13 sleep |
//! | 0x608..60c  | r      | PM timer, 3.579545 MHz, 32 bits                |
//! | 0x60c       | r/w    | what the guest says of its sleep: bit 0 asleep; our own, for `_DSM` |
//! | 0xcf9       | w      | reset control: bit 2 resets; reads as 0        |
//! | 0x64        | r/w    | keyboard controller: 0xfe pulses reset; reads as if none was there |
//! | 0x92        | r/w    | system control A: bit 1 A20, always on; 0 reset |

use std::{sync::Arc, time::Duration};

use crate::irq::{InterruptLine, Level};

/// First of the PM ports.
pub const PM_BASE: u16 = 0x600;
/// Number of PM ports.
pub const PM_LENGTH: u16 = 13;
/// Where the chipset has its register of system management interrupts (SMI_EN, Intel ICH9 datasheet 316972
/// §13.8.3); there is none here.
pub const SMI_ENABLE: std::ops::Range<u16> = PM_BASE + 0x30..PM_BASE + 0x34;
/// PM1 event block.
pub const PM1_EVENT: u16 = PM_BASE;
/// PM1 control block.
pub const PM1_CONTROL: u16 = PM_BASE + 4;
/// PM timer block.
pub const PM_TIMER: u16 = PM_BASE + 8;
/// Register of the guest's sleep, which the chipset's datasheet leaves free: the AML method that an
/// operating system calls on its way into sleep and out of it writes it.
pub const SLEEP_PORT: u16 = PM_BASE + 12;
/// What the method writes there on the way in; on the way out it is 0.
pub const ASLEEP: u8 = 1 << 0;
/// Reset control register.
pub const RESET_PORT: u16 = 0xcf9;
/// What the guest writes there to reset.
pub const RESET_VALUE: u8 = 6;
/// Keyboard controller's command and status port.
pub const KEYBOARD_PORT: u16 = 0x64;
/// What it reads as: a time-out and a parity error, by which firmware knows that there is no controller
/// (edk2 MdeModulePkg/Bus/Isa/Ps2KeyboardDxe) and does not wait for its answers. Nothing to read (bit 0)
/// and ready for a command (bit 1), or who resets through it would wait.
pub const KEYBOARD_STATUS: u8 = 1 << 7 | 1 << 6;
/// System control port A.
pub const CONTROL_A_PORT: u16 = 0x92;
/// What it reads as: address line 20 is on.
pub const CONTROL_A: u8 = 1 << 1;
/// Interrupt of ACPI events.
pub const SCI: u32 = 9;
/// Sleep type that means off (`\_S5`): the one of QEMU's q35. Firmware's `ResetSystem`, with which
/// Windows ends a shutdown, writes it without reading `\_S5` (edk2
/// OvmfPkg/Library/ResetSystemLib/DxeResetShutdown.c).
pub const SLEEP_OFF: u8 = 0;

/// The uppermost bit of the PM timer has changed.
const TIMER_CARRY: u16 = 1 << 0;
const POWER_BUTTON: u16 = 1 << 8;
/// Enable bits that there are: of the timer, the global lock, the button, the clock (ACPI 6.5 table 4.17; no
/// sleep button).
const ENABLES: u16 = TIMER_CARRY | 1 << 5 | POWER_BUTTON | CLOCK;
/// The clock's alarm, which wakes a sleeping system and comes never: no machine sleeps so, and the FADT says that
/// the alarm is not told here. Linux' driver of the clock enables it all the same and complains where the bit
/// does not stay.
const CLOCK: u16 = 1 << 10;
const SCI_ENABLE: u16 = 1 << 0;
/// Control bits that keep what is written: SCI on, bus master reload, sleep type (ACPI 6.5 table
/// 4.18). Releasing the global lock and sleeping are orders, which read as zero.
const CONTROLS: u16 = SCI_ENABLE | 1 << 1 | 7 << 10;
const SLEEP_ENABLE: u16 = 1 << 13;
const KEYBOARD_RESET: u8 = 0xfe;
const CONTROL_A_RESET: u8 = 1 << 0;
/// Reset control: reset the CPU.
const RESET_CPU: u8 = 1 << 2;
/// Frequency of the PM timer, in Hz (ACPI 6.5 §4.8.3.3).
const TIMER_HZ: u128 = 3_579_545;
/// Ticks after which the uppermost bit of the PM timer changes: it has 32.
const CARRY_TICKS: u128 = 1 << 31;
const NANOSECONDS: u128 = 1_000_000_000;

/// What a write asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Nothing.
    None,
    /// Power off.
    Off,
    /// Reset.
    Reset,
}

/// Registers of power management.
pub struct Power {
    status: u16,
    enable: u16,
    control: u16,
    /// How often the uppermost bit of the timer has changed, as far as that was noted.
    carries: u128,
    sleep: u8,
    sci: Arc<dyn InterruptLine>,
}

impl Power {
    /// Makes the registers, with ACPI mode already on, interrupting through `sci`.
    pub fn new(sci: Arc<dyn InterruptLine>) -> Self {
        Self { status: 0, enable: 0, control: SCI_ENABLE, carries: 0, sleep: 0, sci }
    }

    /// Presses the power button.
    pub fn press_button(&mut self) {
        self.status |= POWER_BUTTON;
        self.update();
    }

    /// Returns whether the guest says that it sleeps. Its processors idle then, and the power button is
    /// among what wakes it.
    pub fn is_asleep(&self) -> bool {
        self.sleep & ASLEEP != 0
    }

    /// Returns how long after `uptime` the timer carries next: somebody has to look then, because the
    /// carry may interrupt.
    pub fn carry_in(uptime: Duration) -> Duration {
        let next = (ticks(uptime) / CARRY_TICKS + 1) * CARRY_TICKS;
        let at = (next * NANOSECONDS).div_ceil(TIMER_HZ);
        Duration::from_nanos(u64::try_from(at).unwrap_or(u64::MAX)).saturating_sub(uptime)
    }

    /// Notes whether the timer has carried, and interrupts if the guest wants that.
    pub fn look(&mut self, uptime: Duration) {
        let carries = ticks(uptime) / CARRY_TICKS;
        if carries > self.carries {
            self.carries = carries;
            self.status |= TIMER_CARRY;
            self.update();
        }
    }

    /// Reads one byte at `offset` from [`PM_BASE`], `uptime` after the machine started.
    pub fn read(&mut self, offset: u16, uptime: Duration) -> u8 {
        self.look(uptime);
        let [status0, status1] = self.status.to_le_bytes();
        let [enable0, enable1] = self.enable.to_le_bytes();
        let [control0, control1] = self.control.to_le_bytes();
        let timer = ticks(uptime).to_le_bytes();
        let registers = [
            status0, status1, enable0, enable1, control0, control1, 0, 0, timer[0], timer[1],
            timer[2], timer[3], self.sleep,
        ];
        registers.get(usize::from(offset)).copied().unwrap_or(0xff)
    }

    /// Writes bytes at `offset` from [`PM_BASE`], `uptime` after the machine started.
    pub fn write(&mut self, offset: u16, data: &[u8], uptime: Duration) -> Request {
        self.look(uptime);
        for (at, byte) in (usize::from(offset)..).zip(data) {
            let byte = *byte;
            match at {
                0 => self.status &= !u16::from(byte),
                1 => self.status &= !(u16::from(byte) << 8),
                2 => self.enable = self.enable & 0xff00 | u16::from(byte) & ENABLES,
                3 => self.enable = self.enable & 0x00ff | u16::from(byte) << 8 & ENABLES,
                4 => self.control = self.control & 0xff00 | u16::from(byte) | SCI_ENABLE,
                5 => self.control = self.control & 0x00ff | u16::from(byte) << 8,
                12 => self.sleep = byte & ASLEEP,
                _ => {}
            }
        }
        self.update();
        let off =
            self.control & SLEEP_ENABLE != 0 && self.control >> 10 & 7 == u16::from(SLEEP_OFF);
        self.control &= CONTROLS;
        if off { Request::Off } else { Request::None }
    }

    fn update(&self) {
        let level = if self.status & self.enable != 0 { Level::High } else { Level::Low };
        // KVM refuses only on a machine that is going away.
        let _ = self.sci.set_level(level);
    }
}

fn ticks(uptime: Duration) -> u128 {
    uptime.as_nanos() * TIMER_HZ / NANOSECONDS
}

/// Returns what a write to the reset control register asks for.
pub fn reset_control(value: u8) -> Request {
    if value & RESET_CPU != 0 { Request::Reset } else { Request::None }
}

/// Returns what a write to system control port A asks for: bit 0 resets as it is set.
pub fn control_a(value: u8) -> Request {
    if value & CONTROL_A_RESET != 0 { Request::Reset } else { Request::None }
}

/// Returns what a write to the keyboard controller's command port asks for.
pub fn keyboard(value: u8) -> Request {
    if value == KEYBOARD_RESET { Request::Reset } else { Request::None }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        os::fd::{AsFd, BorrowedFd, OwnedFd},
        sync::Mutex,
    };

    use super::*;

    struct Wire {
        level: Mutex<Level>,
        file: OwnedFd,
    }

    impl InterruptLine for Wire {
        fn set_level(&self, asserted: Level) -> io::Result<()> {
            *self.level.lock().expect("one thread") = asserted;
            Ok(())
        }
        fn trigger_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
        fn resample_fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    fn power() -> (Power, Arc<Wire>) {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let wire = Arc::new(Wire { level: Mutex::new(Level::Low), file });
        (Power::new(Arc::<Wire>::clone(&wire)), wire)
    }

    #[test]
    fn the_button_interrupts_until_acknowledged() {
        let (mut power, wire) = power();
        power.write(2, &[0, 1], Duration::ZERO);
        power.press_button();
        assert_eq!(*wire.level.lock().expect("one thread"), Level::High);
        assert_eq!(power.read(1, Duration::ZERO), 1);
        power.write(0, &[0, 1], Duration::ZERO);
        assert_eq!(*wire.level.lock().expect("one thread"), Level::Low);
    }

    #[test]
    fn only_the_sleep_type_of_off_turns_off() {
        let (mut power, _) = power();
        let mut control = |value: u16| power.write(4, &value.to_le_bytes(), Duration::ZERO);
        let off = u16::from(SLEEP_OFF) << 10;
        assert_eq!(control(off), Request::None);
        assert_eq!(control(off | 1 << 13), Request::Off);
        assert_eq!(control(1 << 10 | 1 << 13), Request::None);
        assert_eq!(control(5 << 10 | 1 << 13), Request::None);
        assert_eq!(power.read(4, Duration::ZERO) & 1, 1);
    }

    /// edk2's `ResetShutdown`: bits 10 to 13 are cleared, then 13 is set, each by a read and a write of
    /// 16 bits.
    #[test]
    fn firmware_turns_off_without_knowing_the_tables() {
        let (mut power, _) = power();
        power.write(4, &[0x03, 0x1c], Duration::ZERO);
        let mut change = |change: fn(u16) -> u16| {
            let old = [4, 5].map(|at| power.read(at, Duration::ZERO));
            let new = change(u16::from_le_bytes(old));
            power.write(4, &new.to_le_bytes(), Duration::ZERO)
        };
        assert_eq!(change(|control| control & !(0xf << 10)), Request::None);
        assert_eq!(change(|control| control | 1 << 13), Request::Off);
    }

    #[test]
    fn only_what_there_is_can_be_switched_on() {
        let (mut power, _) = power();
        power.write(2, &[0xff, 0xff, 0xff, 0x1f], Duration::ZERO);
        let kept: Vec<u8> = (2..6).map(|at| power.read(at, Duration::ZERO)).collect();
        assert_eq!(kept, [0x21, 0x05, 0x03, 0x1c]);
    }

    #[test]
    fn the_guest_says_that_it_sleeps_and_that_it_does_no_longer() {
        let (mut power, _) = power();
        let offset = SLEEP_PORT - PM_BASE;
        let mut said = |byte| {
            assert_eq!(power.write(offset, &[byte], Duration::ZERO), Request::None);
            (power.is_asleep(), power.read(offset, Duration::ZERO))
        };
        assert_eq!(
            [said(0xff), said(0xfe), said(1), said(0)],
            [(true, 1), (false, 0), (true, 1), (false, 0)]
        );
    }

    #[test]
    fn all_resets_are_known() {
        assert_eq!((reset_control(2), reset_control(RESET_VALUE)), (Request::None, Request::Reset));
        assert_eq!((keyboard(0xd1), keyboard(0xfe)), (Request::None, Request::Reset));
        assert_eq!((control_a(2), control_a(3)), (Request::None, Request::Reset));
    }

    #[test]
    fn the_timer_counts_at_its_frequency() {
        let (mut power, _) = power();
        let ticks: Vec<u8> = (8..12).map(|at| power.read(at, Duration::from_secs(1))).collect();
        assert_eq!(u32::from_le_bytes([ticks[0], ticks[1], ticks[2], ticks[3]]), 3_579_545);
    }

    #[test]
    fn the_timer_tells_each_change_of_its_uppermost_bit_once() {
        let (mut power, _) = power();
        let carries: Vec<u8> = [0, 599, 600].map(|s| power.read(0, Duration::from_secs(s))).into();
        assert_eq!(carries, [0, 0, 1]);
        power.write(0, &[0, 1], Duration::from_secs(601));
        assert_eq!(power.read(0, Duration::from_secs(601)), 1, "another bit was cleared");
        power.write(0, &[1, 0], Duration::from_secs(601));
        let carries: Vec<u8> =
            [602, 1199, 1200].map(|s| power.read(0, Duration::from_secs(s))).into();
        assert_eq!(carries, [0, 0, 1]);
    }

    #[test]
    fn a_carry_interrupts_when_the_guest_wants_it() {
        let (mut power, wire) = power();
        let level = || *wire.level.lock().expect("one thread");
        let carry = Power::carry_in(Duration::ZERO);
        power.look(carry.saturating_sub(Duration::from_micros(1)));
        assert_eq!(power.read(0, Duration::ZERO), 0, "too early");
        power.look(carry);
        assert_eq!(level(), Level::Low);
        power.write(2, &[1, 0], carry);
        assert_eq!(level(), Level::High);
        power.write(0, &[1, 0], carry);
        assert_eq!(level(), Level::Low);
        power.look(carry + Power::carry_in(carry));
        assert_eq!((level(), power.status), (Level::High, TIMER_CARRY));
    }
}
