//! The clock with CMOS memory: real time, and the memory sizes that firmware looks for. It interrupts for
//! updates, alarms and periods that the guest enables, until register C is read; whoever owns it has to
//! look when the next is due.
//! Source: Motorola MC146818A datasheet, "Address Map" and "Registers"; Intel ICH9 datasheet §13.6.
//!
//! | Port | Access | Meaning                                           |
//! |------|--------|---------------------------------------------------|
//! | 0x70 | w      | bits 6:0 select a byte                            |
//! | 0x71 | r/w    | the selected byte                                 |
//!
//! | Byte       | Content                                                          |
//! |------------|------------------------------------------------------------------|
//! | 0, 2, 4    | seconds, minutes, hours (bit 7: afternoon, in 12-hour form)      |
//! | 1, 3, 5    | alarm                                                            |
//! | 6, 7, 8, 9 | day of the week (1 = Sunday), of the month, month, year          |
//! | 0x0a       | bit 7 update in progress, 6:4 divider, 3:0 rate                  |
//! | 0x0b       | bit 7 set, 6:4 interrupts on, 2 binary, 1 24 hours, 0 unused     |
//! | 0x0c       | bit 7 interrupt, 6 periodic, 5 alarm, 4 updated; reading clears  |
//! | 0x0d       | bit 7: the time is valid                                         |
//! | 0x32       | century                                                          |
//! | 0x34, 0x35 | RAM between 16 MiB and 4 GiB, in 64 KiB                          |
//! | 0x5b–0x5d  | RAM above 4 GiB, in 64 KiB                                       |

use std::{sync::Arc, time::Duration};

use crate::irq::{InterruptLine, Level};

/// First port.
pub const BASE: u16 = 0x70;
/// Ports.
pub const LENGTH: u16 = 2;
/// Its interrupt, as on every PC (ISA line 8).
pub const GSI: u32 = 8;

const BYTES: usize = 128;
const REGISTER_A: u8 = 0x0a;
const REGISTER_B: u8 = 0x0b;
const REGISTER_C: u8 = 0x0c;
const REGISTER_D: u8 = 0x0d;
/// Byte of the century, which the FADT names.
pub const CENTURY: u8 = 0x32;
const UPDATING: u8 = 1 << 7;
/// Register A after power-on: a 32,768 Hz crystal, 1,024 Hz periodic rate.
const DIVIDER: u8 = 0x26;
/// Register A: which crystal there is, or that the divider rests.
const DIVIDER_BITS: u8 = 0x70;
const SET: u8 = 1 << 7;
const BINARY: u8 = 1 << 2;
const HOURS_24: u8 = 1 << 1;
const REQUEST_FLAG: u8 = 1 << 7;
const PERIODIC_FLAG: u8 = 1 << 6;
const ALARM_FLAG: u8 = 1 << 5;
const UPDATED_FLAG: u8 = 1 << 4;
/// Register B enables by the bits with which register C tells.
const ENABLES: u8 = PERIODIC_FLAG | ALARM_FLAG | UPDATED_FLAG;
const VALID: u8 = 1 << 7;
const AFTERNOON: u8 = 1 << 7;
/// An alarm byte from here up matches anything.
const ANY: u8 = 0xc0;
/// How long before each second the update bit is set (datasheet, "Update Cycle": 244 µs).
const UPDATE_NANOS: u32 = 1_000_000_000 - 244_000;
const DAY_S: i64 = 86_400;
const SECOND: Duration = Duration::from_secs(1);
/// Jumps in which the next second is found that an alarm names: over minutes to the end of an hour, over
/// hours, minutes, and seconds.
const MAX_JUMPS: usize = 60 + 60 + 24 + 60 + 60;
/// Most that a machine starts ahead of the host's time or behind it: a hundred years, which is what a
/// clock without a century can be set to.
const MOST_AHEAD_S: i64 = 36_525 * DAY_S;

/// The clock.
pub struct Cmos {
    index: u8,
    bytes: [u8; BYTES],
    /// Seconds that the guest's time is ahead of the host's.
    ahead_s: i64,
    /// The time while register B holds updates back: a date that is changed part by part need not
    /// exist in between.
    held: Option<Moment>,
    /// The second at which register C was read last.
    seen_s: i64,
    /// When that was, on the host's clock: periods do not follow what the guest sets.
    seen: Duration,
    /// What happened since register C was read.
    flags: u8,
    line: Option<Arc<dyn InterruptLine>>,
    level: Level,
}

