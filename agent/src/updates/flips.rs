//! Bits that a disk alters, on the EFI system partition and in the journal. The node reads what was written,
//! or says that it cannot; it mends what it has a copy of, and what was altered never becomes what is good.
//!
//! A run prints its seed. `HOLDFAST_FLIP_SEED` repeats one, `HOLDFAST_FLIPS` sets how many bits are tried.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::Seek,
    os::unix::fs::FileExt,
    path::Path,
};

use update::{
    disk::{esp, gpt::BlockSize, layout},
    slots::{
        Contents, Place, Program, Slot,
        firmware::{self, Firmware, Usable},
        gate::Gate,
        journal::Journal,
        plan::{Action, Facts, Offer, Rest, plan},
        release_of,
    },
};

use super::{journal, partition::Partition, slots::contents};
use crate::testing::{Random, setting};

/// Bits that are tried on each partition unless the environment says how many.
const FLIPS: usize = 150;
/// Everything of the partition that is used.
const USED: usize = 4 << 20;
/// Bytes of a line. One that is all zeros is not altered: nothing is there.
const LINE: usize = 64;
/// Bytes of a program.
const LENGTH: usize = 150_000;
/// Most actions until a node rests.
const ACTIONS: usize = 20;
/// The releases: the good one, and the one before.
const GOOD: &str = "ID=holdfast\nVERSION_ID=1.0.1\n";
const OLD: &str = "ID=holdfast\nVERSION_ID=1.0.0\n";

/// A program of a release: a PE file with one section, and something behind it.
fn program(os_release: &str) -> Vec<u8> {
    const SECTION: usize = 0x98 + 0xf0;
    let noise = |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0];
    let mut bytes: Vec<u8> = (0..LENGTH).map(noise).collect();
    bytes[..0x400].fill(0);
    bytes[0x3c] = 0x80;
    bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
    bytes[0x86] = 1;
    bytes[0x94] = 0xf0;
    bytes[SECTION..SECTION + 6].copy_from_slice(b".osrel");
    bytes[SECTION + 8] = u8::try_from(os_release.len()).unwrap();
    bytes[SECTION + 20..SECTION + 24].copy_from_slice(&0x300_u32.to_le_bytes());
    bytes[0x300..0x300 + os_release.len()].copy_from_slice(os_release.as_bytes());
    bytes
}

const FIRST: Place = Place::Slot(Slot::A);

/// The partition of a node with this release in its first slot: the good one after an installation, the
/// one before after an update.
fn partition(folder: &Path, slot: &str) -> (Partition, File) {
    let device = folder.join("esp");
    let file = File::options().create_new(true).read(true).write(true).open(&device).unwrap();
    file.set_len(layout::ESP_BYTES).unwrap();
    let paths = [esp::FALLBACK, esp::SLOT_A];
    esp::write(&file, BlockSize::B512, &program(GOOD), &paths).unwrap();
    if slot != GOOD {
        (&file).rewind().unwrap();
        esp::put(&file, esp::SLOT_A, &program(slot)).unwrap();
    }
    let id = "00112233-4455-6677-8899-aabbccddeeff".parse().unwrap();
    let place = firmware::Partition { number: 1, first: 0, blocks: 1, id };
    (Partition { device, place, from: Some(Place::Fallback) }, file)
}

fn facts(contents: Contents) -> Facts {
    let known = |text: &str| (Program::of(&program(text)).sha256, release_of(text));
    let ((old, before), (good, release)) = (known(OLD), known(GOOD));
    // Firmware has started what is there, altered or not.
    let runs = contents.fallback.clone().filter(|program| program.os_release == GOOD);
    Facts {
        journal: Journal::default().with_good(old, before).with_good(good, release),
        contents,
        firmware: Firmware {
            usable: Usable::Yes,
            a: Some(10),
            b: Some(11),
            fallback: Some(12),
            order: vec![12, 10, 3],
            next: None,
        },
        from: Some(Place::Fallback),
        medium: None,
        runs,
        started: None,
        crashed: false,
        boot: "boot".to_owned(),
        offer: Offer::Nothing,
        machines: Vec::new(),
        window_s: 0,
        gate: Gate::Passed,
        present: Vec::new(),
    }
}

/// What became of a flipped bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Every program was what it was before.
    Harmless,
    /// The good release was altered and is whole again.
    Mended,
    /// The slot was altered, and firmware does not start it.
    Left,
    /// The good release was altered, and firmware starts the one before.
    Spared,
    /// The node says that it cannot mend it.
    Told,
}

