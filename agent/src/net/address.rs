//! Hardware addresses and IPv4 networks. Pure.

use std::{fmt, net::Ipv4Addr, str::FromStr};

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HardwareAddress(pub [u8; 6]);

impl HardwareAddress {
    /// Returns the address in `bytes`, or `None` unless there are six.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for HardwareAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let refusal = || AddressError::Hardware { text: text.to_owned() };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(refusal)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| refusal())?;
        }
        if parts.next().is_some() { Err(refusal()) } else { Ok(Self(bytes)) }
    }
}

/// An IPv4 address and the length of its network's prefix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ipv4Prefix {
    address: Ipv4Addr,
    length: u8,
}

impl Ipv4Prefix {
    /// Returns the pair, or `None` when `length` is more than 32.
    pub const fn new(address: Ipv4Addr, length: u8) -> Option<Self> {
        if length <= 32 { Some(Self { address, length }) } else { None }
    }

    /// Returns the network that holds `address` alone.
    pub const fn single(address: Ipv4Addr) -> Self {
        Self { address, length: 32 }
    }

    /// Returns the pair for a netmask, or `None` when its ones are not all in front.
    pub fn from_mask(address: Ipv4Addr, mask: Ipv4Addr) -> Option<Self> {
        let bits = mask.to_bits();
        let length = u8::try_from(bits.leading_ones()).ok()?;
        (bits.count_ones() == u32::from(length)).then_some(Self { address, length })
    }

    /// Returns the address, host part included.
    pub const fn address(self) -> Ipv4Addr {
        self.address
    }

    /// Returns the length of the prefix, 0 to 32.
    pub const fn length(self) -> u8 {
        self.length
    }

    /// Returns the netmask.
    pub fn mask(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(self.length)).unwrap_or(0))
    }

    /// Returns the first address of the network.
    pub fn network(self) -> Ipv4Addr {
        self.address & self.mask()
    }

    /// Returns the last address of the network.
    pub fn broadcast(self) -> Ipv4Addr {
        self.address | !self.mask()
    }

    /// Returns whether `address` belongs to the network.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address & self.mask() == self.network()
    }
}

impl fmt::Display for Ipv4Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl fmt::Debug for Ipv4Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Ipv4Prefix {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parsed = text
            .split_once('/')
            .and_then(|(address, length)| Self::new(address.parse().ok()?, length.parse().ok()?));
        parsed.ok_or_else(|| AddressError::Prefix { text: text.to_owned() })
    }
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AddressError {
    #[error("{text:?} is not a hardware address, as 02:00:00:00:00:01")]
    Hardware { text: String },
    #[error("{text:?} is not an IPv4 network, as 10.77.0.0/16")]
    Prefix { text: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Ipv4Prefix {
        text.parse().expect("a prefix")
    }

    #[test]
    fn a_network_knows_its_bounds() {
        let network = prefix("10.77.3.9/22");
        assert_eq!(network.mask(), Ipv4Addr::new(255, 255, 252, 0));
        assert_eq!(network.network(), Ipv4Addr::new(10, 77, 0, 0));
        assert_eq!(network.broadcast(), Ipv4Addr::new(10, 77, 3, 255));
        assert!(network.contains(Ipv4Addr::new(10, 77, 1, 1)));
        assert!(!network.contains(Ipv4Addr::new(10, 77, 4, 0)));
    }

    #[test]
    fn the_extreme_lengths_work() {
        assert_eq!(prefix("1.2.3.4/0").mask(), Ipv4Addr::UNSPECIFIED);
        assert_eq!(prefix("1.2.3.4/32").network(), Ipv4Addr::new(1, 2, 3, 4));
        assert!("1.2.3.4/33".parse::<Ipv4Prefix>().is_err());
    }

    #[test]
    fn a_mask_with_a_hole_is_refused() {
        let mask = Ipv4Addr::new(255, 0, 255, 0);
        assert_eq!(Ipv4Prefix::from_mask(Ipv4Addr::LOCALHOST, mask), None);
    }

    #[test]
    fn hardware_addresses_survive_text() {
        let address: HardwareAddress = "02:00:5e:10:00:ff".parse().expect("an address");
        assert_eq!(address.to_string(), "02:00:5e:10:00:ff");
        assert!("02:00:5e:10:00".parse::<HardwareAddress>().is_err());
        assert!("02:00:5e:10:00:ff:00".parse::<HardwareAddress>().is_err());
        assert!("2:0:5e:10:0:ff".parse::<HardwareAddress>().is_err());
    }
}
