//! Checks a target's bytes while they arrive.
//!
//! Source: TUF specification 1.0.34, section 5.7.2 and 5.7.3: never more than the length that the
//! metadata says, and every digest that it says.

use aws_lc_rs::digest::{self, Context};

use crate::pattern;

/// The digests of a file. Without any, by an algorithm that is known here, nothing is the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashes {
    /// SHA-256.
    pub sha256: Option<[u8; 32]>,
    /// SHA-512.
    pub sha512: Option<[u8; 64]>,
}

/// Why a file is not the one that metadata describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum TargetError {
    #[error("it is longer than the {length} bytes that its metadata says")]
    TooLong { length: u64 },
    #[error("it ends after {found} of the {length} bytes that its metadata says")]
    TooShort { length: u64, found: u64 },
    #[error("its metadata has neither a SHA-256 nor a SHA-512 digest")]
    NoDigest,
    #[error("its {algorithm} digest is not the one that its metadata says")]
    Digest { algorithm: &'static str },
}

/// A target that a lookup found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its path in the repository.
    pub path: String,
    /// The role that described it.
    pub role: String,
    /// Length, digests and custom fields.
    pub file: crate::metadata::TargetFile,
    /// Where it is below the targets URL, percent-encoded.
    pub location: String,
}

impl Target {
    /// Whether its metadata has a digest that can be checked.
    pub fn checkable(&self) -> Result<(), TargetError> {
        let Hashes { sha256, sha512 } = &self.file.hashes;
        if sha256.is_none() && sha512.is_none() { Err(TargetError::NoDigest) } else { Ok(()) }
    }

    /// Begins a check of its bytes.
    pub fn check(&self) -> Check {
        Check::new(self.file.length, &self.file.hashes)
    }
}

/// Returns where a target lies: with consistent snapshots its file name begins with a digest
/// (specification 6.2).
pub(crate) fn location(path: &str, hashes: &Hashes, digest_in_name: Naming) -> String {
    let digest = match (digest_in_name, &hashes.sha256, &hashes.sha512) {
        (Naming::Plain, ..) | (Naming::Digest, None, None) => return pattern::encode_path(path),
        (Naming::Digest, Some(digest), _) => types::hex::encode(digest),
        (Naming::Digest, None, Some(digest)) => types::hex::encode(digest),
    };
    match path.rsplit_once('/') {
        Some((folder, name)) => pattern::encode_path(&format!("{folder}/{digest}.{name}")),
        None => pattern::encode_path(&format!("{digest}.{path}")),
    }
}

/// How a repository names its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// With version and digest: consistent snapshots.
    Digest,
    /// As metadata names them.
    Plain,
}

impl Hashes {
    /// Whether `bytes` have these digests.
    pub fn fit(&self, bytes: &[u8]) -> bool {
        let mut check = Check::new(bytes.len() as u64, self);
        check.update(bytes).is_ok() && check.finish().is_ok()
    }
}

/// A running check. Bytes go through [`Check::update`] before anyone believes them, and count once
/// [`Check::finish`] agreed.
pub struct Check {
    length: u64,
    found: u64,
    sha256: Option<(Context, [u8; 32])>,
    sha512: Option<(Context, [u8; 64])>,
}

impl Check {
    fn new(length: u64, hashes: &Hashes) -> Self {
        Self {
            length,
            found: 0,
            sha256: hashes.sha256.map(|digest| (Context::new(&digest::SHA256), digest)),
            sha512: hashes.sha512.map(|digest| (Context::new(&digest::SHA512), digest)),
        }
    }

    /// Bytes that went through so far.
    pub fn found(&self) -> u64 {
        self.found
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) -> Result<(), TargetError> {
        let found = self.found.saturating_add(bytes.len() as u64);
        if found > self.length {
            return Err(TargetError::TooLong { length: self.length });
        }
        self.found = found;
        if let Some((context, _)) = &mut self.sha256 {
            context.update(bytes);
        }
        if let Some((context, _)) = &mut self.sha512 {
            context.update(bytes);
        }
        Ok(())
    }

    /// Says whether what went through is the file.
    pub fn finish(self) -> Result<(), TargetError> {
        if self.sha256.is_none() && self.sha512.is_none() {
            return Err(TargetError::NoDigest);
        }
        if self.found < self.length {
            return Err(TargetError::TooShort { length: self.length, found: self.found });
        }
        if let Some((context, digest)) = self.sha256
            && context.finish().as_ref() != digest
        {
            return Err(TargetError::Digest { algorithm: "SHA-256" });
        }
        if let Some((context, digest)) = self.sha512
            && context.finish().as_ref() != digest
        {
            return Err(TargetError::Digest { algorithm: "SHA-512" });
        }
        Ok(())
    }
}
