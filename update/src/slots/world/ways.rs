//! The ways that a node in small can go.

use proptest::prelude::*;

use super::*;

const WELL: [Health; 3] = [Health::Well; 3];

/// A node after its first update, which runs what is on the fallback path.
fn updated() -> World {
    let mut world = World::installed(true, &WELL);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Current);
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs, &world.order[..]), ((Place::Fallback, 1), &[Place::Fallback, A][..]));
    world
}

#[test]
fn an_installed_node_updates_and_commits() {
    let mut world = World::installed(true, &WELL);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.order, [Place::Fallback, A]);
    for (number, boots) in [(1, 2), (2, 3)] {
        world.offer = Some(number);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!((world.runs, world.boots), ((B, number), boots));
        assert_eq!(world.order, [Place::Fallback, A]);
        let Contents { a, b, fallback, shared } = &world.contents;
        assert_eq!((a, b), (&Some(program(number - 1)), &None));
        assert_eq!((fallback, shared), (&Some(program(number)), &None));
    }
}

#[test]
fn each_release_is_written_once() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    world.offer = Some(2);
    let mut fetched = 0;
    while world.runs.1 != 2 || plan(&world.facts()) != Action::Rest(Rest::Current) {
        let action = plan(&world.facts());
        assert!(!matches!(action, Action::Mend { .. }), "it is written again");
        fetched += u32::from(matches!(action, Action::Fetch(_)));
        assert_eq!(world.step(), None);
    }
    assert_eq!(fetched, 1);
}

#[test]
fn a_node_without_entries_makes_them() {
    let mut world = World::installed(false, &WELL);
    assert_eq!(world.runs.0, Place::Fallback);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.entries, &world.order[..]), ([true, false, true], &[Place::Fallback, A][..]));
}

#[test]
fn a_release_that_does_not_come_up_is_tried_once() {
    for health in [Health::Dead, Health::Sick] {
        let mut world = World::installed(true, &[Health::Well, health, Health::Well]);
        world.offer = Some(1);
        assert!(matches!(world.settle(), Rest::Failed(..)));
        assert_eq!((world.runs, world.starts[1]), ((Place::Fallback, 0), 1));
        world.cut(Blow::None);
        assert!(matches!(world.settle(), Rest::Failed(..)));
        assert_eq!(world.starts[1], 1);
        // A newer one is another matter, and so is an operator's word.
        world.journal.as_mut().unwrap().failed.clear();
        world.settle();
        assert_eq!(world.starts[1], 2);
        world.offer = Some(2);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!(world.runs.1, 2);
    }
}

/// Some firmware deletes an entry that its order does not name.
#[test]
fn a_release_is_tried_where_firmware_deletes_what_its_order_does_not_name() {
    let mut world = World::installed(true, &[Health::Well, Health::Well, Health::Dead]);
    world.quirk = Quirk::DeletesUnlisted;
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs, world.starts[1]), ((B, 1), 1));
    assert_eq!(world.order, [Place::Fallback, A], "what was tried is not the last any more");
    world.offer = Some(2);
    assert!(matches!(world.settle(), Rest::Failed(..)));
    assert_eq!((world.runs, world.starts[2]), ((Place::Fallback, 1), 1));
    assert_eq!(world.order, [Place::Fallback, A], "what failed is not the last any more");
}

/// QEMU's firmware does, where it is told what to start.
#[test]
fn a_release_is_tried_where_firmware_deletes_what_its_order_names() {
    let mut world = World::installed(true, &WELL);
    world.quirk = Quirk::DeletesListed;
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs, world.starts[1], world.boots), ((B, 1), 1, 2));
    assert!(world.journal.unwrap().unstarted.is_none());
}

#[test]
fn a_release_that_firmware_does_not_start_has_not_failed() {
    let mut world = World::installed(true, &WELL);
    world.quirk = Quirk::ClearsNext;
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Unstarted(release(1)));
    let journal = world.journal.clone().unwrap();
    assert!(journal.failed.is_empty() && journal.last.contains("boot order"), "{journal:?}");
    assert_eq!((world.starts[1], world.boots), (0, 3), "it is tried twice");
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Unstarted(release(1)));
    // It stays in the boot menu, and is judged when somebody chooses it there.
    assert_eq!(world.order, [Place::Fallback, A, B]);
    let mut chosen = world.clone();
    chosen.quirk = Quirk::None;
    chosen.next = Some(Slot::B);
    chosen.cut(Blow::None);
    assert_eq!(chosen.settle(), Rest::Current);
    assert_eq!(chosen.runs, (B, 1));
    assert_eq!(chosen.order, [Place::Fallback, A]);
    // Another release is another matter; so is an operator's word.
    let mut insisted = world.clone();
    insisted.quirk = Quirk::None;
    insisted.journal.as_mut().unwrap().insisted = Some(release(1));
    assert_eq!(insisted.settle(), Rest::Current);
    assert_eq!(insisted.runs.1, 1);
    world.quirk = Quirk::None;
    world.offer = Some(2);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (2, 0));
    assert_eq!(world.journal.unwrap().unstarted, None);
}

