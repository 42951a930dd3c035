//! Addresses as configurations write them. Whoever reads them with serde learns what was found and what
//! is right instead.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, de};

/// An address that is written as text.
pub(crate) trait Written: FromStr {
    /// What is right, with an example.
    const RIGHT: &str;
}

impl Written for IpAddr {
    const RIGHT: &str = "an IP address, as 192.0.2.1";
}

impl Written for Ipv4Addr {
    const RIGHT: &str = "an IPv4 address, as 192.0.2.1";
}

impl Written for SocketAddr {
    const RIGHT: &str = "an IP address and port, as 203.0.113.7:4600 or [2001:db8::7]:4600; names are not looked up";
}

struct Text<T>(T);

impl<'de, T: Written> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let wrong = |_| de::Error::custom(format_args!("{text:?} is not {}", T::RIGHT));
        text.parse().map(Self).map_err(wrong)
    }
}

/// Reads an address.
pub(crate) fn one<'de, T: Written, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    Text::deserialize(from).map(|Text(address)| address)
}

/// Reads an address that may be left out.
pub(crate) fn given<'de, T: Written, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    Option::<Text<T>>::deserialize(from).map(|read| read.map(|Text(address)| address))
}

/// Reads several addresses.
pub(crate) fn list<'de, T: Written, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    let read = Vec::<Text<T>>::deserialize(from)?;
    Ok(read.into_iter().map(|Text(address)| address).collect())
}
