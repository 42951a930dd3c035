//! What the fuzz targets do with their bytes; the tests replay corpora through the same functions.

// Each fuzz target is a program that uses one of these.
#![allow(dead_code, reason = "each fuzz target uses one entry")]

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{self, Read, Seek, SeekFrom, Write},
    sync::LazyLock,
};

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use jiff::Timestamp;
use serde_json::{Value, json};
use update::{
    channel::{Channel, Decision, Manifest, Release, place},
    client::{Client, Limits, Outcome, Request},
    json::Json,
    metadata::{Envelope, Newest, Root, Snapshot, Targets},
    pattern,
    slots::{
        Place, Program,
        fat::{Storage, Volume},
        journal::Journal,
    },
};

/// Requests that one refresh or search may take at most in [`workflow`].
const MAX_REQUESTS: usize = 600;
/// Signed documents that are kept, because signing takes the longest.
const MAX_MADE: usize = 4096;
/// Time of the client, in seconds since 1970.
const NOW: i64 = 1_800_000_000;

/// Metadata of every kind: what is parsed has a canonical form that says the same again, and every
/// delegation can be searched.
pub(crate) fn metadata(bytes: &[u8]) {
    if let Ok(json) = Json::parse(bytes)
        && !bytes.contains(&b'\\')
    {
        let again = Json::parse(&json.canonical()).expect("the canonical form is JSON");
        assert_eq!(again, json);
    }
    let Ok(envelope) = Envelope::parse(bytes) else {
        return;
    };
    let _ = (Root::read(&envelope), Newest::read(&envelope), Snapshot::read(&envelope));
    if let Ok(targets) = Targets::read(&envelope)
        && let Some(delegations) = &targets.delegations
    {
        for path in targets.targets.keys().map(String::as_str).take(16).chain(["a/b.c"]) {
            let (visits, _) = delegations.covering(path);
            assert!(visits.iter().all(|visit| pattern::encode(&visit.role).len() <= 250));
        }
        assert!(delegations.all(64).len() <= 64);
    }
}

/// Manifests and channels: what is parsed is written and parsed to the same, and a decision never
/// leads to a release that may not run.
pub(crate) fn channel(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::parse(bytes) {
        let text = serde_json::to_vec(&manifest).expect("a manifest is JSON");
        assert_eq!(Manifest::parse(&text).ok(), Some(manifest));
    }
    let Ok(channel) = Channel::parse(bytes) else {
        return;
    };
    let text = serde_json::to_vec(&channel).expect("a channel is JSON");
    assert_eq!(Channel::parse(&text).ok().as_ref(), Some(&channel));
    for running in ["0.0.0", "1.0.0", "4294967295.0.0"] {
        let running: Release = running.parse().expect("a release");
        assert!(place(bytes, running) < 1000);
        match channel.decide(bytes, running, now()) {
            Decision::Update(release) | Decision::Wait(release, _) => {
                assert!(channel.permits(release) && channel.permits(running) && release > running);
            }
            Decision::Replace(release) => {
                assert!(channel.permits(release) && !channel.permits(running));
            }
            Decision::Stay => assert!(channel.permits(running)),
            Decision::Stranded => assert!(!channel.permits(running)),
        }
    }
}

/// A mirror that owns all keys and answers each request as the bytes say, to a client with a store.
/// The client ends, within bounds, and no trusted version of the timestamp ever goes back.
pub(crate) fn workflow(bytes: &[u8]) {
    let mut choices = bytes.iter().copied();
    let mut store: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for _ in 0..2 {
        let stored = store.get("root.json").cloned();
        let shipped = signed("root", 1, root());
        let limits = Limits { roots: 4, roles: 8, ..Limits::default() };
        let Ok(mut client) = Client::new(&shipped, stored.as_deref(), now(), limits) else {
            return;
        };
        answer(&mut client, &mut store, &mut choices);
        if client.outcome() == Outcome::Refreshed && client.look_up("a/b").is_ok() {
            answer(&mut client, &mut store, &mut choices);
            assert_ne!(client.outcome(), Outcome::Working);
        }
        if client.outcome() != Outcome::Failed && client.walk().is_ok() {
            answer(&mut client, &mut store, &mut choices);
        }
    }
}

