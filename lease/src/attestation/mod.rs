//! What a node proves of itself by its TPM: which release it was started with, and that it is the node
//! it says it is.
//!
//! Whoever wants to know sends a [`Challenge`] (`POST /v1/nodes/{id}/attestation`, or `/v1/node/attestation`
//! of the node) and gets [`Evidence`]. [`verify`] is pure: it compares the evidence with the question and
//! with what is known of releases (`measurements.json`, which the image's builder writes). [`Inquiry`] keeps
//! the order of both rounds.
//!
//! What links the parts: the TPM's quote is over the values of the registers and over a digest of the
//! question, the node's name and the release's word on its volumes; it is signed by a key that signs
//! nothing but what the TPM itself says (`restricted`); the node's own key signs the quote. In a second
//! round a [`Credential`] shows that this key is in the TPM with the endorsement key, by which a TPM is
//! known for its whole life. That this is a TPM and no program, nobody says but its maker, in a certificate
//! ([`TpmCertificate`]) by an [`Authority`] that the verifier named, or the verifier, who knows the TPM.
//! Sources: TPM 2.0 Library, Parts 1 to 3; systemd-stub(7) for the registers' meaning.

mod certificate;
#[cfg(test)]
mod certificate_tests;
mod credential;
mod drivers;
mod log;
#[cfg(test)]
mod log_tests;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::BTreeMap;

use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use types::{hex, ids::NodeId, units::UnixSeconds, volumes::VolumeReport};

pub use certificate::{
    Authority, MAX_AUTHORITIES, MAX_CERTIFICATE, MAX_CHAIN, TpmCertificate, judge_certificate,
};
pub use credential::make as make_credential;
pub use drivers::{Driver, drivers};
pub use log::{FirmwareEvent, FirmwareLog, LogError, MAX_LOG};
use wire::{EccKey, Quote, Scheme};

/// Registers that a quote is about: firmware and its choices (0 to 7), the boot program and its
/// companions (11 to 13), the volumes (15).
pub const REGISTERS: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15];
/// Register of the boot program's sections.
const RELEASE: u8 = 11;
/// Registers into which systemd-stub measures what it was given beside the boot program: command lines
/// and credentials, and extensions of the system. Zero when there was nothing.
const BESIDE: [u8; 2] = [12, 13];
/// Register of the volumes, extended once they are open.
const VOLUMES: u8 = 15;
/// What the digest in register 15 begins with.
const VOLUMES_MARK: &[u8] = b"holdfast volumes ";

/// What is signed begins with this.
const CONTEXT: &[u8] = b"holdfast/1 attestation\0";
/// Why a TPM does not count where TPMs were named and no authorities.
const UNNAMED: &str =
    "it is none of those that were named; a server whose mainboard was exchanged has another";
/// Names of both keys in refusals.
const ATTESTATION: &str = "attestation";
const ENDORSEMENT: &str = "endorsement";

/// What an attestation key is (TPMA_OBJECT, Part 2 §8.3): of this TPM, made in it, signing only what the
/// TPM says. `fixedTPM`, `fixedParent`, `sensitiveDataOrigin`, `restricted`, `sign`.
const SIGNING: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 18;
/// And an endorsement key: `restricted` and `decrypt` in place of `sign`.
const STORING: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 17;

/// Longest document that describes a release, in bytes.
pub const MAX_MEASUREMENTS: usize = 64 << 10;

/// A question to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Challenge {
    /// 32 random bytes as hexadecimal digits, new for each question.
    pub nonce: String,
    /// A secret that the TPM is to give back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<Credential>,
}

