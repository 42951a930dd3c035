//! What one altered byte of a signed document does: it is refused by name, wherever it is.
//!
//! Documents are altered as they travel, so what is swept is their JSON: each bit of each byte, bytes
//! that are gone, doubled or replaced, texts that end early or go on.

#![allow(clippy::unwrap_used, reason = "fixtures that cannot fail")]

use std::{error::Error, ops::Range};

#[path = "common/fixtures.rs"]
mod fixtures;

use fixtures::{authorities, key, lease, signed_by};
use lease::{
    attestation::{self, Asked, Attested, Evidence, Known, Measurements},
    document::{Envelope, Lease},
    lifecycle,
    metering::{self, Meter, SignedReceipt},
    problem::chain,
    request::{self, MAX_AGE_S},
};
use types::{forward::ForwardedRequest, ids::NodeId, units::UnixSeconds};

/// The JSON of a lease as `seeds` signed it.
fn signed(lease: &Lease, seeds: &[u8]) -> Vec<u8> {
    serde_json::to_vec(&signed_by(lease, seeds)).unwrap()
}

/// Everything that happens to one byte, or because of it, at each place of `places`.
fn altered(whole: &[u8], places: Range<usize>) -> impl Iterator<Item = Vec<u8>> {
    places.flat_map(move |at| {
        let replaced = |byte: u8| [&whole[..at], &[byte][..], &whole[at + 1..]].concat();
        let bits = (0..8).map(|bit| replaced(whole[at] ^ (1 << bit)));
        let others = [0, 0xff, b'0', b'"', b'}'].into_iter().filter(|byte| *byte != whole[at]);
        let others: Vec<_> = others.map(replaced).collect();
        let gone = [&whole[..at], &whole[at + 1..]].concat();
        let doubled = [&whole[..=at], &whole[at..]].concat();
        let ends = whole[..at].to_vec();
        bits.chain(others).chain([gone, doubled, ends]).collect::<Vec<_>>()
    })
}

/// Checks that no alteration of `whole` passes `judge`, and that each refusal speaks of `names`.
fn all_refused(whole: &[u8], names: &[&str], judge: impl Fn(&[u8]) -> Result<(), String>) {
    judge(whole).expect("what was not altered counts");
    let longer = [whole, b"{}"].concat();
    for bytes in altered(whole, 0..whole.len()).chain([longer]).filter(|bytes| bytes != whole) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let refusal = judge(&bytes).expect_err(&text);
        assert!(names.iter().any(|name| refusal.contains(name)), "{refusal}\n{text}");
    }
}

fn said(error: impl Error) -> String {
    chain(&error)
}

fn judge_lease(bytes: &[u8]) -> Result<Lease, String> {
    let envelope = Envelope::from_json(bytes).map_err(said)?;
    Ok(authorities(2).verify(&envelope).map_err(said)?.into_lease())
}

#[test]
fn no_byte_of_a_lease_can_be_altered() {
    let names = ["the lease", "the envelope", "the payload type", "this is no lease"];
    all_refused(&signed(&lease(), &[1, 2]), &names, |bytes| judge_lease(bytes).map(drop));
}

#[test]
fn a_spare_signature_makes_up_for_a_damaged_one_and_for_nothing_else() {
    let whole = signed(&lease(), &[1, 2, 3]);
    for bytes in altered(&whole, 0..whole.len()) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(judge_lease(&bytes).map_or(true, |read| read == lease()), "{text}");
    }
}

#[test]
fn no_byte_of_a_renewal_can_be_altered() {
    let next = Lease { serial: 2, end: UnixSeconds(3000), ..lease() };
    let names = ["the lease", "the envelope", "the payload type", "this is no lease"];
    all_refused(&signed(&next, &[2, 3]), &names, |bytes| {
        let envelope = Envelope::from_json(bytes).map_err(said)?;
        let verified = authorities(2).verify(&envelope).map_err(said)?;
        lifecycle::renew(&lease(), verified).map(drop).map_err(said)
    });
}

