//! Whether a maker of TPMs vouches for an endorsement key: the certificate that the maker left in the TPM,
//! judged by the certificates of those whose word counts here. Without it a key that answers like a TPM's
//! may be a program's.
//!
//! The path from certificate to authority (signatures, validity, constraints, critical extensions) is
//! webpki's work; here is what makes it the certificate of an endorsement key, and of this one. Nobody is
//! asked whether it was revoked: makers' lists are on servers that a verifier need not reach.
//! Sources: TCG EK Credential Profile for TPM Family 2.0, §2.2.1 (where it is kept) and §3.2 (its fields); RFC 5280.

use std::{ptr, time::Duration};

use jiff::Timestamp;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime, pem::PemObject};
use serde::{Deserialize, Serialize};
use types::{hex, units::UnixSeconds};
use webpki::{ALL_VERIFICATION_ALGS, EndEntityCert, Error, anchor_from_trusted_cert};
use x509_cert::{
    Certificate,
    der::{self, Decode, asn1::ObjectIdentifier},
    ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAltName, name::GeneralName},
    name::Name,
};

use super::{Evidence, wire::EccKey};

/// Longest certificate of a TPM, with what its maker filled its place up with, in bytes.
pub const MAX_CERTIFICATE: usize = 8 << 10;
/// Longest list of certificates between it and its authority's, in bytes.
pub const MAX_CHAIN: usize = 32 << 10;
/// Longest file of authorities' certificates, in bytes. All makers' together are a fifth of it.
pub const MAX_AUTHORITIES: usize = 4 << 20;
/// Most certificates in such a list.
const MAX_BETWEEN: usize = 16;
/// Most characters of a name that a certificate gives.
const MAX_NAME: usize = 200;

/// What a certificate begins with: a SEQUENCE.
const SEQUENCE: u8 = 0x30;
/// A public key on P-256 up to its point (RFC 5480 §2): `id-ecPublicKey`, `prime256v1`, a string of 66 bytes.
const P256_KEY: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// `tcg-kp-EKCertificate`: the key is an endorsement key.
const PURPOSE: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.23.133.8.1");
/// The same, encoded.
const PURPOSE_DER: &[u8] = &[0x67, 0x81, 0x05, 0x08, 0x01];
/// `tcg-at-tpmManufacturer`, `tcg-at-tpmModel`, `tcg-at-tpmVersion`.
const MANUFACTURER: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.23.133.2.1");
const MODEL: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.23.133.2.2");
const VERSION: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.23.133.2.3");

/// What became of the certificate of a TPM's endorsement key, where authorities were named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum TpmCertificate {
    /// An authority vouches for the key.
    Checked {
        /// The authority's name, as its certificate has it.
        authority: String,
        /// The TPM's maker, model and firmware's version, as the certificate has them.
        tpm: String,
    },
    /// The node sent none.
    Missing,
    /// It does not count.
    Refused {
        /// What is wrong with it.
        reason: String,
    },
}

impl TpmCertificate {
    /// Returns why nobody vouches for the TPM.
    pub(super) fn objection(&self) -> Option<String> {
        match self {
            Self::Checked { .. } => None,
            Self::Missing => Some(
                "the node sent no maker's certificate for it: the TPM holds none for a key on P-256, \
                 or the node's release is too old to send it"
                    .to_owned(),
            ),
            Self::Refused { reason } => Some(format!("its certificate is refused: {reason}")),
        }
    }
}

/// Somebody whose word on TPMs counts: a maker, by the certificate of one of its authorities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authority {
    name: String,
    der: Vec<u8>,
    /// First and last second of its validity, since 1970.
    valid: (u64, u64),
    /// Whether it vouches for itself. Others may also stand between a TPM's certificate and their own authority.
    root: bool,
}

