//! The firmware's key variables, as they travel beside a boot program: lists of certificates in
//! signed updates.
//!
//! Pure: bytes in, bytes out; whoever has the keys signs. Sources: UEFI Specification 2.10 §8.2.2
//! (`EFI_VARIABLE_AUTHENTICATION_2`), §32.4.1 (`EFI_SIGNATURE_LIST`), §32.6.1 (well-known variables).
//!
//! | Field of an update                  | Offset | | Field of a list               | Offset  |
//! |-------------------------------------|--------|-|-------------------------------|---------|
//! | time (`EFI_TIME`)                   | 0      | | type GUID                     | 0       |
//! | length of what follows, with itself | 16     | | length of the list            | 16, u32 |
//! | revision 0x0200, type 0x0ef1        | 20     | | length of its header          | 20, u32 |
//! | GUID of PKCS#7                      | 24     | | length of each entry          | 24, u32 |
//! | signature                           | 40     | | entry: owner GUID             | 28      |
//! | the new content                     | after  | | entry: certificate            | 44      |

use uuid::Uuid;

use crate::efi;

/// Folder of the updates on an EFI system partition; systemd-boot uses the same one.
pub const FOLDER: &str = "loader/keys/auto";
/// Longest update that is read, in bytes.
pub const LIMIT: u64 = 64 << 10;
/// Attributes of the variables: kept without power, known to boot programs and to the running system,
/// changed only by signed updates that say a time.
pub const ATTRIBUTES: u32 = 0x27;
/// Vendor of `db`: EFI_IMAGE_SECURITY_DATABASE_GUID.
pub const IMAGE_SECURITY: &str = "d719b2cb-3d3a-4596-a3bc-dad00e67656f";
/// EFI_CERT_X509_GUID.
const X509: Uuid = Uuid::from_u128(0xa5c059a1_94e4_4aa7_87b5_ab155c2bf072);
/// EFI_CERT_TYPE_PKCS7_GUID.
const PKCS7: Uuid = Uuid::from_u128(0x4aafd29d_68df_49ee_8aa9_347d375665a7);
/// Owner of our entries.
const OWNER: Uuid = Uuid::from_u128(0x686f6c64_6661_4374_8000_6f776e657231);
/// Bytes of a time.
const TIME: usize = 16;
/// Bytes before the signature: time, length, revision, type, GUID.
const HEADER: usize = TIME + 24;
/// Bytes before the first entry of a list.
const LIST_HEADER: usize = 28;
/// Bytes before the certificate of an entry.
const ENTRY_HEADER: usize = 16;

/// One of the variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variable {
    /// Whose programs may start.
    Db,
    /// Who may change `Db`.
    KeyExchange,
    /// Who may change `KeyExchange`; with it, firmware leaves its setup mode.
    Platform,
}

impl Variable {
    /// All of them, in the order in which they are written: the one that closes the door is the last.
    pub const ALL: [Self; 3] = [Self::Db, Self::KeyExchange, Self::Platform];

    /// What firmware calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Db => "db",
            Self::KeyExchange => "KEK",
            Self::Platform => "PK",
        }
    }

    /// The GUID of its vendor.
    pub const fn vendor(self) -> &'static str {
        match self {
            Self::Db => IMAGE_SECURITY,
            Self::KeyExchange | Self::Platform => efi::GLOBAL,
        }
    }

    /// Where its update lies on an EFI system partition.
    pub fn path(self) -> String {
        format!("{FOLDER}/{}.auth", self.name())
    }
}

/// Returns a list of one certificate in DER.
pub fn list(certificate: &[u8]) -> Vec<u8> {
    let entry = u32::try_from(ENTRY_HEADER + certificate.len()).unwrap_or(u32::MAX);
    let mut list = X509.to_bytes_le().to_vec();
    list.extend(entry.saturating_add(28).to_le_bytes());
    list.extend(0_u32.to_le_bytes());
    list.extend(entry.to_le_bytes());
    list.extend(OWNER.to_bytes_le());
    list.extend(certificate);
    list
}

/// Returns the time of an update: year, month, day, hour, minute and second in UTC.
pub fn time(year: u16, rest: [u8; 5]) -> [u8; TIME] {
    let mut time = [0; TIME];
    time[..2].copy_from_slice(&year.to_le_bytes());
    time[2..7].copy_from_slice(&rest);
    time
}