/// A secret for one TPM and one key in it (`TPM2_MakeCredential`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credential {
    /// `TPM2B_ID_OBJECT` without its length.
    #[serde(with = "types::base64_bytes")]
    pub blob: Vec<u8>,
    /// `TPM2B_ENCRYPTED_SECRET` without its length.
    #[serde(with = "types::base64_bytes")]
    pub secret: Vec<u8>,
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// The node that answers.
    pub node: NodeId,
    /// `TPMS_ATTEST`: what the TPM says.
    #[serde(with = "types::base64_bytes")]
    pub quote: Vec<u8>,
    /// `TPMT_SIGNATURE` of it.
    #[serde(with = "types::base64_bytes")]
    pub signature: Vec<u8>,
    /// `TPMT_PUBLIC` of the key that signed.
    #[serde(with = "types::base64_bytes")]
    pub attestation_key: Vec<u8>,
    /// `TPMT_PUBLIC` of the TPM's endorsement key.
    #[serde(with = "types::base64_bytes")]
    pub endorsement_key: Vec<u8>,
    /// Its maker's certificate of that key as the TPM keeps it, at most [`MAX_CERTIFICATE`]: DER, and perhaps
    /// something to fill its place. Empty where there is none, and in answers to a credential.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "types::base64_bytes")]
    pub endorsement_certificate: Vec<u8>,
    /// Certificates of authorities between that one and a maker's root, as the TPM keeps them: DER, one after
    /// the other, at most [`MAX_CHAIN`]. Most TPMs keep none.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "types::base64_bytes")]
    pub endorsement_chain: Vec<u8>,
    /// The registers' values, SHA-256, as hexadecimal digits.
    pub registers: BTreeMap<u8, String>,
    /// What was measured of the volumes, as it was measured: JSON, a list of [`VolumeReport`].
    #[serde(default)]
    pub volumes: String,
    /// The secret of the challenge's credential, as hexadecimal digits.
    #[serde(default)]
    pub activated: Option<String>,
    /// The firmware's log of what it measured, at most [`MAX_LOG`]; empty where there is none, and in
    /// answers to a credential. Nothing signs it: what it says counts by the registers that it yields.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "types::base64_bytes")]
    pub log: Vec<u8>,
    /// The node's signature of quote and key (Ed25519), as hexadecimal digits.
    pub node_signature: String,
}

/// What is known of a release: `measurements.json` beside its image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Measurements {
    #[serde(default)]
    release: Named,
    tpm: Registers,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
struct Named {
    version: Option<String>,
    commit: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Registers {
    pcr11_sha256: Option<String>,
}

impl Measurements {
    /// Reads the document; a refusal says what is missing.
    pub fn from_json(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_MEASUREMENTS {
            return Err(format!("it is longer than {MAX_MEASUREMENTS} bytes"));
        }
        let read: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let register = read.tpm.pcr11_sha256.as_deref().unwrap_or_default();
        hex::decode::<32>(register).map_err(|error| {
            format!("tpm.pcr11_sha256 says not what register 11 will hold: {error}")
        })?;
        Ok(read)
    }

    /// Returns the release's name: version and commit.
    pub fn name(&self) -> String {
        match (&self.release.version, &self.release.commit) {
            (None, _) => "unnamed".to_owned(),
            (Some(version), None) => version.clone(),
            (Some(version), Some(commit)) => format!("{version} ({commit})"),
        }
    }

    fn register(&self) -> &str {
        self.tpm.pcr11_sha256.as_deref().unwrap_or_default()
    }
}

/// What was asked, and of whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked<'a> {
    /// The node that was asked.
    pub node: NodeId,
    /// The challenge's nonce.
    pub nonce: &'a str,
    /// When: certificates count for a time.
    pub at: UnixSeconds,
    /// The secret in the challenge's credential, when there was one.
    pub secret: Option<&'a [u8; 32]>,
}

/// What counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// Releases.
    pub releases: Vec<Measurements>,
    /// TPMs, by [`Attested::tpm`].
    pub tpms: Vec<String>,
    /// Whose word makes a TPM count that is not among `tpms`. Where both are empty, any TPM does.
    pub authorities: Vec<Authority>,
}

impl Known {
    /// Refuses a TPM that is neither named nor vouched for.
    fn check_tpm(
        &self,
        tpm: &str,
        certificate: Option<&TpmCertificate>,
    ) -> Result<(), AttestationError> {
        let any = self.tpms.is_empty() && self.authorities.is_empty();
        if any || self.tpms.iter().any(|named| named == tpm) {
            return Ok(());
        }
        let objection = match certificate {
            Some(certificate) => certificate.objection(),
            None => Some(UNNAMED.to_owned()),
        };
        objection
            .map_or(Ok(()), |reason| Err(AttestationError::Tpm { tpm: tpm.to_owned(), reason }))
    }
}