#[test]
fn no_byte_of_a_receipt_can_be_altered() {
    let mut meter = Meter::new(UnixSeconds(1000));
    meter.handle_started(UnixSeconds(1100));
    let receipt = meter.close(UnixSeconds(1200), &lease()).unwrap();
    let whole = serde_json::to_vec(&metering::sign(receipt, &key(7)).unwrap()).unwrap();
    // What is no JSON of a receipt is told by whoever reads the file, with its name.
    all_refused(&whole, &["the receipt", "the file"], |bytes| {
        let read = serde_json::from_slice::<SignedReceipt>(bytes);
        let read = read.map_err(|error| format!("the file is no receipt: {error}"))?;
        metering::verify(&read).map(drop).map_err(said)
    });
}

/// A request of a renter, with each part that is signed.
fn request() -> ForwardedRequest {
    let mut request = ForwardedRequest {
        method: "POST".into(),
        target: "/v1/machines?dry=1".into(),
        headers: vec![("idempotency-key".into(), "k1".into())],
        body: b"{\"lease\":{}}".to_vec(),
    };
    request::sign(&key(8), &mut request, UnixSeconds(5000), "0123456789abcdef").unwrap();
    request
}

/// Checks every alteration of one part of a request, which `put` puts into it.
fn part_refused(whole: &[u8], put: impl Fn(&mut ForwardedRequest, Vec<u8>)) {
    for bytes in altered(whole, 0..whole.len()).filter(|bytes| bytes != whole) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let mut altered = request();
        put(&mut altered, bytes);
        if altered == request() {
            continue;
        }
        let verified = request::verify(&altered, UnixSeconds(5000), MAX_AGE_S);
        assert!(verified.is_err(), "{text}");
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn no_byte_of_a_signed_request_can_be_altered() {
    let whole = request();
    part_refused(whole.method.as_bytes(), |request, bytes| request.method = text(bytes));
    part_refused(whole.target.as_bytes(), |request, bytes| request.target = text(bytes));
    part_refused(&whole.body, |request, bytes| request.body = bytes);
    for at in 0..whole.headers.len() {
        let (name, value) = whole.headers[at].clone();
        part_refused(value.as_bytes(), |request, bytes| request.headers[at].1 = text(bytes));
        part_refused(name.as_bytes(), |request, bytes| request.headers[at].0 = text(bytes));
    }
}

/// Evidence of a TPM (swtpm) for the nonce of thirty-two fives, and its release's measurements.
const EVIDENCE: &[u8] = include_bytes!("../fuzz/corpus/attestation/evidence");
const RELEASE: &[u8] = include_bytes!("../fuzz/corpus/attestation/measurements");

/// Returns what the evidence proves. Without a credential nothing proves the endorsement key, by which the
/// TPM is named: it is told so.
fn proved(node: NodeId, bytes: &[u8]) -> Result<Attested, String> {
    let evidence: Evidence =
        serde_json::from_slice(bytes).map_err(|error| format!("no evidence: {error}"))?;
    let releases = vec![Measurements::from_json(RELEASE).unwrap()];
    let known = Known { releases, ..Known::default() };
    let nonce = types::hex::encode(&[5; 32]);
    let asked = Asked { node, nonce: &nonce, at: UnixSeconds(0), secret: None };
    let attested = attestation::verify(&evidence, asked, &known).map_err(said)?;
    assert!(!attested.endorsed);
    Ok(Attested { tpm: String::new(), ..attested })
}

#[test]
fn no_altered_byte_of_evidence_proves_anything_else() {
    let evidence: Evidence = serde_json::from_slice(EVIDENCE).unwrap();
    let whole = serde_json::to_vec(&evidence).unwrap();
    let original = proved(evidence.node, &whole).unwrap();
    let other = |bytes: &Vec<u8>| proved(evidence.node, bytes).is_ok_and(|all| all != original);
    let passed: Vec<_> = altered(&whole, 0..whole.len()).filter(other).map(text).collect();
    assert_eq!(passed, Vec::<String>::new());
}
