//! What a TPM says of a node, made by swtpm and judged as a gateway judges it.

use ed25519_dalek::SigningKey;
use lease::attestation::{
    Asked, AttestationError, Attested, Challenge, Evidence, Inquiry, Known, Measurements,
    make_credential, verify, volumes_digest,
};
use types::{ids::NodeId, units::UnixSeconds};

use super::{
    tpm::{CERTIFICATE, LATCH_PCR, RELEASE_PCR, Tpm, TpmError},
    tpm_tests::{Emulated, start_release},
};
use crate::attest::evidence;

const NONCE: [u8; 32] = [5; 32];
const VOLUMES: &str =
    r#"[{"name":"holdfast-state","protection":{"is":"sealed","bound":"release"}}]"#;

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn node(key: &SigningKey) -> NodeId {
    NodeId::from_bytes(key.verifying_key().to_bytes())
}

fn nonce() -> String {
    types::hex::encode(&NONCE)
}

/// The release that the emulated server was started with.
fn measured(tpm: &mut Tpm) -> Known {
    let register = types::hex::encode(&tpm.register(RELEASE_PCR).expect("read"));
    let document = format!(
        r#"{{"release":{{"version":"1.2.3","commit":"abc"}},"tpm":{{"pcr11_sha256":"{register}"}}}}"#
    );
    let releases = vec![Measurements::from_json(document.as_bytes()).expect("understood")];
    Known { releases, ..Known::default() }
}

fn ask(tpm: &mut Tpm, key: &SigningKey) -> Evidence {
    let challenge = Challenge { nonce: nonce(), credential: None };
    evidence(tpm, key, &challenge, VOLUMES.to_owned()).expect("answered")
}

fn asked<'a>(evidence: &Evidence, nonce: &'a str) -> Asked<'a> {
    Asked { node: evidence.node, nonce, at: UnixSeconds(0), secret: None }
}

fn judge(evidence: &Evidence, known: &Known) -> Result<Attested, AttestationError> {
    verify(evidence, asked(evidence, &nonce()), known)
}

#[test]
fn a_node_proves_which_release_it_was_started_with_and_how_its_volumes_were_opened() {
    let Some(mut emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    tpm.extend(LATCH_PCR, &volumes_digest(VOLUMES.as_bytes())).expect("extended");
    let known = measured(&mut tpm);
    let first = ask(&mut tpm, &key(1));
    let attested = judge(&first, &known).expect("proved");
    assert_eq!(attested.release, "1.2.3 (abc)");
    let volumes = attested.volumes.expect("measured");
    assert_eq!(
        (volumes[0].name.as_str(), volumes[0].protection.name()),
        ("holdfast-state", "sealed")
    );
    // What was not measured of the volumes does not count, nor do other TPMs.
    let mut tpm_named = known.clone();
    tpm_named.tpms = vec!["00".repeat(32)];
    assert!(matches!(judge(&first, &tpm_named), Err(AttestationError::Tpm { .. })));
    tpm_named.tpms.push(attested.tpm.clone());
    assert!(judge(&first, &tpm_named).is_ok());

    // Another release, and this one with a command line of its own.
    drop(tpm);
    emulated.restart();
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 2);
    let other = ask(&mut tpm, &key(1));
    assert_eq!(other.attestation_key, first.attestation_key);
    let refused = judge(&other, &known);
    assert!(matches!(refused, Err(AttestationError::Started { register: 11, .. })), "{refused:?}");
    let known = measured(&mut tpm);
    let judged = judge(&other, &known).expect("proved");
    assert_eq!((judged.volumes, judged.tpm), (None, attested.tpm));
    tpm.extend(12, &[1; 32]).expect("extended");
    let refused = judge(&ask(&mut tpm, &key(1)), &known);
    assert!(matches!(refused, Err(AttestationError::Started { register: 12, .. })), "{refused:?}");
}

