//! Interval timer 8254, for machines whose interrupt controllers leave KVM's out: its three counters, which systems
//! measure the processor by at their start. It interrupts nobody; local APICs do.
//! Source: Intel 8254 data sheet (231164), "Programming the 8254", "Read Operations", "Mode Definitions"; Intel 82801
//! (ICH9) data sheet §13.7.1 "NMI_SC—NMI Status and Control Register".
//!
//! | Port        | Access | Meaning                                                                   |
//! |-------------|--------|---------------------------------------------------------------------------|
//! | 0x40 – 0x42 | r/w    | counter 0, 1, 2: a byte or two of it, as its control word says            |
//! | 0x43        | w      | control word: 7:6 counter (3: read back), 5:4 bytes (0: latch), 3:1 mode  |
//! | 0x61        | r/w    | 0 gate of counter 2, 1 speaker; read: 4 alternates, 5 output of counter 2 |
//!
//! Counts are binary, also where a control word asks for decimal ones. A new count of a counter that runs holds at
//! once.

use std::time::Duration;

/// First port of the counters.
pub const PORT: u16 = 0x40;
/// Ports of counters and control word.
pub const LENGTH: u16 = 4;
/// Port with the gate of the last counter.
pub const GATE_PORT: u16 = 0x61;

/// Ticks a second (14.31818 MHz / 12).
const HERTZ: u128 = 1_193_182;
/// How long bit 4 of the gate's port stays as it is: it follows the refresh of memory.
const REFRESH: Duration = Duration::from_nanos(15_085);
/// Bits of the gate's port that can be written.
const GATE: u8 = 1 << 0;
const SPEAKER: u8 = 1 << 1;

/// Which bytes of a count are moved, and in which order: those of the control word.
const LOW: u8 = 1;
const HIGH: u8 = 2;

/// Status bits of a read-back.
const STATUS_OUT: u8 = 1 << 7;
const STATUS_NULL: u8 = 1 << 6;

/// The timer. Times are those since the machine was built.
#[derive(Debug)]
pub struct Pit {
    counters: [Counter; 3],
    gate: u8,
}

#[derive(Debug, Clone, Default)]
struct Counter {
    mode: u8,
    bytes: u8,
    /// What it counts down from, 1..=65536; 0 before a count was written.
    reload: u64,
    /// Whether its gate is open.
    open: bool,
    /// When it began to count, if it does.
    began: Option<Duration>,
    /// Ticks that it had counted when its gate was closed.
    stopped_at: u64,
    latched: Option<u16>,
    status: Option<u8>,
    /// The other byte of the two comes next.
    second_read: bool,
    first_written: Option<u8>,
}

impl Default for Pit {
    fn default() -> Self {
        let open = |open| Counter { open, bytes: LOW | HIGH, ..Counter::default() };
        Self { counters: [open(true), open(true), open(false)], gate: 0 }
    }
}

impl Pit {
    /// Reads a port of the counters, by its offset, at `now`.
    pub fn read(&mut self, offset: u8, now: Duration) -> u8 {
        // The control word cannot be read.
        self.counters.get_mut(usize::from(offset)).map_or(0xff, |counter| counter.read(now))
    }

    /// Writes it.
    pub fn write(&mut self, offset: u8, value: u8, now: Duration) {
        match self.counters.get_mut(usize::from(offset)) {
            Some(counter) => counter.write(value, now),
            None => self.control(value, now),
        }
    }

    /// Reads the port with the gate.
    pub fn read_gate(&self, now: Duration) -> u8 {
        let refresh = !(now.as_nanos() / REFRESH.as_nanos()).is_multiple_of(2);
        let out = self.counters[2].output(now);
        self.gate | u8::from(refresh) << 4 | u8::from(out) << 5
    }

    /// Writes it.
    pub fn write_gate(&mut self, value: u8, now: Duration) {
        self.gate = value & (GATE | SPEAKER);
        self.counters[2].set_gate(value & GATE != 0, now);
    }

