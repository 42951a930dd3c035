//! The node's configuration: one versioned TOML document, unknown keys refused by name and line.
//!
//! The same document comes from wherever `agent::config` finds it. It is parsed once; what parses is
//! valid. `check` holds the rules that no type does, `place` finds what broke one in the document,
//! `words` says what the TOML reader means.

mod check;
mod place;
mod words;

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Deserializer, Serialize, de};

use crate::{
    ids::{NodeId, PublicKey},
    install::{Disk, Install},
    node::Bdf,
    secure_boot::SecureBoot,
    units::Mebibytes,
    updates::Updates,
    uplinks::Uplink,
    written,
};

/// Version of the document that this build reads.
pub const CONFIG_VERSION: u32 = 1;

/// Largest configuration document, in bytes.
pub const MAX_CONFIG: usize = 64 << 10;

/// What a provider wants of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// [`CONFIG_VERSION`].
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Name shown to renters and on the console.
    #[serde(default)]
    pub name: String,
    /// Uplink; DHCPv4 and SLAAC on every wired interface when left out.
    #[serde(default)]
    pub network: Network,
    /// Other members of the overlay.
    #[serde(default)]
    pub overlay: Overlay,
    /// Who may sign leases.
    pub authority: Authority,
    /// Keys that may look after the node itself: restart its service, release devices, steer its updates and fetch
    /// the sealed recovery key. They can start no machine and read nothing of one.
    #[serde(default)]
    pub operators: Vec<PublicKey>,
    /// What may be rented.
    #[serde(default)]
    pub machines: Machines,
    /// Who else may read the node's metrics.
    #[serde(default)]
    pub metrics: Metrics,
    /// How the encrypted disk is opened where the TPM does not.
    #[serde(default)]
    pub disk: Option<Disk>,
    /// Clock sources.
    #[serde(default)]
    pub time: Time,
    /// Whether and where the node installs itself; nothing is installed when left out.
    pub install: Option<Install>,
    /// What it does about the firmware's keys; nothing when left out.
    #[serde(default)]
    pub secure_boot: SecureBoot,
    /// Where releases come from; the node is never updated when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updates: Option<Updates>,
}

/// How the node reaches the network: `uplinks`, or the short form for one card or all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Interface to use, by kernel name or hardware address; every wired one when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Where addresses come from.
    #[serde(default)]
    pub mode: NetworkMode,
    /// Static addresses with prefix length, as `192.0.2.5/24`. Only with `mode = "static"`.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Default gateways. Only with `mode = "static"`.
    #[serde(default, deserialize_with = "written::list")]
    pub gateways: Vec<IpAddr>,
    /// Name servers; those of DHCP when empty.
    #[serde(default, deserialize_with = "written::list")]
    pub dns: Vec<IpAddr>,
    /// Seconds that a changed network has to reach the overlay, 30 to 86400, before the last one that
    /// did comes back.
    #[serde(default = "Network::default_trial")]
    pub trial_s: u64,
    /// Bonds, VLANs, several uplinks. Not with `interface`, `mode`, `addresses` or `gateways`.
    #[serde(default)]
    pub uplinks: Vec<Uplink>,
}

impl Network {
    /// Longer than DHCP, LACP and spanning tree take together, shorter than a provider's patience.
    fn default_trial() -> u64 {
        180
    }
}

impl Default for Network {
    fn default() -> Self {
        Self {
            interface: None,
            mode: NetworkMode::default(),
            addresses: Vec::new(),
            gateways: Vec::new(),
            dns: Vec::new(),
            trial_s: Self::default_trial(),
            uplinks: Vec::new(),
        }
    }
}

/// Where addresses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// DHCPv4 and SLAAC.
    #[default]
    Auto,
    /// As `addresses` and `gateways` say.
    Static,
}

/// Other members of the overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// UDP address to listen on.
    #[serde(default = "Overlay::default_listen", deserialize_with = "written::one")]
    pub listen: SocketAddr,
    /// Members with a well-known address.
    #[serde(default)]
    pub seeds: Vec<Seed>,
}

impl Overlay {
    /// UDP port of the overlay unless configured.
    pub const DEFAULT_PORT: u16 = 4600;

    fn default_listen() -> SocketAddr {
        SocketAddr::from(([0; 8], Self::DEFAULT_PORT))
    }
}

impl Default for Overlay {
    fn default() -> Self {
        Self { listen: Self::default_listen(), seeds: Vec::new() }
    }
}

