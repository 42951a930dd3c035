//! What one altered byte of a repository's metadata does: on a mirror it is refused by the file's name and kept
//! nowhere, and in a node's own store it costs nothing but fetching again.

mod fixture;

use std::collections::BTreeMap;

use fixture::{Disk, End, Mirror, client, keys, role, run};
use serde_json::json;
use update::client::{Client, Outcome, Request};

/// A path that a delegated role describes.
const PATH: &str = "releases/7.efi";

/// A repository with every kind of file: two roots, and a role that `targets` delegates to.
fn repository() -> Mirror {
    repository_of(&"ab".repeat(32))
}

/// The same, whose target of seven bytes has this SHA-256.
fn repository_of(sha256: &str) -> Mirror {
    let mut entry = role(5);
    entry["name"] = json!("stable");
    entry["paths"] = json!(["releases/*"]);
    entry["terminating"] = json!(true);
    let target = json!({"length": 7, "hashes": {"sha256": sha256}});
    let top = json!({"targets": {}, "delegations": {"keys": keys(&[5]), "roles": [entry]}});
    let stable = json!({"targets": {PATH: target}});
    let mut mirror = Mirror::default();
    mirror.release(1, &[("targets", top, 4), ("stable", stable, 5)], 2);
    mirror.root(2, 2);
    mirror
}

/// What a node has and says after it looked for [`PATH`].
#[derive(Clone, PartialEq)]
struct Ran {
    end: Result<Outcome, String>,
    files: BTreeMap<String, Vec<u8>>,
}

fn look(mirror: &Mirror, mut disk: Disk) -> Ran {
    let end = search(mirror, &mut disk);
    Ran { end, files: disk.files }
}

fn search(mirror: &Mirror, disk: &mut Disk) -> Result<Outcome, String> {
    let said = |error: &dyn std::error::Error| {
        let causes = std::iter::successors(Some(error), |error| error.source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    };
    let mut client: Client = client(disk).map_err(|error| said(&error))?;
    for step in 0..2 {
        if step == 1 {
            client.look_up(PATH).map_err(|error| said(&error))?;
        }
        match run(&mut client, mirror, disk, usize::MAX) {
            End::Done => {}
            End::Refused(error) => return Err(said(&error)),
            End::Cut => unreachable!("the power stays on"),
        }
    }
    assert!(client.next().is_none_or(|request| matches!(request, Request::Store { .. })));
    Ok(client.outcome())
}

/// Two bits of each byte, of which one is a letter's case; bytes that are gone or doubled, ends, and what is
/// appended.
fn altered(whole: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let bits = (0..whole.len()).flat_map(move |at| {
        let flipped = |mask: u8| [&whole[..at], &[whole[at] ^ mask], &whole[at + 1..]].concat();
        [flipped(1 << (at % 8)), flipped(0x20)]
    });
    let lengths = (0..whole.len()).step_by(11).flat_map(move |at| {
        let (gone, doubled) = ([&whole[..at], &whole[at + 1..]], [&whole[..=at], &whole[at..]]);
        [gone.concat(), doubled.concat(), whole[..at].to_vec()]
    });
    let all = bits.chain(lengths).chain([[whole, b"{}"].concat()]);
    all.filter(move |bytes| bytes != whole)
}

#[test]
fn no_byte_of_a_file_on_a_mirror_can_be_altered() {
    let mirror = repository();
    let good = look(&mirror, Disk::default());
    assert!(matches!(good.end, Ok(Outcome::Found(_))), "{:?}", good.end);
    for (location, whole) in &mirror.0 {
        let name = location.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        for (number, bytes) in altered(whole).enumerate() {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let mut other = mirror.clone();
            other.0.insert(location.clone(), bytes.clone());
            let ran = look(&other, Disk::default());
            let refusal = ran.end.clone().expect_err(&text);
            assert!(refusal.contains(name), "{location}: {refusal}");
            assert!(!ran.files.values().any(|kept| *kept == bytes), "{location}: kept");
            // A good mirror is enough to go on.
            let again = number
                .is_multiple_of(31)
                .then(|| look(&mirror, Disk { files: ran.files.clone(), writes: 0 }));
            assert!(again.is_none_or(|again| again == good), "{location}: {text}");
        }
    }
}

#[test]
fn an_altered_byte_of_the_store_costs_another_fetch_only() {
    let mirror = repository();
    let good = look(&mirror, Disk::default());
    for (name, whole) in &good.files {
        for bytes in altered(whole).step_by(19) {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let mut disk = Disk { files: good.files.clone(), writes: 0 };
            disk.files.insert(name.clone(), bytes);
            assert!(look(&mirror, disk) == good, "{name}: {text}");
        }
    }
}

#[test]
fn a_file_in_the_place_of_another_is_refused_by_name() {
    let mirror = repository();
    for location in mirror.0.keys() {
        let name = location.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        for (from, bytes) in mirror.0.iter().filter(|(from, _)| *from != location) {
            let mut other = mirror.clone();
            other.0.insert(location.clone(), bytes.clone());
            let refusal = look(&other, Disk::default()).end.expect_err(from);
            assert!(refusal.contains(name), "{from} as {location}: {refusal}");
        }
    }
}

/// What somebody may write in the place of a number, or of a whole document.
const STRANGE: [&str; 12] = [
    "1,\"version\":1",
    "01",
    "1.0",
    "1e0",
    "-1",
    "0",
    "18446744073709551615",
    "18446744073709551616",
    "1e999999999",
    "\"1\"",
    "null",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
];

#[test]
fn numbers_that_no_version_is_are_refused_by_name() {
    let mirror = repository();
    for (location, whole) in &mirror.0 {
        let name = location.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let text = String::from_utf8(whole.clone()).expect("JSON");
        let at = text.rfind("\"version\":").expect("a version") + "\"version\":".len();
        for strange in STRANGE {
            let altered = format!("{}{strange}{}", &text[..at], &text[at + 1..]);
            let mut other = mirror.clone();
            other.0.insert(location.clone(), altered.into_bytes());
            let refusal = look(&other, Disk::default()).end.expect_err(strange);
            assert!(refusal.contains(name), "{location}, {strange}: {refusal}");
        }
    }
}

#[test]
fn no_byte_of_a_target_can_be_altered() {
    let whole = b"release";
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, whole);
    let mirror = repository_of(&types::hex::encode(digest.as_ref()));
    let Ok(Outcome::Found(target)) = look(&mirror, Disk::default()).end else {
        panic!("the target is there")
    };
    let judged = |bytes: &[u8]| {
        let mut check = target.check();
        // In two pieces, as they arrive.
        let (first, second) = bytes.split_at(bytes.len() / 2);
        check.update(first).and_then(|()| check.update(second)).and_then(|()| check.finish())
    };
    assert_eq!(judged(whole), Ok(()));
    assert!(altered(whole).all(|bytes| judged(&bytes).is_err()));
}