    fn control(&mut self, word: u8, now: Duration) {
        let bytes = word >> 4 & 3;
        let Some(counter) = self.counters.get_mut(usize::from(word >> 6)) else {
            // Read back: bits 5 and 4 are clear for what is latched, count and status.
            for (at, counter) in self.counters.iter_mut().enumerate() {
                if word >> (at + 1) & 1 != 0 {
                    if word & 1 << 5 == 0 {
                        counter.latch(now);
                    }
                    if word & 1 << 4 == 0 {
                        counter.latch_status(now);
                    }
                }
            }
            return;
        };
        if bytes == 0 {
            return counter.latch(now);
        }
        // Modes 6 and 7 are 2 and 3.
        let mode = match word >> 1 & 7 {
            mode @ 0..=5 => mode,
            mode => mode - 4,
        };
        *counter = Counter { mode, bytes, open: counter.open, ..Counter::default() };
    }
}

impl Counter {
    /// Whether it waits for its gate to open once more before it counts.
    fn is_triggered(&self) -> bool {
        matches!(self.mode, 1 | 5)
    }

    /// Whether it begins anew at its end.
    fn repeats(&self) -> bool {
        matches!(self.mode, 2 | 3)
    }

    /// Returns how many ticks it has counted.
    fn ticks(&self, now: Duration) -> u64 {
        let Some(began) = self.began else { return self.stopped_at };
        let ticks = now.saturating_sub(began).as_nanos() * HERTZ / 1_000_000_000;
        self.stopped_at.saturating_add(u64::try_from(ticks).unwrap_or(u64::MAX))
    }