/// Lets a node act on its partition, of which `what` was altered, until it rests.
fn settle(partition: &Partition, good: &Program, what: &str) -> Outcome {
    let mut now = facts(contents(Some(partition)).unwrap_or_default());
    let mut outcome = Outcome::Harmless;
    for _ in 0..ACTIONS {
        match plan(&now) {
            Action::Mend { from, sha256 } => {
                assert_eq!(sha256, good.sha256, "{what}: another program is copied");
                if partition.mend(from, sha256).is_err() {
                    return Outcome::Told;
                }
                outcome = Outcome::Mended;
            }
            // A bit may let two names lead to one file.
            Action::Release(slot) => partition.remove(slot).unwrap(),
            Action::List(places) => {
                let trusted = |place: &Place| {
                    now.contents.at(*place).is_some_and(|it| now.journal.trusts(it.sha256))
                };
                assert!(places.iter().all(trusted), "{what}: {places:?}");
                let changes = firmware::list(&now.firmware, &places);
                let [firmware::Change::Set(_, order)] = &changes[..] else { panic!("{changes:?}") };
                now.firmware.order = update::efi::order(order);
                outcome = if outcome == Outcome::Harmless { Outcome::Left } else { outcome };
                continue;
            }
            Action::Rest(Rest::NothingGood) => return Outcome::Told,
            Action::Rest(Rest::OnlySpare) => {
                assert_eq!(now.firmware.leading(), Some(FIRST), "{what}");
                assert_eq!(now.contents.a, Some(Program::of(&program(OLD))), "{what}");
                return Outcome::Spared;
            }
            Action::Rest(Rest::Current) => {
                let read = contents(Some(partition)).unwrap();
                assert_eq!(read.fallback.as_ref(), Some(good), "{what}");
                assert_eq!(now.firmware.leading(), Some(Place::Fallback), "{what}");
                return outcome;
            }
            other @ (Action::Note(_)
            | Action::Promote { .. }
            | Action::Fetch(_)
            | Action::MakeEntry(_)
            | Action::Append(_)
            | Action::Arm(_)
            | Action::Disarm
            | Action::Restart
            | Action::Rest(_)) => panic!("{what}: {other:?}"),
        }
        now.contents = contents(Some(partition)).unwrap();
    }
    panic!("{what}: it never rests: {now:?}");
}

/// Flips bits of a node's partition; `known` is what becomes of one in the fallback path's program, and
/// of one in the slot's.
fn flip_bits(slot: &str, known: [Outcome; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let (partition, file) = partition(folder.path(), slot);
    let good = Program::of(&program(GOOD));
    assert_eq!(good.os_release, GOOD);
    let mut used = vec![0; USED];
    file.read_exact_at(&mut used, 0).unwrap();
    // Where the programs are; everything else that is not zero says so.
    let head = &program(GOOD)[..LINE * 8];
    let starts: Vec<usize> =
        (0..USED).step_by(head.len()).filter(|at| used[*at..].starts_with(head)).collect();
    // Between them may lie what the slot was before.
    let (Some(first), Some(second)) = (starts.first(), starts.last()) else { panic!("{slot}") };
    let is_program = |line: &usize| {
        starts.iter().any(|start| (start / LINE..(start + LENGTH) / LINE).contains(line))
    };
    let filled = |line: &usize| used[line * LINE..][..LINE].iter().any(|byte| *byte != 0);
    let (bytes, tables): (Vec<usize>, Vec<usize>) =
        (0..USED / LINE).filter(filled).partition(is_program);
    assert!(tables.len() > 20 && bytes.len() > 4000, "{} {}", tables.len(), bytes.len());

    let flip = |at: usize, bit: u8| {
        file.write_all_at(&[used[at] ^ bit], at as u64).unwrap();
        let outcome = settle(&partition, &good, &format!("bit {bit:#04x} at {at:#x}"));
        file.write_all_at(&used, 0).unwrap();
        outcome
    };
    let found = [first, second].map(|start| flip(start + LENGTH / 2, 1));
    assert_eq!(found, known, "{slot}");
    // The boot sector's signature, without which there is no volume.
    assert_eq!(flip(510, 1), Outcome::Told);

    let mut random = Random::start("HOLDFAST_FLIP_SEED");
    let mut counts = [0; 5];
    for round in 0..setting("HOLDFAST_FLIPS").unwrap_or(FLIPS) {
        let lines = if round % 2 == 0 { &tables } else { &bytes };
        let at = lines[random.below(lines.len())] * LINE + random.below(LINE);
        counts[flip(at, 1 << random.below(8)) as usize] += 1;
    }
    println!("harmless, mended, left, spared, told: {counts:?}");
}

#[test]
fn whatever_bit_is_altered_after_an_installation_it_is_mended_or_told() {
    flip_bits(GOOD, [Outcome::Mended, Outcome::Left]);
}

#[test]
fn whatever_bit_is_altered_after_an_update_the_node_has_something_whole_or_tells() {
    flip_bits(OLD, [Outcome::Spared, Outcome::Left]);
}

#[test]
fn whatever_bit_of_the_journal_is_altered_it_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let written = Journal {
        good: Some(Program::of(&program(GOOD)).sha256),
        last: "release 1.0.1 passed and stays".to_owned(),
        held: true,
        ..Journal::default()
    };
    journal::store(folder.path(), &written).unwrap();
    let path = folder.path().join(journal::FILE);
    let bytes = fs::read(&path).unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut altered = bytes.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, altered).unwrap();
        assert_eq!(journal::load(folder.path()), None, "bit {bit}");
        assert!(!path.exists(), "bit {bit}");
    }
}
