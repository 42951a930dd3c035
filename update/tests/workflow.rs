//! The client's core against models: which roles a search visits, and what a power cut leaves.

mod fixture;

use std::collections::BTreeSet;

use fixture::{Disk, End, Mirror, client, keys, role, root, run, sign, signed};
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};
use update::{
    client::{Client, Limits, Outcome, Request},
    verify::UpdateError,
};

const NAMES: [&str; 6] = ["targets", "a", "b", "c", "d", "e"];
const PATHS: [&str; 3] = ["x", "y/z", "x.py"];
const PATTERNS: [&str; 5] = ["*", "*/*", "x", "*.py", "y/?"];

/// One delegation: from and to which role, for which pattern, and whether it terminates.
#[derive(Debug, Clone)]
struct Edge {
    from: usize,
    to: usize,
    pattern: usize,
    terminating: bool,
}

fn edges() -> impl Strategy<Value = Vec<Edge>> {
    let edge = (0..6usize, 1..6usize, 0..5usize, any::<bool>());
    let edge = edge.prop_map(|(from, to, pattern, t)| Edge { from, to, pattern, terminating: t });
    prop::collection::vec(edge, 0..14).prop_map(|edges| {
        let mut seen = BTreeSet::new();
        edges.into_iter().filter(|edge| seen.insert((edge.from, edge.to))).collect()
    })
}

fn covers(pattern: &str, path: &str) -> bool {
    matches!((pattern, path), ("*" | "x", "x") | ("*" | "*.py", "x.py") | ("*/*" | "y/?", "y/z"))
}

/// What became of a visit in the model.
enum Visit {
    Found,
    GoOn,
    Stop,
}

/// The specification's words as a recursion.
fn visit(role: usize, path: &str, edges: &[Edge], holder: usize, seen: &mut Vec<usize>) -> Visit {
    if seen.contains(&role) {
        return Visit::GoOn;
    }
    seen.push(role);
    if role == holder {
        return Visit::Found;
    }
    for edge in edges.iter().filter(|edge| edge.from == role) {
        if covers(PATTERNS[edge.pattern], path) {
            match visit(edge.to, path, edges, holder, seen) {
                Visit::GoOn if !edge.terminating => {}
                Visit::GoOn | Visit::Stop => return Visit::Stop,
                Visit::Found => return Visit::Found,
            }
        }
    }
    Visit::GoOn
}

fn document(name: usize, edges: &[Edge], held: &[&str]) -> Value {
    let of = |edge: &&Edge| edge.from == name;
    let roles: Vec<Value> = edges.iter().filter(of).map(delegation).collect();
    let digest = "00".repeat(32);
    let target =
        |path: &&str| ((*path).to_owned(), json!({"length": 1, "hashes": {"sha256": digest}}));
    let targets: serde_json::Map<String, Value> = held.iter().map(target).collect();
    json!({"targets": targets, "delegations": {"keys": keys(&[5]), "roles": roles}})
}

fn delegation(edge: &Edge) -> Value {
    let mut entry = role(5);
    entry["name"] = json!(NAMES[edge.to]);
    entry["paths"] = json!([PATTERNS[edge.pattern]]);
    entry["terminating"] = json!(edge.terminating);
    entry
}

