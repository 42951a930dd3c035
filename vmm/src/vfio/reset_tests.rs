use super::*;
use crate::vfio::fake::{FakeDevice, FakeSet};

fn start(device: &str, fake: FakeDevice) -> Arc<Resetter> {
    start_beside(&Neighbours::default(), device, fake)
}

fn start_beside(neighbours: &Neighbours, device: &str, fake: FakeDevice) -> Arc<Resetter> {
    let address = device.parse().expect("an address");
    let mut resetter =
        Resetter::start(address, Arc::new(fake), neighbours, Confinement::Open).expect("a thread");
    resetter.deadline = Duration::from_secs(1);
    Arc::new(resetter)
}

fn reset(fake: FakeDevice) -> Result<(), ResetError> {
    reset_all(&[start("0000:01:00.0", fake)]).remove(0)
}

#[test]
fn a_device_that_answers_is_clean() {
    let resetter = [start("0000:01:00.0", FakeDevice::nvme())];
    assert!(reset_all(&resetter)[0].is_ok());
    assert!(reset_all(&resetter)[0].is_ok());
}

#[test]
fn a_device_that_stays_away_is_named() {
    assert!(matches!(reset(FakeDevice::gone()), Err(ResetError::Gone { .. })));
}

#[test]
fn a_device_that_hangs_meets_the_deadline() {
    let result = reset(FakeDevice::nvme().hanging());
    assert!(matches!(result, Err(ResetError::Deadline { rung: Rung::Function, .. })));
}

/// The first reset ends well while the second is waited for, and says nothing of it.
#[test]
fn a_report_that_comes_too_late_is_not_that_of_the_next_reset() {
    let resetter = [start("0000:01:00.0", FakeDevice::nvme().late_then_hanging())];
    let is_late = || matches!(reset_all(&resetter)[0], Err(ResetError::Deadline { .. }));
    assert!(is_late(), "the first is over too late");
    assert!(is_late(), "the second is never over");
}

#[test]
fn an_order_that_finds_no_room_is_late_at_once() {
    let resetter = [start("0000:01:00.0", FakeDevice::nvme().hanging())];
    assert!(reset_all(&resetter)[0].is_err(), "the first hangs");
    assert!(reset_all(&resetter)[0].is_err(), "the second stays behind it");
    let third = resetter[0].order(Rung::Function);
    assert!(third.report.is_none(), "there is nothing to wait for");
    let result = resetter[0].wait(third);
    assert!(matches!(result, Err(ResetError::Deadline { rung: Rung::Function, .. })));
}

#[test]
fn devices_that_hang_are_late_together() {
    let devices = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]
        .map(|device| start(device, FakeDevice::nvme().hanging()));
    let ordered = devices.each_ref().map(|device| device.order(Rung::Function));
    let last = Instant::now() + devices[0].deadline;
    assert!(ordered.iter().all(|ordered| ordered.until <= last), "time runs from the order");
    for (device, ordered) in devices.iter().zip(ordered) {
        assert!(matches!(device.wait(ordered), Err(ResetError::Deadline { .. })));
    }
}

#[test]
fn a_device_that_cannot_be_reset_is_refused() {
    let result = reset(FakeDevice::nvme().unresettable());
    assert!(matches!(result, Err(ResetError::Refused { .. })));
}

#[test]
fn a_device_whose_function_cannot_be_reset_goes_with_its_set() {
    let set = FakeSet::default();
    reset(FakeDevice::nvme().reset_by_set().within(&set)).expect("reset");
    assert_eq!(set.rungs(), [Rung::Function, Rung::Set]);
}

#[test]
fn a_device_that_is_silent_after_its_own_reset_is_reset_with_its_set() {
    let set = FakeSet::default();
    reset(FakeDevice::nvme().silent_until_set().within(&set)).expect("reset");
    assert_eq!(set.rungs(), [Rung::Function, Rung::Set]);
}

/// A GPU, whose own reset takes a while, and its audio function, which has none.
#[test]
fn a_set_is_reset_after_the_functions_are_through_with_their_own() {
    let set = FakeSet::default();
    let pair = [
        start("0000:01:00.0", FakeDevice::nvme().slow().within(&set)),
        start("0000:01:00.1", FakeDevice::nvme().reset_by_set().within(&set)),
    ];
    assert!(reset_all(&pair).iter().all(Result::is_ok));
    assert_eq!(set.rungs(), [Rung::Function, Rung::Function, Rung::Set]);
}