impl Authority {
    /// Reads a file of authorities' certificates: PEM, with any number of them, or DER with one.
    ///
    /// # Errors
    /// What is no certificate of an authority, and which.
    pub fn read(bytes: &[u8]) -> Result<Vec<Self>, String> {
        if bytes.len() > MAX_AUTHORITIES {
            return Err(format!("it is longer than {MAX_AUTHORITIES} bytes"));
        }
        if matches!(bytes, [SEQUENCE, 0x80..=0xff, ..]) {
            return Self::from_der(bytes).map(|one| vec![one]);
        }
        let mut all = Vec::new();
        for (number, found) in (1..).zip(CertificateDer::pem_slice_iter(bytes)) {
            let read = match found {
                Ok(der) => Self::from_der(&der),
                Err(error) => Err(format!("it is no PEM: {error}")),
            };
            all.push(read.map_err(|reason| format!("certificate {number}: {reason}"))?);
        }
        if all.is_empty() {
            return Err("it holds no certificate, neither as PEM nor as DER".to_owned());
        }
        Ok(all)
    }

    fn from_der(der: &[u8]) -> Result<Self, String> {
        let certificate = parsed(der)?;
        let facts = certificate.tbs_certificate();
        let name = named(facts.subject());
        let limits = facts.get_extension::<BasicConstraints>();
        let limits = limits.map_err(|error| unread("basicConstraints", &error))?;
        if !limits.is_some_and(|(_, limits)| limits.ca) {
            return Err(format!(
                "{name} is no authority: by its basicConstraints it signs no certificates"
            ));
        }
        anchor_from_trusted_cert(&CertificateDer::from(der)).map_err(|error| meaning(&error))?;
        let validity = facts.validity();
        let second = |time: x509_cert::time::Time| time.to_unix_duration().as_secs();
        let valid = (second(validity.not_before), second(validity.not_after));
        let root = facts.subject() == facts.issuer();
        Ok(Self { name, der: der.to_vec(), valid, root })
    }

    fn is_valid(&self, at: UnixSeconds) -> bool {
        (self.valid.0..=self.valid.1).contains(&at.0)
    }
}

/// Judges what came with evidence, for the endorsement key in it.
pub(super) fn judge(
    evidence: &Evidence,
    key: &EccKey,
    authorities: &[Authority],
    at: UnixSeconds,
) -> TpmCertificate {
    let (own, chain) = (&evidence.endorsement_certificate, &evidence.endorsement_chain);
    if own.is_empty() {
        return TpmCertificate::Missing;
    }
    let checked = certificate_in(own).and_then(|own| {
        speaks_for(own, key)?;
        vouched((own, chain), authorities, at)
    });
    checked.unwrap_or_else(|reason| TpmCertificate::Refused { reason })
}

/// Returns the certificate at the start of its place in a TPM; what follows it there is no part of it.
fn certificate_in(place: &[u8]) -> Result<&[u8], String> {
    if place.len() > MAX_CERTIFICATE {
        return Err(format!("it is longer than {MAX_CERTIFICATE} bytes"));
    }
    let cut = first(place);
    cut.map(|(own, _)| own)
        .ok_or_else(|| "what the TPM holds in its place is no certificate".into())
}

/// Checks whose key is in a certificate.
fn speaks_for(own: &[u8], key: &EccKey) -> Result<(), String> {
    let own = CertificateDer::from(own);
    let end = EndEntityCert::try_from(&own).map_err(|error| meaning(&error))?;
    let wanted = [&P256_KEY[..], &key.point()].concat();
    if end.subject_public_key_info().as_ref() == wanted {
        return Ok(());
    }
    Err("it is for another key than the endorsement key that the TPM uses here".to_owned())
}

