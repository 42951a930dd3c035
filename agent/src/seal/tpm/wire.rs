//! Writing and reading the TPM's structures. Source: TPM 2.0 Library, Part 1 §D (big-endian integers;
//! `TPM2B`: a length of two bytes and as many bytes) and Part 2.

use super::TpmError;

/// SHA-256, the only digest here (TPM_ALG_SHA256).
pub(super) const SHA256: u16 = 0x000b;
/// No algorithm (TPM_ALG_NULL).
pub(super) const NULL: u16 = 0x0010;

/// Bytes of a command or a structure in the making.
#[derive(Debug, Clone, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(super) fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// A length and the bytes. Nothing here is longer than a few KiB.
    pub(super) fn sized(self, bytes: &[u8]) -> Self {
        let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.u16(length).raw(&bytes[..usize::from(length)])
    }

    /// A selection of one register of SHA-256's bank (TPML_PCR_SELECTION).
    pub(super) fn register(self, register: u8) -> Self {
        self.registers(&[register])
    }

    /// A selection of several, 24 and more left out: there are none.
    pub(super) fn registers(self, registers: &[u8]) -> Self {
        let mut bits = [0_u8; 3];
        for register in registers {
            if let Some(byte) = bits.get_mut(usize::from(register / 8)) {
                *byte |= 1 << (register % 8);
            }
        }
        self.u32(1).u16(SHA256).u8(3).raw(&bits)
    }
}

/// What the TPM said, read from its start. It may be anybody's on the bus.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], TpmError> {
        let (now, rest) = self.0.split_at_checked(count).ok_or(TpmError::Short)?;
        self.0 = rest;
        Ok(now)
    }

    pub(super) fn u8(&mut self) -> Result<u8, TpmError> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16, TpmError> {
        let bytes = self.take(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    pub(super) fn u32(&mut self) -> Result<u32, TpmError> {
        let bytes = self.take(4)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    pub(super) fn sized(&mut self) -> Result<&'a [u8], TpmError> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }
}

/// A response: its code, and what follows.
pub(super) fn response(bytes: &[u8]) -> Result<(u32, &[u8]), TpmError> {
    let mut reader = Reader(bytes);
    let (_tag, size, code) = (reader.u16()?, reader.u32()?, reader.u32()?);
    if usize::try_from(size).ok() != Some(bytes.len()) {
        return Err(TpmError::Short);
    }
    Ok((code, reader.0))
}

/// Parts of a response with a session: parameters, and what proves that they are the TPM's.
#[derive(Debug)]
pub(super) struct Authorized<'a> {
    pub(super) parameters: &'a [u8],
    pub(super) nonce: &'a [u8],
    pub(super) attributes: u8,
    pub(super) hmac: &'a [u8],
}

/// Reads what follows the handles of such a response.
pub(super) fn authorized(rest: &[u8]) -> Result<Authorized<'_>, TpmError> {
    let mut reader = Reader(rest);
    let size = usize::try_from(reader.u32()?).map_err(|_| TpmError::Short)?;
    let parameters = reader.take(size)?;
    let nonce = reader.sized()?;
    let attributes = reader.u8()?;
    let hmac = reader.sized()?;
    Ok(Authorized { parameters, nonce, attributes, hmac })
}

/// The point of an elliptic curve's public area (TPMT_PUBLIC of the storage key): x and y.
pub(super) fn point(public: &[u8]) -> Result<([u8; 32], [u8; 32]), TpmError> {
    let mut reader = Reader(public);
    let (kind, _name) = (reader.u16()?, reader.u16()?);
    let (_attributes, _policy) = (reader.u32()?, reader.sized()?);
    // Symmetric: AES, 128 bits, CFB; scheme, curve, key derivation.
    reader.take(6)?;
    let (scheme, curve, derivation) = (reader.u16()?, reader.u16()?, reader.u16()?);
    if (kind, scheme, curve, derivation) != (0x0023, NULL, 0x0003, NULL) {
        return Err(TpmError::Strange { what: "its storage key is none on P-256" });
    }
    let coordinate = |bytes: &[u8]| {
        let mut padded = [0; 32];
        let start = 32_usize.checked_sub(bytes.len()).ok_or(TpmError::Short)?;
        padded[start..].copy_from_slice(bytes);
        Ok::<_, TpmError>(padded)
    };
    Ok((coordinate(reader.sized()?)?, coordinate(reader.sized()?)?))
}

/// Reads `bytes` as everything that a TPM may send; for the fuzz target and its corpus. Returns
/// whether it is an answer.
pub fn everything(bytes: &[u8]) -> bool {
    let Ok((_, rest)) = response(bytes) else { return false };
    let _ = authorized(rest);
    let _ = point(rest);
    let mut reader = Reader(rest);
    while reader.sized().is_ok_and(|part| !part.is_empty()) {}
    true
}
