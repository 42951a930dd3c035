//! Spreading a key over many stripes before it is written. Source: LUKS1 On-Disk Format 1.2.3 §2.4
//! (anti-forensic splitter).

use sha2::{Digest, Sha256};
use types::disk_key::{DiskKey, KEY_BYTES};
use zeroize::Zeroizing;

use super::luks::HeaderError;

/// How many stripes a key is spread over.
pub(super) const STRIPES: usize = 4000;
/// Bytes of a split key.
pub(super) const SPLIT: usize = STRIPES * KEY_BYTES;

/// Spreads a key over 4000 stripes, so that none of it is left when a few are overwritten.
pub(super) fn split(key: &DiskKey) -> Result<Vec<u8>, HeaderError> {
    let mut bytes = vec![0; SPLIT];
    let (front, last) = bytes.split_at_mut(SPLIT - KEY_BYTES);
    getrandom::fill(front).map_err(|source| HeaderError::Random { source })?;
    let mixed = mix(front);
    for ((to, key), mixed) in last.iter_mut().zip(key.as_bytes()).zip(mixed.iter()) {
        *to = key ^ mixed;
    }
    Ok(bytes)
}

/// Returns the key that was spread over [`SPLIT`] bytes.
pub(super) fn merge(bytes: &[u8]) -> DiskKey {
    let (front, last) = bytes.split_at(SPLIT - KEY_BYTES);
    let mut key = *mix(front);
    key.iter_mut().zip(last).for_each(|(to, from)| *to ^= from);
    DiskKey::from_bytes(key)
}

fn mix(stripes: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut mixed = Zeroizing::new([0; KEY_BYTES]);
    for stripe in stripes.chunks_exact(KEY_BYTES) {
        mixed.iter_mut().zip(stripe).for_each(|(to, from)| *to ^= from);
        for (index, part) in (0_u32..).zip(mixed.chunks_exact_mut(32)) {
            let digest = Sha256::new().chain_update(index.to_be_bytes()).chain_update(&*part);
            part.copy_from_slice(&digest.finalize());
        }
    }
    mixed
}
