//! Parameters of a request's query: `name=value`, parted by `&`, where a name or value may be percent-encoded.
//! Sources: RFC 3986 §2.1 and §3.4.

/// The query of a request's target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<'a>(&'a str);

/// Why a query cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum QueryError {
    #[error(
        "{piece:?} in the query has a percent sign without two hexadecimal digits behind it, or is no text"
    )]
    Encoding { piece: String },
    #[error("{name} comes more than once in the query; once is right")]
    Twice { name: String },
    #[error("{name} is {value:?} in the query; {right} is right")]
    Value { name: String, value: String, right: &'static str },
    #[error("{name:?} in the query is no parameter of this; {}", known(right))]
    Unknown { name: String, right: &'static [&'static str] },
}

impl<'a> Query<'a> {
    /// Returns what is behind the question mark of a target.
    pub fn of(target: &'a str) -> Self {
        Self(target.split_once('?').map_or("", |(_, query)| query))
    }

    /// Returns the only value of the parameter `name`, decoded; empty when it has none. Every name in the query has to
    /// be one that can be decoded, as it could be this one.
    pub fn parameter(self, name: &str) -> Result<Option<String>, QueryError> {
        let read = |piece: &str| {
            decoded(piece).ok_or_else(|| QueryError::Encoding { piece: piece.to_owned() })
        };
        let mut found = None;
        for pair in self.0.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if read(key)? == name && found.replace(read(value)?).is_some() {
                return Err(QueryError::Twice { name: name.to_owned() });
            }
        }
        Ok(found)
    }

    /// Returns whether every parameter's name is one of `names`.
    pub fn only(self, names: &'static [&'static str]) -> Result<(), QueryError> {
        for piece in self.0.split('&').filter(|pair| !pair.is_empty()) {
            let key = piece.split_once('=').map_or(piece, |(key, _)| key);
            let name =
                decoded(key).ok_or_else(|| QueryError::Encoding { piece: key.to_owned() })?;
            if !names.contains(&name.as_str()) {
                return Err(QueryError::Unknown { name, right: names });
            }
        }
        Ok(())
    }

    /// Returns whether the parameter `name` is 1. It is not when it is 0, or left out; anything else is an error.
    pub fn flag(self, name: &str) -> Result<bool, QueryError> {
        match self.parameter(name)? {
            None => Ok(false),
            Some(value) if value == "0" => Ok(false),
            Some(value) if value == "1" => Ok(true),
            Some(value) => Err(wrong(name, value, "0 or 1")),
        }
    }

    /// Returns the parameter `name`, a whole number below 2^64 in digits alone.
    pub fn number(self, name: &str) -> Result<Option<u64>, QueryError> {
        let Some(value) = self.parameter(name)? else { return Ok(None) };
        // What reads numbers would take a sign as well.
        let is_digits = value.bytes().all(|byte| byte.is_ascii_digit());
        match value.parse() {
            Ok(number) if is_digits => Ok(Some(number)),
            Ok(_) | Err(_) => Err(wrong(name, value, "a whole number below 2^64")),
        }
    }
}

/// Says which parameters there are.
fn known(names: &[&str]) -> String {
    if names.is_empty() { "it has none".into() } else { format!("{} is right", names.join(", ")) }
}

fn wrong(name: &str, value: String, right: &'static str) -> QueryError {
    QueryError::Value { name: name.to_owned(), value, right }
}

/// Decodes a piece of a target (RFC 3986 §2.1); `None` when a percent sign has no two hexadecimal digits behind it, or
/// the bytes are no text. A plus sign stays one: it is a space in HTML's forms only.
pub fn decoded(piece: &str) -> Option<String> {
    let mut pieces = piece.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (digits, rest) = piece.split_at_checked(2)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_decoded_once() {
        assert_eq!(decoded("0000%3A41%3a00.0").as_deref(), Some("0000:41:00.0"));
        assert_eq!(decoded("a%20b%C3%A4+%2531").as_deref(), Some("a bä+%31"));
        for wrong in ["%", "a%4", "%+1", "%zz", "%ff", "%ä1"] {
            assert_eq!(decoded(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_parameter_is_found_by_its_name_however_it_is_written() {
        let of = |target, name| Query::of(target).parameter(name).map_err(|e| e.to_string());
        assert_eq!(of("/a", "b"), Ok(None));
        assert_eq!(of("/a?b=1", "a"), Ok(None));
        assert_eq!(of("/b=2?c&b=%31", "b"), Ok(Some("1".to_owned())));
        assert_eq!(of("/?%62=x%3d&c=", "b"), Ok(Some("x=".to_owned())));
        assert_eq!(of("/?c", "c"), Ok(Some(String::new())));
        // What is decoded parts nothing.
        assert_eq!(of("/?from=1%26erase=1", "erase"), Ok(None));
        let twice = "erase comes more than once in the query; once is right".to_owned();
        assert_eq!(of("/?erase=1&%65rase=0", "erase"), Err(twice));
        assert!(of("/?a=1&%6=2", "a").is_err_and(|why| why.contains("\"%6\"")));
        assert!(of("/?a=%ff", "a").is_err_and(|why| why.contains("\"%ff\"")));
        assert_eq!(of("/?a=%ff&b=1", "b"), Ok(Some("1".to_owned())));
    }

    #[test]
    fn flags_are_0_or_1() {
        let flag = |query: &str| Query::of(query).flag("follow").ok();
        assert_eq!(flag("/"), Some(false));
        assert_eq!(flag("/?from=1&unfollow=2"), Some(false));
        assert_eq!(flag("/?follow=0"), Some(false));
        assert_eq!(flag("/?from=7&f%6Fllow=%31"), Some(true));
        for wrong in ["=true", "=2", "", "=", "=1&follow=1", "=0&follow=1", "=+1"] {
            assert_eq!(flag(&format!("/?follow{wrong}")), None, "{wrong}");
        }
        let why = Query::of("/?follow=yes").flag("follow").expect_err("refused").to_string();
        assert_eq!(why, "follow is \"yes\" in the query; 0 or 1 is right");
    }

    #[test]
    fn names_that_are_none_are_told() {
        let only = |query: &str| Query::of(query).only(&["from", "level"]);
        for right in ["/", "/?", "/?&", "/?from=1&level", "/?%66rom=1&from=2"] {
            assert_eq!(only(right), Ok(()), "{right}");
        }
        let why = only("/?from=1&form=2").expect_err("refused").to_string();
        assert_eq!(why, "\"form\" in the query is no parameter of this; from, level is right");
        assert!(only("/?=1").is_err() && only("/?%f").is_err());
        let why = Query::of("/?x").only(&[]).expect_err("refused").to_string();
        assert_eq!(why, "\"x\" in the query is no parameter of this; it has none");
    }

    #[test]
    fn numbers_are_digits() {
        let number = |value: &str| Query::of(&format!("/?from={value}")).number("from").ok();
        assert_eq!(Query::of("/?to=1").number("from"), Ok(None));
        assert_eq!(number("0"), Some(Some(0)));
        assert_eq!(number("18446744073709551615"), Some(Some(u64::MAX)));
        for wrong in ["", "+5", "%2B5", "-1", "1.0", "1e3", " 1", "18446744073709551616"] {
            assert_eq!(number(wrong), None, "{wrong}");
        }
    }
}
