//! Sessions with the TPM, salted with its storage key: whoever listens on the bus sees no secret, and
//! whoever alters answers is noticed.
//! Source: TPM 2.0 Library, Part 1 §11.4.10 (KDFa, KDFe), §19 (sessions), §21 (session-based
//! encryption), Annex C.6.1 (secret sharing by ECDH).

use aes::{
    Aes128, Block,
    cipher::{BlockCipherEncrypt, KeyInit},
};
use aws_lc_rs::{
    agreement::{ECDH_P256, PrivateKey, UnparsedPublicKey, agree},
    error::Unspecified,
};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::{
    Tpm, TpmError,
    wire::{self, NULL, Reader, SHA256, Writer},
};

/// Kinds of sessions (TPM_SE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Hmac = 0,
    Policy = 1,
}

/// What a session does with a command (TPMA_SESSION).
const CONTINUE: u8 = 1 << 0;
/// The first parameter of the command is encrypted.
pub(super) const DECRYPT: u8 = 1 << 5;
/// The first parameter of the response is.
pub(super) const ENCRYPT: u8 = 1 << 6;

const START_SESSION: u32 = 0x176;
const NONCE: usize = 32;

/// A session.
pub(super) struct Session {
    pub(super) handle: u32,
    key: Zeroizing<[u8; 32]>,
    nonce_tpm: Vec<u8>,
}

/// The TPM's storage key: a parent, and what salts are encrypted for.
#[derive(Debug, Clone)]
pub(super) struct StorageKey {
    pub(super) handle: u32,
    pub(super) name: Vec<u8>,
    pub(super) public: Vec<u8>,
}

/// A command that a session protects.
pub(super) struct Protected<'a> {
    pub(super) code: u32,
    /// The handle that it needs permission for, and its name.
    pub(super) object: (u32, &'a [u8]),
    pub(super) parameters: Vec<u8>,
    /// [`DECRYPT`] or [`ENCRYPT`].
    pub(super) protect: u8,
}

impl Session {
    /// Starts a session.
    pub(super) fn start(
        tpm: &mut Tpm,
        kind: Kind,
        salt_for: &StorageKey,
    ) -> Result<Self, TpmError> {
        let nonce = nonce()?;
        let (salt, encrypted) = make_salt(&salt_for.public)?;
        let parameters = Writer::default()
            .u32(salt_for.handle)
            .u32(super::NULL_HANDLE)
            .sized(&nonce)
            .sized(&encrypted)
            .u8(kind as u8)
            .u16(super::AES)
            .u16(128)
            .u16(super::CFB)
            .u16(SHA256);
        let answer = tpm.plain(START_SESSION, parameters.0)?;
        let mut reader = Reader(&answer);
        let handle = reader.u32()?;
        let nonce_tpm = reader.sized()?.to_vec();
        let key = kdfa(salt.as_ref(), b"ATH", &nonce_tpm, &nonce);
        Ok(Self { handle, key, nonce_tpm })
    }

    /// Runs a command and returns its parameters, decrypted.
    pub(super) fn run(
        &mut self,
        tpm: &mut Tpm,
        command: Protected<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let Protected { code, object: (handle, name), mut parameters, protect } = command;
        let nonce = nonce()?;
        if protect & DECRYPT != 0 {
            let mask = kdfa(self.key.as_ref(), b"CFB", &nonce, &self.nonce_tpm);
            cfb(&mask, first(&mut parameters)?, Direction::Encrypt);
        }
        let attributes = CONTINUE | protect;
        let digest = Sha256::new()
            .chain_update(code.to_be_bytes())
            .chain_update(name)
            .chain_update(&parameters)
            .finalize();
        let hmac = self.hmac(&digest, (&nonce, &self.nonce_tpm), attributes).finalize();
        let session = Writer::default()
            .u32(self.handle)
            .sized(&nonce)
            .u8(attributes)
            .sized(&hmac.into_bytes());
        let answer = tpm.authorized(code, handle, &session.0, &parameters)?;
        self.open(code, &answer, &nonce, attributes)
    }

