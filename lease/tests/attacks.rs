//! One fixture for each attack on a lease or a signed request, and the properties that must hold
//! of all of them.

#![allow(clippy::unwrap_used, reason = "fixtures that cannot fail")]

#[path = "common/fixtures.rs"]
mod fixtures;

use fixtures::{authorities, key, lease, signed_by};
use lease::{
    authority,
    document::{DocumentError, Envelope, Lease, Price},
    lifecycle::{self, RenewalError},
    metering::{self, Meter, MeterError, Receipt},
    request::{self, MAX_AGE_S, ReplayError, ReplayGuard, RequestError},
    threshold::{Fault, ThresholdError},
};
use proptest::prelude::*;
use types::{
    forward::ForwardedRequest,
    ids::{MachineId, NodeId},
    node::{Bdf, MachineShape},
    units::UnixSeconds,
};

#[test]
fn two_of_three_count_in_any_order_and_combined() {
    let set = authorities(2);
    assert_eq!(set.verify(&signed_by(&lease(), &[3, 1])).unwrap().lease(), &lease());
    let combined =
        authority::combine(&[signed_by(&lease(), &[1]), signed_by(&lease(), &[2])]).unwrap();
    assert_eq!(set.verify(&combined).unwrap().signers().len(), 2);
}

#[test]
fn one_signature_too_few_says_how_many() {
    let refusal = authorities(2).verify(&signed_by(&lease(), &[1, 5])).unwrap_err();
    let ThresholdError::TooFew { valid, needed, faults } = refusal else { panic!("{refusal}") };
    assert_eq!((valid, needed), (1, 2));
    assert_eq!(faults.0, vec![(authority::public_key(&key(5)), Fault::Stranger)]);
}

#[test]
fn the_same_signer_twice_counts_once() {
    let mut envelope = signed_by(&lease(), &[1]);
    envelope.signatures.push(envelope.signatures[0].clone());
    let refusal = authorities(2).verify(&envelope).unwrap_err();
    assert!(matches!(refusal, ThresholdError::TooFew { valid: 1, .. }), "{refusal}");
}

#[test]
fn a_higher_threshold_is_not_met_by_fewer() {
    let refusal = authorities(3).verify(&signed_by(&lease(), &[1, 2])).unwrap_err();
    assert!(matches!(refusal, ThresholdError::TooFew { valid: 2, needed: 3, .. }), "{refusal}");
}

#[test]
fn an_altered_field_voids_every_signature() {
    let mut envelope = signed_by(&lease(), &[1, 2]);
    let longer = Lease { end: UnixSeconds(9000), ..lease() };
    envelope.payload = longer.to_bytes().unwrap();
    let refusal = authorities(2).verify(&envelope).unwrap_err();
    assert!(matches!(refusal, ThresholdError::TooFew { valid: 0, .. }), "{refusal}");
}

#[test]
fn another_payload_type_is_refused() {
    let mut envelope = signed_by(&lease(), &[1, 2]);
    envelope.payload_type = metering::PAYLOAD_TYPE.into();
    let refusal = authorities(2).verify(&envelope).unwrap_err();
    let expected =
        matches!(refusal, ThresholdError::Document { source: DocumentError::PayloadType { .. } });
    assert!(expected, "{refusal}");
}

#[test]
fn a_text_that_is_not_canonical_is_refused_although_signed() {
    let canonical = String::from_utf8(lease().to_bytes().unwrap()).unwrap();
    for text in [
        canonical.replace("\"serial\":1", "\"serial\": 1"),
        canonical.replace("\"serial\":1", "\"serial\":1,\"serial\":1"),
        canonical.replace("\"serial\":1", "\"serial\":1,\"sneaky\":1"),
        canonical.replace("\"serial\":1", "\"serial\":1.0"),
    ] {
        assert!(
            matches!(Lease::from_bytes(text.as_bytes()), Err(DocumentError::Payload { .. })),
            "{text}"
        );
    }
}

#[test]
fn impossible_leases_are_refused() {
    let refused = |lease: Lease| lease.to_bytes().is_err();
    let shape = lease().shape;
    assert!(refused(Lease { version: 2, ..lease() }));
    assert!(refused(Lease { serial: 0, ..lease() }));
    assert!(refused(Lease { end: UnixSeconds(1000), ..lease() }));
    assert!(refused(Lease { shape: MachineShape { vcpus: 0, ..shape.clone() }, ..lease() }));
    let twice = vec![shape.devices[0], shape.devices[0]];
    let with = |devices| Lease { shape: MachineShape { devices, ..shape.clone() }, ..lease() };
    assert!(refused(with(twice)));
    let first = shape.devices[0];
    let many = |count: u8| (0..count).map(|bus| Bdf { bus, ..first }).collect::<Vec<_>>();
    assert!(with(many(32)).to_bytes().is_ok());
    assert!(refused(with(many(33))));
}

