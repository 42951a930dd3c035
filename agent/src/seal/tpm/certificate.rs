//! What the TPM's maker left in it to vouch for it: the certificate of the endorsement key that
//! [`super::quote`] uses, and perhaps certificates of the maker's authorities. They are read, and judged elsewhere.
//!
//! A TPM whose maker certified another key only (RSA, or one with a nonce of its own in the template) has
//! none for this one.
//! Source: TCG EK Credential Profile for TPM Family 2.0, §2.2.1 (indices and their attributes).

use lease::attestation::{MAX_CERTIFICATE, MAX_CHAIN};

use super::{
    OWNER, Tpm, TpmError,
    nv::{ANYBODY_READS, OWNER_READS, READ, WRITTEN},
    password,
    wire::{self, Reader, Writer},
};

/// Certificate of the endorsement key on P-256 (template L-2).
pub const CERTIFICATE: u32 = 0x01c0_000a;
/// Certificates between it and the maker's root, one after the other through as many indices as they need.
const CHAIN: std::ops::RangeInclusive<u32> = 0x01c0_0100..=0x01c0_01ff;
/// Most that is read at a time, in bytes: every TPM of a server gives so many.
const PIECE: u16 = 512;

/// What the maker left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Certificates {
    /// The endorsement key's certificate and what follows it in its index; empty where there is none.
    pub own: Vec<u8>,
    /// Certificates of authorities; mostly empty.
    pub chain: Vec<u8>,
}

impl Tpm {
    /// Reads what the maker left, if anything.
    ///
    /// # Errors
    /// If the TPM fails, or there is something that nobody may read or that is too long for a certificate.
    pub fn certificates(&mut self) -> Result<Certificates, TpmError> {
        let Some(own) = self.left_by_maker(CERTIFICATE, MAX_CERTIFICATE)? else {
            return Ok(Certificates::default());
        };
        let mut chain = Vec::new();
        for index in CHAIN {
            let Some(more) = self.left_by_maker(index, MAX_CHAIN - chain.len())? else { break };
            chain.extend(more);
        }
        Ok(Certificates { own, chain })
    }

    fn left_by_maker(&mut self, index: u32, most: usize) -> Result<Option<Vec<u8>>, TpmError> {
        let Some(public) = self.index(index)? else { return Ok(None) };
        if public.attributes & WRITTEN == 0 {
            return Ok(None);
        }
        if usize::from(public.size) > most {
            return Err(TpmError::Strange { what: "its maker's certificates are too long" });
        }
        let reader = if public.attributes & ANYBODY_READS != 0 {
            index
        } else if public.attributes & OWNER_READS != 0 {
            OWNER
        } else {
            return Err(TpmError::Strange { what: "its maker's certificate may not be read" });
        };
        let mut bytes = Vec::new();
        while let Ok(offset) = u16::try_from(bytes.len())
            && offset < public.size
        {
            let count = PIECE.min(public.size - offset);
            let parameters = Writer::default().u16(count).u16(offset);
            let answer = self.authorized_for(READ, &[reader, index], &password(), &parameters.0)?;
            let piece = Reader(wire::authorized(&answer)?.parameters).sized()?;
            if piece.len() != usize::from(count) {
                return Err(TpmError::Short);
            }
            bytes.extend(piece);
        }
        Ok(Some(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            nv::{DEFINE, WRITE},
            wire::SHA256,
        },
        *,
    };
    use crate::seal::tpm_tests::Emulated;

    /// The maker's hierarchy (TPM_RH_PLATFORM).
    const MAKER: u32 = 0x4000_000c;
    /// What makers give it: `PPWRITE`, `WRITEDEFINE`, `PPREAD`, `NO_DA`, `PLATFORMCREATE`.
    const ATTRIBUTES: u32 = 1 << 0 | 1 << 13 | 1 << 16 | 1 << 25 | 1 << 30;

    fn define(tpm: &mut Tpm, index: u32, attributes: u32, size: u16) {
        let public = Writer::default().u32(index).u16(SHA256).u32(ATTRIBUTES | attributes);
        let parameters = Writer::default().sized(&[]).sized(&public.sized(&[]).u16(size).0);
        tpm.authorized(DEFINE, MAKER, &password(), &parameters.0).expect("defined");
    }

    fn write(tpm: &mut Tpm, (index, offset): (u32, u16), bytes: &[u8]) {
        let parameters = Writer::default().sized(bytes).u16(offset);
        tpm.authorized_for(WRITE, &[MAKER, index], &password(), &parameters.0).expect("written");
    }

    #[test]
    fn a_certificate_is_read_in_pieces_with_what_is_beside_it() {
        let Some(emulated) = Emulated::start() else { return };
        let mut tpm = emulated.tpm();
        assert_eq!(tpm.certificates().expect("nothing to read"), Certificates::default());
        define(&mut tpm, CERTIFICATE, ANYBODY_READS, 1300);
        assert_eq!(tpm.certificates().expect("never written"), Certificates::default());
        write(&mut tpm, (CERTIFICATE, 0), &[7; 900]);
        write(&mut tpm, (CERTIFICATE, 900), &[0; 400]);
        let own = [vec![7; 900], vec![0; 400]].concat();
        let read = tpm.certificates().expect("read");
        assert_eq!(read, Certificates { own: own.clone(), chain: Vec::new() });
        // The owner reads what not everybody may.
        define(&mut tpm, 0x01c0_0100, OWNER_READS, 512);
        write(&mut tpm, (0x01c0_0100, 0), &[1; 512]);
        define(&mut tpm, 0x01c0_0101, ANYBODY_READS, 20);
        write(&mut tpm, (0x01c0_0101, 0), &[2; 20]);
        let chain = [vec![1; 512], vec![2; 20]].concat();
        assert_eq!(tpm.certificates().expect("read"), Certificates { own, chain });
    }

    #[test]
    fn what_nobody_may_read_is_told() {
        let Some(emulated) = Emulated::start() else { return };
        let mut tpm = emulated.tpm();
        define(&mut tpm, CERTIFICATE, 0, 16);
        write(&mut tpm, (CERTIFICATE, 0), &[7; 16]);
        let refused = tpm.certificates().expect_err("not to be read").to_string();
        assert!(refused.contains("may not be read"), "{refused}");
    }
}