/// What is proved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Attested {
    /// The release that was started.
    pub release: String,
    /// The TPM, by the SHA-256 of its endorsement key's public area.
    pub tpm: String,
    /// Whether the TPM showed that it has that endorsement key.
    pub endorsed: bool,
    /// Its maker's word for that key, where authorities were named.
    pub certificate: Option<TpmCertificate>,
    /// Times that this TPM was switched on since it was made or cleared.
    pub resets: u32,
    /// How the volumes were opened; nothing when what the node says of it is not what was measured.
    pub volumes: Option<Vec<VolumeReport>>,
    /// The registers' values.
    pub registers: BTreeMap<u8, String>,
    /// What the firmware's log tells of them, where there is one.
    pub firmware: Option<FirmwareLog>,
}

/// Why evidence does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AttestationError {
    #[error("the {what} in the evidence is none that a TPM makes for Holdfast")]
    Malformed { what: &'static str },
    #[error("the {which} key in the evidence is {what}")]
    Key { which: &'static str, what: &'static str },
    #[error("node {found} answered, and node {asked} was asked")]
    Node { asked: NodeId, found: NodeId },
    #[error("the evidence is not signed by node {node}")]
    NodeSignature { node: NodeId },
    #[error("the quote is not signed by the attestation key that came with it")]
    Signature,
    #[error("the quote answers another question: it is old, or another node's")]
    Nonce,
    #[error("the registers' values in the evidence are not those that the TPM signed: {what}")]
    Registers { what: String },
    #[error("register {register} is {value}: {meaning}")]
    Started { register: u8, value: String, meaning: String },
    #[error("the TPM did not show that the attestation key is its own")]
    Credential,
    #[error("the TPM with endorsement key {tpm} does not count: {reason}")]
    Tpm { tpm: String, reason: String },
}

/// What the TPM is to sign beside its registers. A quote for one node never counts for another.
pub fn qualifying(node: NodeId, nonce: &str, volumes: &str) -> [u8; 32] {
    let digest = Sha256::new()
        .chain_update(CONTEXT)
        .chain_update(node.as_bytes())
        .chain_update(Sha256::digest(nonce))
        .chain_update(Sha256::digest(volumes));
    digest.finalize().into()
}

/// What register 15 is extended with when the volumes are open; `volumes` as [`Evidence::volumes`].
pub fn volumes_digest(volumes: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(VOLUMES_MARK).chain_update(volumes).finalize().into()
}

/// Signs quote and key with the node's own key; hexadecimal digits.
pub fn sign(key: &SigningKey, quote: &[u8], attestation_key: &[u8]) -> String {
    hex::encode(&key.sign(&signed(quote, attestation_key)).to_bytes())
}

fn signed(quote: &[u8], attestation_key: &[u8]) -> Vec<u8> {
    let (quote, key) = (Sha256::digest(quote), Sha256::digest(attestation_key));
    [CONTEXT, &quote, &key].concat()
}

/// Returns a TPM's name for a public area (Part 1 §16): its digest's algorithm and the digest.
fn name_of(public: &[u8]) -> Vec<u8> {
    [&wire::SHA256.to_be_bytes()[..], &Sha256::digest(public)].concat()
}

fn endorsement(public: &[u8]) -> Result<EccKey, AttestationError> {
    let key = EccKey::read(public, "endorsement key")?;
    if key.scheme != Scheme::Stores || key.attributes & STORING != STORING {
        let what = "none that stays in one TPM and only decrypts for it";
        return Err(AttestationError::Key { which: ENDORSEMENT, what });
    }
    Ok(key)
}

/// Compares what a node answered with what it was asked and with what is known.
pub fn verify(
    evidence: &Evidence,
    asked: Asked<'_>,
    known: &Known,
) -> Result<Attested, AttestationError> {
    if evidence.node != asked.node {
        return Err(AttestationError::Node { asked: asked.node, found: evidence.node });
    }
    check_node(evidence)?;
    let endorsement_key = endorsement(&evidence.endorsement_key)?;
    let quote = check_quote(evidence, asked)?;
    let registers = check_registers(evidence, &quote)?;
    let tpm = hex::encode(&Sha256::digest(&evidence.endorsement_key));
    let endorsed = match asked.secret {
        Some(secret) if evidence.activated.as_deref() != Some(&*hex::encode(secret)) => {
            return Err(AttestationError::Credential);
        }
        Some(_) => true,
        None => false,
    };
    let judged = || certificate::judge(evidence, &endorsement_key, &known.authorities, asked.at);
    let certificate = (!known.authorities.is_empty()).then(judged);
    known.check_tpm(&tpm, certificate.as_ref())?;
    let firmware = log::judge(&evidence.log, &registers);
    Ok(Attested {
        release: started(&registers, known, firmware.as_ref())?,
        tpm,
        endorsed,
        certificate,
        resets: quote.resets,
        volumes: volumes(&evidence.volumes, &registers),
        firmware,
        registers: evidence.registers.clone(),
    })
}

