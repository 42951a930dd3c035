//! What the store keeps, and what is there when it was lost.

use super::*;
use crate::twice;

#[test]
fn what_was_kept_is_there_after_opening_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("agent.redb");
    let answer =
        Answered { digest: "d".into(), status: 201, body: "{}".into(), at: UnixSeconds(5) };
    {
        let store = Store::open(&path).expect("made");
        store.put_answer("k", &answer).expect("kept");
        store.raise_floor(UnixSeconds(9)).expect("raised");
        store.raise_floor(UnixSeconds(3)).expect("ignored");
    }
    let store = Store::open(&path).expect("opened");
    assert_eq!(store.answer("k").expect("read"), Some(answer));
    assert_eq!(store.answer("other").expect("read"), None);
    assert_eq!(store.floor().expect("read"), UnixSeconds(9));
    // What a clock said alone is overruled, what sources agreed on is not forgotten.
    store.agree_on(UnixSeconds(8)).expect("recorded");
    store.agree_on(UnixSeconds(7)).expect("recorded");
    let times =
        || [store.floor(), store.confirmed(), store.agreed()].map(|time| time.expect("read").0);
    assert_eq!(times(), [7, 7, 8]);
    store.raise_floor(UnixSeconds(90)).expect("recorded");
    assert_eq!(times(), [90, 7, 8]);
    store.confirm(UnixSeconds(20)).expect("recorded");
    assert_eq!(times(), [20, 20, 8]);
    // Slewed a little meanwhile.
    store.confirm(UnixSeconds(19)).expect("recorded");
    assert_eq!(times(), [19, 20, 8]);
    assert!(store.machines().expect("read").is_empty());
}

#[test]
fn want_of_room_is_told_from_a_disk_that_fails() {
    let path = || "/state/x".to_owned();
    let told = |number| {
        let source = io::Error::from_raw_os_error(number);
        let file = full_or(StoreError::File { path: path(), source });
        let source = io::Error::from_raw_os_error(number).into();
        let failed = full_or(StoreError::Failed { doing: "x", source: Box::new(source) });
        let storage = redb::StorageError::Io(io::Error::from_raw_os_error(number));
        let source = redb::DatabaseError::Storage(storage);
        let opened = full_or(StoreError::Open { path: path(), source });
        [file, failed, opened].map(|error| matches!(error, StoreError::Full { .. }))
    };
    assert_eq!(told(libc::ENOSPC), [true; 3]);
    assert_eq!(told(libc::EIO), [false; 3]);
}

#[test]
fn a_store_that_cannot_grow_says_so_keeps_all_it_has_and_grows_when_there_is_room() {
    const MIB: u32 = 4;
    let folder = tempfile::tempdir().expect("a directory");
    let Some(mounted) = crate::testing::Mounted::memory(MIB, &folder.path().join("state")) else {
        println!("skipped: a store on a full disk: needs root");
        return;
    };
    let filler = mounted.0.join("filler");
    fs::write(&filler, vec![7; 1 << 20]).expect("written");
    let path = mounted.0.join("agent.redb");
    let answer = Answered {
        digest: "d".to_owned(),
        status: 200,
        body: "x".repeat(20_000),
        at: UnixSeconds(5),
    };
    let store = Store::open(&path).expect("made");
    store.put_machine(&super::super::plan::fixture::record()).expect("kept");
    let most = 2 * (MIB << 20) / 20_000;
    let kept = |key: u32| store.put_answer(&key.to_string(), &answer);
    let (count, refused) = (0..most).find_map(|key| Some((key, kept(key).err()?))).expect("full");
    assert!(count > 5 && matches!(refused, StoreError::Full { .. }), "{count}: {refused}");
    let again = kept(most).expect_err("still full");
    assert!(matches!(again, StoreError::Full { .. }), "{again}");
    let whole = |store: &Store| {
        let known = |key: u32| store.answer(&key.to_string()).expect("read").is_some();
        (0..count).all(known) && store.machines().expect("read").len() == 1
    };
    assert!(whole(&store));
    drop(store);
    // A service that starts meanwhile finds it as it was.
    assert_eq!(super::super::damage::examine(&path), 0);
    let store = Store::open(&path).expect("opened");
    assert!(whole(&store));
    assert!(store.put_answer("more", &answer).is_err(), "there is room");
    fs::remove_file(&filler).expect("removed");
    store.put_answer("more", &answer).expect("there is room");
    assert!(whole(&store) && store.answer("more").expect("read").is_some());
}