#[test]
fn a_quote_counts_for_one_node_and_one_question() {
    let Some(emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    let known = measured(&mut tpm);
    let honest = ask(&mut tpm, &key(1));
    let thief = key(2);
    assert_ne!(ask(&mut tpm, &thief).attestation_key, honest.attestation_key);
    // Somebody without a TPM shows another server's quote as its own.
    let node_signature = lease::attestation::sign(&thief, &honest.quote, &honest.attestation_key);
    let stolen = Evidence { node: node(&thief), node_signature, ..honest.clone() };
    assert_eq!(judge(&stolen, &known), Err(AttestationError::Nonce));
    let other = asked(&honest, "another");
    assert_eq!(verify(&honest, other, &known), Err(AttestationError::Nonce));
    // Registers that read better than they are.
    let mut better = honest.clone();
    better.registers.insert(7, "00".repeat(31) + "01");
    assert!(matches!(judge(&better, &known), Err(AttestationError::Registers { .. })));
}

#[test]
fn a_credential_shows_that_both_keys_are_in_one_tpm() {
    let (Some(one), Some(other)) = (Emulated::start(), Emulated::start()) else { return };
    let mut tpm = one.tpm();
    start_release(&mut tpm, 1);
    let known = measured(&mut tpm);
    let first = ask(&mut tpm, &key(1));
    let secret = [9; 32];
    let made = make_credential(&first.endorsement_key, &first.attestation_key, &secret);
    let credential = Some(made.expect("made"));
    let challenge = Challenge { nonce: nonce(), credential };
    let answer = evidence(&mut tpm, &key(1), &challenge, String::new()).expect("answered");
    let nonce = nonce();
    let asked = |secret| Asked { secret: Some(secret), ..asked(&answer, &nonce) };
    let attested = verify(&answer, asked(&secret), &known).expect("proved");
    assert!(attested.endorsed);
    let refused = verify(&answer, asked(&[8; 32]), &known);
    assert_eq!(refused, Err(AttestationError::Credential));
    // Another TPM, and another node's key in the same one, do not open it.
    let refused = evidence(&mut other.tpm(), &key(1), &challenge, String::new());
    assert!(matches!(refused, Err(TpmError::Refused { command: 0x147, .. })), "{refused:?}");
    let refused = evidence(&mut tpm, &key(2), &challenge, String::new());
    assert!(matches!(refused, Err(TpmError::Refused { command: 0x147, .. })), "{refused:?}");
    // Both rounds as a gateway asks them; a second answer by other keys does not count.
    let mut inquiry = Inquiry::new(answer.node, UnixSeconds(0), &[[1; 32], [2; 32], [3; 32]]);
    let mut told = |challenge: &Challenge, seed| {
        evidence(&mut tpm, &key(seed), challenge, String::new()).expect("answered")
    };
    let second = inquiry.second(&told(&inquiry.first(), 1), &known).expect("a question");
    let last = told(&second, 1);
    assert!(inquiry.judge(&last, &known).expect("proved").endorsed);
    let attestation_key = first.endorsement_key.clone();
    let others = Evidence { attestation_key, ..last };
    assert_eq!(inquiry.judge(&others, &known), Err(AttestationError::Credential));
    // Nothing is left behind in the TPM, which has room for three objects and as many sessions.
    let again = (0..6).map(|_| evidence(&mut tpm, &key(1), &challenge, String::new()));
    assert!(again.into_iter().all(|answer| answer.is_ok()));
}

#[test]
fn the_makers_certificate_goes_with_the_first_answer() {
    let Some(emulated) = Emulated::start() else { return };
    let mut tpm = emulated.tpm();
    start_release(&mut tpm, 1);
    assert_eq!(ask(&mut tpm, &key(1)).endorsement_certificate, b"");
    tpm.keep(CERTIFICATE, b"as the maker left it").expect("kept");
    let first = ask(&mut tpm, &key(1));
    assert_eq!(first.endorsement_certificate, b"as the maker left it");
    let made = make_credential(&first.endorsement_key, &first.attestation_key, &[9; 32]);
    let challenge = Challenge { nonce: nonce(), credential: Some(made.expect("made")) };
    let second = evidence(&mut tpm, &key(1), &challenge, String::new()).expect("answered");
    assert_eq!(second.endorsement_certificate, b"");
}