fn answer(
    client: &mut Client,
    store: &mut BTreeMap<String, Vec<u8>>,
    choices: &mut impl Iterator<Item = u8>,
) {
    let mut requests = 0;
    while let Some(request) = client.next() {
        requests += 1;
        assert!(requests < MAX_REQUESTS, "the client does not end");
        match request {
            Request::Load { file } => {
                let _ = client.handle_loaded(store.get(file).cloned().as_deref());
            }
            Request::Fetch { location, limit } => {
                let made = make(location, choices);
                let made = made.filter(|bytes| bytes.len() as u64 <= limit);
                let _ = client.handle_fetched(made.as_deref());
            }
            Request::Store { file, bytes } => {
                assert!(!file.contains('/') && file.ends_with(".json"));
                if file == "timestamp.json" {
                    let before = store.get(file).map_or(0, |old| version(old));
                    assert!(version(bytes) >= before, "the timestamp goes back");
                }
                store.insert(file.to_owned(), bytes.to_vec());
                client.handle_written();
            }
            Request::Remove { file } => {
                // The only key never changes, so nothing is ever forgotten.
                panic!("{file} is removed");
            }
        }
    }
}

fn version(bytes: &[u8]) -> u64 {
    let document: Value = serde_json::from_slice(bytes).expect("only good files are stored");
    document["signed"]["version"].as_u64().expect("a version")
}

/// Makes the file at `location`: none, broken, or signed, with versions that the choices say.
fn make(location: &str, choices: &mut impl Iterator<Item = u8>) -> Option<Vec<u8>> {
    let mut next = || choices.next().unwrap_or(0);
    let name = location.trim_end_matches(".json");
    let (number, role) = name.split_once('.').unwrap_or(("1", name));
    let number: u64 = number.parse().unwrap_or(1);
    let choice = next();
    let version = match choice % 16 {
        0 => return None,
        1 => return Some(vec![choice; usize::from(next())]),
        2 => number + 1,
        3 => u64::from(next()),
        _ if role == "timestamp" => u64::from(next() % 4) + 1,
        _ => number,
    };
    let listed = |n: u8| json!({"version": u64::from(n % 4) + 1});
    Some(match role {
        // Long chains end by themselves.
        "root" if number > 3 => return None,
        "root" => signed("root", version, root()),
        "timestamp" => {
            signed("timestamp", version, json!({"meta": {"snapshot.json": listed(next())}}))
        }
        "snapshot" => {
            let names = ["targets", "a", "b", "c", "../d"];
            let meta: serde_json::Map<String, Value> =
                names.iter().map(|name| (format!("{name}.json"), listed(next()))).collect();
            signed("snapshot", version, json!({"meta": meta}))
        }
        _ => signed("targets", version, targets(next(), next())),
    })
}

fn targets(edges: u8, more: u8) -> Value {
    let names = ["a", "b", "c", "../d"];
    let chosen = names.iter().enumerate().filter(|(at, _)| edges >> at & 1 == 1);
    let role = |(at, name): (usize, &&str)| {
        let pattern = ["*", "*/*", "a/?", "[a-c]/b"][usize::from(more >> 6)];
        json!({"name": name, "keyids": ["key"], "threshold": 1, "paths": [pattern],
               "terminating": edges >> (4 + at) & 1 == 1})
    };
    let roles: Vec<Value> = chosen.map(role).collect();
    let held = if more & 7 == 7 {
        json!({"a/b": {"length": 1, "hashes": {"sha256": "00".repeat(32)}}})
    } else {
        json!({})
    };
    json!({"targets": held, "delegations": {"keys": keys(), "roles": roles}})
}

fn root() -> Value {
    let role = json!({"keyids": ["key"], "threshold": 1});
    json!({"consistent_snapshot": true, "keys": keys(),
           "roles": {"root": role, "timestamp": role, "snapshot": role, "targets": role}})
}

