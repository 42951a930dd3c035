//! What the TPM will hold after this boot program started, and the signed policy that lets keys be
//! bound to it.
//!
//! Pure but for the key. systemd-stub measures the sections of a unified kernel image into PCR 11, the
//! name and then the content of each. A key in the TPM that is bound to "whatever the owner of this
//! key signs for PCR 11" opens for every release that carries such a signature, so that updates need
//! no sealing anew. Signature and key travel in the program, and the stub hands them to the system.
//! Sources: systemd v257 `src/fundamental/uki.c` and `src/boot/stub.c` (order of sections),
//! systemd-measure(1) (the JSON document); TPM 2.0 Library Specification rev. 1.59, part 3 §23.7
//! (`TPM2_PolicyPCR`), part 2 §10.9.7 (`TPML_PCR_SELECTION`).

use base64::{Engine, engine::general_purpose::STANDARD};
use object::{Object, ObjectSection, read::pe::PeFile64};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::signer::{Key, SignerError};

/// The register that holds the boot program's sections.
pub const REGISTER: u32 = 11;
/// Sections in the order in which the stub measures them, each where there is one. The signature
/// itself is not among them: it says what the others come to.
const MEASURED: [&str; 12] = [
    ".linux", ".osrel", ".cmdline", ".initrd", ".ucode", ".splash", ".dtb", ".uname", ".sbat",
    ".pcrpkey", ".profile", ".hwids",
];
/// Releases of systemd whose stub measures in this order.
const KNOWN_STUBS: [&str; 1] = ["257"];
/// What the stub says before its version in `.sdmagic`.
const STUB_MAGIC: &[u8] = b"#### LoaderInfo: systemd-stub ";
/// TPM_CC_PolicyPCR.
const POLICY_PCR: u32 = 0x0000_017f;
/// TPM_ALG_SHA256.
const TPM_SHA256: u16 = 0x000b;
/// Bytes of a selection of registers.
const SELECTION: u32 = 3;

/// Why nothing can be said of what will be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum PcrError {
    #[error("the boot program cannot be read: {0}")]
    Program(String),
    #[error(
        "what systemd-stub {0} measures has not been compared with a TPM; systemd-stub 257 has been"
    )]
    UnknownStub(String),
    #[error(transparent)]
    Key(#[from] SignerError),
}

/// Returns PCR 11 in its SHA-256 bank as it is when the stub has handed over to the kernel.
pub fn predict(program: &[u8]) -> Result<[u8; 32], PcrError> {
    let file: PeFile64<'_> =
        PeFile64::parse(program).map_err(|error| PcrError::Program(error.to_string()))?;
    let content = |name: &str| file.section_by_name(name).and_then(|found| found.data().ok());
    known_stub(content(".sdmagic").unwrap_or_default())?;
    Ok(measure(content))
}

/// Returns the register after a stub measured these sections, given by their names.
pub fn measure<'a>(content: impl Fn(&str) -> Option<&'a [u8]>) -> [u8; 32] {
    let mut register = [0; 32];
    for name in MEASURED {
        if let Some(data) = content(name) {
            extend(&mut register, &[name.as_bytes(), &[0]].concat());
            extend(&mut register, data);
        }
    }
    register
}

fn known_stub(magic: &[u8]) -> Result<(), PcrError> {
    let version = magic.strip_prefix(STUB_MAGIC).unwrap_or_default();
    let version = String::from_utf8_lossy(version);
    let version = version.split([' ', '-', '.']).next().unwrap_or_default();
    if KNOWN_STUBS.contains(&version) {
        Ok(())
    } else {
        Err(PcrError::UnknownStub(version.to_owned()))
    }
}

/// A register takes the digest of itself and of the digest of what is measured.
fn extend(register: &mut [u8; 32], data: &[u8]) {
    let mut hash = Sha256::new();
    hash.update(*register);
    hash.update(Sha256::digest(data));
    *register = hash.finalize().into();
}

/// Returns the digest of the policy that PCR 11 holds this value.
pub fn policy(register: &[u8; 32]) -> [u8; 32] {
    let mut select = [0; SELECTION as usize];
    select[(REGISTER / 8) as usize] = 1 << (REGISTER % 8);
    let mut hash = Sha256::new();
    // The policy so far: none.
    hash.update([0; 32]);
    hash.update(POLICY_PCR.to_be_bytes());
    hash.update(1_u32.to_be_bytes());
    hash.update(TPM_SHA256.to_be_bytes());
    hash.update([SELECTION.to_be_bytes()[3]]);
    hash.update(select);
    hash.update(Sha256::digest(register));
    hash.finalize().into()
}

/// Returns the content of `.pcrsig`: the policy for this value, signed.
pub fn signature(register: &[u8; 32], key: &Key) -> Result<Vec<u8>, PcrError> {
    let policy = policy(register);
    let document = json!({
        "sha256": [{
            "pcrs": [REGISTER],
            "pkfp": crate::sha256_hex(key.public_pkcs1()),
            "pol": crate::hex(&policy),
            "sig": STANDARD.encode(key.sign(&policy)?),
        }]
    });
    Ok(document.to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stubs_are_known_by_their_release() {
        assert!(known_stub(b"#### LoaderInfo: systemd-stub 257.13-1~deb13u1 ####").is_ok());
        let refusal = known_stub(b"#### LoaderInfo: systemd-stub 252.39-1 ####").map(drop);
        assert!(matches!(refusal, Err(PcrError::UnknownStub(version)) if version == "252"));
        assert!(known_stub(b"").is_err());
    }

    #[test]
    fn a_register_is_extended_as_tpms_do() {
        let mut register = [0; 32];
        extend(&mut register, b"x");
        let inner = Sha256::digest(b"x");
        let wanted: [u8; 32] = Sha256::digest([&[0; 32][..], &inner].concat()).into();
        assert_eq!(register, wanted);
    }
}