    fn count(&self, now: Duration) -> u16 {
        let ticks = self.ticks(now);
        let count = match self.mode {
            _ if self.reload == 0 => 0,
            2 => self.reload - ticks % self.reload,
            // Counts down by two, twice in a period.
            3 => self.reload - 2 * ticks % self.reload,
            _ => self.reload.wrapping_sub(ticks),
        };
        let [low, high, ..] = count.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    fn output(&self, now: Duration) -> bool {
        let ticks = self.ticks(now);
        let counting = self.reload > 0 && (self.began.is_some() || self.stopped_at > 0);
        match self.mode {
            0 => counting && ticks >= self.reload,
            1 => !counting || ticks >= self.reload,
            2 => !counting || !self.open || ticks % self.reload != self.reload - 1,
            3 => !counting || !self.open || 2 * (ticks % self.reload) < self.reload,
            _ => !counting || ticks != self.reload,
        }
    }

    fn set_gate(&mut self, open: bool, now: Duration) {
        if std::mem::replace(&mut self.open, open) == open {
            return;
        }
        if !open {
            if !self.is_triggered() {
                self.stopped_at = self.ticks(now);
                self.began = None;
            }
        } else if self.reload > 0 {
            if self.is_triggered() || self.repeats() {
                self.stopped_at = 0;
            }
            self.began = Some(now);
        }
    }

    fn latch(&mut self, now: Duration) {
        // A count that was not read yet stays.
        if self.latched.is_none() {
            self.latched = Some(self.count(now));
            self.second_read = false;
        }
    }

    fn latch_status(&mut self, now: Duration) {
        let out = if self.output(now) { STATUS_OUT } else { 0 };
        let null = if self.reload == 0 { STATUS_NULL } else { 0 };
        let status = out | null | self.bytes << 4 | self.mode << 1;
        self.status.get_or_insert(status);
    }

    fn read(&mut self, now: Duration) -> u8 {
        if let Some(status) = self.status.take() {
            return status;
        }
        let [low, high] = self.latched.unwrap_or_else(|| self.count(now)).to_le_bytes();
        let both = self.bytes == LOW | HIGH;
        let byte = if self.bytes == HIGH || self.second_read { high } else { low };
        self.second_read = both && !self.second_read;
        if !self.second_read {
            self.latched = None;
        }
        byte
    }

    fn write(&mut self, value: u8, now: Duration) {
        let (low, high) = match (self.bytes, self.first_written.take()) {
            (LOW, _) => (value, 0),
            (HIGH, _) => (0, value),
            (_, Some(low)) => (low, value),
            (_, None) => {
                self.first_written = Some(value);
                return;
            }
        };
        let count = u64::from(u16::from_le_bytes([low, high]));
        self.reload = if count == 0 { 1 << 16 } else { count };
        if !self.is_triggered() {
            self.stopped_at = 0;
            self.began = self.open.then_some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When so many ticks have been since the machine was built.
    fn at(ticks: u64) -> Duration {
        let nanoseconds = (u128::from(ticks) * 1_000_000_000).div_ceil(HERTZ);
        Duration::from_nanos(u64::try_from(nanoseconds).expect("small"))
    }

    /// When so many have been since a second later.
    fn later(ticks: u64) -> Duration {
        Duration::from_secs(1) + at(ticks)
    }

    fn count(pit: &mut Pit, counter: u8, now: Duration) -> u16 {
        pit.write(3, counter << 6, now);
        u16::from_le_bytes([pit.read(counter, now), pit.read(counter, now)])
    }

    fn load(pit: &mut Pit, counter: u8, mode: u8, reload: u16) {
        pit.write(3, counter << 6 | 3 << 4 | mode << 1, at(0));
        reload.to_le_bytes().iter().for_each(|byte| pit.write(counter, *byte, at(0)));
    }

    #[test]
    fn a_rate_generator_counts_down_again_and_again() {
        let mut pit = Pit::default();
        load(&mut pit, 0, 2, 1000);
        let counts = [1, 999, 1000, 2500].map(|ticks| count(&mut pit, 0, at(ticks)));
        assert_eq!(counts, [999, 1, 1000, 500]);
        load(&mut pit, 0, 2, 0);
        assert_eq!(count(&mut pit, 0, at(1)), 0xffff);
        load(&mut pit, 0, 3, 1000);
        assert_eq!([100, 600].map(|ticks| count(&mut pit, 0, at(ticks))), [800, 800]);
    }

    /// Linux (`pit_calibrate_tsc`) and FreeBSD watch the output of counter 2 at the gate's port.
    #[test]
    fn the_output_of_the_last_counter_goes_high_at_its_end() {
        let mut pit = Pit::default();
        pit.write_gate(1, at(0));
        load(&mut pit, 2, 0, 500);
        assert_eq!(pit.read_gate(at(499)) & 0x23, 0x01);
        assert_eq!(pit.read_gate(at(500)) & 0x23, 0x21);
        assert_eq!(count(&mut pit, 2, at(501)), 0xffff);
        // With the gate closed it stands still.
        load(&mut pit, 2, 0, 500);
        pit.write_gate(0, at(100));
        assert_eq!((count(&mut pit, 2, later(0)), pit.read_gate(later(0)) & 0x21), (400, 0));
        pit.write_gate(1, later(0));
        assert_eq!(count(&mut pit, 2, later(100)), 300);
    }

    #[test]
    fn a_gate_that_opens_starts_what_waits_for_it() {
        let mut pit = Pit::default();
        load(&mut pit, 2, 1, 500);
        assert_eq!(pit.read_gate(later(0)) & 0x20, 0x20);
        pit.write_gate(1, later(0));
        assert_eq!(pit.read_gate(later(100)) & 0x20, 0);
        assert_eq!(pit.read_gate(later(500)) & 0x20, 0x20);
    }

    #[test]
    fn latched_counts_and_status_are_read_once() {
        let mut pit = Pit::default();
        load(&mut pit, 0, 2, 0x1234);
        // Read back count and status of counter 0.
        pit.write(3, 0xc2, at(4));
        pit.write(3, 0x00, at(90));
        assert_eq!(pit.read(0, at(100)), 0x80 | 3 << 4 | 2 << 1);
        assert_eq!([pit.read(0, at(100)), pit.read(0, at(100))], [0x30, 0x12]);
        assert_eq!(pit.read(0, at(0x34)), 0x00, "0x1200, not latched");
        // One byte alone: the upper one.
        pit.write(3, 2 << 4 | 2 << 1, at(0));
        pit.write(0, 0x10, at(0));
        assert_eq!(pit.read(0, at(1)), 0x0f);
        assert_eq!(pit.read(3, at(1)), 0xff);
    }
}