/// Looks for a path from a TPM's certificate to an authority. `chain` are certificates that may be on it.
fn vouched(
    (own, chain): (&[u8], &[u8]),
    authorities: &[Authority],
    at: UnixSeconds,
) -> Result<TpmCertificate, String> {
    if chain.len() > MAX_CHAIN {
        return Err(format!("its issuers' certificates are longer than {MAX_CHAIN} bytes"));
    }
    let (issuer, tpm) = endorsement_facts(own)?;
    let own = CertificateDer::from(own);
    let end = EndEntityCert::try_from(&own).map_err(|error| meaning(&error))?;
    let (valid, late): (Vec<_>, Vec<_>) = authorities.iter().partition(|one| one.is_valid(at));
    let trusted: Vec<_> = valid.iter().map(|one| CertificateDer::from(&one.der[..])).collect();
    let anchors: Result<Vec<TrustAnchor<'_>>, Error> =
        trusted.iter().map(anchor_from_trusted_cert).collect();
    let anchors = anchors.map_err(|error| meaning(&error))?;
    let named = authorities.iter().filter(|one| !one.root).map(|one| &one.der[..]);
    let between: Vec<_> = named.chain(pieces(chain)).map(CertificateDer::from).collect();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(at.0));
    let usage = webpki::KeyUsage::required_if_present(PURPOSE_DER);
    let path = end
        .verify_for_usage(ALL_VERIFICATION_ALGS, &anchors, &between, time, usage, None, None)
        .map_err(|error| {
            if error == Error::UnknownIssuer {
                unknown(&issuer, &late, at)
            } else {
                meaning(&error)
            }
        })?;
    let place = anchors.iter().position(|anchor| ptr::eq(anchor, path.anchor()));
    let found = place.and_then(|place| valid.get(place));
    let authority = found.map(|one| one.name.clone());
    authority
        .map(|authority| TpmCertificate::Checked { authority, tpm })
        .ok_or_else(|| unknown(&issuer, &late, at))
}

fn unknown(issuer: &str, late: &[&Authority], at: UnixSeconds) -> String {
    let mut text = format!("its issuer, {issuer}, is none of the authorities that were named");
    for one in late {
        let (name, (begin, end)) = (&one.name, one.valid);
        let (begin, end, at) = (told(begin), told(end), told(at.0));
        text.push_str(&format!("; {name} counts from {begin} to {end}, and now is {at}"));
    }
    text
}

/// Returns who issued a certificate and which TPM it names, if it is one for an endorsement key.
fn endorsement_facts(own: &[u8]) -> Result<(String, String), String> {
    let certificate = parsed(own)?;
    let facts = certificate.tbs_certificate();
    let purposes = facts.get_extension::<ExtendedKeyUsage>();
    let purposes = purposes.map_err(|error| unread("extendedKeyUsage", &error))?;
    if !purposes.is_some_and(|(_, purposes)| purposes.0.contains(&PURPOSE)) {
        return Err(format!(
            "it is for no endorsement key: its extendedKeyUsage does not hold {PURPOSE}"
        ));
    }
    let usage = facts.get_extension::<KeyUsage>();
    let usage = usage.map_err(|error| unread("keyUsage", &error))?;
    if !usage.is_some_and(|(_, usage)| usage.key_agreement() || usage.key_encipherment()) {
        return Err("its key is for no secrets: its keyUsage holds neither keyAgreement nor \
                    keyEncipherment"
            .to_owned());
    }
    let names = facts.get_extension::<SubjectAltName>();
    let names = names.map_err(|error| unread("subjectAltName", &error))?;
    let names = names.map(|(_, names)| names.0).unwrap_or_default();
    let tpm = names.iter().find_map(|name| {
        if let GeneralName::DirectoryName(name) = name { tpm_named(name) } else { None }
    });
    let tpm = tpm.ok_or("it names no TPM: its subjectAltName has no directoryName with a maker")?;
    Ok((named(facts.issuer()), tpm))
}

/// Returns maker, model and version in a name, if it has a maker.
fn tpm_named(name: &Name) -> Option<String> {
    let part = |wanted| {
        let found = name.iter().find(|part| part.oid == wanted)?;
        Some(plain(&String::from_utf8_lossy(found.value.value())))
    };
    let maker = part(MANUFACTURER)?;
    let words = [Some(registered(&maker).unwrap_or(maker)), part(MODEL), part(VERSION)];
    Some(words.into_iter().flatten().collect::<Vec<_>>().join(" "))
}

