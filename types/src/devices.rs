//! Devices that come and go while a machine runs: what `POST /v1/devices` of a VMM takes, and what
//! `GET /v1/devices` answers.

use serde::{Deserialize, Serialize};

use crate::{
    disk_key::DiskKey,
    node::Bdf,
    vm::{DiskModel, RateLimit},
};

/// Longest name of an attached device, in bytes.
pub const MAX_DEVICE_NAME: usize = 64;

/// Asks to plug a device into a spare port. Its descriptor travels with the request (SCM_RIGHTS).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// Name by which it is detached: letters, digits, `.`, `:`, `_` and `-`, 1..=64.
    pub id: String,
    /// What it is.
    pub device: AttachDevice,
}

/// What is plugged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum AttachDevice {
    /// A device passed through; its descriptor as `PassthroughDevice.cdev_fd`. The machine was
    /// started with `VmSpec.passthrough`, perhaps without devices.
    Pci {
        /// Its address on the host.
        address: Bdf,
    },
    /// A disk over a raw file.
    Disk {
        /// Whether writes are refused.
        read_only: bool,
        /// Serial number the guest reads, at most 20 bytes.
        serial: String,
        /// What the guest sees it as.
        #[serde(default, deserialize_with = "crate::json::name")]
        model: DiskModel,
        /// Most that the guest gets of it, if that is bounded.
        #[serde(default)]
        limit: Option<RateLimit>,
        /// What the file is encrypted with; it is plain without one. Never in an answer.
        #[serde(
            default,
            deserialize_with = "crate::json::present",
            skip_serializing_if = "Option::is_none"
        )]
        key: Option<DiskKey>,
    },
}

impl AttachDevice {
    /// Returns it as it may be shown.
    pub fn without_key(mut self) -> Self {
        if let Self::Disk { key, .. } = &mut self {
            *key = None;
        }
        self
    }
}

/// An attached device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedDevice {
    /// Its name.
    pub id: String,
    /// What it is.
    pub device: AttachDevice,
    /// Number of its slot, as the guest reads it.
    pub slot: u16,
    /// How far it is.
    pub state: AttachedState,
}

/// How far an attached device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum AttachedState {
    /// In its slot; the guest gives it no power yet, or any more.
    Waiting,
    /// The guest reaches it.
    Connected,
    /// The guest has been asked to let go of it.
    Leaving,
    /// It was taken out, and its reset failed: it must not be given to anybody.
    Unclean {
        /// What was seen.
        reason: String,
    },
}
