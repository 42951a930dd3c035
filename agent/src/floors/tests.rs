#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{io, sync::Arc};

use tempfile::TempDir;

use super::*;
use crate::seal::tpm_tests::Emulated;

const DAY: u64 = 24 * 3600;
const NOW: UnixSeconds = UnixSeconds(1_800_000_000);

fn release(text: &str) -> Option<Release> {
    Some(text.parse().unwrap())
}

fn floors(time: u64, text: &str) -> Floors {
    Floors { time: UnixSeconds(time), release: release(text) }
}

fn load(folder: &TempDir, tpm: &Arc<Emulated>) -> Keeper {
    let tpm = Arc::clone(tpm);
    let opener = Opener::with(move || Ok(tpm.tpm()));
    let mut keeper = Keeper::load(folder.path(), opener, Floors::default());
    keeper.raise(Floors::default());
    keeper
}

fn without_tpm() -> Opener {
    Opener::with(|| Err(TpmError::Absent { path: "/dev/tpmrm0".to_owned() }))
}

#[test]
fn records_are_read_as_they_were_written_and_none_that_is_altered() {
    for (floors, held) in [
        (Floors::default(), Held::OnDiskOnly),
        (floors(u64::MAX, "4294967295.0.7"), Held::InTpm),
        (Floors { time: NOW, release: None }, Held::InTpm),
    ] {
        let bytes = floors.to_bytes(held);
        assert_eq!(Floors::from_bytes(&bytes), Some((floors, held)));
        for at in 0..bytes.len() {
            let mut altered = bytes;
            altered[at] ^= 1;
            assert_eq!(Floors::from_bytes(&altered), None, "byte {at}");
            assert_eq!(Floors::from_bytes(&bytes[..at]), None);
        }
    }
}