#[test]
fn a_store_that_is_lost_leaves_behind_which_leases_were_used_up() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("agent.redb");
    let mut running = super::super::plan::fixture::record();
    running.lease.serial = 2;
    let mut deleted = running.clone();
    deleted.lease.id = MachineId::from_bytes([7; 16]);
    deleted.deleted = Some(UnixSeconds(1500));
    {
        let store = Store::open(&path).expect("made");
        assert_eq!(store.requests_from(UnixSeconds(900)).expect("read"), UnixSeconds(0));
        store.put_machine(&running).expect("kept");
        store.put_machine(&deleted).expect("kept");
        store.remove_machine(deleted.lease.id).expect("forgotten");
        store.agree_on(UnixSeconds(1800)).expect("recorded");
        store.raise_floor(UnixSeconds(9000)).expect("recorded");
    }
    for file in ["agent.redb", "leases.used"] {
        fs::remove_file(folder.path().join(file)).expect("lost");
    }
    for _ in 0..2 {
        let store = Store::open(&path).expect("made anew");
        assert!(store.machines().expect("read").is_empty());
        let serial = |record: &Record| store.serial(record.lease.id).expect("read");
        // The machine that is lost may be made again, by its newest lease only.
        assert_eq!((serial(&running), serial(&deleted)), (Some(1), Some(2)));
        // To the hour.
        let times =
            [store.floor(), store.confirmed(), store.agreed()].map(|time| time.expect("read").0);
        assert_eq!(times, [9000, 9000, 0]);
        let from = store.requests_from(UnixSeconds(9500)).expect("noted");
        assert_eq!(from, UnixSeconds(9500 + MAX_AHEAD_S));
        assert_eq!(store.requests_from(UnixSeconds(9900)).expect("read"), from);
    }
}

#[test]
fn a_store_of_an_earlier_release_gets_what_is_kept_beside_it() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("agent.redb");
    let record = super::super::plan::fixture::record();
    let store = Store::open(&path).expect("made");
    store.put_machine(&record).expect("kept");
    drop(store);
    for file in ["leases.used", "leases.used.copy"] {
        fs::remove_file(folder.path().join(file)).expect("there");
    }
    drop(Store::open(&path).expect("opened"));
    fs::remove_file(&path).expect("lost");
    let serial = Store::open(&path).expect("made anew").serial(record.lease.id);
    assert_eq!(serial.expect("read"), None, "its newest lease, which has serial 1, may come");
    let beside = used::load(&folder.path().join("leases.used")).0.expect("kept");
    assert_eq!(beside.leases.len(), 1);
}

#[test]
fn a_store_on_a_full_disk_opens_whatever_is_to_be_written_beside_it_and_that_follows() {
    let folder = tempfile::tempdir().expect("a directory");
    let Some(mounted) = crate::testing::Mounted::memory(4, &folder.path().join("state")) else {
        println!("skipped: a store without what is beside it on a full disk: needs root");
        return;
    };
    let path = mounted.0.join("agent.redb");
    let mut record = super::super::plan::fixture::record();
    let store = Store::open(&path).expect("made");
    store.put_machine(&record).expect("kept");
    drop(store);
    let beside = mounted.0.join(used::FILE);
    let copy = twice::copy_of(&beside);
    // A cut came before the copy was written; nothing was there yet; both are of an earlier time.
    for (lost, old) in
        [(&[&copy][..], false), (&[&beside, &copy], false), (&[&beside, &copy], true)]
    {
        for file in lost {
            fs::remove_file(file).expect("there");
            if old {
                fs::write(file, Used::default().bytes()).expect("written");
            }
        }
        let filler = mounted.fill();
        let store = Store::open(&path).expect("opened");
        assert_eq!(store.machines().expect("read"), std::slice::from_ref(&record));
        record.lease.serial += 1;
        let refused = store.put_machine(&record).expect_err("no room");
        assert!(matches!(refused, StoreError::Full { .. }), "{refused}");
        record.lease.serial -= 1;
        fs::remove_file(filler).expect("removed");
        // What was not written, and nothing that was refused, comes with whatever is written next.
        store.agree_on(UnixSeconds(9)).expect("kept");
        let (found, whole) = used::load(&beside);
        assert!(whole);
        assert_eq!(found.expect("kept").leases[&record.lease.id].serial, record.lease.serial);
    }
}