#[test]
fn one_reset_of_a_set_serves_all_and_other_sets_have_their_own() {
    let (set, other) = (FakeSet::default(), FakeSet::default());
    let devices = [
        start("0000:01:00.0", FakeDevice::nvme().reset_by_set().within(&set)),
        start("0000:01:00.1", FakeDevice::nvme().reset_by_set().within(&set)),
        start("0000:02:00.0", FakeDevice::nvme().reset_by_set().within(&other)),
    ];
    assert!(reset_all(&devices).iter().all(Result::is_ok));
    assert_eq!(set.rungs(), [Rung::Function, Rung::Function, Rung::Set]);
    assert_eq!(other.rungs(), [Rung::Function, Rung::Set]);
}

#[test]
fn a_set_that_is_in_use_for_a_moment_is_tried_again() {
    let set = FakeSet::default();
    set.be_busy(2);
    reset(FakeDevice::nvme().reset_by_set().within(&set)).expect("reset");
    assert_eq!(set.rungs(), [Rung::Function, Rung::Set, Rung::Set, Rung::Set]);
}

#[test]
fn devices_whose_set_hangs_are_all_late() {
    let pair = [
        start("0000:01:00.0", FakeDevice::nvme().hanging_in_set()),
        start("0000:01:00.1", FakeDevice::nvme().reset_by_set()),
    ];
    let late = |result: &Result<(), ResetError>| {
        matches!(result, Err(ResetError::Deadline { rung: Rung::Set, .. }))
    };
    assert!(reset_all(&pair).iter().all(late));
}

#[test]
fn what_the_kernel_reset_when_it_was_opened_is_not_reset_again() {
    let set = FakeSet::default();
    clean(&[start("0000:01:00.0", FakeDevice::nvme().within(&set))]).expect("clean");
    assert_eq!(set.rungs(), []);
}

/// What an earlier machine could not reset is not given to the next.
#[test]
fn what_does_not_answer_when_it_is_opened_is_refused() {
    let gone = clean(&[start("0000:01:00.0", FakeDevice::gone())]);
    assert!(matches!(gone, Err(ResetError::Gone { .. })));
    let unresettable = clean(&[start("0000:01:00.0", FakeDevice::nvme().unresettable())]);
    assert!(matches!(unresettable, Err(ResetError::Refused { .. })));
}

fn admit(neighbours: &Neighbours, device: &str) -> super::super::neighbours::InUse {
    neighbours.admit(device.parse().expect("an address"))
}

#[test]
fn the_last_of_a_set_that_is_taken_back_carries_its_reset() {
    let (set, neighbours) = (FakeSet::default(), Neighbours::default());
    let [gpu, audio] = ["0000:01:00.0", "0000:01:00.1"];
    let (with_gpu, with_audio) = (admit(&neighbours, gpu), admit(&neighbours, audio));
    let first = FakeDevice::nvme().reset_by_set().within(&set);
    let first = [start_beside(&neighbours, audio, first)];
    assert!(reset_all(&first)[0].is_ok());
    assert_eq!(set.rungs(), [Rung::Function]);
    drop(with_audio);
    let last = [start_beside(&neighbours, gpu, FakeDevice::nvme().within(&set))];
    assert!(reset_all(&last)[0].is_ok());
    assert_eq!(set.rungs(), [Rung::Function, Rung::Function, Rung::Set]);
    // Nothing is owed any more.
    assert!(reset_all(&last)[0].is_ok());
    assert_eq!(set.rungs()[3..], [Rung::Function]);
    drop(with_gpu);
}

#[test]
fn what_is_attached_beside_a_device_in_use_has_to_answer() {
    let (set, neighbours) = (FakeSet::default(), Neighbours::default());
    let _gpu = admit(&neighbours, "0000:01:00.0");
    let answering = FakeDevice::nvme().reset_by_set().within(&set);
    clean(&[start_beside(&neighbours, "0000:01:00.1", answering)]).expect("it answers");
    let silent = FakeDevice::nvme().silent_until_set().within(&set);
    let refused = clean(&[start_beside(&neighbours, "0000:01:00.2", silent)]);
    assert!(matches!(refused, Err(ResetError::Gone { .. })));
    assert_eq!(set.rungs(), [Rung::Function, Rung::Function]);
}

#[test]
fn a_device_in_use_on_another_bus_is_no_neighbour() {
    let (set, neighbours) = (FakeSet::default(), Neighbours::default());
    let _others = ["0000:02:00.0", "0001:01:00.0"].map(|device| admit(&neighbours, device));
    let fake = FakeDevice::nvme().reset_by_set().within(&set);
    assert!(reset_all(&[start_beside(&neighbours, "0000:01:00.0", fake)])[0].is_ok());
    assert_eq!(set.rungs(), [Rung::Function, Rung::Set]);
}
