//! The few forms of DER that signatures need: writing nested values, and walking a certificate.
//!
//! Pure. Source: ITU-T X.690, §8 and §10.

/// INTEGER.
pub(crate) const INTEGER: u8 = 0x02;
/// OCTET STRING.
pub(crate) const OCTET_STRING: u8 = 0x04;
/// NULL.
const NULL: u8 = 0x05;
/// OBJECT IDENTIFIER.
pub(crate) const OBJECT: u8 = 0x06;
/// SEQUENCE.
pub(crate) const SEQUENCE: u8 = 0x30;
/// SET.
pub(crate) const SET: u8 = 0x31;
/// A constructed value with the context's tag 0.
pub(crate) const CONTEXT_0: u8 = 0xa0;

/// Writes one value: tag, length, content.
pub(crate) fn value(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    match u8::try_from(content.len()) {
        Ok(short) if short < 0x80 => out.push(short),
        Ok(_) | Err(_) => {
            let bytes = content.len().to_be_bytes();
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            // A length has at most eight bytes.
            out.push(0x80 | u8::try_from(bytes.len() - zeros).unwrap_or(8));
            out.extend(&bytes[zeros..]);
        }
    }
    out.extend(content);
    out
}

/// Writes a value that is made of others.
pub(crate) fn nested(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    value(tag, &parts.concat())
}

/// Writes an algorithm without parameters, by the content of its object identifier.
pub(crate) fn algorithm(object: &[u8]) -> Vec<u8> {
    nested(SEQUENCE, &[&value(OBJECT, object), &value(NULL, &[])])
}

/// Reads values one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes the next value, which must have this tag. Returns all of it, and its content.
    pub(crate) fn take(&mut self, tag: u8) -> Option<(&'a [u8], &'a [u8])> {
        let (&found, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..0x80 => (usize::from(first), rest),
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
            }
            0x80 | 0x85.. => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        if found != tag {
            return None;
        }
        let whole = &self.0[..self.0.len() - rest.len()];
        self.0 = rest;
        Some((whole, content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_as_short_as_they_can_be() {
        assert_eq!(value(OCTET_STRING, &[7; 3]), [4, 3, 7, 7, 7]);
        assert_eq!(value(OCTET_STRING, &[7; 0x80])[..4], [4, 0x81, 0x80, 7]);
        assert_eq!(value(OCTET_STRING, &[7; 0x1234])[..5], [4, 0x82, 0x12, 0x34, 7]);
    }

    #[test]
    fn what_was_written_is_read() {
        for length in [0, 1, 127, 128, 255, 256, 70_000] {
            let content = vec![1; length];
            let bytes = [value(OCTET_STRING, &content), value(INTEGER, &[5])].concat();
            let mut reader = Reader(&bytes);
            assert_eq!(reader.take(OCTET_STRING).map(|(_, c)| c), Some(content.as_slice()));
            assert_eq!(reader.take(OCTET_STRING), None);
            assert_eq!(reader.take(INTEGER), Some((&[2, 1, 5][..], &[5][..])));
            assert_eq!(reader.take(INTEGER), None);
        }
        assert_eq!(Reader(&[4, 0x84, 0xff, 0xff, 0xff, 0xff]).take(OCTET_STRING), None);
        assert_eq!(Reader(&[4, 0x80]).take(OCTET_STRING), None);
    }
}
