//! The configuration's section `[secure_boot]`.

use serde::{Deserialize, Serialize};

/// What the node does about the firmware's keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct SecureBoot {
    /// When the keys that came with the medium are given to the firmware.
    #[serde(default)]
    pub enrol: Enrol,
    /// What is done when keys are to be enrolled that would keep option ROMs of add-in cards from starting.
    #[serde(default)]
    pub option_roms: OptionRoms,
}

/// What is done about option ROMs: firmware's drivers on add-in cards, without which it does not see the
/// cards' drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum OptionRoms {
    /// Keys are not enrolled when a card has one and nobody but the image's builder would be trusted.
    #[default]
    Keep,
    /// Keys are enrolled all the same: nothing that is needed for a start is behind such a card.
    Lose,
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