impl Cmos {
    /// Makes a clock in a machine with RAM at these places, (address, length), that is so many seconds
    /// ahead of the host's, a hundred years at most.
    pub fn new(ram: &[(u64, u64)], ahead_s: i64) -> Self {
        let mut bytes = [0; BYTES];
        bytes[usize::from(REGISTER_A)] = DIVIDER;
        bytes[usize::from(REGISTER_B)] = HOURS_24;
        let four_gib = 1u64 << 32;
        let low = ram.iter().filter(|(address, _)| *address < four_gib).map(|(a, l)| a + l).max();
        let high: u64 =
            ram.iter().filter(|(address, _)| *address >= four_gib).map(|(_, l)| l).sum();
        let low = (low.unwrap_or(0).saturating_sub(16 << 20) >> 16).min(0xffff);
        let high = (high >> 16).min(0xff_ffff);
        bytes[0x34..0x36].copy_from_slice(&low.to_le_bytes()[..2]);
        bytes[0x5b..0x5e].copy_from_slice(&high.to_le_bytes()[..3]);
        let ahead_s = within(ahead_s);
        let (held, line, level) = (None, None, Level::Low);
        Self {
            index: 0,
            bytes,
            ahead_s,
            held,
            seen_s: 0,
            seen: Duration::ZERO,
            flags: 0,
            line,
            level,
        }
    }

    /// Returns the clock with a wire for its interrupt.
    pub fn wired(self, line: Arc<dyn InterruptLine>) -> Self {
        Self { line: Some(line), ..self }
    }

    /// Returns how many seconds ahead of the host's it was set, as [`Self::new`] takes it.
    pub fn ahead_s(&self) -> i64 {
        within(self.ahead_s)
    }

    /// Reads at `offset` from the first port. `now` is the time since 1970, UTC.
    pub fn read(&mut self, offset: u8, now: Duration) -> u8 {
        if offset != 1 {
            return 0xff;
        }
        match self.index {
            0 | 2 | 4 | 6..=9 | CENTURY => self.encode(self.index, self.moment(now)),
            REGISTER_A => {
                let soon = now.subsec_nanos() >= UPDATE_NANOS && self.held.is_none();
                self.stored(REGISTER_A) | if soon { UPDATING } else { 0 }
            }
            REGISTER_C => {
                self.look(now);
                let request = if self.is_requesting() { REQUEST_FLAG } else { 0 };
                let flags = std::mem::take(&mut self.flags) | request;
                self.drive();
                flags
            }
            REGISTER_D => VALID,
            index => self.stored(index),
        }
    }

    /// Writes at `offset` from the first port. `now` is the time since 1970, UTC.
    pub fn write(&mut self, offset: u8, value: u8, now: Duration) {
        if offset == 0 {
            self.index = value & 0x7f;
            return;
        }
        // What happened so far did under the old rules.
        self.look(now);
        let index = self.index;
        match index {
            0 | 2 | 4 | 6..=9 | CENTURY => self.set_part(index, value, now),
            REGISTER_A => self.store(index, value & !UPDATING),
            REGISTER_B => {
                // Held back updates are not interrupted for (datasheet, "SET").
                let updates = if value & SET != 0 { UPDATED_FLAG } else { 0 };
                self.store(index, value & !updates);
                if value & SET != 0 {
                    self.held = Some(self.moment(now));
                } else if let Some(held) = self.held.take() {
                    self.set_seconds(held.seconds(), now);
                }
            }
            REGISTER_C | REGISTER_D => {}
            _ => self.store(index, value),
        }
        self.drive();
    }

    /// Notes what has happened by `now`, and interrupts if the guest wants that.
    pub fn look(&mut self, now: Duration) {
        self.flags |= self.updates(now) | self.periods(now);
        self.drive();
    }