#[test]
fn endless_envelopes_are_refused() {
    let large = vec![b' '; lease::document::MAX_ENVELOPE + 1];
    assert!(matches!(Envelope::from_json(&large), Err(DocumentError::TooLarge { .. })));
}

#[test]
fn signatures_of_different_leases_do_not_combine() {
    let other = Lease { serial: 2, ..lease() };
    let combined = authority::combine(&[signed_by(&lease(), &[1]), signed_by(&other, &[2])]);
    assert!(combined.is_err());
}

#[test]
fn renewals_go_forward_only() {
    let renew = |next: Lease| {
        let verified = authorities(2).verify(&signed_by(&next, &[1, 2])).unwrap();
        lifecycle::renew(&lease(), verified)
    };
    assert!(renew(Lease { serial: 2, end: UnixSeconds(3000), ..lease() }).is_ok());
    assert!(matches!(renew(lease()), Err(RenewalError::Serial { .. })));
    let shorter = Lease { serial: 2, end: UnixSeconds(1500), ..lease() };
    assert!(matches!(renew(shorter), Err(RenewalError::Shorter { .. })));
    let moved = Lease { serial: 2, node: NodeId::from_bytes([1; 32]), ..lease() };
    assert!(matches!(renew(moved), Err(RenewalError::Changed { field: "node" })));
    let other = Lease { serial: 2, id: MachineId::from_bytes([1; 16]), ..lease() };
    assert!(matches!(renew(other), Err(RenewalError::Id { .. })));
}

const NONCE: &str = "0123456789abcdef";

fn request() -> ForwardedRequest {
    let mut request = ForwardedRequest {
        method: "POST".into(),
        target: "/v1/machines?dry=1".into(),
        headers: vec![("idempotency-key".into(), "k1".into())],
        body: b"{}".to_vec(),
    };
    request::sign(&key(8), &mut request, UnixSeconds(5000), NONCE).unwrap();
    request
}

fn verify(request: &ForwardedRequest, now: u64) -> Result<request::VerifiedRequest, RequestError> {
    request::verify(request, UnixSeconds(now), MAX_AGE_S)
}

#[test]
fn signed_requests_verify_while_fresh() {
    let verified = verify(&request(), 5100).unwrap();
    assert_eq!(verified.key, authority::public_key(&key(8)));
    assert_eq!(verified.idempotency_key.as_deref(), Some("k1"));
    assert!(matches!(verify(&request(), 5301), Err(RequestError::Old { .. })));
    assert!(matches!(verify(&request(), 4900), Err(RequestError::Future { .. })));
}

/// What another signer makes of key 8 at 5000: http-message-signatures 3.0.0 of PyPI, with a label, a nonce in
/// base64 and an end of its own.
fn foreign() -> ForwardedRequest {
    let input = "my-label_1=(\"@method\" \"@path\" \"@query\");created=5000;\
        keyid=\"1398f62c6d1a457c51ba6a4b5f3dbd2f69fca93216218dc8997e416bd17d93ca\";alg=\"ed25519\";\
        expires=5200;nonce=\"AbC+/0123456789xyz==\"";
    let signature = "my-label_1=:N19rfUtPskm/lOS9hAIyP7b22fX8qMhpO2vSp6Zp6UONgsJ5HYCPYFfhLUmiVMnr/oMX\
        noKkDgyoZlcE8lsqDw==:";
    ForwardedRequest {
        method: "GET".into(),
        target: "/v1/machines?from=3".into(),
        headers: vec![
            ("signature-input".into(), input.into()),
            ("signature".into(), signature.into()),
        ],
        body: Vec::new(),
    }
}

#[test]
fn what_another_signer_signed_verifies_until_it_expires() {
    let verified = verify(&foreign(), 5200).unwrap();
    assert_eq!(verified.key, authority::public_key(&key(8)));
    assert_eq!(verified.nonce, "AbC+/0123456789xyz==");
    assert!(matches!(verify(&foreign(), 5201), Err(RequestError::Expired { .. })));
    let mut longer = foreign();
    longer.headers[0].1 = longer.headers[0].1.replace("expires=5200", "expires=5300");
    assert!(matches!(verify(&longer, 5201), Err(RequestError::Signature { .. })));
    let mut twice = foreign();
    twice.headers[0].1.push_str(";expires=5200");
    assert!(matches!(verify(&twice, 5000), Err(RequestError::Syntax { .. })));
}

