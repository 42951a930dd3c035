//! A few bytes that the TPM keeps whatever happens to the disk: one index of the owner hierarchy.
//!
//! It holds nothing secret, and whoever runs code of his own with the owner's authority can write or remove
//! it: it is for what must outlast a disk, not for what must resist the server's owner. An index is
//! written whole, and a TPM's memory wears out, so callers write what rose, and rarely.
//! Sources: TPM 2.0 Library, Part 3 §31 (`TPM2_NV_*`), Part 2 §13.4 (`TPMA_NV`), §13.5
//! (`TPMS_NV_PUBLIC`); TCG Registry of Reserved TPM 2.0 Handles and Localities, §2.2 (owner's indices).

use super::{
    OWNER, Tpm, TpmError, password,
    wire::{self, Reader, SHA256, Writer},
};

/// The index, in the range that the registry leaves to a TPM's owner.
pub const INDEX: u32 = 0x0180_4846;

const UNDEFINE: u32 = 0x122;
pub(super) const DEFINE: u32 = 0x12a;
pub(super) const WRITE: u32 = 0x137;
pub(super) const READ: u32 = 0x14e;
const READ_PUBLIC: u32 = 0x169;

/// Written and read by the owner, or with the index's own password, which is empty; not locked by
/// failures elsewhere (`OWNERWRITE`, `AUTHWRITE`, `OWNERREAD`, `AUTHREAD`, `NO_DA`).
const ATTRIBUTES: u32 = 1 << 1 | 1 << 2 | OWNER_READS | ANYBODY_READS | 1 << 25;
/// The owner reads it (`OWNERREAD`), or who knows its password (`AUTHREAD`).
pub(super) const OWNER_READS: u32 = 1 << 17;
pub(super) const ANYBODY_READS: u32 = 1 << 18;
/// It was written at least once (`WRITTEN`).
pub(super) const WRITTEN: u32 = 1 << 29;
/// There is no such index (TPM_RC_HANDLE for the first handle).
const NO_INDEX: u32 = 0x18b;

/// What an index is, as the TPM says.
pub(super) struct Public {
    pub(super) attributes: u32,
    pub(super) size: u16,
}

impl Tpm {
    /// Returns what the index holds, or `None` when there is none or nothing was ever written to it.
    ///
    /// # Errors
    /// If the TPM fails, or the index is not one that [`Tpm::keep`] makes.
    pub fn kept(&mut self, index: u32) -> Result<Option<Vec<u8>>, TpmError> {
        let Some(public) = self.index(index)? else { return Ok(None) };
        if public.attributes & !WRITTEN != ATTRIBUTES {
            return Err(TpmError::Strange { what: "somebody else's index is where ours would be" });
        }
        if public.attributes & WRITTEN == 0 {
            return Ok(None);
        }
        let parameters = Writer::default().u16(public.size).u16(0);
        let answer = self.authorized_for(READ, &[index, index], &password(), &parameters.0)?;
        Ok(Some(Reader(wire::authorized(&answer)?.parameters).sized()?.to_vec()))
    }

    /// Writes the index, which is made if there is none, and made anew if it has another length.
    ///
    /// # Errors
    /// If the TPM fails, has no room, or has an owner with a password; then what was there may be gone.
    pub fn keep(&mut self, index: u32, bytes: &[u8]) -> Result<(), TpmError> {
        let size = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        let found = self.index(index)?;
        if found.as_ref().is_some_and(|found| found.attributes & !WRITTEN != ATTRIBUTES) {
            return Err(TpmError::Strange { what: "somebody else's index is where ours would be" });
        }
        if found.as_ref().is_some_and(|found| found.size != size) {
            self.authorized_for(UNDEFINE, &[OWNER, index], &password(), &[])?;
        }
        if found.is_none_or(|found| found.size != size) {
            let public = Writer::default().u32(index).u16(SHA256).u32(ATTRIBUTES).sized(&[]);
            let parameters = Writer::default().sized(&[]).sized(&public.u16(size).0);
            self.authorized(DEFINE, OWNER, &password(), &parameters.0)?;
        }
        let parameters = Writer::default().sized(bytes).u16(0);
        self.authorized_for(WRITE, &[index, index], &password(), &parameters.0).map(drop)
    }

    pub(super) fn index(&mut self, index: u32) -> Result<Option<Public>, TpmError> {
        let answer = match self.plain(READ_PUBLIC, Writer::default().u32(index).0) {
            Err(TpmError::Refused { code: NO_INDEX, .. }) => return Ok(None),
            answer => answer?,
        };
        let mut reader = Reader(Reader(&answer).sized()?);
        let (_index, _digest, attributes) = (reader.u32()?, reader.u16()?, reader.u32()?);
        let (_policy, size) = (reader.sized()?, reader.u16()?);
        Ok(Some(Public { attributes, size }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seal::tpm_tests::Emulated;

    fn message(refused: Result<(), TpmError>) -> String {
        refused.expect_err("refused").to_string()
    }

    #[test]
    fn an_owner_with_a_password_is_told_of_and_what_is_there_stays_readable() {
        let Some(emulated) = Emulated::start() else { return };
        let mut tpm = emulated.tpm();
        tpm.keep(INDEX, b"before").expect("kept");
        // TPM2_HierarchyChangeAuth.
        let new = Writer::default().sized(b"secret");
        tpm.authorized(0x129, OWNER, &password(), &new.0).expect("a password");
        assert_eq!(tpm.kept(INDEX).expect("read").as_deref(), Some(&b"before"[..]));
        tpm.keep(INDEX, b"after!").expect("the index needs no owner");
        let longer = message(tpm.keep(INDEX, b"longer than before"));
        assert!(longer.contains("owner has set a password"), "{longer}");
        let other = message(tpm.keep(INDEX + 1, b"x"));
        assert!(other.contains("owner has set a password"), "{other}");
        assert_eq!(tpm.kept(INDEX).expect("read").as_deref(), Some(&b"after!"[..]));
    }

    #[test]
    fn a_full_tpm_says_so() {
        let Some(emulated) = Emulated::start() else { return };
        let mut tpm = emulated.tpm();
        let full = (1..5000).find_map(|more| tpm.keep(INDEX + more, &[1; 1024]).err());
        let full = full.expect("room has an end").to_string();
        assert!(full.contains("no room left"), "{full}");
        assert_eq!(tpm.kept(INDEX).expect("read"), None);
    }

    #[test]
    fn an_index_of_somebody_else_is_left_alone() {
        let Some(emulated) = Emulated::start() else { return };
        let mut tpm = emulated.tpm();
        // A counter: TPM_NT_COUNTER in the attributes.
        let public = Writer::default().u32(INDEX).u16(SHA256).u32(ATTRIBUTES | 1 << 4).sized(&[]);
        let parameters = Writer::default().sized(&[]).sized(&public.u16(8).0);
        tpm.authorized(DEFINE, OWNER, &password(), &parameters.0).expect("defined");
        assert!(message(tpm.kept(INDEX).map(drop)).contains("somebody else's"));
        assert!(message(tpm.keep(INDEX, &[1; 8])).contains("somebody else's"));
    }
}
