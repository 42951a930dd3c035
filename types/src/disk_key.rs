//! How disks are encrypted: AES-256 in XTS mode over units of one or several sectors of 512 bytes, each
//! tweaked by the number of its first sector, from the start of what is encrypted. It is what dm-crypt
//! calls `aes-xts-plain64`. Units of machines' disks are single sectors.
//! Sources: IEEE 1619-2018 §5 (XTS-AES); Linux Documentation/admin-guide/device-mapper/dm-crypt.rst.
//!
//! A machine's disk is a sparse file. A sector of it that is all zeros was never written and reads as
//! zeros; ciphertext is never all zeros but by a chance of one in 2^4096.
//!
//! XTS hides content. It does not tell that somebody altered it.

use std::fmt;

use aes::{
    Aes256, Block,
    cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use zeroize::Zeroizing;

use crate::hex;

/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// Bytes of a key: one half for the data, the other for the sectors' numbers.
pub const KEY_BYTES: usize = 64;
/// Bytes of the longest unit.
pub const LARGEST_UNIT: usize = 4096;
/// Blocks of the longest unit.
const BLOCKS: usize = LARGEST_UNIT / 16;
/// Most units of a batch.
const MOST_UNITS: usize = LARGEST_UNIT / SECTOR;

/// The key of one disk. It is in documents as hexadecimal digits, and never in a log.
#[derive(Clone, PartialEq, Eq)]
pub struct DiskKey(Zeroizing<[u8; KEY_BYTES]>);

impl DiskKey {
    /// Takes a key, which should be random; both halves must not be the same.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns its bytes.
    pub fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for DiskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskKey(…)")
    }
}

impl Serialize for DiskKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Zeroizing::new(hex::encode(self.as_bytes())))
    }
}

impl<'de> Deserialize<'de> for DiskKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Zeroizing::new(String::deserialize(deserializer)?);
        let wrong = || D::Error::custom("a disk's key has 128 hexadecimal digits");
        hex::decode(&text).map(Self::from_bytes).map_err(|_| wrong())
    }
}

/// Encrypts and decrypts sectors.
#[derive(Clone)]
pub struct SectorCipher {
    data: Aes256,
    number: Aes256,
    unit: usize,
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SectorCipher(…)")
    }
}

impl SectorCipher {
    /// Makes the cipher of one key.
    pub fn new(key: &DiskKey) -> Self {
        let mut halves = [[0; 32]; 2];
        for (half, bytes) in halves.iter_mut().zip(key.as_bytes().chunks_exact(32)) {
            half.copy_from_slice(bytes);
        }
        let halves = Zeroizing::new(halves);
        let [data, number] = &*halves;
        Self { data: Aes256::new(data.into()), number: Aes256::new(number.into()), unit: SECTOR }
    }

    /// Makes units as long as the longest, 4096 bytes.
    pub fn in_large_units(self) -> Self {
        Self { unit: LARGEST_UNIT, ..self }
    }

    /// Encrypts whole units in place; `first` is the number of the first sector. What is left of
    /// `bytes` after the last whole unit stays as it is.
    pub fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        for (number, units) in self.batches(first, bytes) {
            self.apply(number, units, |blocks| self.data.encrypt_blocks(blocks));
        }
    }

    /// Undoes [`Self::encrypt`].
    pub fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        for (number, units) in self.batches(first, bytes) {
            self.apply(number, units, |blocks| self.data.decrypt_blocks(blocks));
        }
    }

    /// Undoes [`Self::encrypt`] and leaves units that were never written as they are: zeros.
    pub fn decrypt_sparse(&self, first: u64, bytes: &mut [u8]) {
        let cipher = |blocks: &mut [Block]| self.data.decrypt_blocks(blocks);
        for (number, units) in self.batches(first, bytes) {
            if !units.chunks_exact(self.unit).any(is_zero) {
                self.apply(number, units, cipher);
                continue;
            }
            for (number, unit) in self.numbered(number, units, self.unit) {
                if !is_zero(unit) {
                    self.apply(number, unit, cipher);
                }
            }
        }
    }

    /// Returns the whole units in batches of at most [`LARGEST_UNIT`] bytes, with the number of each first sector.
    fn batches<'a>(
        &self,
        first: u64,
        bytes: &'a mut [u8],
    ) -> impl Iterator<Item = (u64, &'a mut [u8])> + use<'a> {
        let whole = bytes.len() - bytes.len() % self.unit;
        let (units, _) = bytes.split_at_mut(whole);
        self.numbered(first, units, LARGEST_UNIT)
    }

    fn numbered<'a>(
        &self,
        first: u64,
        bytes: &'a mut [u8],
        length: usize,
    ) -> impl Iterator<Item = (u64, &'a mut [u8])> + use<'a> {
        (first..).step_by(length / SECTOR).zip(bytes.chunks_mut(length))
    }

    /// Processors encrypt many blocks at once faster than a sector's: a batch of units is done as one.
    fn apply(&self, number: u64, units: &mut [u8], cipher: impl FnOnce(&mut [Block])) {
        let masks = self.masks(number, units.len() / self.unit);
        let (blocks, _) = Block::slice_as_chunks_mut(units);
        let mask = |blocks: &mut [Block]| {
            for (block, mask) in blocks.iter_mut().zip(&masks) {
                *block = (u128::from_le_bytes((*block).into()) ^ mask).to_le_bytes().into();
            }
        };
        mask(blocks);
        cipher(blocks);
        mask(blocks);
    }

    /// For each of `count` units the encrypted number of its first sector, times 2^i in GF(2^128) for its block i.
    fn masks(&self, number: u64, count: usize) -> [u128; BLOCKS] {
        let numbers = (number..).step_by(self.unit / SECTOR);
        let mut starts = [Block::default(); MOST_UNITS];
        for (start, number) in starts.iter_mut().zip(numbers).take(count) {
            *start = u128::from(number).to_le_bytes().into();
        }
        self.number.encrypt_blocks(&mut starts);
        let mut masks = [0; BLOCKS];
        for (unit, start) in masks.chunks_exact_mut(self.unit / 16).zip(starts).take(count) {
            let mut next = u128::from_le_bytes(start.into());
            for mask in unit {
                *mask = next;
                next = (next << 1) ^ ((next >> 127) * 0x87);
            }
        }
        masks
    }
}

