//! Names: keys, nodes, machines, content.

use std::{fmt, str::FromStr};

use ed25519_dalek::VerifyingKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::hex::{self, HexError};

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident, $len:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; $len]);

        impl $name {
            /// Wraps raw bytes. Any value is a well-formed name; whether it names something is
            /// for its user to find out.
            pub const fn from_bytes(bytes: [u8; $len]) -> Self {
                Self(bytes)
            }

            /// Returns the raw bytes.
            pub const fn as_bytes(&self) -> &[u8; $len] {
                &self.0
            }

            /// Returns the first eight digits, for people to tell names apart in a table.
            pub fn short(&self) -> String {
                hex::encode(&self.0[..4])
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), hex::encode(&self.0))
            }
        }

        impl FromStr for $name {
            type Err = HexError;

            fn from_str(text: &str) -> Result<Self, HexError> {
                hex::decode(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(|error| {
                    de::Error::custom(format_args!("{} {:?}: {error}", stringify!($name), text))
                })
            }
        }
    };
}

hex_id! {
    /// An Ed25519 public key (RFC 8032 §5.1.5), as 64 hexadecimal digits. Renters and lease
    /// authorities are named by one.
    PublicKey, 32
}

hex_id! {
    /// A member of the overlay, named by its Ed25519 public key: the key is the address.
    NodeId, 32
}

hex_id! {
    /// One rented machine and the lease it lives under: a lease starts at most one machine, so
    /// both carry the same 16 random bytes.
    MachineId, 16
}

hex_id! {
    /// The SHA-256 of a piece of content (FIPS 180-4). Kernels, initramfs and disk images are
    /// named by it, so whoever delivers them cannot alter them.
    ContentId, 32
}

impl PublicKey {
    /// Returns what checks signatures with this key. `None` when it is no point of the curve, or one of
    /// small order, by which signatures prove nothing.
    pub fn verifier(&self) -> Option<VerifyingKey> {
        let point = VerifyingKey::from_bytes(&self.0).ok()?;
        (!point.is_weak()).then_some(point)
    }
}

impl From<PublicKey> for NodeId {
    fn from(key: PublicKey) -> Self {
        Self(key.0)
    }
}

impl From<NodeId> for PublicKey {
    fn from(node: NodeId) -> Self {
        Self(node.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_points_of_large_order_check_signatures() {
        let usable = |byte: u8| PublicKey::from_bytes([byte; 32]).verifier().is_some();
        assert!(usable(1));
        // No point, and one of order 4.
        assert!(!usable(2) && !usable(0));
    }

    #[test]
    fn ids_survive_json_and_refuse_rubbish() {
        let id = MachineId::from_bytes([7; 16]);
        let json = serde_json::to_string(&id).expect("a string");
        assert_eq!(serde_json::from_str::<MachineId>(&json).expect("round trip"), id);
        let refusal = serde_json::from_str::<MachineId>("\"zz\"").expect_err("too short");
        assert!(refusal.to_string().contains("expected 32 hexadecimal digits"), "{refusal}");
    }
}