/// A member with a well-known address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// Its key. Whoever answers at the address without it is not the seed.
    pub node: NodeId,
    /// Where it listens.
    #[serde(deserialize_with = "written::one")]
    pub address: SocketAddr,
}

/// Who may sign leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Authority {
    /// How many different keys must have signed a lease.
    pub threshold: u32,
    /// The keys.
    pub keys: Vec<PublicKey>,
}

/// What may be rented.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machines {
    /// Devices to rent, by address; every device that is safe to give away when left out.
    pub devices: Option<Vec<Bdf>>,
    /// GPUs that are linked to each other directly, as by an NVLink bridge, one list for each set: a lease has all of a
    /// set, as they reach each other past the IOMMU. What their models tell counts beside it, unless it is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked: Option<Vec<Vec<Bdf>>>,
    /// Virtual CPUs to rent in all; as many as the host has CPUs when left out. More than that share
    /// the host's CPUs.
    pub vcpus: Option<u32>,
    /// Memory kept for the node itself.
    #[serde(default = "Machines::default_reserve")]
    pub reserve_mib: Mebibytes,
    /// Memory set aside as huge pages when the node starts, over its NUMA nodes as they have memory. Machines whose
    /// memory is a multiple of the page get them while there are some.
    #[serde(default = "Machines::default_huge_pages")]
    pub huge_pages_mib: Mebibytes,
    /// Size of those pages.
    #[serde(default)]
    pub huge_page: HugePage,
    /// How their packets leave.
    #[serde(default)]
    pub network: MachineNetwork,
    /// The uplink whose network they are on when `network` is `bridged`: the name of one of
    /// `network.uplinks`, with `ipv4` and `ipv6` off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Whether those on one node reach each other directly. Only with `network` = `bridged`.
    #[serde(default)]
    pub neighbours: Neighbours,
    /// Who may open connections to them.
    #[serde(default)]
    pub inbound: Inbound,
    /// IPv4 network from which machines get addresses, as `10.77.0.0/16`. The provider routes it to the
    /// node when `network` is `routed`.
    #[serde(default = "Machines::default_subnet")]
    pub subnet: String,
    /// Most that each machine may send, and most that it may receive, in Mbit/s, 1 to 400000; what the
    /// uplinks can do when left out.
    pub net_mbit: Option<u32>,
    /// IPv6 for machines: a prefix of 48 to 63 bits that the provider routes to the node,
    /// [`DELEGATED`] for the one that a DHCPv6 server on an uplink delegates, or `off`; a
    /// private one, behind the node's address, when left out. Each machine has 64 bits of its own; those
    /// for which the prefix has no room, as a sixteenth in 60 bits, have no IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,
    /// Seconds a stopped machine's disk is kept after its lease ended.
    #[serde(default = "Machines::default_retain")]
    pub retain_s: u64,
    /// Seconds from the power button to the plug, at a lease's end and at a renter's stop.
    #[serde(default = "Machines::default_grace")]
    pub grace_s: u64,
}

/// What `machines.ipv6` says where the prefix is the one that a DHCPv6 server delegates.
pub const DELEGATED: &str = "delegated";

impl Machines {
    fn default_reserve() -> Mebibytes {
        Mebibytes(256)
    }

    fn default_huge_pages() -> Mebibytes {
        Mebibytes(0)
    }

    fn default_subnet() -> String {
        "10.77.0.0/16".to_owned()
    }

    /// Ten days.
    fn default_retain() -> u64 {
        10 * 24 * 3600
    }

    fn default_grace() -> u64 {
        10
    }
}

impl Default for Machines {
    fn default() -> Self {
        Self {
            devices: None,
            linked: None,
            vcpus: None,
            reserve_mib: Self::default_reserve(),
            huge_pages_mib: Self::default_huge_pages(),
            huge_page: HugePage::default(),
            network: MachineNetwork::default(),
            uplink: None,
            neighbours: Neighbours::default(),
            inbound: Inbound::default(),
            subnet: Self::default_subnet(),
            net_mbit: None,
            ipv6: None,
            retain_s: Self::default_retain(),
            grace_s: Self::default_grace(),
        }
    }
}

/// How machines' packets leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineNetwork {
    /// With the node's address.
    #[default]
    Nat,
    /// As they are: the provider routes machines' addresses to the node.
    Routed,
    /// As frames, through an uplink of their own on which the node has no address: machines are
    /// stations of the provider's network, whose DHCP server and routers give them addresses.
    Bridged,
}