#[test]
fn floors_outlast_the_disk() {
    let Some(tpm) = Emulated::start().map(Arc::new) else { return };
    let (first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut keeper = load(&first, &tpm);
    assert_eq!((keeper.held(), keeper.floors()), (Held::InTpm, Floors::default()));
    keeper.raise(floors(NOW.0, "1.2.0"));
    // Neither goes down, and each is for itself.
    keeper.raise(floors(NOW.0 - DAY, "1.3.0"));
    keeper.raise(floors(NOW.0 - DAY, "1.1.0"));
    assert_eq!(keeper.floors(), floors(NOW.0, "1.3.0"));
    // Installed anew: another disk, and from an old medium.
    let mut anew = load(&second, &tpm);
    assert_eq!(anew.floors(), floors(NOW.0, "1.3.0"));
    anew.judge(release("1.3.0"));
    assert_eq!(anew.told, "");
    anew.judge(release("1.2.9"));
    assert!(anew.told.contains("release 1.2.9 runs, which is older than 1.3.0"), "{}", anew.told);
    // The disk alone knows them too.
    let alone = Keeper::load(first.path(), without_tpm(), Floors::default());
    assert_eq!((alone.held(), alone.floors()), (Held::OnDiskOnly, floors(NOW.0, "1.3.0")));
    assert!(alone.told.contains("has no TPM"), "{}", alone.told);
}

#[test]
fn the_tpm_is_written_only_when_it_is_worth_it() {
    let Some(tpm) = Emulated::start().map(Arc::new) else { return };
    let folder = TempDir::new().unwrap();
    let mut keeper = load(&folder, &tpm);
    keeper.raise(floors(NOW.0, "1.2.0"));
    let there = || Floors::from_bytes(&tpm.tpm().kept(INDEX).unwrap().unwrap()).unwrap().0;
    keeper.raise(floors(NOW.0 + DAY - 1, "1.2.0"));
    assert_eq!(there(), floors(NOW.0, "1.2.0"));
    keeper.raise(floors(NOW.0 + DAY, "1.1.0"));
    assert_eq!(there(), floors(NOW.0 + DAY, "1.2.0"));
    keeper.raise(floors(NOW.0 + DAY + 1, "1.2.1"));
    assert_eq!(there(), floors(NOW.0 + DAY + 1, "1.2.1"));
    drop(keeper);
    assert_eq!(load(&folder, &tpm).floors(), there());
}

#[test]
fn what_is_only_tried_keeps_nothing() {
    let Some(tpm) = Emulated::start().map(Arc::new) else { return };
    let (folder, shared) = (TempDir::new().unwrap(), Arc::clone(&tpm));
    let opener = Opener::with(move || Ok(shared.tpm()));
    let keeper = Keeper::load(folder.path(), opener, floors(NOW.0, "1.0.0"));
    assert_eq!((keeper.held(), keeper.floors()), (Held::OnDiskOnly, floors(NOW.0, "1.0.0")));
    assert_eq!(tpm.tpm().kept(INDEX).unwrap(), None);
    assert!(!folder.path().join(FILE).exists());
}

#[test]
fn a_cleared_tpm_is_told_and_gets_the_floors_again() {
    let (Some(tpm), Some(cleared)) = (Emulated::start(), Emulated::start()) else { return };
    let (tpm, cleared) = (Arc::new(tpm), Arc::new(cleared));
    let folder = TempDir::new().unwrap();
    load(&folder, &tpm).raise(floors(NOW.0, "1.2.0"));
    let keeper = load(&folder, &cleared);
    assert!(keeper.told.contains("cleared or exchanged"), "{}", keeper.told);
    assert_eq!(keeper.held(), Held::InTpm);
    let other = TempDir::new().unwrap();
    assert_eq!(load(&other, &cleared).floors(), floors(NOW.0, "1.2.0"));
}

#[test]
fn what_is_damaged_or_somebody_elses_is_told_and_nothing_stops() {
    let Some(tpm) = Emulated::start().map(Arc::new) else { return };
    let folder = TempDir::new().unwrap();
    // Another length, and rubbish of the right one.
    for rubbish in [&[7; 5][..], &[7; record::LENGTH]] {
        tpm.tpm().keep(INDEX, rubbish).unwrap();
        let keeper = load(&TempDir::new().unwrap(), &tpm);
        assert!(keeper.told.contains("damaged"), "{}", keeper.told);
        assert_eq!(keeper.held(), Held::InTpm);
    }
    fs::write(folder.path().join(FILE), b"rubbish").unwrap();
    let keeper = load(&folder, &tpm);
    assert!(keeper.told.contains("floors is damaged"), "{}", keeper.told);
    // Somebody else's data is left alone.
    let foreign = floors(1, "7.7.7").to_bytes(Held::OnDiskOnly);
    assert_eq!(tpm.tpm().kept(0x0180_4847).unwrap(), None);
    tpm.tpm().keep(0x0180_4847, &foreign).unwrap();
    assert_eq!(tpm.tpm().kept(0x0180_4847).unwrap().unwrap(), foreign);
    let broken = Opener::with(|| Err(TpmError::Io { source: io::ErrorKind::BrokenPipe.into() }));
    let mut keeper = Keeper::load(folder.path(), broken, floors(NOW.0, "1.0.0"));
    keeper.raise(floors(NOW.0, "2.0.0"));
    assert_eq!((keeper.held(), keeper.floors()), (Held::OnDiskOnly, floors(NOW.0, "2.0.0")));
    assert!(keeper.told.contains("cannot talk to the TPM"), "{}", keeper.told);
    let again = Keeper::load(folder.path(), without_tpm(), Floors::default());
    assert_eq!((again.floors(), again.told.as_str()), (floors(NOW.0, "2.0.0"), ""));
}

#[test]
fn a_minimum_counts_once_this_server_runs_as_much() {
    let (low, high) = (release("1.2.0"), release("9.0.0"));
    assert_eq!(risen(NOW, low, release("1.2.0")).release, low);
    assert_eq!(risen(NOW, high, release("1.2.0")).release, None);
    assert_eq!(risen(NOW, low, None).release, None);
    assert_eq!(risen(NOW, None, low), Floors { time: NOW, release: None });
}
