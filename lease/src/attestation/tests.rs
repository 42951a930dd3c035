//! Evidence that a TPM made (swtpm; `agent` has the test that makes it anew), and what is forged of it.

use aws_lc_rs::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair},
};

use super::*;

const RECORDED: &[u8] = include_bytes!("../../fuzz/corpus/attestation/evidence");
const RELEASE_FILE: &[u8] = include_bytes!("../../fuzz/corpus/attestation/measurements");

pub(super) fn recorded() -> Evidence {
    serde_json::from_slice(RECORDED).expect("evidence")
}

pub(super) fn nonce() -> String {
    hex::encode(&[5; 32])
}

pub(super) fn known() -> Known {
    let release = Measurements::from_json(RELEASE_FILE).expect("a release");
    Known { releases: vec![release], ..Known::default() }
}

pub(super) fn asked(nonce: &str) -> Asked<'_> {
    Asked { node: recorded().node, nonce, at: UnixSeconds(0), secret: None }
}

fn judge(evidence: &Evidence) -> Result<Attested, AttestationError> {
    let nonce = nonce();
    verify(evidence, asked(&nonce), &known())
}

/// The key of the node in the recorded evidence.
fn node_key() -> SigningKey {
    SigningKey::from_bytes(&[1; 32])
}

/// Signs altered evidence again as its node would.
fn as_node(mut evidence: Evidence) -> Evidence {
    evidence.node_signature = sign(&node_key(), &evidence.quote, &evidence.attestation_key);
    evidence
}

#[test]
fn what_a_tpm_said_counts() {
    let attested = judge(&recorded()).expect("proved");
    assert_eq!(attested.release, "1.2.3 (abc)");
    assert!(!attested.endorsed);
    assert_eq!(attested.volumes.map(|all| all.len()), Some(1));
    assert_eq!(attested.registers.len(), 10);
    assert_eq!(attested.firmware, None, "there was no log");
    assert_eq!(attested.certificate, None, "no authority was named");
}

#[test]
fn every_altered_byte_of_what_is_signed_is_noticed() {
    let whole = recorded();
    let refused = |alter: &dyn Fn(&mut Evidence, usize), count: usize| {
        (0..count).all(|at| {
            let mut evidence = whole.clone();
            alter(&mut evidence, at);
            // Once as altered on the way, once as a node would that lies.
            judge(&evidence).is_err() && judge(&as_node(evidence)).is_err()
        })
    };
    assert!(refused(&|evidence, at| evidence.quote[at] ^= 1, whole.quote.len()));
    assert!(refused(&|evidence, at| evidence.signature[at] ^= 1, whole.signature.len()));
    let registers: Vec<u8> = whole.registers.keys().copied().collect();
    let count = registers.len();
    let one = "00".repeat(31) + "01";
    assert!(refused(&|e, at| drop(e.registers.insert(registers[at], one.clone())), count));
    assert!(refused(&|e, at| drop(e.registers.remove(&registers[at])), count));
    assert!(refused(&|evidence, _| evidence.volumes.push(' '), 1));
}

#[test]
fn a_refusal_says_what_is_wrong() {
    let mut other = recorded();
    other.node = NodeId::from_bytes([9; 32]);
    assert!(matches!(judge(&other), Err(AttestationError::Node { .. })));
    let mut unsigned = recorded();
    unsigned.node_signature = "00".repeat(64);
    assert!(matches!(judge(&unsigned), Err(AttestationError::NodeSignature { .. })));
    let mut no_quote = recorded();
    no_quote.quote.truncate(20);
    assert_eq!(judge(&as_node(no_quote)), Err(AttestationError::Signature));
    let mut swapped = recorded();
    swapped.endorsement_key = swapped.attestation_key.clone();
    let refused = judge(&swapped);
    assert!(matches!(refused, Err(AttestationError::Key { which: "endorsement", .. })));
    let nonce = nonce();
    let asked = Asked { secret: Some(&[1; 32]), ..asked(&nonce) };
    assert_eq!(verify(&recorded(), asked, &known()), Err(AttestationError::Credential));
    let none = Known { releases: Vec::new(), ..known() };
    let asked = Asked { secret: None, ..asked };
    let refused = verify(&recorded(), asked, &none);
    assert!(matches!(refused, Err(AttestationError::Started { register: 11, .. })));
}

