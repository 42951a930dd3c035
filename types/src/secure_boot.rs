//! The configuration's section `[secure_boot]`.

use serde::{Deserialize, Serialize};

/// What the node does about the firmware's keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct SecureBoot {
    /// When the keys that came with the medium are given to the firmware.
    #[serde(default)]
    pub enrol: Enrol,
}

/// When keys are enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Enrol {
    /// Never.
    #[default]
    Never,
    /// When the firmware is in its setup mode, in which it has no keys and takes them from anybody.
    SetupMode,
}