/// Returns the letters of a maker's number, which is how the certificate has it: `id:` and eight digits.
/// Source: TCG TPM Vendor ID Registry, §2.
fn registered(maker: &str) -> Option<String> {
    let digits = maker.strip_prefix("id:")?.to_ascii_lowercase();
    let letters = hex::decode::<4>(&digits).ok()?;
    let text = std::str::from_utf8(&letters).ok()?.trim_matches(['\0', ' ']);
    text.bytes().all(|byte| byte.is_ascii_graphic()).then(|| text.to_owned())
}

fn parsed(der: &[u8]) -> Result<Certificate, String> {
    Certificate::from_der(der).map_err(|error| format!("it is no X.509 certificate: {error}"))
}

fn unread(what: &str, error: &der::Error) -> String {
    format!("its {what} cannot be read: {error}")
}

fn named(name: &Name) -> String {
    if name.is_empty() { "somebody without a name".to_owned() } else { plain(&name.to_string()) }
}

/// What may be shown of a text of others.
fn plain(text: &str) -> String {
    let shown = text.chars().take(MAX_NAME);
    shown.map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// A time as people read it.
fn told(second: u64) -> String {
    let time = i64::try_from(second).ok().and_then(|second| Timestamp::from_second(second).ok());
    time.map_or_else(|| format!("second {second}"), |time| time.to_string())
}

/// Says what webpki found wrong with a certificate or its issuers'.
fn meaning(error: &Error) -> String {
    if let Error::CertExpired { not_after, .. } = error {
        return format!(
            "it, or one of its issuers' certificates, ended at {}",
            told(not_after.as_secs())
        );
    }
    if let Error::CertNotValidYet { not_before, .. } = error {
        let begin = told(not_before.as_secs());
        return format!("it, or one of its issuers' certificates, counts from {begin} on only");
    }
    let text = if *error == Error::CaUsedAsEndEntity {
        "it is an authority's certificate and no TPM's (basicConstraints)"
    } else if *error == Error::EndEntityUsedAsCa {
        "one of its issuers is no authority (basicConstraints)"
    } else if *error == Error::InvalidSignatureForPublicKey {
        "it, or one of its issuers' certificates, is not signed by whom it names"
    } else if *error == Error::UnsupportedCriticalExtension {
        "it, or one of its issuers' certificates, has a critical extension that is not known here"
    } else if matches!(error, Error::RequiredEkuNotFoundContext(_)) {
        "one of its issuers vouches for other things than TPMs (extendedKeyUsage)"
    } else if matches!(error, Error::UnsupportedSignatureAlgorithmContext(_)) {
        "it, or one of its issuers' certificates, is signed in a way that does not count, as with SHA-1"
    } else {
        return format!("it cannot be used: {error}");
    };
    text.to_owned()
}

/// Splits off a certificate by its length; nothing where there is none. None is shorter than 128 bytes.
fn first(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (head, length) = match bytes {
        [SEQUENCE, 0x81, length, ..] => (3, usize::from(*length)),
        [SEQUENCE, 0x82, high, low, ..] => (4, usize::from(u16::from_be_bytes([*high, *low]))),
        _ => return None,
    };
    bytes.split_at_checked(head + length)
}

/// Returns certificates that lie one after the other; what follows the last is left out.
fn pieces(mut rest: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while all.len() < MAX_BETWEEN
        && let Some((one, more)) = first(rest)
    {
        all.push(one);
        rest = more;
    }
    all
}

/// Reads `bytes` as certificates one after the other, of an authority, of a TPM, and those between them, and
/// judges them by the middle of the authority's time; for the fuzz target and its corpus. Returns whether
/// the authority vouches for the TPM.
pub fn judge_certificate(bytes: &[u8]) -> bool {
    let _ = Authority::read(bytes);
    let all = pieces(bytes);
    let [authority, own, chain @ ..] = &all[..] else { return false };
    let Ok(authorities) = Authority::read(authority) else { return false };
    let middle = authorities.first().map_or(0, |one| one.valid.0 / 2 + one.valid.1 / 2);
    vouched((own, &chain.concat()), &authorities, UnixSeconds(middle)).is_ok()
}
