//! The boot program from its parts to the last signature, and back to its parts.
//!
//! Pure but for the keys. The order matters: what the TPM measures is signed inside of the program,
//! then the whole program is signed for Secure Boot.

use object::{Object, ObjectSection, read::pe::PeFile64};
use serde_json::{Value, json};

use crate::authenticode::{self, AuthenticodeError};
use crate::enrolment;
use crate::keys::Keys;
use crate::pcr::{self, PcrError};
use crate::signer::SignerError;
use crate::uki::{self, Section, UkiError};

/// Our sections, which follow the stub's, in the order in which they are written.
pub const SECTIONS: [&str; 7] =
    [".osrel", ".cmdline", ".uname", ".initrd", ".linux", PUBLIC_KEY, SIGNATURE];
/// The public key of the one below, in PEM.
const PUBLIC_KEY: &str = ".pcrpkey";
/// What the TPM measures, signed.
const SIGNATURE: &str = ".pcrsig";

/// Why a boot program was not made, or not understood.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ProgramFileError {
    #[error(transparent)]
    Uki(#[from] UkiError),
    #[error(transparent)]
    Authenticode(#[from] AuthenticodeError),
    #[error(transparent)]
    Pcr(#[from] PcrError),
    #[error(transparent)]
    Signer(#[from] SignerError),
    #[error("the boot program cannot be read: {0}")]
    Unreadable(String),
    #[error("the boot program has a section {0}, which this builder does not know")]
    UnknownSection(String),
    #[error("the boot program has no section {0}; it is none of this builder's")]
    MissingSection(&'static str),
    #[error("the boot program is not what its own parts come to; another builder made it")]
    Different,
}

/// A boot program's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// systemd-stub.
    pub stub: Vec<u8>,
    /// `/etc/os-release`.
    pub os_release: Vec<u8>,
    /// The kernel's command line.
    pub cmdline: Vec<u8>,
    /// What `uname -r` says.
    pub kernel_release: Vec<u8>,
    /// The initramfs.
    pub initrd: Vec<u8>,
    /// The kernel.
    pub kernel: Vec<u8>,
}

/// A finished boot program and what travels with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The file.
    pub bytes: Vec<u8>,
    /// Updates of the firmware's keys, by their paths on the EFI system partition.
    pub updates: Vec<(String, Vec<u8>)>,
    /// What there is to say of it: digests, signatures, the expected state of the TPM.
    pub measurements: Value,
}

impl Parts {
    fn sections(&self) -> [Section<'_>; 5] {
        let section = |name, data| Section { name, data };
        [
            section(SECTIONS[0], &self.os_release),
            section(SECTIONS[1], &self.cmdline),
            section(SECTIONS[2], &self.kernel_release),
            section(SECTIONS[3], &self.initrd),
            section(SECTIONS[4], &self.kernel),
        ]
    }

    /// Puts the program together and signs it with the keys that there are. `time` is in seconds since
    /// 1970 and dates the updates of firmware's keys.
    pub fn finish(&self, keys: &Keys, time: u64) -> Result<Program, ProgramFileError> {
        let mut sections = self.sections().to_vec();
        let public = keys.pcr.as_ref().map(|key| key.public_pem()).transpose()?;
        if let Some(public) = &public {
            sections.push(Section { name: PUBLIC_KEY, data: public.as_bytes() });
        }
        let bare = uki::assemble(&self.stub, &sections)?;
        let signature = match &keys.pcr {
            Some(key) => Some(pcr::signature(&pcr::predict(&bare)?, key)?),
            None => None,
        };
        let bare = match &signature {
            Some(data) => {
                sections.push(Section { name: SIGNATURE, data });
                uki::assemble(&self.stub, &sections)?
            }
            None => bare,
        };
        let owner = keys.owner.as_ref().or(keys.programs.as_ref());
        let (bytes, updates) = match (&keys.programs, owner) {
            (Some(signer), Some(owner)) => {
                let updates = enrolment::updates(owner, signer, &keys.db, time)?;
                (authenticode::sign(&bare, signer)?, updates)
            }
            _ => (bare, Vec::new()),
        };
        let measurements = measurements(&bytes, keys)?;
        Ok(Program { bytes, updates, measurements })
    }

    /// Takes a program apart, which must be what its checksum and its signatures say: what was altered would be
    /// signed again. The signatures go, and what is left must come to the same program again.
    pub fn of(program: &[u8]) -> Result<Self, ProgramFileError> {
        authenticode::check(program)?;
        let bare = authenticode::unsigned(program)?;
        let file: PeFile64<'_> = PeFile64::parse(bare.as_slice())
            .map_err(|error| ProgramFileError::Unreadable(error.to_string()))?;
        let names: Vec<&str> = file.sections().filter_map(|section| section.name().ok()).collect();
        let first = names
            .iter()
            .position(|name| *name == SECTIONS[0])
            .ok_or(ProgramFileError::MissingSection(SECTIONS[0]))?;
        if let Some(name) = names[first..].iter().find(|name| !SECTIONS.contains(name)) {
            return Err(ProgramFileError::UnknownSection((*name).to_owned()));
        }
        let content = |name: &'static str| {
            let found = file.section_by_name(name).and_then(|found| found.data().ok());
            found.ok_or(ProgramFileError::MissingSection(name))
        };
        let parts = Self {
            stub: uki::truncated(&bare, first)?,
            os_release: content(SECTIONS[0])?.to_vec(),
            cmdline: content(SECTIONS[1])?.to_vec(),
            kernel_release: content(SECTIONS[2])?.to_vec(),
            initrd: content(SECTIONS[3])?.to_vec(),
            kernel: content(SECTIONS[4])?.to_vec(),
        };
        let mut sections = parts.sections().to_vec();
        for name in [PUBLIC_KEY, SIGNATURE] {
            if let Ok(data) = content(name) {
                sections.push(Section { name, data });
            }
        }
        if uki::assemble(&parts.stub, &sections)? != bare {
            return Err(ProgramFileError::Different);
        }
        Ok(parts)
    }
}

/// Which signatures a program carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signatures {
    /// For Secure Boot.
    pub secure_boot: bool,
    /// Of what the TPM measures.
    pub measurements: bool,
}

