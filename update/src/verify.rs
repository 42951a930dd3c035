//! When a metadata file counts: signed by enough keys, of the right version, not expired, and with
//! the bytes that its delegator says.
//!
//! Source: TUF specification 1.0.34, section 5; each function names its steps. Nothing here keeps
//! state.

use std::collections::BTreeSet;

use jiff::Timestamp;

use crate::metadata::{Envelope, Header, Keys, Listed, MetadataError, RoleKeys, Snapshot};

/// Why a refresh or lookup ended without what was asked for. Files are named as in the store.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum UpdateError {
    #[error("{file} cannot be read")]
    Unreadable { file: String, source: MetadataError },
    #[error("{file} is not there")]
    Unavailable { file: String },
    #[error("{file} is longer than {limit} bytes")]
    TooLong { file: String, limit: u64 },
    #[error("{file} is signed by {valid} of the {threshold} keys that must have signed it")]
    Signatures { file: String, valid: u64, threshold: u64 },
    #[error("{file} has version {found}, not {expected}")]
    Version { file: String, expected: u64, found: u64 },
    #[error("{file} goes back from version {trusted} to {found}")]
    Rollback { file: String, trusted: u64, found: u64 },
    #[error("{file} has not the digest or length that its delegator says")]
    Altered { file: String },
    #[error("{file} expired on {expires}")]
    Expired { file: String, expires: Timestamp },
    #[error("the snapshot lists no {file}")]
    NotListed { file: String },
    #[error("no answer after looking into {limit} roles")]
    TooManyRoles { limit: usize },
}

/// Parses `bytes` as an envelope.
pub(crate) fn envelope(file: &str, bytes: &[u8], limit: u64) -> Result<Envelope, UpdateError> {
    if bytes.len() as u64 > limit {
        return Err(UpdateError::TooLong { file: file.to_owned(), limit });
    }
    Envelope::parse(bytes).map_err(|source| unreadable(file, source))
}

/// Names the file that could not be read.
pub(crate) fn unreadable(file: &str, source: MetadataError) -> UpdateError {
    UpdateError::Unreadable { file: file.to_owned(), source }
}

/// 5.3.4, 5.4.2, 5.5.3, 5.6.3: a threshold of the role's keys signed. Each key counts once, under
/// however many ids it is listed and however many signatures it made.
///
/// That an id is its key's digest is not asked for, as python-tuf and TAP 12 do not: ids are names
/// that the delegator signs, one key for each.
pub(crate) fn threshold(
    file: &str,
    envelope: &Envelope,
    signers: &RoleKeys,
    keys: &Keys,
) -> Result<(), UpdateError> {
    let message = envelope.message();
    let mut valid: BTreeSet<&[u8]> = BTreeSet::new();
    for signature in envelope.signatures() {
        if !signers.keyids.contains(&signature.keyid) {
            continue;
        }
        if let Some(key) = keys.get(&signature.keyid)
            && !valid.contains(key.identity())
            && key.verifies(&message, &signature.bytes)
        {
            valid.insert(key.identity());
        }
    }
    let valid = valid.len() as u64;
    if valid < signers.threshold {
        let file = file.to_owned();
        return Err(UpdateError::Signatures { file, valid, threshold: signers.threshold });
    }
    Ok(())
}

/// 5.3.10, 5.4.4, 5.5.6, 5.6.5: the protection against a freeze.
pub(crate) fn fresh(file: &str, header: &Header, now: Timestamp) -> Result<(), UpdateError> {
    if header.expires <= now {
        return Err(UpdateError::Expired { file: file.to_owned(), expires: header.expires });
    }
    Ok(())
}

/// 5.5.2, 5.6.2: the bytes are those that the delegator describes, as far as it does.
pub(crate) fn described(file: &str, bytes: &[u8], listed: &Listed) -> Result<(), UpdateError> {
    let length = listed.length.is_none_or(|length| length == bytes.len() as u64);
    let hashes = listed.hashes.as_ref().is_none_or(|hashes| hashes.fit(bytes));
    if length && hashes { Ok(()) } else { Err(UpdateError::Altered { file: file.to_owned() }) }
}

/// 5.3.5, 5.5.4, 5.6.4: the version is the expected one.
pub(crate) fn version(file: &str, found: u64, expected: u64) -> Result<(), UpdateError> {
    if found == expected {
        return Ok(());
    }
    Err(UpdateError::Version { file: file.to_owned(), expected, found })
}

/// 5.4.3: no version goes back.
pub(crate) fn forward(file: &str, trusted: u64, found: u64) -> Result<(), UpdateError> {
    if trusted <= found {
        return Ok(());
    }
    Err(UpdateError::Rollback { file: file.to_owned(), trusted, found })
}

/// 5.5.5: what the trusted snapshot lists stays listed, with versions that do not go back.
pub(crate) fn keeps_listed(trusted: &Snapshot, new: &Snapshot) -> Result<(), UpdateError> {
    for (role, old) in &trusted.roles {
        let file = format!("{role}.json");
        match new.roles.get(role) {
            None => return Err(UpdateError::NotListed { file }),
            Some(listed) => forward(&file, old.version, listed.version)?,
        }
    }
    Ok(())
}