#[test]
fn receipts_are_found_by_machine_and_renter_and_outlive_both() {
    use lease::metering::{self, Meter};
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::open(&folder.path().join("agent.redb")).expect("made");
    let key = lease::SigningKey::from_bytes(&[7; 32]);
    let mut record = super::super::plan::fixture::record();
    record.lease.node = types::ids::NodeId::from_bytes(key.verifying_key().to_bytes());
    let mut meter = Meter::new(UnixSeconds(1000));
    let mut make = |to| {
        let receipt = meter.close(UnixSeconds(to), &record.lease).expect("closed");
        metering::sign(receipt, &key).expect("signed")
    };
    let (first, second) = (make(1100), make(1200));
    let (id, renter) = (record.lease.id, record.lease.renter);
    store.put_receipt(&record, &first).expect("kept");
    store.put_receipt(&record, &second).expect("kept");
    store.remove_machine(id).expect("forgotten");
    let found = |renter, after, limit| store.receipts(id, renter, after, limit).expect("read");
    assert_eq!(found(renter, 0, 9), [(1, first.clone()), (2, second.clone())]);
    assert_eq!(found(renter, 0, 1), [(1, first)]);
    assert_eq!(found(renter, 1, 9), [(2, second)]);
    assert!(found(PublicKey::from_bytes([9; 32]), 0, 9).is_empty(), "another's");
}

#[test]
fn a_record_of_a_newer_release_stays_and_hides_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::open(&folder.path().join("agent.redb")).expect("made");
    let record = super::super::plan::fixture::record();
    store.put_machine(&record).expect("kept");
    let newer = |store: &Store, bytes: &[u8]| {
        let put = |tables: &mut Tables<'_>| tables.machines.insert("newer", bytes).map(|_| ());
        store.write("kept a machine", put).expect("kept");
    };
    newer(&store, br#"{"of-a-newer-release":1}"#);
    assert_eq!(store.machines().expect("read"), std::slice::from_ref(&record));
    let read = store.begin("read", Database::begin_read).expect("begun");
    let table = read.open_table(MACHINES).expect("opened");
    assert!(table.get("newer").expect("read").is_some());
}

#[test]
fn outdated_nonces_are_forgotten() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::open(&folder.path().join("agent.redb")).expect("made");
    let key = PublicKey::from_bytes([9; 32]);
    let put = |now, until, nonce| {
        store.put_nonce(UnixSeconds(now), UnixSeconds(until), key, nonce).expect("kept");
    };
    put(1, 10, "a");
    put(2, 20, "b");
    put(10, 30, "c");
    let left = store.nonces().expect("read");
    assert_eq!(
        left,
        [(UnixSeconds(20), key, "b".to_owned()), (UnixSeconds(30), key, "c".to_owned())]
    );
}

#[test]
fn a_store_that_was_closed_in_order_is_known_again_until_something_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent.redb");
    let store = Store::open(&path).expect("made");
    store.raise_floor(UnixSeconds(7)).expect("raised");
    assert!(!closed::is_unchanged(&path), "it was not closed");
    store.close().expect("closed");
    store.close().expect("closed before");
    assert!(closed::is_unchanged(&path));
    // A task that comes late does no harm, and hears why.
    assert!(matches!(store.floor(), Err(StoreError::Closed)));
    assert!(matches!(store.raise_floor(UnixSeconds(8)), Err(StoreError::Closed)));
    assert!(closed::is_unchanged(&path));

    let store = Store::open(&path).expect("opened");
    assert_eq!(store.floor().expect("read"), UnixSeconds(7));
    store.raise_floor(UnixSeconds(9)).expect("raised");
    drop(store);
    assert!(!closed::is_unchanged(&path), "as after a crash");
}