fn check_node(evidence: &Evidence) -> Result<(), AttestationError> {
    let node = evidence.node;
    let refused = AttestationError::NodeSignature { node };
    let signature = hex::decode::<64>(&evidence.node_signature).map_err(|_| refused.clone())?;
    let key = VerifyingKey::from_bytes(node.as_bytes()).map_err(|_| refused.clone())?;
    let message = signed(&evidence.quote, &evidence.attestation_key);
    key.verify_strict(&message, &Signature::from_bytes(&signature)).map_err(|_| refused)
}

/// Checks who signed the quote, and that it answers the question.
fn check_quote<'a>(
    evidence: &'a Evidence,
    asked: Asked<'_>,
) -> Result<Quote<'a>, AttestationError> {
    let key = EccKey::read(&evidence.attestation_key, "attestation key")?;
    if key.scheme != Scheme::Signs || key.attributes & SIGNING != SIGNING {
        let what = "none that stays in one TPM and signs only what the TPM says";
        return Err(AttestationError::Key { which: ATTESTATION, what });
    }
    let signature = wire::signature(&evidence.signature)?;
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key.point())
        .verify(&evidence.quote, &signature)
        .map_err(|_| AttestationError::Signature)?;
    let quote = Quote::read(&evidence.quote)?;
    if quote.extra != qualifying(asked.node, asked.nonce, &evidence.volumes) {
        return Err(AttestationError::Nonce);
    }
    Ok(quote)
}

/// Checks that the values are those that the TPM signed.
fn check_registers(
    evidence: &Evidence,
    quote: &Quote<'_>,
) -> Result<BTreeMap<u8, [u8; 32]>, AttestationError> {
    let wrong = |what: String| AttestationError::Registers { what };
    let given: Vec<u8> = evidence.registers.keys().copied().collect();
    if given != quote.registers {
        return Err(wrong(format!(
            "it signed registers {:?}, given are {given:?}",
            quote.registers
        )));
    }
    let mut digest = Sha256::new();
    let mut values = BTreeMap::new();
    for (register, text) in &evidence.registers {
        let value = hex::decode::<32>(text)
            .map_err(|error| wrong(format!("register {register}: {error}")))?;
        digest.update(value);
        values.insert(*register, value);
    }
    if digest.finalize().as_slice() != quote.digest {
        return Err(wrong("their digest differs".to_owned()));
    }
    Ok(values)
}

/// Returns the release that was started, if it was started as it was built.
fn started(
    registers: &BTreeMap<u8, [u8; 32]>,
    known: &Known,
    firmware: Option<&FirmwareLog>,
) -> Result<String, AttestationError> {
    let value = |register: u8| {
        let missing = || AttestationError::Registers {
            what: format!("register {register} is not among them"),
        };
        registers.get(&register).ok_or_else(missing)
    };
    let found = hex::encode(value(RELEASE)?);
    let release = known.releases.iter().find(|release| release.register() == found);
    let release = release.ok_or_else(|| AttestationError::Started {
        register: RELEASE,
        value: found.clone(),
        meaning:
            "no release that is known here measures so; the node runs another or an altered one"
                .to_owned(),
    })?;
    for register in BESIDE {
        let value = value(register)?;
        if *value != [0; 32] {
            return Err(AttestationError::Started {
                register,
                value: hex::encode(value),
                meaning: beside(register, firmware),
            });
        }
    }
    Ok(release.name())
}

/// What a register that is not zero means, with what firmware's log proves to have gone into it.
fn beside(register: u8, firmware: Option<&FirmwareLog>) -> String {
    let events = firmware.map(|log| &*log.events).unwrap_or_default().iter();
    let proved = events.filter(|event| event.register == register && event.proved);
    let said: Vec<_> =
        proved.filter_map(|event| event.says.as_ref().map(|it| format!("{it:?}"))).collect();
    let said = if said.is_empty() { String::new() } else { format!(", {}", said.join(" and ")) };
    format!(
        "the release was started with a command line or extensions of its own{said}; start it without load \
         options, as boot.ipxe does, and with nothing in folders beside it"
    )
}

