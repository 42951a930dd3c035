//! The JSON bodies that renter, gateway and node exchange.
//!
//! | Request                                | Body             | Answer                  |
//! |----------------------------------------|------------------|-------------------------|
//! | `GET /v1/nodes`                        |                  | list of [`NodeView`]    |
//! | `GET /v1/nodes/{id}`                   |                  | [`NodeView`]            |
//! | `POST /v1/machines`                    | [`CreateMachine`]| 201 [`Machine`]         |
//! | `GET /v1/machines`                     |                  | list of [`Machine`]     |
//! | `GET /v1/machines/{id}`                |                  | [`Machine`]             |
//! | `POST /v1/machines/{id}/{power}`       |                  | 202 [`Machine`]         |
//! | `DELETE /v1/machines/{id}`             |                  | 202 [`Machine`]         |
//! | `PUT /v1/machines/{id}/lease`          | [`LeaseRenewal`] | [`Machine`]             |
//! | `POST /v1/nodes/{id}/attestation` (unsigned) | [`crate::attestation::Challenge`] | [`crate::attestation::Evidence`] |
//! | `GET /v1/nodes/{id}/recovery-key`      |                  | [`RecoveryKeys`]        |
//! | `POST /v1/nodes/{id}/restart-agent`    |                  | 202 [`Restarting`]      |
//! | `POST /v1/nodes/{id}/devices/{address}/release` |         | 202 [`Releasing`]       |
//! | `POST /v1/nodes/{id}/updates/{word}`   |                  | 202 [`Updating`]        |
//! | `GET /v1/machines/{id}/receipts`      |                  | [`Receipts`]            |
//! | `POST /v1/machines/{id}/{nmi, pause, resume}` |          | [`Machine`]             |
//! | `GET /v1/machines/{id}/devices`        |                  | [`crate::hardware::Attachments`] |
//! | `POST /v1/machines/{id}/devices`       | [`crate::hardware::Attach`] | 202 [`crate::hardware::Attachment`] |
//! | `DELETE /v1/machines/{id}/devices/{name}` |               | 202 [`crate::hardware::Attachment`] |
//! | `GET /v1/machines/{id}/counters`       |                  | [`types::operations::VmCounters`] |
//! | `GET /v1/machines/{id}/events`         |                  | [`types::operations::VmEvents`] |
//! | `GET /v1/node` (to a node, unsigned)   |                  | [`types::node::Offer`]  |

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use types::{
    ids::{ContentId, MachineId, NodeId, PublicKey},
    node::{MachineShape, Offer, PciDevice},
    units::{Mebibytes, UnixSeconds},
    volumes::EscrowedKey,
};

use crate::{
    attestation::TpmCertificate,
    document::Envelope,
    hardware::{Hardware, Placement},
    metering::SignedReceipt,
};

/// Longest kernel command line that is passed on, in bytes (x86 `COMMAND_LINE_SIZE` less one).
pub const MAX_CMDLINE: usize = 2047;

/// Longest host name (Linux's HOST_NAME_MAX less one).
pub const MAX_HOSTNAME: usize = 63;

/// Most SSH keys of a seed.
pub const MAX_SSH_KEYS: usize = 32;

/// Longest SSH key, in characters: RSA of 16,384 bits and a comment.
pub const MAX_SSH_KEY: usize = 4096;

/// Most user data, in bytes.
pub const MAX_USER_DATA: usize = 128 << 10;

/// Longest idempotency key, in bytes.
pub const MAX_IDEMPOTENCY_KEY: usize = 64;

/// Status of a node's answer to what it has taken note of and carries out from then on: machines that are turned on,
/// off or deleted, and what comes into them and goes (RFC 9110 §15.3.3, 202 Accepted).
pub const BEGUN: u16 = 202;

/// Most receipts in one answer.
pub const MAX_RECEIPTS: usize = 500;

/// Asks for the machine of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateMachine {
    /// The signed lease.
    pub lease: Envelope,
    /// What to start.
    pub image: Image,
    /// What is chosen of the hardware.
    #[serde(default)]
    pub hardware: Hardware,
}

