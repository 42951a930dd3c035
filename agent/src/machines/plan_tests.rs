use proptest::prelude::*;

use super::*;

const POLICY: Policy =
    Policy { grace_s: 10, retain_s: 100, time: TimeTrust::Confirmed, node: Node::Stays };

fn record(power: Power) -> Record {
    Record { power, ..fixture::record() }
}

fn check(now: u64, power: Power, seen: &Seen, expected: Option<Action>) {
    assert_eq!(plan(UnixSeconds(now), &record(power), seen, POLICY), expected, "at {now}");
}

fn running() -> Seen {
    Seen { process: Process::Running { pid: 7 }, ..Seen::default() }
}

#[test]
fn a_lease_begins_and_ends_by_itself() {
    check(999, Power::On, &Seen::default(), None);
    check(1000, Power::On, &Seen::default(), Some(Action::Start));
    check(1500, Power::On, &running(), None);
    check(1940, Power::On, &running(), Some(Action::Warn { left_s: 60 }));
    let warned = Seen { warned: Some(UnixSeconds(2000)), ..running() };
    check(1941, Power::On, &warned, None);
    check(1990, Power::On, &warned, Some(Action::Press { because: "lease-end" }));
    let pressed = Seen { pressed: Some(UnixSeconds(1990)), ..warned };
    check(1999, Power::On, &pressed, None);
    check(2000, Power::On, &pressed, Some(Action::Kill { because: "lease-end" }));
    check(2000, Power::On, &Seen::default(), Some(Action::Release));
}

#[test]
fn a_stopped_machine_is_asked_before_it_is_forced() {
    check(1500, Power::Off, &running(), Some(Action::Press { because: "renter" }));
    let at = |first, last| Seen {
        pressed: Some(UnixSeconds(first)),
        pressed_last: Some(UnixSeconds(last)),
        ..running()
    };
    let pressed = at(1500, 1500);
    check(1502, Power::Off, &pressed, None);
    // The first may have woken a guest that slept.
    check(1503, Power::Off, &pressed, Some(Action::Press { because: "renter" }));
    check(1505, Power::Off, &at(1500, 1503), None);
    check(1509, Power::Off, &at(1500, 1506), Some(Action::Press { because: "renter" }));
    check(1510, Power::Off, &pressed, Some(Action::Kill { because: "renter" }));
    let killed = Seen { killed: Some(UnixSeconds(1510)), ..pressed };
    check(1520, Power::Off, &killed, None);
}

#[test]
fn a_node_that_goes_down_presses_again_and_leaves_force_to_init() {
    let pressed = Seen {
        pressed: Some(UnixSeconds(1500)),
        pressed_last: Some(UnixSeconds(1500)),
        ..running()
    };
    let leaving = Policy { node: Node::GoesDown, ..POLICY };
    let at = |now| plan(UnixSeconds(now), &record(Power::On), &pressed, leaving);
    let again = Some(Action::Press { because: SHUTDOWN });
    assert_eq!([1502, 1503, 1530].map(at), [None, again, again]);
    check(1530, Power::On, &pressed, None);
}

#[test]
fn only_a_reset_starts_again() {
    let ended = |status| Seen { process: Process::Ended { status }, ..Seen::default() };
    let settle = |status, power| Some(Action::Settle { status, power });
    let reset = Ending::Exit { code: exit::RESET };
    check(1500, Power::On, &ended(reset), settle(reset, Power::On));
    check(1500, Power::Off, &ended(reset), settle(reset, Power::Off));
    let off = Ending::Exit { code: exit::POWERED_OFF };
    check(1500, Power::On, &ended(off), settle(off, Power::Off));
    let crashed = Ending::Signal { number: 31 };
    check(1500, Power::On, &ended(crashed), settle(crashed, Power::Off));
}

#[test]
fn what_is_refused_at_a_start_is_tried_again_and_what_ran_is_not() {
    let status = Ending::Exit { code: exit::REFUSED };
    let ended = Seen { process: Process::Ended { status }, ..Seen::default() };
    let starting = Seen { busy: Some(Work::Start), ..ended.clone() };
    check(1500, Power::On, &starting, Some(Action::Fail { status }));
    check(1500, Power::On, &ended, Some(Action::Settle { status, power: Power::Off }));
    // Another end of a start is what it is otherwise.
    let killed = Ending::Signal { number: 9 };
    let starting = Seen { process: Process::Ended { status: killed }, ..starting };
    let off = Some(Action::Settle { status: killed, power: Power::Off });
    check(1500, Power::On, &starting, off);
}