/// Returns what was said of the volumes, if that was measured.
fn volumes(text: &str, registers: &BTreeMap<u8, [u8; 32]>) -> Option<Vec<VolumeReport>> {
    let digest = volumes_digest(text.as_bytes());
    let extended = Sha256::new().chain_update([0; 32]).chain_update(digest).finalize();
    let measured = registers.get(&VOLUMES).is_some_and(|value| extended.as_slice() == value);
    if measured { serde_json::from_str(text).ok() } else { None }
}

/// Both rounds of questions to one node. Pure: who uses it sends the challenges and brings the answers.
#[derive(Debug)]
pub struct Inquiry {
    node: NodeId,
    at: UnixSeconds,
    nonces: [String; 2],
    secret: [u8; 32],
    /// The first answer, with the keys and with what comes only once.
    first: Option<Evidence>,
}

impl Inquiry {
    /// Begins to ask a node at a time. `random` are random bytes of which nobody else knows.
    pub fn new(node: NodeId, at: UnixSeconds, random: &[[u8; 32]; 3]) -> Self {
        let [first, second, secret] = random;
        let nonces = [hex::encode(first), hex::encode(second)];
        Self { node, at, nonces, secret: *secret, first: None }
    }

    /// Returns the first question.
    pub fn first(&self) -> Challenge {
        Challenge { nonce: self.nonces[0].clone(), credential: None }
    }

    /// Judges the first answer and returns the second question.
    pub fn second(
        &mut self,
        evidence: &Evidence,
        known: &Known,
    ) -> Result<Challenge, AttestationError> {
        verify(evidence, self.asked(0), known)?;
        let (attestation, endorsement) = (&evidence.attestation_key, &evidence.endorsement_key);
        let credential = make_credential(endorsement, attestation, &self.secret)?;
        self.first = Some(evidence.clone());
        Ok(Challenge { nonce: self.nonces[1].clone(), credential: Some(credential) })
    }

    /// Judges the second answer. It must be by the keys that the credential was made for.
    pub fn judge(&self, evidence: &Evidence, known: &Known) -> Result<Attested, AttestationError> {
        let keys = |of: &Evidence| (of.attestation_key.clone(), of.endorsement_key.clone());
        let first = self.first.as_ref().ok_or(AttestationError::Credential)?;
        if keys(first) != keys(evidence) {
            return Err(AttestationError::Credential);
        }
        // The log comes once, and is compared with the registers as they are now; so do certificates.
        let whole = Evidence {
            log: first.log.clone(),
            endorsement_certificate: first.endorsement_certificate.clone(),
            endorsement_chain: first.endorsement_chain.clone(),
            ..evidence.clone()
        };
        verify(&whole, Asked { secret: Some(&self.secret), ..self.asked(1) }, known)
    }

    fn asked(&self, round: usize) -> Asked<'_> {
        Asked { node: self.node, nonce: &self.nonces[round], at: self.at, secret: None }
    }
}

/// Reads `bytes` as everything that a node may send; for the fuzz target and its corpus. Returns whether
/// it is evidence whose parts can be read.
pub fn everything(bytes: &[u8]) -> bool {
    let _ = Measurements::from_json(bytes);
    let _ = (Quote::read(bytes), wire::signature(bytes), EccKey::read(bytes, ATTESTATION));
    let Ok(evidence) = serde_json::from_slice::<Evidence>(bytes) else { return false };
    let asked = Asked { node: evidence.node, nonce: "", at: UnixSeconds(0), secret: None };
    let _ = verify(&evidence, asked, &Known::default());
    let _ = make_credential(&evidence.endorsement_key, &evidence.attestation_key, &[7; 32]);
    let quote = Quote::read(&evidence.quote).is_ok_and(|quote| {
        let _ = check_registers(&evidence, &quote);
        !quote.registers.is_empty()
    });
    quote && wire::signature(&evidence.signature).is_ok()
}

/// Reads `bytes` as a firmware's log and compares it with registers of zeros; for the fuzz target and its
/// corpus. Returns whether it is one.
pub fn judge_log(bytes: &[u8]) -> bool {
    let registers = (0..24).map(|register| (register, [0; 32])).collect();
    log::judge(bytes, &registers).is_some_and(|found| found.unread.is_none())
}