/// What a machine starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Kernel: a bzImage or a PVH vmlinux. Without one, UEFI firmware starts what is on the disk,
    /// and there is neither an initramfs nor a command line.
    #[serde(default)]
    pub kernel: Option<ContentId>,
    /// Initramfs.
    #[serde(default)]
    pub initrd: Option<ContentId>,
    /// What the machine's disk holds at first.
    #[serde(default)]
    pub disk: Option<ContentId>,
    /// Kernel command line, at most [`MAX_CMDLINE`] bytes.
    #[serde(default)]
    pub cmdline: String,
    /// What cloud-init finds at the first start, if it is to find anything.
    #[serde(default)]
    pub seed: Option<Seed>,
}

/// What cloud-init finds (NoCloud data source). Without user data, keys are in a generated one, too, and are shown to
/// Ignition for the user `core`, with the host name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// Host name: labels of letters, digits and hyphens, at most 63 characters in all.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Public keys for the image's usual user, as in `authorized_keys`, at most
    /// [`MAX_SSH_KEYS`], each a line of UTF-8 of at most [`MAX_SSH_KEY`] bytes. Nobody gets them where user data is a
    /// cloud-config with `users` of its own and no `default` among them; a configuration for Ignition carries its own.
    #[serde(default)]
    pub ssh_keys: Vec<String>,
    /// User data: text, not gzip, passed on as it is, at most [`MAX_USER_DATA`] bytes. A JSON object with
    /// `ignition.version` is shown to Ignition, too, where that looks for its configuration.
    #[serde(default)]
    pub user_data: Option<String>,
}

/// Why a machine cannot start from an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ImageError {
    #[error(
        "image.cmdline has {bytes} bytes; at most {MAX_CMDLINE} are passed on, without line ends"
    )]
    Cmdline { bytes: usize },
    #[error("image has neither a kernel nor a disk to start from")]
    Nothing,
    #[error("image.initrd and image.cmdline are the kernel's, and there is no kernel")]
    NoKernel,
    #[error(
        "image.seed.hostname is not a host name of at most {MAX_HOSTNAME} letters, digits, dots and hyphens"
    )]
    Hostname,
    #[error(
        "image.seed.ssh_keys has {keys} keys; at most {MAX_SSH_KEYS} are passed on, each one line of UTF-8 without control characters, of at most {MAX_SSH_KEY} bytes"
    )]
    SshKeys { keys: usize },
    #[error("image.seed.user_data has {bytes} bytes; at most {MAX_USER_DATA} are passed on")]
    UserData { bytes: usize },
}

impl Image {
    /// Checks everything but whether the files exist.
    pub fn check(&self) -> Result<(), ImageError> {
        if self.cmdline.len() > MAX_CMDLINE || self.cmdline.contains(['\0', '\n']) {
            return Err(ImageError::Cmdline { bytes: self.cmdline.len() });
        }
        if self.kernel.is_none() && self.disk.is_none() {
            return Err(ImageError::Nothing);
        }
        if self.kernel.is_none() && (self.initrd.is_some() || !self.cmdline.is_empty()) {
            return Err(ImageError::NoKernel);
        }
        self.seed.as_ref().map_or(Ok(()), Seed::check)
    }

    /// Returns the files it names.
    pub fn contents(&self) -> impl Iterator<Item = ContentId> {
        [self.kernel, self.initrd, self.disk].into_iter().flatten()
    }
}