#[test]
fn what_was_killed_because_its_start_failed_is_tried_again() {
    let status = Ending::Signal { number: 9 };
    let given_up = Some(UnixSeconds(1500));
    let process = Process::Ended { status };
    let ended = Seen { process, given_up, failures: 1, ..Seen::default() };
    check(1500, Power::On, &ended, Some(Action::Settle { status, power: Power::On }));
    check(1500, Power::Off, &ended, Some(Action::Settle { status, power: Power::Off }));
    let failed = UnixSeconds(1500);
    let rests = Seen { process: Process::Absent, given_up: None, failed, ..ended };
    check(1500 + RETRY_S - 1, Power::On, &rests, None);
    check(1500 + RETRY_S, Power::On, &rests, Some(Action::Start));
}

#[test]
fn what_ended_by_its_own_deadline_is_over_if_its_lease_is_and_goes_on_if_not() {
    let status = Ending::Exit { code: exit::DEADLINE };
    let ended = Seen { process: Process::Ended { status }, ..Seen::default() };
    let settled = Some(Action::Settle { status, power: Power::On });
    check(2003, Power::On, &ended, settled);
    check(2003, Power::On, &Seen::default(), Some(Action::Release));
    // It was renewed when nobody could tell its process.
    check(1500, Power::On, &ended, settled);
    check(1500, Power::On, &Seen::default(), Some(Action::Start));
    check(1500, Power::Off, &ended, Some(Action::Settle { status, power: Power::Off }));
}

#[test]
fn data_is_destroyed_late_and_never_on_one_clock() {
    let mut gone = record(Power::Off);
    gone.released = Released::Yes;
    let at = |now, policy| plan(UnixSeconds(now), &gone, &Seen::default(), policy);
    assert_eq!(at(2099, POLICY), None);
    let over = Some(Action::Destroy { because: "retention-over" });
    assert_eq!(at(2100, POLICY), over);
    assert_eq!(at(9999, Policy { time: TimeTrust::Alone, ..POLICY }), None);
}

#[test]
fn a_deleted_machine_ends_at_once_and_for_good() {
    let mut deleted = record(Power::Off);
    deleted.deleted = Some(UnixSeconds(1500));
    let alone = Policy { time: TimeTrust::Alone, ..POLICY };
    let at = |record: &Record, seen| plan(UnixSeconds(1500), record, &seen, alone);
    assert_eq!(at(&deleted, running()), Some(Action::Kill { because: "deleted" }));
    assert_eq!(at(&deleted, Seen::default()), Some(Action::Release));
    deleted.released = Released::Yes;
    assert_eq!(at(&deleted, Seen::default()), Some(Action::Destroy { because: "renter" }));
}

#[test]
fn a_start_that_waits_for_content_is_given_up_when_it_is_not_wanted() {
    let starting = Seen { busy: Some(Work::Start), ..Seen::default() };
    check(1999, Power::On, &starting, None);
    check(2000, Power::On, &starting, Some(Action::Abandon));
    check(1500, Power::Off, &starting, Some(Action::Abandon));
    let mut deleted = record(Power::Off);
    deleted.deleted = Some(UnixSeconds(1500));
    let action = plan(UnixSeconds(1500), &deleted, &starting, POLICY);
    assert_eq!(action, Some(Action::Abandon));
    // What is taken back is not held up, and a process that was started is ended as such.
    let releasing = Seen { busy: Some(Work::Release), ..Seen::default() };
    check(2000, Power::On, &releasing, None);
    let started = Seen { busy: Some(Work::Start), ..running() };
    check(2000, Power::On, &started, Some(Action::Kill { because: "lease-end" }));
}

#[test]
fn what_a_wrong_clock_ended_goes_on_and_what_its_renter_deleted_does_not() {
    let mut back = record(Power::On);
    back.released = Released::Yes;
    let at = |record: &Record| plan(UnixSeconds(1500), record, &Seen::default(), POLICY);
    assert_eq!(at(&back), Some(Action::Reclaim));
    back.power = Power::Off;
    assert_eq!(at(&back), None);
    // It was deleted when the clock was ahead.
    back.deleted = Some(UnixSeconds(1900));
    assert_eq!(at(&back), Some(Action::Destroy { because: "renter" }));
}

proptest! {
    #[test]
    fn nothing_runs_outside_its_lease(now in 0u64..4000, pressed in proptest::option::of(0u64..4000)) {
        let seen = Seen { pressed: pressed.map(UnixSeconds), ..running() };
        let action = plan(UnixSeconds(now), &record(Power::On), &seen, POLICY);
        if now >= 2000 {
            prop_assert_eq!(action, Some(Action::Kill { because: "lease-end" }));
        }
        let start = plan(UnixSeconds(now), &record(Power::On), &Seen::default(), POLICY);
        if !(1000..2000).contains(&now) {
            prop_assert_ne!(start, Some(Action::Start));
        }
    }
}