    fn open(
        &mut self,
        code: u32,
        answer: &[u8],
        nonce: &[u8],
        sent: u8,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let found = wire::authorized(answer)?;
        let digest = Sha256::new()
            .chain_update(0_u32.to_be_bytes())
            .chain_update(code.to_be_bytes())
            .chain_update(found.parameters)
            .finalize();
        let proof = self.hmac(&digest, (found.nonce, nonce), found.attributes);
        proof.verify_slice(found.hmac).map_err(|_| TpmError::Forged)?;
        self.nonce_tpm = found.nonce.to_vec();
        let mut parameters = Zeroizing::new(found.parameters.to_vec());
        if sent & ENCRYPT != 0 {
            let mask = kdfa(self.key.as_ref(), b"CFB", &self.nonce_tpm, nonce);
            cfb(&mask, first(&mut parameters)?, Direction::Decrypt);
        }
        Ok(parameters)
    }

    fn hmac(&self, digest: &[u8], (newer, older): (&[u8], &[u8]), attributes: u8) -> Hmac<Sha256> {
        let mac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(self.key.as_ref());
        let mut mac = mac.expect("any length is right");
        for part in [digest, newer, older, &[attributes]] {
            mac.update(part);
        }
        mac
    }
}

fn nonce() -> Result<[u8; NONCE], TpmError> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce)
        .map_err(|_| TpmError::Strange { what: "there is no randomness" })?;
    Ok(nonce)
}

/// The bytes of the first parameter, which begins with its length.
fn first(parameters: &mut [u8]) -> Result<&mut [u8], TpmError> {
    let length = Reader(parameters).u16()?;
    parameters.get_mut(2..2 + usize::from(length)).ok_or(TpmError::Short)
}

/// Agrees on a salt with the holder of a key on P-256; returns it and what the holder needs for it.
fn make_salt(public: &[u8]) -> Result<(Zeroizing<[u8; 32]>, Vec<u8>), TpmError> {
    let (x, y) = wire::point(public)?;
    let broken =
        |_: Unspecified| TpmError::Strange { what: "its storage key is no point of P-256" };
    let own = PrivateKey::generate(&ECDH_P256).map_err(broken)?;
    let own_public = own.compute_public_key().map_err(broken)?;
    // Uncompressed: 4, x, y.
    let own_public = own_public.as_ref();
    let (own_x, own_y) =
        own_public.get(1..).unwrap_or_default().split_at_checked(32).ok_or(TpmError::Short)?;
    let theirs = UnparsedPublicKey::new(&ECDH_P256, [&[4][..], &x, &y].concat());
    let salt = agree(&own, theirs, Unspecified, |shared| {
        // KDFe: counter, shared secret, use, both x coordinates.
        let mut digest = Sha256::new();
        for part in [&1_u32.to_be_bytes()[..], shared, b"SECRET\0", own_x, &x] {
            digest.update(part);
        }
        Ok(Zeroizing::new(<[u8; 32]>::from(digest.finalize())))
    });
    let point = Writer::default().sized(own_x).sized(own_y);
    Ok((salt.map_err(broken)?, point.0))
}

/// KDFa for 256 bits: HMAC over counter, use, both contexts, and the number of bits.
fn kdfa(key: &[u8], label: &[u8], first: &[u8], second: &[u8]) -> Zeroizing<[u8; 32]> {
    let mac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(key);
    let mut mac = mac.expect("any length is right");
    for part in [&1_u32.to_be_bytes(), label, &[0], first, second, &256_u32.to_be_bytes()] {
        mac.update(part);
    }
    Zeroizing::new(mac.finalize().into_bytes().into())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// AES-128 in CFB mode; the first half of `mask` is the key, the second the initial vector.
fn cfb(mask: &[u8; 32], bytes: &mut [u8], direction: Direction) {
    let (mut key, mut previous) = ([0; 16], [0; 16]);
    key.copy_from_slice(&mask[..16]);
    previous.copy_from_slice(&mask[16..]);
    let cipher = Aes128::new(&key.into());
    for chunk in bytes.chunks_mut(16) {
        let mut block: Block = previous.into();
        cipher.encrypt_block(&mut block);
        for (at, (byte, mask)) in chunk.iter_mut().zip(block).enumerate() {
            let before = *byte;
            *byte ^= mask;
            previous[at] = if direction == Direction::Encrypt { *byte } else { before };
        }
    }
}

const _: () = assert!(NULL == 0x10);