/// Whether bridged machines of one node reach each other directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Neighbours {
    /// They do not: each reaches what is beyond the uplink only.
    #[default]
    Apart,
    /// They do, as if they were servers at one switch.
    Together,
}

/// Who may open connections to machines, beside those that hold their lease, through the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inbound {
    /// Nobody.
    #[default]
    Closed,
    /// Whoever reaches their routed addresses.
    Open,
}

/// Size of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum HugePage {
    /// 2 MiB.
    #[default]
    #[serde(rename = "2m")]
    Size2M,
    /// 1 GiB.
    #[serde(rename = "1g")]
    Size1G,
}

/// Who else may read the node's metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// TCP address at which anybody who reaches it reads `/metrics`, and nothing else, without a
    /// password; none when left out. Metrics name machines, addresses and lease ends.
    #[serde(default, deserialize_with = "written::given")]
    pub listen: Option<SocketAddr>,
}

/// Clock sources.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// NTP servers (RFC 4330 requests), host name or address.
    #[serde(default)]
    pub ntp: Vec<String>,
    /// Servers of authenticated time (NTS, RFC 8915), `HOST` or `HOST:PORT` of their key
    /// establishment. With these, servers that DHCP names are not asked.
    #[serde(default)]
    pub nts: Vec<String>,
    /// Certificates, in PEM, that vouch for those servers; the public authorities when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nts_roots: Option<String>,
}

/// Why a document is no node configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ConfigError {
    #[error("the configuration has {found} bytes; at most {MAX_CONFIG} are read")]
    TooLarge { found: usize },
    #[error("configuration line {line}: {found}; save it as UTF-8 (Notepad: Save as, Encoding)")]
    Encoding { line: usize, found: &'static str },
    #[error("configuration {0}")]
    Document(Explained),
    #[error("configuration line {line}: {said}: {right}")]
    Value { line: usize, said: String, right: String },
}

/// What is wrong in a TOML document, in words for who wrote it, and where. Lines and columns count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
#[allow(missing_docs, reason = "the message is the doc")]
pub struct Explained {
    pub line: usize,
    pub column: usize,
    pub message: String,
}

impl NodeSpec {
    /// Returns the text of a document, whatever it says.
    pub fn text(bytes: &[u8]) -> Result<&str, ConfigError> {
        if bytes.len() > MAX_CONFIG {
            return Err(ConfigError::TooLarge { found: bytes.len() });
        }
        if let Some(line) = bytes.split(|byte| *byte == b'\n').position(|line| line.contains(&0)) {
            return Err(ConfigError::Encoding { line: line + 1, found: zero(bytes) });
        }
        std::str::from_utf8(bytes).map_err(|error| {
            let before = bytes.get(..error.valid_up_to()).unwrap_or_default();
            let line = before.split(|byte| *byte == b'\n').count();
            ConfigError::Encoding { line, found: "it holds a character in another encoding" }
        })
    }

    /// Parses a configuration document.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let text = Self::text(bytes)?;
        let spec: Self =
            toml::from_str(text).map_err(|error| ConfigError::Document(explain(text, &error)))?;
        check::check(&spec).map_err(|fault| {
            let (offset, said) = place::find(text, &fault.key);
            let (line, _) = line_and_column(text, offset);
            ConfigError::Value { line, said, right: fault.right }
        })?;
        Ok(spec)
    }
}

/// Says what the TOML reader found in a document in words for who wrote it, and where: a node's
/// configuration, or another file of ours that people write.
pub fn explain(text: &str, error: &toml::de::Error) -> Explained {
    let offset = error.span().map_or(0, |span| span.start);
    let (line, column) = line_and_column(text, offset);
    Explained { line, column, message: words::told(text, offset, error.message()) }
}

/// What a document is that has zero bytes: every letter of UTF-16 has one in the place of half of it.
fn zero(bytes: &[u8]) -> &'static str {
    match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [0, _, ..] | [_, 0, ..] => "it is UTF-16",
        _ => "it holds a zero byte, which no text does",
    }
}

/// Parses `ADDRESS/LENGTH`; `None` when either part is wrong or the length too large.
pub fn parse_prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let length: u8 = length.parse().ok()?;
    let max = if address.is_ipv4() { 32 } else { 128 };
    (length <= max).then_some((address, length))
}

fn known_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let version = u32::deserialize(deserializer)?;
    if version == CONFIG_VERSION {
        return Ok(version);
    }
    Err(de::Error::custom(format_args!(
        "{version} is not known to this release; it reads version {CONFIG_VERSION}"
    )))
}

fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
