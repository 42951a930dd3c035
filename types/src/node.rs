//! What a provider node is made of and what it says of itself.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    ids::{MachineId, NodeId},
    units::{Mebibytes, UnixSeconds},
    vm::RateLimit,
};

/// A PCI function's address, `DDDD:BB:DD.F` in hexadecimal as `lspci -D` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// PCI segment ("domain").
    pub segment: u16,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0..=31.
    pub device: u8,
    /// Function number, 0..=7.
    pub function: u8,
}

/// Why a text is no PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
#[error("{text:?} is not a PCI address; expected DDDD:BB:DD.F in hexadecimal, as 0000:01:00.0")]
pub struct BdfError {
    text: String,
}

impl FromStr for Bdf {
    type Err = BdfError;

    fn from_str(text: &str) -> Result<Self, BdfError> {
        let parse = || {
            let (segment, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            let parts = [segment, bus, device, function];
            // What reads numbers would take a sign as well.
            let digits = parts.iter().all(|part| part.bytes().all(|b| b.is_ascii_hexdigit()));
            if parts.map(str::len) != [4, 2, 2, 1] || !digits {
                return None;
            }
            let bdf = Self {
                segment: u16::from_str_radix(segment, 16).ok()?,
                bus: u8::from_str_radix(bus, 16).ok()?,
                device: u8::from_str_radix(device, 16).ok()?,
                function: u8::from_str_radix(function, 16).ok()?,
            };
            (bdf.device < 32 && bdf.function < 8).then_some(bdf)
        };
        parse().ok_or_else(|| BdfError { text: text.to_owned() })
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, bus, device, function } = self;
        write!(f, "{segment:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl Serialize for Bdf {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bdf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// A PCI device that a node rents, or could.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciDevice {
    /// Where it sits on the node.
    pub address: Bdf,
    /// PCI vendor id.
    pub vendor: u16,
    /// PCI device id.
    pub device: u16,
    /// 24-bit class code: base class, subclass, programming interface.
    pub class: u32,
    /// IOMMU group on the node.
    pub iommu_group: Option<u32>,
    /// NUMA node, if the firmware tells.
    pub numa_node: Option<u32>,
    /// What it reaches past the IOMMU: GPUs that it is linked to directly, functions of its chip. One lease has all of
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub linked: Vec<Bdf>,
    /// Whether it says which GPUs of the node reach each other: a switch between them, or the way to those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fabric: bool,
    /// What it can be used for now.
    pub state: DeviceState,
}

/// What a node can do with a device now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum DeviceState {
    /// Free to be rented.
    Free,
    /// Held by a machine.
    Leased {
        /// The machine that holds it.
        machine: MachineId,
    },
    /// Given back and being reset.
    Resetting,
    /// Not offered: the reset failed, or the device does not answer.
    Quarantined {
        /// What was seen.
        reason: String,
        /// When, by the node's clock.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<UnixSeconds>,
    },
    /// Never offered: the host needs it or something in its IOMMU group.
    Refused {
        /// What the host needs, by address.
        reason: String,
    },
}

/// What a provider node says it can rent, sent through the overlay (which signs it with the
/// node's key).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The node that offers.
    pub node: NodeId,
    /// Name the provider gave the node; empty if none.
    pub name: String,
    /// Release the node runs.
    pub release: String,
    /// When this offer was made. A later one replaces it.
    pub issued: UnixSeconds,
    /// When it stops counting.
    pub expires: UnixSeconds,
    /// Virtual CPUs free now.
    pub vcpus: u32,
    /// Memory free for machines now.
    pub memory_mib: Mebibytes,
    /// Disk space free for machines now.
    pub disk_mib: Mebibytes,
    /// All devices the node would rent or explain, free or not.
    pub devices: Vec<PciDevice>,
}

/// Size of a machine, as leases and offers state it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineShape {
    /// Virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Memory.
    pub memory_mib: Mebibytes,
    /// Disk; 0 for a machine without one.
    pub disk_mib: Mebibytes,
    /// Devices passed through, by address on the node.
    pub devices: Vec<Bdf>,
    /// Most that the machine's disks move together, if that is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_limit: Option<RateLimit>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        let text = "0001:af:1f.7";
        assert_eq!(text.parse::<Bdf>().map(|bdf| bdf.to_string()), Ok(text.to_owned()));
    }

    #[test]
    fn addresses_out_of_range_are_refused() {
        for text in ["01:00.0", "0000:01:20.0", "0000:01:00.8", "0000:1:00.0", "0000:01:0g.0"] {
            assert!(text.parse::<Bdf>().is_err(), "{text}");
        }
        for signed in ["+000:01:00.0", "0000:+1:00.0", "0000:01:+0.0", "+000:+1:+0.0"] {
            assert!(signed.parse::<Bdf>().is_err(), "{signed}");
        }
    }
}