/// Nobody can tell it from a release that firmware did not start.
#[test]
fn a_release_whose_kernel_does_not_get_to_its_first_program_is_tried_twice() {
    let mut world = World::installed(true, &[Health::Well, Health::Stillborn, Health::Well]);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Unstarted(release(1)));
    assert_eq!((world.runs, world.starts[1]), ((Place::Fallback, 0), 2));
    world.offer = Some(2);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 2);
}

#[test]
fn machines_are_waited_for_and_named() {
    let mut world = World::installed(true, &WELL);
    (world.offer, world.machines) = (Some(1), vec!["m1".to_owned()]);
    assert_eq!(world.settle(), Rest::Machines(vec!["m1".to_owned()]));
    assert_eq!((world.next, world.runs.1), (None, 0));
    let mut facts = world.facts();
    facts.journal.insisted = Some(release(1));
    assert_eq!(plan(&facts), Action::MakeEntry(B));
    facts.journal.insisted = Some(release(2));
    assert!(matches!(plan(&facts), Action::Rest(Rest::Machines(_))));
    world.machines.clear();
    let mut facts = world.facts();
    facts.window_s = 90;
    assert_eq!(plan(&facts), Action::Rest(Rest::Window(90)));
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 1);
}

#[test]
fn a_held_node_stays_on_what_it_runs_until_told_otherwise() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    let hold = |world: &mut World, held| world.journal.as_mut().unwrap().held = held;
    hold(&mut world, true);
    world.offer = Some(1);
    assert_eq!(world.settle(), Rest::Held(release(1)));
    assert_eq!(world.contents.b, None, "nothing is fetched for later");
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Held(release(1)));
    // What is written already, and waits for a machine, waits for the word then.
    hold(&mut world, false);
    world.machines = vec!["m1".to_owned()];
    assert!(matches!(world.settle(), Rest::Machines(_)));
    hold(&mut world, true);
    world.machines.clear();
    assert_eq!(world.settle(), Rest::Held(release(1)));
    assert_eq!((world.next, world.starts[1]), (None, 0));
    // What runs may not run any longer, or an operator insists.
    let mut facts = world.facts();
    let sha256 = program(1).sha256;
    let (release, urgency) = (release(1), Urgency::Now);
    facts.offer = Offer::Program(Offered { release, sha256, urgency });
    assert!(matches!(plan(&facts), Action::Note(noted) if noted.trial.is_some()));
    let mut insisted = world.clone();
    insisted.journal.as_mut().unwrap().insisted = Some(release);
    assert_eq!(insisted.settle(), Rest::Current);
    assert_eq!(insisted.runs.1, 1);
    hold(&mut world, false);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (1, 1));
}

#[test]
fn what_was_withdrawn_before_it_ran_is_not_tried() {
    let mut world = World::installed(true, &WELL);
    (world.offer, world.machines) = (Some(1), vec!["m1".to_owned()]);
    world.settle();
    (world.offer, world.machines) = (None, Vec::new());
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (0, 0));
}

#[test]
fn a_fallback_path_that_is_lost_is_mended_from_the_copy() {
    let mut world = World::installed(true, &WELL);
    world.settle();
    for lost in [None, Some(program(2))] {
        world.contents.set(Place::Fallback, lost);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!(world.contents.fallback, Some(program(0)));
        assert_eq!(world.contents.a, Some(program(0)));
    }
    world.cut(Blow::Variables);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.runs.1, 0);
}

fn altered(number: u32) -> Program {
    let mut altered = program(number);
    altered.sha256.0[31] ^= 1;
    altered
}

/// Bytes that a disk altered may be of no use to what runs, which then passes every gate.
#[test]
fn an_altered_copy_of_what_is_good_is_mended_and_never_becomes_good() {
    for (secure, blow) in [(false, Blow::None), (false, Blow::Variables), (true, Blow::None)] {
        let mut world = World::installed(true, &WELL);
        world.settle();
        world.secure = secure;
        world.contents.set(Place::Fallback, Some(altered(0)));
        world.cut(blow);
        assert_eq!(world.settle(), Rest::Current);
        let held = [A, Place::Fallback].map(|place| world.contents.at(place));
        assert_eq!(held, [Some(&program(0)); 2], "{secure} {blow:?}");
        assert_eq!(world.journal.as_ref().unwrap().good, Some(program(0).sha256));
        // It follows its repository as before.
        world.offer = Some(1);
        assert_eq!(world.settle(), Rest::Current);
        assert_eq!((world.runs.1, world.starts[1]), (1, 1));
    }
}