impl Seed {
    fn check(&self) -> Result<(), ImageError> {
        if self.hostname.as_deref().is_some_and(|name| !is_hostname(name)) {
            return Err(ImageError::Hostname);
        }
        let is_key = |key: &String| {
            (1..=MAX_SSH_KEY).contains(&key.len())
                && !key.chars().any(|c| c.is_control() || NOT_IN_LINES.contains(&c))
        };
        if self.ssh_keys.len() > MAX_SSH_KEYS || !self.ssh_keys.iter().all(is_key) {
            return Err(ImageError::SshKeys { keys: self.ssh_keys.len() });
        }
        match &self.user_data {
            Some(data) if data.len() > MAX_USER_DATA => {
                Err(ImageError::UserData { bytes: data.len() })
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// What no line has, without being a control character: to YAML 1.1, which cloud-init reads a seed by, the first two
/// end one (§5.4, "b-line-separator", "b-paragraph-separator"), and the others are nowhere (§5.1, "c-printable").
const NOT_IN_LINES: [char; 4] = ['\u{2028}', '\u{2029}', '\u{fffe}', '\u{ffff}'];

/// Returns whether `name` is a host name (RFC 1123 §2.1) that Linux takes.
fn is_hostname(name: &str) -> bool {
    let label = |label: &str| {
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        edge(label.as_bytes().first())
            && edge(label.as_bytes().last())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    name.len() <= MAX_HOSTNAME && name.split('.').all(label)
}

/// Brings a later lease of the same machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRenewal {
    /// The signed lease, of the same id, node and renter, with a higher serial.
    pub lease: Envelope,
}

/// A machine as its node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name, which is its lease's.
    pub id: MachineId,
    /// Where it is.
    pub node: NodeId,
    /// Who may use it.
    pub renter: PublicKey,
    /// Serial of the lease in force.
    pub serial: u64,
    /// First second of the lease.
    pub start: UnixSeconds,
    /// First second after it.
    pub end: UnixSeconds,
    /// Its size.
    pub shape: MachineShape,
    /// What it starts from.
    pub image: Image,
    /// What its renter chose of the hardware.
    #[serde(default)]
    pub hardware: Hardware,
    /// Where on the node it is since its latest start.
    #[serde(default)]
    pub placement: Option<Placement>,
    /// What it does.
    pub state: MachineState,
    /// The same in a sentence; empty when there is nothing to add.
    #[serde(default)]
    pub detail: String,
    /// Its addresses on the node's network.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// When it was made.
    pub created: UnixSeconds,
    /// What happened lately, oldest first.
    #[serde(default)]
    pub events: Vec<MachineEvent>,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// Its lease has not begun.
    Pending,
    /// Content is fetched, devices are prepared.
    Starting,
    /// The guest runs.
    Running,
    /// The guest runs and its lease ends soon.
    Warned,
    /// The guest was asked to stop.
    Stopping,
    /// It is off, its lease goes on.
    Stopped,
    /// It did not start; `detail` says why.
    Failed,
    /// Its lease ended; its disk is kept, a renewal brings it back.
    Retained,
    /// Its disk is gone.
    Destroyed,
}

impl std::fmt::Display for MachineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pending => "pending",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Warned => "warned",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Retained => "retained",
            Self::Destroyed => "destroyed",
        })
    }
}

/// Something that happened to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineEvent {
    /// When.
    pub at: UnixSeconds,
    /// What, in words.
    pub what: String,
}

/// A disk's recovery key as it was sealed to operators when the node was installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoveryKeys {
    /// One for each operator.
    pub keys: Vec<EscrowedKey>,
}

/// What a node does when its service is to be restarted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarting {
    /// `agent`.
    pub restarting: String,
}

/// What a node does about its updates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Updating {
    /// `apply`, `check`, `forget`, `hold` or `resume`.
    pub updating: String,
}

/// What a node does with a quarantined device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Releasing {
    /// The device's address.
    pub releasing: String,
}

/// What a machine used, oldest first. Receipts outlive their machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipts {
    /// At most [`MAX_RECEIPTS`].
    pub receipts: Vec<SignedReceipt>,
    /// What to ask for as `?after=` to get the next ones; absent when these are the last.
    #[serde(default)]
    pub next: Option<u64>,
}

/// A node as a gateway knows it: what it offers and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its key.
    pub node: NodeId,
    /// Name the provider gave it.
    pub name: String,
    /// Release it runs.
    pub release: String,
    /// When it last said what it offers.
    pub issued: UnixSeconds,
    /// Until when that counts.
    pub expires: UnixSeconds,
    /// Virtual CPUs free.
    pub vcpus: u32,
    /// Memory free for machines.
    pub memory_mib: Mebibytes,
    /// Disk space free for machines.
    pub disk_mib: Mebibytes,
    /// Its devices.
    pub devices: Vec<PciDevice>,
    /// Where it can be dialled, as far as known.
    pub addresses: Vec<SocketAddr>,
    /// Seconds since the overlay heard of it.
    pub last_heard_s: u64,
    /// What it proved of itself; absent when the gateway does not ask for that, or did not yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attestation: Option<Attestation>,
}

