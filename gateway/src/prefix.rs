//! Addresses, and prefixes that stand for all addresses in them (RFC 4632 §3.1, RFC 4291 §2.3). Pure.

use std::{net::IpAddr, str::FromStr};

use serde::Deserialize;

/// An address, or all that share its first bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Prefix {
    network: IpAddr,
    length: u8,
}

/// Why a text is no prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is neither an address nor a prefix, as 192.0.2.7 or 2001:db8::/32")]
pub struct PrefixError {
    text: String,
}

impl Prefix {
    /// Whether `address` is in it. An IPv4 address that is written as an IPv6 one is the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
            IpAddr::V6(address) => address.to_bits(),
        };
        let address = address.to_canonical();
        let differing = bits(self.network) ^ bits(address);
        self.network.is_ipv4() == address.is_ipv4()
            && differing.leading_zeros() >= u32::from(self.length)
    }
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let whole = |network: IpAddr| (network, if network.is_ipv4() { 32 } else { 128 });
        let parsed = types::config::parse_prefix(text).or_else(|| text.parse().ok().map(whole));
        let (network, length) = parsed.ok_or_else(|| PrefixError { text: text.to_owned() })?;
        Ok(Self { network, length })
    }
}

impl TryFrom<String> for Prefix {
    type Error = PrefixError;

    fn try_from(text: String) -> Result<Self, PrefixError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_holds_what_shares_its_bits() {
        let holds = |prefix: &str, address: &str| {
            let prefix: Prefix = prefix.parse().expect("a prefix");
            prefix.contains(address.parse().expect("an address"))
        };
        assert!(holds("192.0.2.0/24", "192.0.2.255") && !holds("192.0.2.0/24", "192.0.3.0"));
        assert!(holds("192.0.2.7", "::ffff:192.0.2.7") && !holds("192.0.2.7", "192.0.2.6"));
        assert!(holds("2001:db8::/32", "2001:db8:1::") && !holds("2001:db8::/32", "2001:db9::"));
        assert!(holds("0.0.0.0/0", "203.0.113.1") && !holds("0.0.0.0/0", "2001:db8::"));
        assert!("192.0.2.0/33".parse::<Prefix>().is_err() && "proxy".parse::<Prefix>().is_err());
    }
}
