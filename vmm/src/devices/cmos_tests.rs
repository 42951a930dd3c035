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
    assert_eq!(get(&mut clock, REGISTER_C, later) & (REQUEST_FLAG | UPDATED_FLAG), UPDATED_FLAG);
}
