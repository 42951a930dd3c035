//! Reading what a TPM signed. Pure; whoever answers chose these bytes.
//! Source: TPM 2.0 Library, Part 2 (integers are big-endian; `TPM2B`: a length of two bytes and as many
//! bytes).
//!
//! | Structure        | Section | Here            |
//! |------------------|---------|-----------------|
//! | `TPMS_ATTEST`    | 10.12.8 | [`Quote`]       |
//! | `TPMT_SIGNATURE` | 11.3.4  | [`signature`]   |
//! | `TPMT_PUBLIC`    | 12.2.4  | [`EccKey`]      |

use super::AttestationError;

/// TPM_GENERATED_VALUE: only a TPM signs what begins so, where the key is restricted.
const GENERATED: u32 = 0xff54_4347;
/// TPM_ST_ATTEST_QUOTE.
const QUOTE: u16 = 0x8018;
/// TPM_ALG_ECC, TPM_ALG_ECDSA, TPM_ALG_SHA256, TPM_ALG_NULL, TPM_ECC_NIST_P256.
const ECC: u16 = 0x0023;
const ECDSA: u16 = 0x0018;
pub(super) const SHA256: u16 = 0x000b;
const NULL: u16 = 0x0010;
const P256: u16 = 0x0003;
/// TPM_ALG_AES in CFB mode.
const AES: u16 = 0x0006;
const CFB: u16 = 0x0043;
/// Most banks that one quote is about.
const MAX_BANKS: u32 = 16;

/// What a quote says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Quote<'a> {
    /// Digest of what was asked.
    pub(super) extra: &'a [u8],
    /// Starts of the TPM since it was made or cleared.
    pub(super) resets: u32,
    /// Registers of SHA-256's bank that the digest is of, in order.
    pub(super) registers: Vec<u8>,
    /// Digest of their values.
    pub(super) digest: &'a [u8],
}

/// A public key on P-256.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EccKey {
    /// What it may do (TPMA_OBJECT, Part 2 §8.3).
    pub(super) attributes: u32,
    /// Its coordinates.
    pub(super) x: [u8; 32],
    pub(super) y: [u8; 32],
    /// Whether it signs with ECDSA and SHA-256 and nothing else, or decrypts for a parent's children.
    pub(super) scheme: Scheme,
}

/// What a key is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// ECDSA with SHA-256.
    Signs,
    /// A storage key: no scheme, and AES-128 in CFB mode for what is below it.
    Stores,
}

/// Bytes that are read from the start.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], AttestationError> {
        let cut = self.0.split_at_checked(count);
        let (now, rest) = cut.ok_or(AttestationError::Malformed { what })?;
        self.0 = rest;
        Ok(now)
    }

    fn u8(&mut self, what: &'static str) -> Result<u8, AttestationError> {
        Ok(self.take(1, what)?[0])
    }

    fn u16(&mut self, what: &'static str) -> Result<u16, AttestationError> {
        let bytes = self.take(2, what)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, AttestationError> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn sized(&mut self, what: &'static str) -> Result<&'a [u8], AttestationError> {
        let length = self.u16(what)?;
        self.take(usize::from(length), what)
    }

    /// A number of at most 32 bytes, with the zeros before it that the TPM may leave out.
    fn number(&mut self, what: &'static str) -> Result<[u8; 32], AttestationError> {
        let bytes = self.sized(what)?;
        let mut padded = [0; 32];
        let start =
            32_usize.checked_sub(bytes.len()).ok_or(AttestationError::Malformed { what })?;
        padded[start..].copy_from_slice(bytes);
        Ok(padded)
    }

    fn end(self, what: &'static str) -> Result<(), AttestationError> {
        if self.0.is_empty() { Ok(()) } else { Err(AttestationError::Malformed { what }) }
    }
}

impl<'a> Quote<'a> {
    /// Reads a `TPMS_ATTEST` that is a quote.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, AttestationError> {
        const WHAT: &str = "quote";
        let mut reader = Reader(bytes);
        if reader.u32(WHAT)? != GENERATED || reader.u16(WHAT)? != QUOTE {
            return Err(AttestationError::Malformed { what: WHAT });
        }
        let (_signer, extra) = (reader.sized(WHAT)?, reader.sized(WHAT)?);
        let _clock = reader.take(8, WHAT)?;
        let (resets, _restarts) = (reader.u32(WHAT)?, reader.u32(WHAT)?);
        let (_safe, _firmware) = (reader.u8(WHAT)?, reader.take(8, WHAT)?);
        let banks = reader.u32(WHAT)?;
        if banks > MAX_BANKS {
            return Err(AttestationError::Malformed { what: WHAT });
        }
        let mut registers = Vec::new();
        for _ in 0..banks {
            let (bank, length) = (reader.u16(WHAT)?, reader.u8(WHAT)?);
            let bits = reader.take(usize::from(length.min(4)), WHAT)?;
            // One bank only: the digest is over the values in the order of the banks.
            if bank != SHA256 || !registers.is_empty() || length > 4 {
                return Err(AttestationError::Malformed { what: WHAT });
            }
            let set = |number: &u8| bits[usize::from(number / 8)] & (1 << (number % 8)) != 0;
            registers = (0..length * 8).filter(set).collect();
        }
        let digest = reader.sized(WHAT)?;
        reader.end(WHAT)?;
        Ok(Self { extra, resets, registers, digest })
    }
}

/// Reads a `TPMT_SIGNATURE` of ECDSA with SHA-256: r and s, one after the other.
pub(super) fn signature(bytes: &[u8]) -> Result<[u8; 64], AttestationError> {
    const WHAT: &str = "signature";
    let mut reader = Reader(bytes);
    if (reader.u16(WHAT)?, reader.u16(WHAT)?) != (ECDSA, SHA256) {
        return Err(AttestationError::Malformed { what: WHAT });
    }
    let (r, s) = (reader.number(WHAT)?, reader.number(WHAT)?);
    reader.end(WHAT)?;
    let mut both = [0; 64];
    both[..32].copy_from_slice(&r);
    both[32..].copy_from_slice(&s);
    Ok(both)
}

impl EccKey {
    /// Reads a `TPMT_PUBLIC` on P-256; `what` names it in a refusal.
    pub(super) fn read(bytes: &[u8], what: &'static str) -> Result<Self, AttestationError> {
        let mut reader = Reader(bytes);
        if (reader.u16(what)?, reader.u16(what)?) != (ECC, SHA256) {
            return Err(AttestationError::Malformed { what });
        }
        let (attributes, _policy) = (reader.u32(what)?, reader.sized(what)?);
        let stores = match reader.u16(what)? {
            NULL => false,
            AES if (reader.u16(what)?, reader.u16(what)?) == (128, CFB) => true,
            _ => return Err(AttestationError::Malformed { what }),
        };
        let scheme = match (reader.u16(what)?, stores) {
            (ECDSA, false) if reader.u16(what)? == SHA256 => Scheme::Signs,
            (NULL, true) => Scheme::Stores,
            _ => return Err(AttestationError::Malformed { what }),
        };
        if (reader.u16(what)?, reader.u16(what)?) != (P256, NULL) {
            return Err(AttestationError::Malformed { what });
        }
        let (x, y) = (reader.number(what)?, reader.number(what)?);
        reader.end(what)?;
        Ok(Self { attributes, x, y, scheme })
    }

    /// The point as X9.62 writes it: 4, x, y.
    pub(super) fn point(&self) -> Vec<u8> {
        [&[4][..], &self.x, &self.y].concat()
    }
}
