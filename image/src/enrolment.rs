//! The updates that put an operator's keys into a server's firmware, made once and shipped beside the
//! boot program.
//!
//! Sources: see `update::secure_boot`. The platform key signs its own update and that of the key
//! exchange key, which is the same key here; that one signs the update of `db`.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use update::secure_boot::{self, Variable};

use crate::der::{self, OBJECT, SEQUENCE};
use crate::signer::{Signed, Signer, SignerError};

/// pkcs7-data: 1.2.840.113549.1.7.1.
const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07, 0x01];

/// Returns every update as its path on the EFI system partition and its bytes.
///
/// `owner` may change the keys later, `programs` signs boot programs, and what the certificates `others` (DER)
/// vouch for starts as well. `time` is in seconds since 1970:
/// firmware takes no update that is older than the one before.
pub fn updates(
    owner: &Signer,
    programs: &Signer,
    others: &[Vec<u8>],
    time: u64,
) -> Result<Vec<(String, Vec<u8>)>, SignerError> {
    let time = efi_time(time);
    let update = |variable: Variable| {
        let certificates = match variable {
            Variable::Db => {
                let others = others.iter().map(Vec::as_slice);
                let others = others.filter(|other| *other != programs.certificate());
                std::iter::once(programs.certificate()).chain(others).collect()
            }
            Variable::KeyExchange | Variable::Platform => vec![owner.certificate()],
        };
        let lists = certificates.into_iter().map(secure_boot::list);
        let content: Vec<u8> = lists.flatten().collect();
        let signature = owner.signed_data(&Signed {
            content_info: &der::nested(SEQUENCE, &[&der::value(OBJECT, DATA)]),
            attributes: None,
            message: &secure_boot::message(variable, &time, &content),
        })?;
        Ok((variable.path(), secure_boot::update(&time, &signature, &content)))
    };
    Variable::ALL.into_iter().map(update).collect()
}

fn efi_time(seconds: u64) -> [u8; 16] {
    let time = i64::try_from(seconds)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .to_zoned(TimeZone::UTC);
    let small = |number: i8| u8::try_from(number).unwrap_or(0);
    secure_boot::time(
        u16::try_from(time.year()).unwrap_or(1970),
        [time.month(), time.day(), time.hour(), time.minute(), time.second()].map(small),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_utc() {
        let time = efi_time(1_761_955_199);
        assert_eq!(time[..7], [0xe9, 0x07, 10, 31, 23, 59, 59]);
        assert_eq!(time[7..], [0; 9]);
    }
}