/// Runs a search and returns the outcome and the roles that were fetched, in order.
fn search(client: &mut Client, mirror: &Mirror, path: &str) -> (Outcome, Vec<String>) {
    let mut fetched = Vec::new();
    client.look_up(path).expect("every role is listed");
    while let Some(request) = client.next() {
        match request {
            Request::Load { .. } => client.handle_loaded(None).expect("nothing is stored"),
            Request::Fetch { location, .. } => {
                let name = location.trim_start_matches("1.").trim_end_matches(".json");
                fetched.push(name.to_owned());
                let bytes = mirror.0.get(location).cloned();
                client.handle_fetched(bytes.as_deref()).expect("a good role");
            }
            Request::Store { .. } | Request::Remove { .. } => client.handle_written(),
        }
    }
    (client.outcome(), fetched)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn search_visits_what_the_specification_says(
        edges in edges(), holder in 0..7usize, path in 0..3usize,
    ) {
        let path = PATHS[path];
        let mut mirror = Mirror::default();
        let documents: Vec<(&str, Value, u8)> = NAMES.iter().enumerate().map(|(number, name)| {
            let held: &[&str] = if number == holder { &[path] } else { &[] };
            (*name, document(number, &edges, held), if number == 0 { 4 } else { 5 })
        }).collect();
        mirror.release(1, &documents, 2);
        let mut disk = Disk::default();
        let mut client = client(&disk).expect("a client");
        prop_assert!(matches!(run(&mut client, &mirror, &mut disk, usize::MAX), End::Done));

        let mut seen = Vec::new();
        let found = matches!(visit(0, path, &edges, holder, &mut seen), Visit::Found);
        let (outcome, fetched) = search(&mut client, &mirror, path);
        let expected: Vec<&str> = seen.iter().skip(1).map(|role| NAMES[*role]).collect();
        prop_assert_eq!(fetched, expected);
        let role = if let Outcome::Found(target) = &outcome { Some(target.role.as_str()) } else { None };
        prop_assert_eq!(role, found.then(|| NAMES[holder]));
        prop_assert!(found || outcome == Outcome::NotFound);
    }
}

/// An old repository and the same one later: a new timestamp key, and everything in version 2.
fn two_states() -> (Mirror, Mirror) {
    let empty = json!({"targets": {}});
    let mut old = Mirror::default();
    old.release(1, &[("targets", empty.clone(), 4)], 2);
    let mut new = old.clone();
    new.release(2, &[("targets", empty, 4)], 6);
    new.root(2, 6);
    new.root(3, 6);
    (old, new)
}

#[test]
fn every_power_cut_leaves_a_store_that_goes_on() {
    let (old, new) = two_states();
    let mut before = Disk::default();
    let mut first = client(&before).expect("a client");
    assert!(matches!(run(&mut first, &old, &mut before, usize::MAX), End::Done));

    let mut whole = before.clone();
    let mut second = client(&whole).expect("a client");
    assert!(matches!(run(&mut second, &new, &mut whole, usize::MAX), End::Done));
    let cuts: Vec<usize> = (before.writes..whole.writes).collect();
    assert_eq!(cuts.len(), 7, "two roots, two removals, timestamp, snapshot, targets");

    let recovered: Vec<_> = cuts
        .iter()
        .map(|cut| {
            let mut disk = before.clone();
            let mut cut_off = client(&disk).expect("a client");
            assert!(matches!(run(&mut cut_off, &new, &mut disk, *cut), End::Cut));
            let mut again = client(&disk).expect("a client");
            let end = run(&mut again, &new, &mut disk, usize::MAX);
            assert!(matches!(end, End::Done), "cut at {cut}: {end:?}");
            disk.files
        })
        .collect();
    assert_eq!(recovered, vec![whole.files; cuts.len()]);
}

#[test]
fn no_power_cut_opens_a_way_back() {
    let empty = json!({"targets": {}});
    let mut old = Mirror::default();
    old.release(1, &[("targets", empty.clone(), 4)], 2);
    let mut new = Mirror::default();
    new.release(2, &[("targets", empty, 4)], 2);
    let mut disk = Disk::default();
    let mut first = client(&disk).expect("a client");
    // Root was stored, then the timestamp; then the power went.
    assert!(matches!(run(&mut first, &new, &mut disk, 2), End::Cut));
    let mut again = client(&disk).expect("a client");
    let end = run(&mut again, &old, &mut disk, usize::MAX);
    assert!(matches!(end, End::Refused(UpdateError::Rollback { trusted: 2, found: 1, .. })));
}

