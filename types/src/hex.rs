//! Lower-case hexadecimal, the text form of every key and digest.

/// Why a text is not the hexadecimal form of `N` bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum HexError {
    #[error("expected {expected} hexadecimal digits, found {found} characters")]
    Length { expected: usize, found: usize },
    #[error("character {found:?} at position {position} is not a lower-case hexadecimal digit")]
    Digit { position: usize, found: char },
}

/// Returns `bytes` as lower-case hexadecimal digits.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses exactly `2 * N` lower-case hexadecimal digits.
pub fn decode<const N: usize>(text: &str) -> Result<[u8; N], HexError> {
    let found = text.chars().count();
    if found != 2 * N {
        return Err(HexError::Length { expected: 2 * N, found });
    }
    let mut bytes = [0u8; N];
    for (position, found) in text.chars().enumerate() {
        let nibble = match found {
            '0'..='9' => found as u8 - b'0',
            'a'..='f' => found as u8 - b'a' + 10,
            _ => return Err(HexError::Digit { position, found }),
        };
        bytes[position / 2] = bytes[position / 2] << 4 | nibble;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        assert_eq!(decode::<3>(&encode(&[0, 0xab, 255])), Ok([0, 0xab, 255]));
    }

    #[test]
    fn refuses_wrong_length_and_digits() {
        assert_eq!(decode::<2>("abc"), Err(HexError::Length { expected: 4, found: 3 }));
        assert_eq!(decode::<2>("abcG"), Err(HexError::Digit { position: 3, found: 'G' }));
        assert_eq!(decode::<2>("ABcd"), Err(HexError::Digit { position: 0, found: 'A' }));
    }
}
