//! Values as JSON Schema has them, where serde's own readers take more or less: for
//! `#[serde(deserialize_with = …)]`.
//! Source: JSON Schema 2020-12, Core §4.2.1 (5.0 is an integer), Validation §6.1.1.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{
        self, DeserializeOwned, IntoDeserializer, Unexpected, Visitor, value::StringDeserializer,
    },
};

/// Up to here no other whole number becomes the same float, which serde_json reads exactly with `float_roundtrip`:
/// 2^53 − 1. What is above is written in digits alone.
const EXACT: f64 = 9_007_199_254_740_991.0;

/// Reads a whole number, also one that is written with a fraction of nothing, as 5.0.
pub fn whole<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    from.deserialize_any(Whole)
}

/// Reads a whole number from 1 on, as [`whole`] does.
pub fn positive<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    match whole(from)? {
        0 => Err(de::Error::invalid_value(Unexpected::Unsigned(0), &"a whole number from 1 on")),
        number => Ok(number),
    }
}

/// Reads a variant without content by its name. Serde takes `{"stop": null}` for `"stop"` too.
pub fn name<'de, T: DeserializeOwned, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    let text: StringDeserializer<D::Error> = String::deserialize(from)?.into_deserializer();
    T::deserialize(text)
}

/// Reads what may be left out, by `#[serde(default)]`, and is not null where it is there.
pub fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

struct Whole;

impl Visitor<'_> for Whole {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0 to 18446744073709551615")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<u64, E> {
        u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<u64, E> {
        if !(0.0..=EXACT).contains(&number) || number.fract() != 0.0 {
            return Err(E::invalid_value(Unexpected::Float(number), &self));
        }
        #[allow(clippy::cast_possible_truncation, reason = "whole, and below 2^53")]
        let number = number as u64;
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        devices::{AttachDevice, AttachRequest},
        vm::{Deadline, Disk, Rate, RateLimit},
    };

    fn read(text: &str) -> Option<u64> {
        whole(&mut serde_json::Deserializer::from_str(text)).ok()
    }

    #[test]
    fn whole_numbers_are_read_however_they_are_written() {
        assert_eq!(["0", "5", "5.0", "5e2", "-0"].map(read), [0, 5, 5, 500, 0].map(Some));
        assert_eq!(read("18446744073709551615"), Some(u64::MAX));
        assert_eq!(read("9007199254740991.0"), Some((1 << 53) - 1));
        assert_eq!(read("9007199254740993"), Some((1 << 53) + 1));
        let rounded = ["9007199254740992.0", "9007199254740993.0", "9007199254740994.0", "1e16"];
        for wrong in rounded.iter().chain(&["18446744073709551616", "0.5", "-1", "-1.0"]) {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        assert_eq!(["true", "null", "\"5\"", "[5]", "{}"].map(read), [None::<u64>; 5]);
        let deadline = r#"{"at_boot_ms":7.0,"grace_ms":18446744073709551615}"#;
        let expected = Deadline { at_boot_ms: 7, grace_ms: u64::MAX };
        assert_eq!(serde_json::from_str::<Deadline>(deadline).ok(), Some(expected));
    }

    #[test]
    fn a_rate_is_one_at_least() {
        let rate = |text: &str| serde_json::from_str::<Rate>(text).ok();
        let expected = Rate { per_second: 1, burst: 0 };
        assert_eq!(rate(r#"{"per_second":1.0,"burst":0}"#), Some(expected));
        assert_eq!(rate(r#"{"per_second":0,"burst":0}"#), None);
        assert_eq!(rate(r#"{"per_second":0.0,"burst":0}"#), None);
        assert_eq!(toml::from_str::<Rate>("per_second = 1\nburst = 0").ok(), Some(expected));
    }

    /// A disk whose key was lost on the way must not be written in plain.
    #[test]
    fn a_key_is_there_or_left_out() {
        let key = format!("\"{}\"", "ab".repeat(64));
        let attached = |key: &str| {
            let device = r#"{"kind":"disk","read_only":false,"serial":"s""#;
            let read = serde_json::from_str::<AttachDevice>(&format!("{device}{key}}}")).ok()?;
            let AttachDevice::Disk { key, .. } = read else { return None };
            Some(key.is_some())
        };
        let started = |key: &str| {
            let disk = r#"{"fd":5,"read_only":false,"serial":"s""#;
            let read = serde_json::from_str::<Disk>(&format!("{disk}{key}}}"));
            read.ok().map(|disk| disk.key.is_some())
        };
        let cases = [
            (String::new(), Some(false)),
            (format!(",\"key\":{key}"), Some(true)),
            (",\"key\":null".to_owned(), None),
        ];
        for (key, expected) in cases {
            assert_eq!((attached(&key), started(&key)), (expected, expected), "{key}");
        }
    }

    /// What is tagged is read into memory first, and from there by another reader of serde.
    #[test]
    fn a_disk_that_is_attached_is_read_alike() {
        let disk = |more: &str| {
            let device = r#"{"kind":"disk","read_only":false,"serial":"s""#;
            let text = format!(r#"{{"id":"a","device":{device},{more}}}}}"#);
            serde_json::from_str::<AttachRequest>(&text).map(|request| request.device).ok()
        };
        let device = disk(r#""model":"nvme","limit":{"bytes":{"per_second":5.0,"burst":1e3}}"#);
        let Some(AttachDevice::Disk { limit, .. }) = device else { panic!("what?") };
        let bytes = Some(Rate { per_second: 5, burst: 1000 });
        assert_eq!(limit, Some(RateLimit { bytes, operations: None }));
        for wrong in [r#""model":{"nvme":null}"#, r#""model":"floppy""#] {
            assert_eq!(disk(wrong), None, "{wrong}");
        }
        let idle = disk(r#""limit":{"bytes":{"per_second":0,"burst":1}}"#);
        assert_eq!(idle, None);
    }
}