    /// Returns how long after `now`, at which somebody looked, it interrupts next; `None` if it does not
    /// before the guest has written or read a register.
    pub fn due_in(&self, now: Duration) -> Option<Duration> {
        if self.is_requesting() {
            return None;
        }
        let enabled = |flag| self.stored(REGISTER_B) & flag != 0;
        let period = self.period_nanos().filter(|_| enabled(PERIODIC_FLAG)).map(|period| {
            let rest = period - now.as_nanos() % period;
            Duration::from_nanos(u64::try_from(rest).unwrap_or(u64::MAX))
        });
        let update = SECOND.saturating_sub(Duration::from_nanos(now.subsec_nanos().into()));
        let seconds = self.seconds(now);
        let until = |at: i64| {
            let whole = u64::try_from(at.saturating_sub(seconds) - 1).unwrap_or(0);
            update + Duration::from_secs(whole)
        };
        let runs = self.held.is_none();
        let updated = Some(update).filter(|_| runs && enabled(UPDATED_FLAG));
        let alarm = runs && enabled(ALARM_FLAG);
        let alarm = if alarm { self.next_alarm(seconds).map(until) } else { None };
        [period, updated, alarm].into_iter().flatten().min()
    }

    /// Whether the guest wants any interrupt.
    pub fn is_armed(&self) -> bool {
        self.stored(REGISTER_B) & ENABLES != 0
    }

    /// Whether something happened that register B wants an interrupt for.
    fn is_requesting(&self) -> bool {
        self.flags & self.stored(REGISTER_B) & ENABLES != 0
    }

    fn drive(&mut self) {
        let level = if self.is_requesting() { Level::High } else { Level::Low };
        if std::mem::replace(&mut self.level, level) != level
            && let Some(line) = &self.line
        {
            // KVM refuses only on a machine that is going away.
            let _ = line.set_level(level);
        }
    }

    fn stored(&self, index: u8) -> u8 {
        self.bytes.get(usize::from(index)).copied().unwrap_or(0xff)
    }

    fn store(&mut self, index: u8, value: u8) {
        if let Some(byte) = self.bytes.get_mut(usize::from(index)) {
            *byte = value;
        }
    }

    fn set_seconds(&mut self, seconds: i64, now: Duration) {
        let change = seconds.saturating_sub(self.seconds(now));
        self.ahead_s = self.ahead_s.saturating_add(change);
        self.seen_s = seconds;
    }

    fn moment(&self, now: Duration) -> Moment {
        self.held.unwrap_or_else(|| Moment::of(self.seconds(now)))
    }

    fn seconds(&self, now: Duration) -> i64 {
        let host = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        host.saturating_add(self.ahead_s)
    }

    /// Changes one part of the time.
    fn set_part(&mut self, index: u8, value: u8, now: Duration) {
        let mut moment = self.moment(now);
        let afternoon = value & AFTERNOON != 0;
        let hour = if self.has(HOURS_24) { value } else { value & !AFTERNOON };
        match index {
            0 => moment.second = self.decode(value),
            2 => moment.minute = self.decode(value),
            4 if self.has(HOURS_24) => moment.hour = self.decode(hour),
            4 => moment.hour = self.decode(hour) % 12 + if afternoon { 12 } else { 0 },
            7 => moment.day = self.decode(value),
            8 => moment.month = self.decode(value),
            9 => moment.year = moment.year - moment.year.rem_euclid(100) + self.decode(value),
            CENTURY => moment.year = self.decode(value) * 100 + moment.year.rem_euclid(100),
            // The day of the week follows from the date.
            _ => {}
        }
        match &mut self.held {
            Some(held) => *held = moment,
            None => self.set_seconds(moment.seconds(), now),
        }
    }

    /// Updates and alarms, of which there are none while they are held back.
    fn updates(&mut self, now: Duration) -> u8 {
        if self.held.is_some() {
            return 0;
        }
        let seconds = self.seconds(now);
        let since = std::mem::replace(&mut self.seen_s, seconds);
        if seconds <= since {
            return 0;
        }
        // An alarm comes once a day or more often.
        let since = since.max(seconds.saturating_sub(DAY_S + 1));
        let alarm = self.next_alarm(since).is_some_and(|at| at <= seconds);
        UPDATED_FLAG | if alarm { ALARM_FLAG } else { 0 }
    }