/// What a gateway found when it asked a node to prove what it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attestation {
    /// When it asked.
    pub at: UnixSeconds,
    /// The release that the node was started with, by its TPM's word; absent when it proved none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// Its TPM: SHA-256 of the endorsement key's public area.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<String>,
    /// Whether the TPM's maker vouches for it; absent when the gateway was told no authorities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<TpmCertificate>,
    /// Why it proved none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl NodeView {
    /// Puts together what a node says and what the overlay knows of it.
    pub fn new(offer: Offer, addresses: Vec<SocketAddr>, last_heard_s: u64) -> Self {
        let Offer { node, name, release, issued, expires, vcpus, memory_mib, disk_mib, devices } =
            offer;
        Self {
            node,
            name,
            release,
            issued,
            expires,
            vcpus,
            memory_mib,
            disk_mib,
            devices,
            addresses,
            last_heard_s,
            attestation: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Image {
        let disk = Some(ContentId::from_bytes([1; 32]));
        Image { kernel: None, initrd: None, disk, cmdline: String::new(), seed: None }
    }

    fn seeded(seed: Seed) -> Result<(), ImageError> {
        Image { seed: Some(seed), ..disk() }.check()
    }

    #[test]
    fn a_disk_alone_or_a_kernel_will_do() {
        assert_eq!(disk().check(), Ok(()));
        let kernel = Some(ContentId::from_bytes([2; 32]));
        assert_eq!(Image { kernel, disk: None, ..disk() }.check(), Ok(()));
        assert_eq!(Image { disk: None, ..disk() }.check(), Err(ImageError::Nothing));
        let cmdline = Image { cmdline: "quiet".into(), ..disk() };
        assert_eq!(cmdline.check(), Err(ImageError::NoKernel));
        assert_eq!(Image { initrd: kernel, ..disk() }.check(), Err(ImageError::NoKernel));
        let lines = Image { kernel, cmdline: "a\nb".into(), ..disk() };
        assert_eq!(lines.check(), Err(ImageError::Cmdline { bytes: 3 }));
    }

    #[test]
    fn host_names_are_host_names() {
        let named = |name: &str| seeded(Seed { hostname: Some(name.into()), ..Seed::default() });
        assert_eq!(["a", "web-1", "a.b.example"].map(named), [Ok(()); 3]);
        let long = "a".repeat(64);
        let wrong = ["", "-a", "a-", "a..b", "a b", "a\nb: c", "ä", &long];
        assert_eq!(wrong.map(named), [Err(ImageError::Hostname); 8]);
    }

    #[test]
    fn keys_and_data_are_bounded() {
        let key = |key: &str| seeded(Seed { ssh_keys: vec![key.into()], ..Seed::default() });
        assert_eq!(key("ssh-ed25519 AAAA me@here"), Ok(()));
        // A comment is whatever its owner wrote.
        assert_eq!(key("ssh-ed25519 AAAA J\u{fc}rgens Rechner \u{1f5a5}"), Ok(()));
        let wrong = ["", "two\nlines", "tab\t", "a\u{85}b", "a\u{2028}b", "a\u{2029}b", "a\u{7f}b"];
        assert_eq!(wrong.map(key), [Err(ImageError::SshKeys { keys: 1 }); 7]);
        let unprintable = ["a\u{fffe}b", "a\u{ffff}b"];
        assert_eq!(unprintable.map(key), [Err(ImageError::SshKeys { keys: 1 }); 2]);
        assert_eq!(key(&"\u{fc}".repeat(MAX_SSH_KEY / 2)), Ok(()));
        assert!(key(&"\u{fc}".repeat(MAX_SSH_KEY / 2 + 1)).is_err());
        let many = Seed { ssh_keys: vec!["k".into(); 33], ..Seed::default() };
        assert_eq!(seeded(many), Err(ImageError::SshKeys { keys: 33 }));
        let data = Seed { user_data: Some("x".repeat((128 << 10) + 1)), ..Seed::default() };
        assert_eq!(seeded(data), Err(ImageError::UserData { bytes: 131_073 }));
    }

    #[test]
    fn documents_from_before_still_parse() {
        let text = format!("{{\"kernel\":\"{}\"}}", "01".repeat(32));
        let image: Image = serde_json::from_str(&text).expect("an image");
        assert_eq!((image.kernel, image.seed), (Some(ContentId::from_bytes([1; 32])), None));
    }
}
