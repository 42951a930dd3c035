//! How the volumes of an installed node are protected: what the program that opens them reports.

use serde::{Deserialize, Serialize};

use crate::ids::PublicKey;

/// A recovery key, sealed to an operator when the node was installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EscrowedKey {
    /// The operator's public key.
    pub operator: PublicKey,
    /// The sealed key, base64.
    #[serde(with = "crate::base64_bytes")]
    pub sealed: Vec<u8>,
}

/// A volume of the node's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Name of its partition.
    pub name: String,
    /// How it is protected.
    pub protection: Protection,
}

/// What keeps whoever pulls the disk from reading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Protection {
    /// It is encrypted, and this server's TPM has the key.
    Sealed {
        /// What the TPM asks for beside itself.
        bound: Bound,
    },
    /// It is encrypted, and the key lies beside it: nothing keeps anybody out.
    Unsealed {
        /// Why the TPM does not have it.
        reason: String,
    },
    /// It is encrypted, and somebody gave the recovery key.
    Recovered {
        /// Whether the TPM has the key from now on; why not otherwise.
        resealed: Result<(), String>,
    },
    /// It is not encrypted at all: an earlier release installed it, or it is a disk image.
    Plain,
    /// It is encrypted and could not be opened.
    Locked {
        /// Why.
        reason: String,
    },
}

/// What a sealed key is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Releases that the provider's key signed, in this server.
    Release,
    /// This server, whatever it was started with.
    Server,
}

/// What the server's firmware starts: as little as a seal to releases is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starts {
    /// Only what its owner's keys signed: Secure Boot is on.
    Signed,
    /// Whatever it finds. A program that it starts can measure what a release would have measured.
    Anything,
}

impl Protection {
    /// Returns its name.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Sealed { bound: Bound::Release } => "sealed",
            Self::Sealed { bound: Bound::Server } => "sealed-to-server",
            Self::Unsealed { .. } => "unsealed",
            Self::Recovered { .. } => "recovered",
            Self::Plain => "plain",
            Self::Locked { .. } => "locked",
        }
    }

    /// Returns what a person should know of it on a server with such firmware; empty when all is as it should
    /// be.
    pub fn notice(&self, starts: Starts) -> String {
        match self {
            Self::Sealed { bound: Bound::Release } => match starts {
                Starts::Signed => String::new(),
                Starts::Anything => {
                    "sealed to this server's TPM, but whoever starts another program on this \
                                     server opens it: switch Secure Boot on"
                        .to_owned()
                }
            },
            Self::Sealed { bound: Bound::Server } => {
                "sealed to this server's TPM, but whatever it is started with may open it: this \
                 release carries no signature of its measurements"
                    .to_owned()
            }
            Self::Unsealed { reason } => {
                format!("NOT SEALED, whoever has the disk can read it: {reason}")
            }
            Self::Recovered { resealed: Ok(()) } => {
                "opened with the recovery key; the TPM has the key from now on".to_owned()
            }
            Self::Recovered { resealed: Err(reason) } => {
                format!(
                    "opened with the recovery key, which the next start asks for again: {reason}"
                )
            }
            Self::Plain => "NOT ENCRYPTED, whoever has the disk can read it: install this release \
                            anew to encrypt it"
                .to_owned(),
            Self::Locked { reason } => format!("LOCKED: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_to_releases_is_whole_with_secure_boot_only() {
        let sealed = Protection::Sealed { bound: Bound::Release };
        assert_eq!(sealed.notice(Starts::Signed), "");
        let notice = sealed.notice(Starts::Anything);
        assert!(notice.contains("switch Secure Boot on"), "{notice}");
        assert_eq!(sealed.name(), "sealed");
        for other in [Protection::Plain, Protection::Sealed { bound: Bound::Server }] {
            assert_eq!(other.notice(Starts::Signed), other.notice(Starts::Anything));
        }
    }
}
