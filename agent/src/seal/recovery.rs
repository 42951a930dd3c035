//! The recovery key: 256 random bits that a person can write down, type, and read over the telephone.
//!
//! Eight groups of eight letters and one of four that is a checksum, in the sixteen letters that every
//! keyboard layout has in the same places (modhex): `bcdefghi-…-jkln`. The text itself, small letters
//! and hyphens included, is the passphrase of the volumes: `cryptsetup open` takes it as it is shown.

use std::fmt;

use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::luks::{HeaderError, random};

const LETTERS: &[u8; 16] = b"cbdefghijklnrtuv";
/// Letters of the secret, of a group, and of the checksum.
const SECRET: usize = 64;
const GROUP: usize = 8;
const CHECK: usize = 4;

/// A recovery key.
#[derive(Clone, PartialEq, Eq)]
pub struct RecoveryKey(Zeroizing<String>);

/// Why a text is no recovery key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RecoveryError {
    #[error("a recovery key has {} letters, not {found}", SECRET + CHECK)]
    Length { found: usize },
    #[error("letter {position} of the recovery key is none of {}", LETTERS.escape_ascii())]
    Letter { position: usize },
    #[error("the recovery key was mistyped: its last four letters do not fit the others")]
    Checksum,
}

impl RecoveryKey {
    /// Makes a new one.
    pub fn generate() -> Result<Self, HeaderError> {
        let bytes = Zeroizing::new(random::<32>()?);
        Ok(Self::spell(&letters(bytes.as_ref())))
    }

    /// Reads what somebody typed; blanks, hyphens and the case of letters do not matter.
    pub fn parse(text: &str) -> Result<Self, RecoveryError> {
        let typed = text.chars().filter(|c| !c.is_whitespace() && *c != '-');
        let typed: Zeroizing<String> = Zeroizing::new(typed.flat_map(char::to_lowercase).collect());
        let found = typed.chars().count();
        if found != SECRET + CHECK {
            return Err(RecoveryError::Length { found });
        }
        let known = |c: char| u8::try_from(c).is_ok_and(|c| LETTERS.contains(&c));
        if let Some(at) = typed.chars().position(|c| !known(c)) {
            return Err(RecoveryError::Letter { position: at + 1 });
        }
        let (secret, check) = typed.split_at(SECRET);
        if checksum(secret) != check {
            return Err(RecoveryError::Checksum);
        }
        Ok(Self::spell(secret))
    }

    /// Returns the passphrase, which is also how it is shown.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns its last group: the letters behind the last hyphen, which depend on all others.
    pub fn last_group(&self) -> &str {
        &self.0[self.0.len() - CHECK..]
    }

    fn spell(secret: &str) -> Self {
        let mut text = Zeroizing::new(String::with_capacity(SECRET + SECRET / GROUP + CHECK));
        for (at, letter) in secret.chars().enumerate() {
            if at > 0 && at.is_multiple_of(GROUP) {
                text.push('-');
            }
            text.push(letter);
        }
        text.push('-');
        text.push_str(&checksum(secret));
        Self(text)
    }
}

impl fmt::Debug for RecoveryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecoveryKey(…)")
    }
}

fn letters(bytes: &[u8]) -> Zeroizing<String> {
    let letter = |nibble: u8| char::from(LETTERS[usize::from(nibble & 0xf)]);
    let pairs = bytes.iter().flat_map(|byte| [letter(byte >> 4), letter(*byte)]);
    Zeroizing::new(pairs.collect())
}

fn checksum(secret: &str) -> String {
    let digest = Sha256::new().chain_update(b"holdfast recovery ").chain_update(secret).finalize();
    letters(&digest[..CHECK / 2]).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_key_is_read_as_it_is_shown_and_as_people_type() {
        let key = RecoveryKey::generate().expect("made");
        assert_eq!(key.as_str().len(), 8 * 9 + 4);
        assert_eq!(RecoveryKey::parse(key.as_str()), Ok(key.clone()));
        let typed = format!("  {}\n", key.as_str().replace('-', " ").to_uppercase());
        assert_eq!(RecoveryKey::parse(&typed), Ok(key));
    }

    #[test]
    fn what_was_mistyped_is_told_from_what_is_wrong() {
        let key = RecoveryKey::generate().expect("made").as_str().to_owned();
        let other = if key.starts_with('c') { "b" } else { "c" };
        let swapped = format!("{other}{}", &key[1..]);
        assert_eq!(RecoveryKey::parse(&swapped), Err(RecoveryError::Checksum));
        assert_eq!(RecoveryKey::parse("cbde"), Err(RecoveryError::Length { found: 4 }));
        let strange = format!("c1{}", &key[2..]);
        assert_eq!(RecoveryKey::parse(&strange), Err(RecoveryError::Letter { position: 2 }));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,90}") {
            let _ = RecoveryKey::parse(&text);
        }
    }
}