#[test]
fn a_shipped_root_that_is_newer_begins_the_chain() {
    let (old, new) = two_states();
    let mut disk = Disk::default();
    let mut first = client(&disk).expect("a client");
    assert!(matches!(run(&mut first, &old, &mut disk, usize::MAX), End::Done));
    let stored = disk.files.get("root.json").cloned();
    let shipped = root(3, 6);
    let now = fixture::now();
    let mut client = Client::new(&shipped, stored.as_deref(), now, Limits::default());
    let client = client.as_mut().expect("a client");
    assert_eq!(client.next(), Some(Request::Remove { file: "timestamp.json" }));
    assert!(matches!(run(client, &new, &mut disk, usize::MAX), End::Done));
    assert_eq!(disk.files.get("root.json"), Some(&shipped));
}

#[test]
fn limits_end_a_refresh_and_a_search() {
    let limits = Limits { roots: 2, roles: 3, ..Limits::default() };
    let mut mirror = Mirror::default();
    (2..=5).for_each(|version| mirror.root(version, 2));
    let chain: Vec<Edge> =
        (0..5).map(|from| Edge { from, to: from + 1, pattern: 0, terminating: false }).collect();
    let documents: Vec<(&str, Value, u8)> = NAMES
        .iter()
        .enumerate()
        .map(|(number, name)| {
            (*name, document(number, &chain, &[]), if number == 0 { 4 } else { 5 })
        })
        .collect();
    mirror.release(1, &documents, 2);
    let mut disk = Disk::default();
    let mut client = Client::new(&root(1, 2), None, fixture::now(), limits).expect("a client");
    assert!(matches!(run(&mut client, &mirror, &mut disk, usize::MAX), End::Done));
    assert_eq!(client.root().header.version, 3);
    client.look_up("x").expect("the first role is listed");
    let end = run(&mut client, &mirror, &mut disk, usize::MAX);
    assert!(matches!(end, End::Refused(UpdateError::TooManyRoles { limit: 3 })), "{end:?}");
    assert_eq!(client.outcome(), Outcome::Refreshed);
}

#[test]
fn metadata_expires_at_its_very_second() {
    let mut mirror = Mirror::default();
    mirror.release(
        1,
        &[("targets", json!({"targets": {}, "expires": "2027-01-15T08:00:00Z"}), 4)],
        2,
    );
    let at = |second: i64| {
        let now = Timestamp::from_second(second).expect("a time");
        let mut client = Client::new(&root(1, 2), None, now, Limits::default()).expect("a client");
        run(&mut client, &mirror, &mut Disk::default(), usize::MAX)
    };
    assert!(matches!(at(fixture::NOW - 1), End::Done));
    assert!(matches!(at(fixture::NOW), End::Refused(UpdateError::Expired { .. })));
}

#[test]
fn a_role_of_two_keys_is_not_signed_by_one_of_them_twice() {
    let document = |keyids: Value| {
        json!({
            "_type": "root", "spec_version": "1.0.0", "version": 1,
            "expires": "2030-01-01T00:00:00Z", "consistent_snapshot": false,
            "keys": keys(&[1, 2]),
            "roles": {"root": {"keyids": keyids, "threshold": 2}, "timestamp": role(1),
                      "snapshot": role(1), "targets": role(1)},
        })
    };
    let open = |bytes: Vec<u8>| Client::new(&bytes, None, fixture::now(), Limits::default());
    let both = document(json!(["key-1", "key-2"]));
    assert!(open(sign(&both, &[1, 2])).is_ok());
    assert!(open(sign(&both, &[1])).is_err());
    assert!(open(sign(&both, &[1, 1])).is_err());
    assert!(open(sign(&document(json!(["key-1", "key-1"])), &[1, 2])).is_err());
}

#[test]
fn documents_of_another_kind_are_refused() {
    let mut mirror = Mirror::default();
    mirror.release(1, &[("targets", json!({"targets": {}}), 4)], 2);
    let meta = json!({"meta": {"snapshot.json": {"version": 1}}});
    let other = signed("snapshot", 1, meta, 2);
    mirror.0.insert("timestamp.json".to_owned(), other);
    let mut disk = Disk::default();
    let mut client = client(&disk).expect("a client");
    let end = run(&mut client, &mirror, &mut disk, usize::MAX);
    assert!(matches!(end, End::Refused(UpdateError::Unreadable { .. })), "{end:?}");
}