fn is_zero(unit: &[u8]) -> bool {
    unit.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cipher() -> SectorCipher {
        let bytes = std::array::from_fn(|at| u8::try_from(at * 3 % 256).expect("a byte"));
        SectorCipher::new(&DiskKey::from_bytes(bytes))
    }

    /// IEEE 1619-2018 annex B, vector 10: AES-256, data unit 0xff.
    #[test]
    fn it_is_the_standards_cipher() {
        let first = "2718281828459045235360287471352662497757247093699959574966967627";
        let second = "3141592653589793238462643383279502884197169399375105820974944592";
        let key = hex::decode(&format!("{first}{second}")).expect("a key");
        let cipher = SectorCipher::new(&DiskKey::from_bytes(key));
        let plain: Vec<u8> = (0..=255).chain(0..=255).collect();
        let mut sector = plain.clone();
        cipher.encrypt(0xff, &mut sector);
        assert_eq!(hex::encode(&sector[..16]), "1c3b3a102f770386e4836c99e370cf9b");
        assert_eq!(hex::encode(&sector[496..]), "c4f36ffda9fcea70b9c6e693e148c151");
        cipher.decrypt(0xff, &mut sector);
        assert_eq!(sector, plain);
    }

    #[test]
    fn each_sector_is_encrypted_by_its_number() {
        let mut two = [7; 2 * SECTOR];
        cipher().encrypt(5, &mut two);
        assert_ne!(two[..SECTOR], two[SECTOR..]);
        let mut second = two[SECTOR..].to_vec();
        cipher().decrypt(6, &mut second);
        assert_eq!(second, [7; SECTOR]);
    }

    #[test]
    fn large_units_are_numbered_by_their_first_sectors() {
        let large = cipher().in_large_units();
        let mut two = vec![7; 2 * LARGEST_UNIT];
        large.encrypt(16, &mut two);
        let mut second = two[LARGEST_UNIT..].to_vec();
        large.decrypt(24, &mut second);
        assert_eq!(second, [7; LARGEST_UNIT]);
        let mut small = vec![7; LARGEST_UNIT];
        cipher().encrypt(16, &mut small);
        assert_eq!(small[..SECTOR], two[..SECTOR]);
        assert_ne!(small[SECTOR..2 * SECTOR], two[SECTOR..2 * SECTOR]);
    }

    #[test]
    fn what_was_never_written_reads_as_zeros() {
        let mut disk = [0; 2 * SECTOR];
        cipher().encrypt(1, &mut disk[SECTOR..]);
        cipher().decrypt_sparse(0, &mut disk);
        assert_eq!(disk, [0; 2 * SECTOR]);
    }

    #[test]
    fn a_key_travels_in_documents_but_not_in_logs() {
        let key = DiskKey::from_bytes([0xab; KEY_BYTES]);
        let text = serde_json::to_string(&key).expect("text");
        assert_eq!(text, format!("\"{}\"", "ab".repeat(KEY_BYTES)));
        assert_eq!(serde_json::from_str::<DiskKey>(&text).expect("a key"), key);
        assert!(serde_json::from_str::<DiskKey>("\"ab\"").is_err());
        assert!(!format!("{key:?}").contains("ab"));
    }
}