#[test]
fn what_was_passed_beside_the_program_is_told_as_far_as_it_is_proved() {
    let event = |register, says: &str, proved| FirmwareEvent {
        register,
        kind: "EV_IPL".to_owned(),
        digest: "ab".repeat(32),
        says: Some(says.to_owned()),
        proved,
    };
    let events = vec![
        event(4, "of another register", true),
        event(12, "holdfast.efi \"quiet\"", true),
        event(12, "a lie", false),
    ];
    let log = FirmwareLog { events, ..FirmwareLog::default() };
    let told = beside(12, Some(&log));
    assert!(told.contains(r#" of its own, "holdfast.efi \"quiet\""; start it without"#), "{told}");
    for nothing in [beside(13, Some(&log)), beside(12, None)] {
        assert!(nothing.contains(" of its own; start it without"), "{nothing}");
    }
}

/// A key of anybody's, said to be a TPM's, and a quote that it signed.
fn forged(attributes: u32, extra: &[u8; 32]) -> Evidence {
    let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("a key");
    let public = key.public_key().as_ref();
    let coordinate = |at: usize| [&[0, 32][..], &public[at..at + 32]].concat();
    let mut attestation_key = recorded().attestation_key;
    let end = attestation_key.len() - 68;
    attestation_key.truncate(end);
    attestation_key.extend([coordinate(1), coordinate(33)].concat());
    attestation_key[4..8].copy_from_slice(&attributes.to_be_bytes());
    let mut quote = recorded().quote;
    let place = quote.windows(2).position(|two| two == [0, 32]).expect("the digest's length");
    quote[place + 2..place + 34].copy_from_slice(extra);
    let raw = key.sign(&SystemRandom::new(), &quote).expect("signed");
    let half = |at: usize| [&[0, 32][..], &raw.as_ref()[at..at + 32]].concat();
    let signature = [vec![0, 0x18, 0, 0x0b], half(0), half(32)].concat();
    as_node(Evidence { attestation_key, quote, signature, ..recorded() })
}

#[test]
fn a_key_that_signs_anything_is_no_tpms_word() {
    let node = recorded().node;
    let extra = qualifying(node, &nonce(), &recorded().volumes);
    // This is what the credential is for: by the quote alone nobody can tell where a key is.
    assert!(judge(&forged(SIGNING, &extra)).is_ok());
    for bit in [1 << 1, 1 << 4, 1 << 5, 1 << 16, 1 << 18] {
        let refused = judge(&forged(SIGNING & !bit, &extra));
        assert!(matches!(refused, Err(AttestationError::Key { which: "attestation", .. })));
    }
    assert_eq!(judge(&forged(SIGNING, &[1; 32])), Err(AttestationError::Nonce));
}

#[test]
fn descriptions_of_releases_say_what_they_lack() {
    let read = |text: &str| Measurements::from_json(text.as_bytes());
    assert!(read("{}").is_err_and(|reason| reason.contains("tpm")));
    let none = r#"{"tpm":{"pcr11_sha256":null}}"#;
    assert!(read(none).is_err_and(|reason| reason.contains("pcr11_sha256")));
    let unnamed = format!(r#"{{"tpm":{{"pcr11_sha256":"{}"}}}}"#, "ab".repeat(32));
    assert_eq!(read(&unnamed).map(|release| release.name()), Ok("unnamed".to_owned()));
    let long = " ".repeat(MAX_MEASUREMENTS + 1);
    assert!(read(&long).is_err_and(|reason| reason.contains("longer")));
}