/// There is one copy of what is good then, and the release before it.
#[test]
fn after_an_update_the_release_before_starts_where_the_good_one_cannot() {
    let mut world = updated();
    world.secure = true;
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.runs, (A, 0));
    // What was good is what the repository has, and comes again.
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, world.starts[1]), (1, 3));
    assert_eq!(world.contents.fallback, Some(program(1)));

    // Firmware that starts everything: the next start is one of the release before.
    let mut world = updated();
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::OnlySpare);
    assert_eq!((world.runs, &world.order[..]), ((Place::Fallback, 1), &[A][..]));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!((world.runs.1, &world.contents.fallback), (1, &Some(program(1))));

    // An altered spare is not led to, and is no help.
    let mut world = updated();
    world.contents.set(A, Some(altered(0)));
    assert_eq!(world.settle(), Rest::Current);
    assert_eq!(world.order, [Place::Fallback]);
    world.contents.set(Place::Fallback, Some(altered(1)));
    world.cut(Blow::None);
    assert_eq!(world.settle(), Rest::NothingGood);
}

#[test]
fn without_variables_nothing_is_tried() {
    let mut facts = World::installed(true, &WELL).facts();
    facts.firmware = Firmware::default();
    facts.journal = Journal::default().with_good(program(0).sha256, Some(release(0)));
    let sha256 = program(1).sha256;
    let offered = Offered { release: release(1), sha256, urgency: Urgency::Now };
    facts.offer = Offer::Program(offered);
    assert_eq!(plan(&facts), Action::Rest(Rest::NoFirmware));
    facts.from = None;
    assert_eq!(plan(&facts), Action::Rest(Rest::NotInstalled));
}

/// Cuts the way of an update after each action, twice, with each blow. Whatever happens, the node comes
/// up (`boot` and `check` say so), and in the end it runs the newest release that is well.
#[test]
fn cuts_at_every_place_do_no_harm() {
    let mut tried = 0;
    for second in [Health::Well, Health::Sick, Health::Dead, Health::Stillborn] {
        let health = [Health::Well, second, Health::Well];
        for entry in [true, false] {
            let mut start = World::installed(entry, &health);
            start.offer = Some(1);
            for first in 0..=start.steps_until_rest() {
                for blow in [Blow::None, Blow::Variables, Blow::Journal] {
                    let mut once = start.clone();
                    (0..first).for_each(|_| drop(once.step()));
                    once.cut(blow);
                    for next in 0..=once.steps_until_rest() {
                        for blow in [Blow::None, Blow::Variables, Blow::Journal] {
                            let mut twice = once.clone();
                            (0..next).for_each(|_| drop(twice.step()));
                            twice.cut(blow);
                            twice.settle();
                            twice.check();
                            let wanted = u32::from(second == Health::Well);
                            let journal = twice.journal.as_ref().unwrap();
                            let left = journal.unstarted.iter().filter(|left| left.is_given_up());
                            let failed = journal.failed.len() + left.count();
                            // A cut of the trial's boot counts as a failure.
                            assert!(twice.runs.1 == wanted || failed > 0, "{twice:?}");
                            // One that leaves no sign of a start has one more try.
                            let most = if second == Health::Stillborn { 7 } else { 5 };
                            assert!(twice.starts[1] <= most, "{twice:?}");
                            tried += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(tried > 1000, "{tried}");
}

proptest! {
    /// Updates, failures, cuts, blows, leases that are made, renewed and expire, in any order.
    #[test]
    fn any_sequence_ends_well(
        health in proptest::collection::vec(0_u8..4, 12),
        acts in proptest::collection::vec((0_u8..12, 1_u32..12, 0_u8..3), 1..60),
    ) {
        let kinds = [Health::Well, Health::Sick, Health::Dead, Health::Stillborn];
        let mut health: Vec<_> = health.iter().map(|kind| kinds[usize::from(*kind)]).collect();
        (health[0], health[11]) = (Health::Well, Health::Well);
        let mut world = World::installed(true, &health);
        for (act, number, blow) in acts {
            match act {
                0 => world.offer = world.offer.max(Some(number)),
                1 => world.cut([Blow::None, Blow::Variables, Blow::Journal][usize::from(blow)]),
                2 => world.leases.push(world.now + 10 * number),
                3 => world.now += 7 * number,
                5 => {
                    let running = world.leases.iter_mut().filter(|end| **end > world.now);
                    running.for_each(|end| *end += number);
                }
                4 => {
                    if let Some(journal) = &mut world.journal {
                        journal.held = number % 2 == 0;
                    }
                }
                _ => drop(world.step()),
            }
        }
        world.offer = Some(11);
        if let Some(journal) = &mut world.journal {
            journal.failed.clear();
            journal.unstarted = None;
            journal.held = false;
        }
        // Whatever has happened, nobody's machine is in the way for longer than its lease.
        let boots = world.boots;
        world.settle();
        prop_assert!(world.rented().is_empty() || world.boots == boots);
        world.now = u32::MAX;
        world.settle();
        if let Some(journal) = &mut world.journal {
            journal.failed.clear();
            journal.unstarted = None;
        }
        world.settle();
        prop_assert_eq!(world.runs.1, 11);
    }
}