impl Signatures {
    /// Looks for signatures; whether they are good is left to firmware and TPM.
    pub fn of(program: &[u8]) -> Result<Self, ProgramFileError> {
        Ok(Self {
            secure_boot: !authenticode::certificates(program)?.is_empty(),
            measurements: uki::section(program, SIGNATURE).is_some(),
        })
    }
}

/// What a release says of its boot program, so that others can compare what they see.
fn measurements(program: &[u8], keys: &Keys) -> Result<Value, ProgramFileError> {
    // A stub that was not compared with a TPM is not worth a failed build without a key.
    let register = pcr::predict(program).ok();
    let certificate = keys.programs.as_ref().map(|signer| crate::sha256_hex(signer.certificate()));
    let about = uki::section(program, SECTIONS[0]).unwrap_or_default();
    let about = String::from_utf8_lossy(&about);
    let field = |name: &str| about.lines().find_map(|line| line.strip_prefix(name));
    Ok(json!({
        "version": 1,
        "release": { "version": field("VERSION_ID="), "commit": field("BUILD_ID=") },
        "uki": { "bytes": program.len(), "sha256": crate::sha256_hex(program) },
        "secure_boot": {
            "authenticode_sha256": crate::hex(&authenticode::digest(program)?),
            "certificate_sha256": certificate,
        },
        "tpm": {
            "pcr11_sha256": register.map(|register| crate::hex(&register)),
            "policy_sha256": register.map(|register| crate::hex(&pcr::policy(&register))),
            "key_sha256": keys.pcr.as_ref().map(|key| crate::sha256_hex(key.public_pkcs1())),
        },
    }))
}
