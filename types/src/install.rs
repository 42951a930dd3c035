//! The configuration's section `[install]`: whether and where a node installs itself.

use serde::{Deserialize, Serialize};

use crate::ids::PublicKey;
use crate::node::Bdf;

/// What a provider wants of the installer. Without this section nothing is ever installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct Install {
    /// Who says the last word.
    #[serde(default)]
    pub confirm: Confirm,
    /// Which disk. When left out there must be only one that could be meant.
    #[serde(default)]
    pub disk: DiskSelector,
    /// Serial number of the disk whose content may be destroyed. Without it only a disk that holds
    /// nothing is written to.
    pub erase: Option<String>,
    /// Operators' public keys, at most [`MAX_ESCROW`]: the recovery key is sealed to them, and no console
    /// shows it then.
    #[serde(default)]
    pub escrow: Vec<PublicKey>,
    /// Where a node that was started from the network gets the running release from, which it installs:
    /// URL of `holdfast.efi`, `#sha256=` and its digest in 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Most keys that a recovery key is sealed to.
pub const MAX_ESCROW: usize = 8;

/// The configuration's section `[disk]`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The recovery key that the installer showed. Only a locked disk asks for it; take it off the
    /// volume again.
    pub recovery_key: Option<String>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disk(…)")
    }
}

/// Who says the last word before a disk is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Confirm {
    /// Somebody at the console, who types the disk's serial number.
    #[default]
    Console,
    /// The configuration alone.
    Unattended,
}

/// What is known of a disk. Everything that is given has to be true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct DiskSelector {
    /// Serial number, as printed on the disk.
    pub serial: Option<String>,
    /// World Wide Name, as `eui.0025388b710116a1`, `naa.5000c500a1b2c3d4` or `0x5000c500a1b2c3d4`.
    pub wwn: Option<String>,
    /// Model; a `*` at its end stands for anything.
    pub model: Option<String>,
    /// PCI function that the disk is attached to.
    pub pci: Option<Bdf>,
    /// Shortest disk, in GiB.
    pub min_gib: Option<u64>,
    /// Longest disk, in GiB.
    pub max_gib: Option<u64>,
}

impl DiskSelector {
    /// Whether anything is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Tells what is wanted, as it would be said.
impl std::fmt::Display for DiskSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |name: &str, value: &Option<String>| {
            value.as_ref().map(|value| format!("{name} {value:?}"))
        };
        let size =
            |name: &str, value: Option<u64>| value.map(|value| format!("{name} {value} GiB"));
        let parts = [
            text("serial", &self.serial),
            text("wwn", &self.wwn),
            text("model", &self.model),
            self.pci.map(|address| format!("pci {address}")),
            size("at least", self.min_gib),
            size("at most", self.max_gib),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        f.write_str(if parts.is_empty() { "any disk" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_says_what_it_wants() {
        let install: Install = toml::from_str(
            "confirm = \"unattended\"\nerase = \"S1\"\nprogram = \"http://a/x\"\n[disk]\nserial = \"S1\"\npci = \"0000:01:00.0\"\n",
        )
        .expect("valid");
        assert_eq!(install.confirm, Confirm::Unattended);
        assert_eq!(install.program.as_deref(), Some("http://a/x"));
        assert_eq!(install.disk.to_string(), "serial \"S1\", pci 0000:01:00.0");
        assert_eq!(DiskSelector::default().to_string(), "any disk");
        assert!(toml::from_str::<Install>("[disk]\nname = \"sda\"\n").is_err());
    }
}