#[test]
fn no_signed_part_can_be_altered() {
    let altered = |alter: fn(&mut ForwardedRequest)| {
        let mut request = request();
        alter(&mut request);
        verify(&request, 5000).unwrap_err()
    };
    let signature = |error| matches!(error, RequestError::Signature { .. });
    assert!(signature(altered(|r| r.method = "PUT".into())));
    assert!(signature(altered(|r| r.target = "/v1/machines?dry=0".into())));
    assert!(signature(altered(|r| r.target = "/v1/machines".into())));
    assert!(signature(altered(|r| r.headers[0].1 = "k2".into())));
    assert!(matches!(altered(|r| r.body = b"{ }".to_vec()), RequestError::Digest));
    assert!(matches!(altered(|r| drop(r.headers.remove(0))), RequestError::Components { .. }));
    assert!(matches!(
        altered(|r| r.headers.push(r.headers[0].clone())),
        RequestError::Field { .. }
    ));
    assert!(matches!(altered(|r| r.headers.clear()), RequestError::Field { .. }));
    assert!(matches!(
        altered(|r| r.target = "/a\n\"@query\": ?".into()),
        RequestError::Field { .. }
    ));
}

#[test]
fn replays_are_refused_and_memory_is_bounded() {
    let mut guard = ReplayGuard::new(2, MAX_AGE_S);
    let mut verified = verify(&request(), 5000).unwrap();
    let mut admit = |now, nonce: &str| {
        verified.nonce = nonce.into();
        guard.admit(UnixSeconds(now), &verified)
    };
    assert_eq!(admit(5000, "a"), Ok(UnixSeconds(5301)));
    assert!(matches!(admit(5300, "a"), Err(ReplayError::Replayed { .. })));
    assert_eq!(admit(5000, "b"), Ok(UnixSeconds(5301)));
    assert_eq!(admit(5000, "c"), Err(ReplayError::Full));
    assert_eq!(admit(5301, "c"), Ok(UnixSeconds(5361)));
}

#[test]
fn a_restored_guard_refuses_what_came_before() {
    let verified = verify(&request(), 5000).unwrap();
    let until = ReplayGuard::new(9, MAX_AGE_S).admit(UnixSeconds(5000), &verified).unwrap();
    let mut again = ReplayGuard::new(9, MAX_AGE_S);
    again.restore(until, verified.key, verified.nonce.clone());
    let replayed = again.admit(UnixSeconds(5300), &verified);
    assert!(matches!(replayed, Err(ReplayError::Replayed { .. })));
    assert_eq!(again.len(), 1);
}

#[test]
fn receipts_are_their_nodes() {
    let mut meter = Meter::new(UnixSeconds(1000));
    meter.handle_started(UnixSeconds(1100));
    let receipt = meter.close(UnixSeconds(1200), &lease()).unwrap();
    assert_eq!((receipt.running_s, receipt.micro), (100, 13_900));
    let mut signed = metering::sign(receipt.clone(), &key(7)).unwrap();
    assert_eq!(metering::verify(&signed).unwrap(), &receipt);
    metering::check(&receipt, &lease()).unwrap();
    let dear = Lease { price: Price { micro_per_second: 1, ..lease().price }, ..lease() };
    assert!(matches!(
        metering::check(&receipt, &dear),
        Err(MeterError::Lease { field: "micro", .. })
    ));
    let late = Receipt { to: UnixSeconds(2001), ..receipt.clone() };
    assert!(matches!(metering::check(&late, &lease()), Err(MeterError::Lease { field: "to", .. })));
    signed.receipt.micro += 1;
    assert!(metering::verify(&signed).is_err());
    assert!(metering::sign(receipt, &key(1)).is_err());
}

proptest! {
    #[test]
    fn receipts_add_up_however_time_is_split(cuts in prop::collection::vec(1000u64..2000, 0..12)) {
        let mut cuts = cuts;
        cuts.sort_unstable();
        cuts.push(2000);
        let mut meter = Meter::new(UnixSeconds(1000));
        meter.handle_started(UnixSeconds(1000));
        let receipts: Vec<_> =
            cuts.iter().map(|cut| meter.close(UnixSeconds(*cut), &lease()).unwrap()).collect();
        prop_assert_eq!(receipts.iter().map(|r| r.running_s).sum::<u64>(), 1000);
        prop_assert_eq!(receipts.iter().map(|r| r.micro).sum::<u64>(), 139_000);
    }

    #[test]
    fn any_bytes_are_refused_or_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), text in ".{0,200}") {
        let _ = Envelope::from_json(&bytes);
        let _ = Lease::from_bytes(&bytes);
        let _ = request::parse(&text, &text);
    }
}
