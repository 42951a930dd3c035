//! The clock with CMOS memory: real time, and the memory sizes that firmware looks for. It tells what
//! it would interrupt for, but has no wire; the ACPI tables tell operating systems that there is no such clock, so only
//! firmware and who asks firmware use it.
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

use std::time::Duration;

/// First port.
pub const BASE: u16 = 0x70;
/// Ports.
pub const LENGTH: u16 = 2;

const BYTES: usize = 128;
const REGISTER_A: u8 = 0x0a;
const REGISTER_B: u8 = 0x0b;
const REGISTER_C: u8 = 0x0c;
const REGISTER_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;
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
const VALID: u8 = 1 << 7;
const AFTERNOON: u8 = 1 << 7;
/// An alarm byte from here up matches anything.
const ANY: u8 = 0xc0;
/// How long before each second the update bit is set (datasheet, "Update Cycle": 244 µs).
const UPDATE_NANOS: u32 = 1_000_000_000 - 244_000;
const DAY_S: i64 = 86_400;
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
        Self { index: 0, bytes, ahead_s, held: None, seen_s: 0, seen: Duration::ZERO }
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
            REGISTER_C => self.flags(now),
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

    /// Register C: what happened since it was read last, and whether register B wants an interrupt
    /// for some of it. Its enables and the flags have the same bits.
    fn flags(&mut self, now: Duration) -> u8 {
        let flags = self.updates(now) | self.periods(now);
        let wanted = flags & self.stored(REGISTER_B) & (PERIODIC_FLAG | ALARM_FLAG | UPDATED_FLAG);
        flags | if wanted != 0 { REQUEST_FLAG } else { 0 }
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
        // An alarm that names less than a day comes once a day.
        let first = since.saturating_add(1).max(seconds.saturating_sub(DAY_S));
        let alarm = (first..=seconds).any(|second| self.is_alarm(Moment::of(second)));
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

    fn is_alarm(&self, moment: Moment) -> bool {
        [(1, 0), (3, 2), (5, 4)].iter().all(|(alarm, time)| {
            let wanted = self.stored(*alarm);
            wanted >= ANY || wanted == self.encode(*time, moment)
        })
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
struct Moment {
    year: i64,
    month: i64,
    day: i64,
    /// 1 is Sunday.
    week_day: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Moment {
    /// Of seconds since 1970. Days are counted from March, so that leap days end years.
    fn of(seconds: i64) -> Self {
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
mod tests {
    use super::*;

    /// 2026-11-21 15:04:05.5 UTC, a Saturday.
    const NOW: Duration = Duration::new(1_795_273_445, 500_000_000);

    fn get(clock: &mut Cmos, index: u8, now: Duration) -> u8 {
        clock.write(0, index, now);
        clock.read(1, now)
    }

    fn put(clock: &mut Cmos, index: u8, value: u8) {
        clock.write(0, index, NOW);
        clock.write(1, value, NOW);
    }

    fn all(clock: &mut Cmos) -> Vec<u8> {
        [0, 2, 4, 6, 7, 8, 9, CENTURY].iter().map(|index| get(clock, *index, NOW)).collect()
    }

    #[test]
    fn time_is_told_in_decimal_and_in_binary() {
        let mut clock = Cmos::new(&[], 0);
        assert_eq!(all(&mut clock), [0x05, 0x04, 0x15, 7, 0x21, 0x11, 0x26, 0x20]);
        put(&mut clock, REGISTER_B, BINARY | HOURS_24);
        assert_eq!(all(&mut clock), [5, 4, 15, 7, 21, 11, 26, 20]);
        put(&mut clock, REGISTER_B, 0);
        assert_eq!(get(&mut clock, 4, NOW), AFTERNOON | 3);
    }

    #[test]
    fn dates_go_there_and_back() {
        let check = |seconds| assert_eq!(Moment::of(seconds).seconds(), seconds);
        (0..5000).for_each(|step| check(step * 7_654_321 - 9_000_000_000));
        let leap = Moment::of(1_709_164_800);
        assert_eq!((leap.year, leap.month, leap.day, leap.week_day), (2024, 2, 29, 5));
    }

    #[test]
    fn time_that_is_set_goes_on_from_there() {
        let mut clock = Cmos::new(&[], 0);
        put(&mut clock, REGISTER_B, SET | HOURS_24);
        [(0, 0x59), (2, 0x59), (4, 0x23), (7, 0x31), (8, 0x12), (9, 0x27), (CENTURY, 0x20)]
            .iter()
            .for_each(|(index, value)| put(&mut clock, *index, *value));
        put(&mut clock, REGISTER_B, HOURS_24);
        let later = NOW + Duration::from_secs(1);
        assert_eq!((get(&mut clock, 9, later), get(&mut clock, 7, later)), (0x28, 1));
    }

    #[test]
    fn the_next_start_goes_on_from_what_was_set() {
        let mut clock = Cmos::new(&[], 0);
        put(&mut clock, 4, 0x17);
        put(&mut clock, 7, 0x20);
        assert_eq!(clock.ahead_s(), 2 * 3600 - DAY_S);
        let mut next = Cmos::new(&[], clock.ahead_s());
        assert_eq!(all(&mut next), all(&mut clock));
        assert_eq!(next.ahead_s(), clock.ahead_s());
        let far = [i64::MIN, i64::MAX].map(|ahead_s| Cmos::new(&[], ahead_s).ahead_s());
        assert_eq!(far, [-MOST_AHEAD_S, MOST_AHEAD_S]);
    }

    #[test]
    fn updates_are_announced_and_told() {
        let mut clock = Cmos::new(&[], 0);
        let just_before = Duration::new(NOW.as_secs(), 999_900_000);
        assert_eq!(get(&mut clock, REGISTER_A, NOW), DIVIDER);
        assert_eq!(get(&mut clock, REGISTER_A, just_before), DIVIDER | UPDATING);
        assert_eq!(get(&mut clock, REGISTER_C, NOW) & UPDATED_FLAG, UPDATED_FLAG);
        assert_eq!(get(&mut clock, REGISTER_C, NOW), 0);
        let soon = NOW + Duration::from_millis(1);
        assert_eq!(get(&mut clock, REGISTER_C, soon), PERIODIC_FLAG, "1,024 times a second");
        assert_eq!(get(&mut clock, REGISTER_D, NOW), VALID);
    }

    #[test]
    fn an_alarm_is_told_when_it_has_passed() {
        let mut clock = Cmos::new(&[], 0);
        let _ = get(&mut clock, REGISTER_C, NOW);
        [(1, 0x07), (3, 0xff), (5, 0xff)].iter().for_each(|(i, v)| put(&mut clock, *i, *v));
        put(&mut clock, REGISTER_A, DIVIDER & !0x0f);
        let at = |s| NOW + Duration::from_secs(s);
        assert_eq!(get(&mut clock, REGISTER_C, at(1)), UPDATED_FLAG);
        assert_eq!(get(&mut clock, REGISTER_C, at(4)), UPDATED_FLAG | ALARM_FLAG);
    }

    /// Datasheet, "Register C" (IRQF, PF) and "Register B" (SET clears UIE).
    #[test]
    fn an_enabled_flag_requests_an_interrupt() {
        let mut clock = Cmos::new(&[], 0);
        let _ = get(&mut clock, REGISTER_C, NOW);
        put(&mut clock, REGISTER_A, 0x2f);
        put(&mut clock, REGISTER_B, HOURS_24 | PERIODIC_FLAG);
        let at = |ms| NOW + Duration::from_millis(ms);
        assert_eq!(get(&mut clock, REGISTER_C, at(499)), 0);
        assert_eq!(get(&mut clock, REGISTER_C, at(500)) & !UPDATED_FLAG, 0b1100_0000);
        put(&mut clock, REGISTER_B, SET | HOURS_24 | UPDATED_FLAG);
        assert_eq!(get(&mut clock, REGISTER_B, NOW), SET | HOURS_24);
        put(&mut clock, REGISTER_A, 0x7f);
        assert_eq!(get(&mut clock, REGISTER_C, at(5000)), 0, "the divider rests");
    }

    #[test]
    fn memory_sizes_are_where_firmware_looks() {
        let mut clock = Cmos::new(&[(0, 2 << 30), (4 << 30, 3 << 30)], 0);
        let mut bytes = |list: [u8; 3]| list.map(|index| get(&mut clock, index, NOW));
        assert_eq!(bytes([0x34, 0x35, 0x40]), [0x00, 0x7f, 0]);
        assert_eq!(bytes([0x5b, 0x5c, 0x5d]), [0x00, 0xc0, 0]);
        put(&mut clock, 0x40, 0x77);
        assert_eq!(get(&mut clock, 0x40, NOW), 0x77);
    }
}