fn keys() -> Value {
    let public = types::hex::encode(key().public_key().as_ref());
    json!({"key": {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": public}}})
}

fn signed(kind: &str, version: u64, mut document: Value) -> Vec<u8> {
    document["_type"] = json!(kind);
    document["spec_version"] = json!("1.0.34");
    document["version"] = json!(version);
    document["expires"] = json!("2030-01-01T00:00:00Z");
    let text = document.to_string();
    thread_local! {
        static MADE: RefCell<BTreeMap<String, Vec<u8>>> = const { RefCell::new(BTreeMap::new()) };
    }
    if let Some(made) = MADE.with_borrow(|made| made.get(&text).cloned()) {
        return made;
    }
    let message = Json::parse(text.as_bytes()).expect("JSON").canonical();
    let sig = types::hex::encode(key().sign(&message).as_ref());
    let file = json!({"signed": document, "signatures": [{"keyid": "key", "sig": sig}]});
    let file: Vec<u8> = file.to_string().into();
    MADE.with_borrow_mut(|made| {
        if made.len() >= MAX_MADE {
            made.clear();
        }
        made.insert(text, file.clone());
    });
    file
}

fn key() -> &'static Ed25519KeyPair {
    static KEY: LazyLock<Ed25519KeyPair> =
        LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[1; 32]).expect("a key"));
    &KEY
}

fn now() -> Timestamp {
    Timestamp::from_second(NOW).expect("a time")
}

/// Sectors of an EFI system partition, the first of which are given; the others hold zeros.
struct Sectors {
    given: BTreeMap<u64, [u8; 512]>,
    at: u64,
}

impl Sectors {
    fn new(bytes: &[u8]) -> Self {
        let sectors = bytes.chunks(512).map(|piece| {
            let mut sector = [0; 512];
            sector[..piece.len()].copy_from_slice(piece);
            sector
        });
        Self { given: (0..).zip(sectors).collect(), at: 0 }
    }
}

impl Read for Sectors {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let within = usize::try_from(self.at % 512).unwrap_or(0);
        let length = buffer.len().min(512 - within);
        match self.given.get(&(self.at / 512)) {
            Some(sector) => buffer[..length].copy_from_slice(&sector[within..within + length]),
            None => buffer[..length].fill(0),
        }
        self.at += length as u64;
        Ok(length)
    }
}

impl Write for Sectors {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let within = usize::try_from(self.at % 512).unwrap_or(0);
        let length = buffer.len().min(512 - within);
        let sector = self.given.entry(self.at / 512).or_insert([0; 512]);
        sector[within..within + length].copy_from_slice(&buffer[..length]);
        self.at += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Sectors {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        if let SeekFrom::Start(at) = to {
            self.at = at;
        }
        Ok(self.at)
    }
}

impl Storage for Sectors {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn forget(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An EFI system partition: a replacement that worked is read back, and it leaves alone what the
/// other places hold.
pub(crate) fn volume(bytes: &[u8]) {
    let Ok(mut volume) = Volume::open(Sectors::new(bytes)) else {
        return;
    };
    let read = |volume: &mut Volume<Sectors>, place: Place| volume.read(place.path(), 1 << 20);
    let before = Place::ALL.map(|place| read(&mut volume, place).ok());
    let program = vec![0x5a; 1500];
    let sha256 = Program::of(&program).sha256;
    let Ok(mut writing) = volume.begin(Place::ALL[1].path(), program.len() as u64) else {
        return;
    };
    if volume.append(&mut writing, &program).is_err() || volume.finish(writing, sha256).is_err() {
        return;
    }
    let after = Place::ALL.map(|place| read(&mut volume, place).ok());
    assert_eq!(after[1], Some(Some(program)));
    assert_eq!((&after[0], &after[2]), (&before[0], &before[2]));
}

/// A node's journal: what is parsed is written and parsed to the same.
pub(crate) fn journal(bytes: &[u8]) {
    if let Ok(journal) = Journal::parse(bytes) {
        assert_eq!(Journal::parse(&journal.bytes()).ok(), Some(journal));
    }
}

/// The list of a program's chunks, which mirrors deliver; with a program that is there.
pub(crate) fn chunks(bytes: &[u8]) {
    use update::delta::{Chunks, Piece, fetched};
    let Ok(chunks) = Chunks::parse(bytes) else { return };
    assert_eq!(chunks.bytes(), bytes);
    let Some(pieces) = chunks.plan(bytes) else { return };
    let copied: u64 = pieces
        .iter()
        .map(|piece| match piece {
            Piece::Copy(range) => bytes[range.clone()].len() as u64,
            Piece::Fetch(_) => 0,
        })
        .sum();
    assert_eq!(copied + fetched(&pieces), chunks.length());
}