    /// Whether a period of register A's rate has ended (datasheet, table 5).
    fn periods(&mut self, now: Duration) -> u8 {
        let since = std::mem::replace(&mut self.seen, now);
        let Some(period) = self.period_nanos() else { return 0 };
        let ended = now.as_nanos() / period > since.as_nanos() / period;
        if ended { PERIODIC_FLAG } else { 0 }
    }

    /// Nanoseconds of a period; none where the rate is none or the divider rests.
    fn period_nanos(&self) -> Option<u128> {
        let register = self.stored(REGISTER_A);
        let crystal = register & DIVIDER_BITS == DIVIDER & DIVIDER_BITS;
        // Rates 1 and 2 are those of 8 and 9.
        let rate = match register & 0x0f {
            0 => return None,
            rate @ (1 | 2) => rate + 7,
            rate => rate,
        };
        crystal.then(|| (1_000_000_000u128 << (rate - 1)) / 32_768)
    }

    /// Returns the first second after `since` that the alarm names; `None` if it names no time of a day.
    fn next_alarm(&self, since: i64) -> Option<i64> {
        let mut at = since.saturating_add(1);
        for _ in 0..MAX_JUMPS {
            let moment = Moment::of(at);
            let is = |alarm, time| {
                let wanted = self.stored(alarm);
                wanted >= ANY || wanted == self.encode(time, moment)
            };
            let step = match (is(5, 4), is(3, 2), is(1, 0)) {
                (false, _, _) => 3600,
                (true, false, _) => 60,
                (true, true, false) => 1,
                (true, true, true) => return Some(at),
            };
            at = at.saturating_add(step - at.rem_euclid(step));
        }
        None
    }

    fn has(&self, bit: u8) -> bool {
        self.stored(REGISTER_B) & bit != 0
    }

    /// One part of a time as register B wants it.
    fn encode(&self, index: u8, moment: Moment) -> u8 {
        let value = match index {
            0 => moment.second,
            2 => moment.minute,
            4 if self.has(HOURS_24) => moment.hour,
            4 => {
                let hour = self.digits((moment.hour + 11) % 12 + 1);
                return if moment.hour >= 12 { hour | AFTERNOON } else { hour };
            }
            6 => moment.week_day,
            7 => moment.day,
            8 => moment.month,
            9 => moment.year.rem_euclid(100),
            _ => moment.year.div_euclid(100),
        };
        self.digits(value)
    }

    fn digits(&self, value: i64) -> u8 {
        let value = u8::try_from(value.rem_euclid(100)).unwrap_or(0);
        if self.has(BINARY) { value } else { ((value / 10) << 4) | (value % 10) }
    }

    fn decode(&self, value: u8) -> i64 {
        let plain = if self.has(BINARY) { value } else { (value >> 4) * 10 + (value & 0xf) };
        i64::from(plain)
    }
}

fn within(ahead_s: i64) -> i64 {
    ahead_s.clamp(-MOST_AHEAD_S, MOST_AHEAD_S)
}

/// A time of day and a date, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) year: i64,
    pub(crate) month: i64,
    pub(crate) day: i64,
    /// 1 is Sunday.
    pub(crate) week_day: i64,
    pub(crate) hour: i64,
    pub(crate) minute: i64,
    pub(crate) second: i64,
}

impl Moment {
    /// Of seconds since 1970. Days are counted from March, so that leap days end years.
    pub(crate) fn of(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(DAY_S), seconds.rem_euclid(DAY_S));
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day_of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Self {
            year: era * 400 + year_of_era + i64::from(month <= 2),
            month,
            day: day_of_year - (153 * from_march + 2) / 5 + 1,
            week_day: (days + 4).rem_euclid(7) + 1,
            hour: rest / 3600,
            minute: rest / 60 % 60,
            second: rest % 60,
        }
    }

    /// Seconds since 1970. Parts beyond their range carry over.
    fn seconds(self) -> i64 {
        let year = if self.month <= 2 { self.year - 1 } else { self.year };
        let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let from_march = (self.month + 9).rem_euclid(12);
        let day_of_year = (153 * from_march + 2) / 5 + self.day - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = era * 146_097 + day_of_era - 719_468;
        days * DAY_S + self.hour * 3600 + self.minute * 60 + self.second
    }
}

#[cfg(test)]
#[path = "cmos_tests.rs"]
mod tests;