/// Returns what the signature of an update is about.
pub fn message(variable: Variable, time: &[u8; TIME], content: &[u8]) -> Vec<u8> {
    let name = variable.name().encode_utf16().flat_map(u16::to_le_bytes);
    let vendor = variable.vendor().parse::<Uuid>().unwrap_or_default();
    let mut message: Vec<u8> = name.collect();
    message.extend(vendor.to_bytes_le());
    message.extend(ATTRIBUTES.to_le_bytes());
    message.extend(time);
    message.extend(content);
    message
}

/// Puts an update together.
pub fn update(time: &[u8; TIME], signature: &[u8], content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER - TIME + signature.len()).unwrap_or(u32::MAX);
    let mut update = time.to_vec();
    update.extend(length.to_le_bytes());
    update.extend([0x00, 0x02, 0xf1, 0x0e]);
    update.extend(PKCS7.to_bytes_le());
    update.extend(signature);
    update.extend(content);
    update
}

/// Returns the certificates that an update sets; `None` when the bytes are no such update.
pub fn certificates(update: &[u8]) -> Option<Vec<&[u8]>> {
    let length = usize::try_from(u32_at(update, TIME)?).ok()?;
    if update.get(24..HEADER)? != PKCS7.to_bytes_le() || length < HEADER - TIME {
        return None;
    }
    let mut rest = update.get(TIME.checked_add(length)?..)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let length = usize::try_from(u32_at(rest, 16)?).ok()?;
        let header = usize::try_from(u32_at(rest, 20)?).ok()?;
        let entry = usize::try_from(u32_at(rest, 24)?).ok()?;
        let (list, after) = rest.split_at_checked(length)?;
        let entries = list.get(LIST_HEADER.checked_add(header)?..)?;
        if list.get(..16)? != X509.to_bytes_le() || entry <= ENTRY_HEADER {
            return None;
        }
        let whole = entries.chunks_exact(entry);
        if !whole.remainder().is_empty() {
            return None;
        }
        found.extend(whole.map(|entry| &entry[ENTRY_HEADER..]));
        rest = after;
    }
    Some(found)
}

/// Returns the certificate table of a boot program, which holds its signatures and whose certificates
/// made them; `None` when the bytes are no program or it has none. Source: Microsoft "PE Format",
/// "Optional Header Data Directories".
pub fn signatures_of(program: &[u8]) -> Option<&[u8]> {
    /// The table's entry, from the PE signature on: headers, then the fifth directory.
    const ENTRY: usize = 24 + 112 + 4 * 8;
    let header = usize::try_from(u32_at(program, 0x3c)?).ok()?;
    if program.get(header..header.checked_add(4)?)? != b"PE\0\0" {
        return None;
    }
    let entry = header.checked_add(ENTRY)?;
    let start = usize::try_from(u32_at(program, entry)?).ok()?;
    let length = usize::try_from(u32_at(program, entry + 4)?).ok()?;
    program.get(start..start.checked_add(length)?).filter(|table| !table.is_empty())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_put_together_is_read() {
        let content = [list(b"one"), list(b"another")].concat();
        let update = update(&time(2026, [11, 21, 1, 2, 3]), b"signature", &content);
        assert_eq!(certificates(&update), Some(vec![&b"one"[..], b"another"]));
        assert_eq!(certificates(&update[..update.len() - 1]), None);
        assert_eq!(update[..7], [0xea, 0x07, 11, 21, 1, 2, 3]);
        assert_eq!(update[TIME..TIME + 4], 33_u32.to_le_bytes());
    }

    #[test]
    fn the_message_says_name_vendor_attributes_time_and_content() {
        let message = message(Variable::Platform, &time(1, [0; 5]), b"x");
        assert_eq!(message[..4], [b'P', 0, b'K', 0]);
        assert_eq!(message[4..8], [0x61, 0xdf, 0xe4, 0x8b]);
        assert_eq!(message[20..24], [0x27, 0, 0, 0]);
        assert_eq!(message.len(), 4 + 16 + 4 + 16 + 1);
    }

    proptest! {
        #[test]
        fn rubbish_makes_nothing_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (certificates(&bytes), signatures_of(&bytes));
            let framed = update(&time(1, [0; 5]), b"", &bytes);
            let _ = certificates(&framed);
        }
    }
}
