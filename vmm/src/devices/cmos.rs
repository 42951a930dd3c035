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

    /// A wire that notes its levels.
    #[derive(Default)]
    struct Wire(std::sync::Mutex<Vec<Level>>);

    impl InterruptLine for Wire {
        fn set_level(&self, level: Level) -> std::io::Result<()> {
            self.0.lock().expect("one thread").push(level);
            Ok(())
        }

        fn trigger_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            unreachable!("no kernel raises it")
        }

        fn resample_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            unreachable!("no kernel lowers it")
        }
    }

    /// A clock whose guest has read register C.
    fn wired() -> (Cmos, Arc<Wire>) {
        let wire = Arc::<Wire>::default();
        let mut clock = Cmos::new(&[], 0).wired(Arc::<Wire>::clone(&wire));
        let _ = get(&mut clock, REGISTER_C, NOW);
        (clock, wire)
    }

    fn levels(wire: &Wire) -> Vec<Level> {
        std::mem::take(&mut wire.0.lock().expect("one thread"))
    }

    /// Looks when the next interrupt is due, and returns how long that took and what register C told.
    fn next(clock: &mut Cmos, now: Duration) -> (Duration, u8) {
        let wait = clock.due_in(now).expect("something is due");
        clock.look(now + wait - Duration::from_micros(1));
        assert!(!clock.is_requesting(), "too early");
        clock.look(now + wait);
        assert!(clock.is_requesting() && clock.due_in(now + wait).is_none());
        (wait, get(clock, REGISTER_C, now + wait))
    }

    #[test]
    fn an_update_interrupts_each_second_until_it_is_seen() {
        let (mut clock, wire) = wired();
        assert_eq!((clock.due_in(NOW), clock.is_armed()), (None, false));
        put(&mut clock, REGISTER_B, HOURS_24 | UPDATED_FLAG);
        assert!(clock.is_armed());
        let half = Duration::from_millis(500);
        let (wait, flags) = next(&mut clock, NOW);
        assert_eq!((wait, flags & !PERIODIC_FLAG), (half, REQUEST_FLAG | UPDATED_FLAG));
        assert_eq!(levels(&wire), [Level::High, Level::Low]);
        let (wait, _) = next(&mut clock, NOW + half);
        assert_eq!(wait, SECOND);
        // One that nobody has seen stands for those after it.
        clock.look(NOW + 10 * SECOND);
        clock.look(NOW + 20 * SECOND);
        assert_eq!(levels(&wire), [Level::High, Level::Low, Level::High]);
        // Updates that are held back are not interrupted for, and their enable goes.
        put(&mut clock, REGISTER_B, SET | HOURS_24 | UPDATED_FLAG);
        assert_eq!((levels(&wire), clock.due_in(NOW)), (vec![Level::Low], None));
    }

    #[test]
    fn a_period_interrupts_at_its_rate() {
        let (mut clock, wire) = wired();
        put(&mut clock, REGISTER_A, 0x2f);
        put(&mut clock, REGISTER_B, HOURS_24 | PERIODIC_FLAG);
        let mut now = NOW;
        for _ in 0..4 {
            let (wait, flags) = next(&mut clock, now);
            now += wait;
            assert_eq!(wait, Duration::from_millis(500));
            assert_eq!(flags & !UPDATED_FLAG, REQUEST_FLAG | PERIODIC_FLAG);
        }
        assert_eq!(levels(&wire).len(), 8);
        clock.write(0, REGISTER_A, now);
        clock.write(1, 0x26, now);
        let wait = clock.due_in(now).expect("due");
        assert!(wait <= Duration::from_nanos(976_563), "{wait:?}");
        clock.write(1, 0x20, now);
        assert_eq!(clock.due_in(now), None, "no rate");
    }

    /// Datasheet, "Alarm": a byte of 0xc0 to 0xff names every hour, minute or second.
    #[test]
    fn an_alarm_interrupts_when_its_time_has_come() {
        let alarm = |second, minute, hour| {
            let (mut clock, wire) = wired();
            [(1, second), (3, minute), (5, hour)].iter().for_each(|(i, v)| put(&mut clock, *i, *v));
            put(&mut clock, REGISTER_B, HOURS_24 | ALARM_FLAG);
            let (wait, flags) = next(&mut clock, NOW);
            assert_eq!(flags & (REQUEST_FLAG | ALARM_FLAG), REQUEST_FLAG | ALARM_FLAG);
            assert_eq!(levels(&wire), [Level::High, Level::Low]);
            (wait + Duration::from_millis(500)).as_secs()
        };
        // It is 15:04:05.5.
        assert_eq!(alarm(0x07, 0x04, 0x15), 2);
        assert_eq!(alarm(0x05, 0x04, 0x15), 86_400, "it has just passed");
        assert_eq!(alarm(0x00, 0x00, 0x15), 86_400 - 245);
        assert_eq!(alarm(0x00, 0x30, 0xc0), 25 * 60 + 55);
        assert_eq!(alarm(0x00, 0xff, 0x23), 7 * 3600 + 55 * 60 + 55);
        assert_eq!(alarm(0xff, 0xff, 0xff), 1);
        assert_eq!(alarm(0x59, 0x59, 0x14), 86_400 - 246);
    }

    #[test]
    fn an_alarm_that_names_no_time_never_comes() {
        let (mut clock, _) = wired();
        [(1, 0x61), (3, 0xff), (5, 0xff)].iter().for_each(|(i, v)| put(&mut clock, *i, *v));
        put(&mut clock, REGISTER_B, HOURS_24 | ALARM_FLAG);
        assert_eq!(clock.due_in(NOW), None);
        clock.look(NOW + 3 * Duration::from_secs(86_400));
        assert!(!clock.is_requesting());
    }

    #[test]
    fn what_happened_already_interrupts_when_it_is_enabled() {
        let (mut clock, wire) = wired();
        let later = NOW + SECOND;
        clock.write(0, REGISTER_B, later);
        clock.write(1, HOURS_24 | UPDATED_FLAG, later);
        assert_eq!(levels(&wire), [Level::High]);
        clock.write(1, HOURS_24, later);
        assert_eq!(levels(&wire), [Level::Low]);
        assert_eq!(
            get(&mut clock, REGISTER_C, later) & (REQUEST_FLAG | UPDATED_FLAG),
            UPDATED_FLAG
        );
    }
}
