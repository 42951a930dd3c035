//! The publisher's keys: which files hold them, and what an image without one lacks.
//!
//! No key is ever made up: an image is signed by keys that were given, or it says that it is not.

use std::path::PathBuf;

use clap::Args;

use crate::signer::{self, Key, Signer, SignerError};

/// Where the publisher's keys are, all in PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct KeyFiles {
    /// RSA key that signs the boot program for Secure Boot; without one it is not signed.
    #[arg(long, requires = "secure_boot_cert", value_name = "FILE")]
    pub secure_boot_key: Option<PathBuf>,
    /// Its certificate, which servers enrol in `db`.
    #[arg(long, requires = "secure_boot_key", value_name = "FILE")]
    pub secure_boot_cert: Option<PathBuf>,
    /// RSA key of PK and KEK, whose owner may change `db` later; the one above unless given.
    #[arg(long, requires_all = ["platform_cert", "secure_boot_key"], value_name = "FILE")]
    pub platform_key: Option<PathBuf>,
    /// Its certificate.
    #[arg(long, requires = "platform_key", value_name = "FILE")]
    pub platform_cert: Option<PathBuf>,
    /// A certificate that servers enrol in `db` besides, in DER or PEM: whose programs and drivers start too,
    /// as Microsoft's, who signs the option ROMs of add-in cards. May be given several times.
    #[arg(long = "db-cert", requires = "secure_boot_key", value_name = "FILE")]
    pub db_certs: Vec<PathBuf>,
    /// RSA key of 2048 bits that signs what the TPM will measure; without one nothing can be sealed to releases.
    #[arg(long, value_name = "FILE")]
    pub pcr_key: Option<PathBuf>,
}

/// The publisher's keys.
#[derive(Debug, Default)]
pub struct Keys {
    /// Signs boot programs.
    pub programs: Option<Signer>,
    /// May change what firmware trusts; `programs` does when there is none.
    pub owner: Option<Signer>,
    /// Certificates for `db` beside that of `programs`, in DER.
    pub db: Vec<Vec<u8>>,
    /// Signs what the TPM will measure.
    pub pcr: Option<Key>,
}

impl KeyFiles {
    /// Reads the keys that there are.
    pub fn read(&self) -> Result<Keys, SignerError> {
        let pair = |key: &Option<PathBuf>, certificate: &Option<PathBuf>| {
            key.as_deref().zip(certificate.as_deref()).map(|(key, cert)| Signer::read(key, cert))
        };
        Ok(Keys {
            programs: pair(&self.secure_boot_key, &self.secure_boot_cert).transpose()?,
            owner: pair(&self.platform_key, &self.platform_cert).transpose()?,
            db: self
                .db_certs
                .iter()
                .map(|path| signer::certificate(path))
                .collect::<Result<_, _>>()?,
            pcr: self.pcr_key.as_deref().map(Key::read_for_tpm).transpose()?,
        })
    }
}

impl Keys {
    /// What an image by these keys lacks, in words for its publisher; empty when it lacks nothing.
    pub fn lacks(&self) -> Vec<&'static str> {
        let mut lacks = Vec::new();
        if self.programs.is_none() {
            lacks.push("the boot program is not signed: servers with Secure Boot refuse it");
        }
        if self.pcr.is_none() {
            lacks
                .push("no signature says what the TPM measures: nothing can be sealed to releases");
        }
        lacks
    }
}
