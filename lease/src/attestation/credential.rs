//! A secret that only the TPM with one endorsement key gives back, and only when it has one other key,
//! too: so both are in the same TPM.
//! Source: TPM 2.0 Library, Part 1 §24 (credential protection), §11.4.10 (KDFa, KDFe), Annex C.6.4;
//! Part 2 §11.4.33 (`TPM2B_ENCRYPTED_SECRET`), §12.4.3 (`TPM2B_ID_OBJECT`).
//!
//! The ephemeral key is the library's own randomness: a repeated one would give the secret away.

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

use super::{AttestationError, Credential, ENDORSEMENT, wire};

/// Makes a secret that [`super::Evidence::activated`] repeats.
pub fn make(
    endorsement_key: &[u8],
    attestation_key: &[u8],
    secret: &[u8; 32],
) -> Result<Credential, AttestationError> {
    let key = super::endorsement(endorsement_key)?;
    let name = super::name_of(attestation_key);
    let broken =
        |_: Unspecified| AttestationError::Key { which: ENDORSEMENT, what: "no point of P-256" };
    let own = PrivateKey::generate(&ECDH_P256).map_err(broken)?;
    let own_public = own.compute_public_key().map_err(broken)?;
    let (own_x, own_y) = own_public.as_ref().get(1..).unwrap_or_default().split_at(32);
    let theirs = UnparsedPublicKey::new(&ECDH_P256, key.point());
    let seed = agree(&own, theirs, Unspecified, |shared| {
        // KDFe: counter, shared secret, use, both x coordinates.
        let mut digest = Sha256::new();
        for part in [&1_u32.to_be_bytes()[..], shared, b"IDENTITY\0", own_x, &key.x] {
            digest.update(part);
        }
        Ok(Zeroizing::new(<[u8; 32]>::from(digest.finalize())))
    });
    let seed = seed.map_err(broken)?;
    let mut sealed = sized(secret);
    let storage = kdfa(seed.as_ref(), (b"STORAGE", &name), 128);
    cfb(&storage[..16], &mut sealed);
    let integrity = kdfa(seed.as_ref(), (b"INTEGRITY", &[]), 256);
    let proof = mac(integrity.as_ref(), &[&sealed, &name]);
    Ok(Credential {
        blob: [sized(&proof), sealed].concat(),
        secret: [sized(own_x), sized(own_y)].concat(),
    })
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes()[..], bytes].concat()
}

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(key);
    let mut mac = mac.expect("any length is right");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// KDFa for at most 256 bits: HMAC over counter, use, context, and the number of bits.
fn kdfa(key: &[u8], (label, context): (&[u8], &[u8]), bits: u32) -> Zeroizing<[u8; 32]> {
    let parts = [&1_u32.to_be_bytes(), label, &[0], context, &bits.to_be_bytes()];
    Zeroizing::new(mac(key, &parts))
}

/// AES-128 in CFB mode with an initial vector of zeros; every key is used once.
fn cfb(key: &[u8], bytes: &mut [u8]) {
    let mut exact = [0; 16];
    exact.copy_from_slice(key);
    let cipher = Aes128::new(&exact.into());
    let mut previous = [0; 16];
    for chunk in bytes.chunks_mut(16) {
        let mut block: Block = previous.into();
        cipher.encrypt_block(&mut block);
        for ((byte, mask), before) in chunk.iter_mut().zip(block).zip(&mut previous) {
            *byte ^= mask;
            *before = *byte;
        }
    }
}

const _: () = assert!(wire::SHA256 == 0x0b, "names are SHA-256 digests");
