//! The node's configuration: one versioned TOML document, unknown keys refused by name and line.
//!
//! The same document comes from the image, from a FAT volume labelled `HOLDFAST`
//! (`holdfast.toml`), or from the kernel command line (`holdfast.config=` and the document in
//! base64). It is parsed once; what parses is valid. `check` holds the rules that no type does,
//! `place` finds what broke one in the document,
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
    /// Keys that may look after the node itself (restart its service, drain it). They can start no
    /// machine and read nothing of one.
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
    /// Virtual CPUs to rent in all; as many as the host has CPUs when left out. More than that share
    /// the host's CPUs.
    pub vcpus: Option<u32>,
    /// Memory kept for the node itself.
    #[serde(default = "Machines::default_reserve")]
    pub reserve_mib: Mebibytes,
    /// Memory set aside as huge pages when the node starts, evenly over its NUMA nodes. Machines whose
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
    /// Seconds between the warning at a lease's end and the ACPI power button being forced.
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

    /// Ten days: design §6.
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
    #[error("configuration line {line}, column {column}: {message}")]
    Document { line: usize, column: usize, message: String },
    #[error("configuration line {line}: {said}: {right}")]
    Value { line: usize, said: String, right: String },
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
        let spec: Self = toml::from_str(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            let (line, column) = line_and_column(text, offset);
            let message = words::told(text, offset, error.message());
            ConfigError::Document { line, column, message }
        })?;
        check::check(&spec).map_err(|fault| {
            let (offset, said) = place::find(text, &fault.key);
            let (line, _) = line_and_column(text, offset);
            ConfigError::Value { line, said, right: fault.right }
        })?;
        Ok(spec)
    }
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
mod tests {
    use super::*;

    const KEY: &str = "0101010101010101010101010101010101010101010101010101010101010101";

    fn document(extra: &str) -> String {
        format!("version = 1\n{extra}\n[authority]\nthreshold = 1\nkeys = [\"{KEY}\"]\n")
    }

    #[test]
    fn smallest_document_is_enough() {
        let spec = NodeSpec::parse(document("").as_bytes()).expect("valid");
        assert_eq!(spec.network.mode, NetworkMode::Auto);
        assert_eq!(spec.machines.retain_s, 864_000);
    }

    #[test]
    fn unknown_key_is_named_with_its_line() {
        let refusal = NodeSpec::parse(document("nmae = \"x\"").as_bytes()).expect_err("typo");
        let ConfigError::Document { line, message, .. } = refusal else { panic!("{refusal}") };
        assert_eq!(line, 2);
        assert!(message.contains("nmae"), "{message}");
    }

    /// The line, what it says, and what is right.
    fn wrong(text: &str) -> (usize, String, String) {
        match NodeSpec::parse(text.as_bytes()) {
            Err(ConfigError::Value { line, said, right }) => (line, said, right),
            other => panic!("{other:?}"),
        }
    }

    /// The same of a value that none of its type is.
    fn unreadable(text: &str) -> (usize, String) {
        match NodeSpec::parse(text.as_bytes()) {
            Err(ConfigError::Document { line, message, .. }) => (line, message),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn threshold_counts_different_keys() {
        let text =
            format!("version = 1\n[authority]\nthreshold = 2\nkeys = [\"{KEY}\", \"{KEY}\"]\n");
        let (line, said, right) = wrong(&text);
        assert_eq!((line, said.as_str()), (3, "authority.threshold = 2"));
        assert!(right.contains("1 to 1"), "{right}");
        let none = "version = 1\nauthority = { threshold = 1, keys = [] }\n";
        assert_eq!(wrong(none).1, "authority.keys");
    }

    #[test]
    fn keys_that_can_check_no_signature_are_refused() {
        let bad = "02".repeat(32);
        let text =
            format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\n\"{KEY}\",\n\"{bad}\"]\n");
        let (line, said, right) = wrong(&text);
        assert_eq!((line, said), (6, format!("authority.keys[1] = \"{bad}\"")));
        assert!(right.contains("holdfast keygen"), "{right}");
        let said = |text: &str| wrong(&document(text)).1;
        assert!(said(&format!("operators = [\"{bad}\"]")).starts_with("operators[0]"));
        let escrow = said(&format!("[install]\nescrow = [\"{KEY}\", \"{bad}\"]"));
        assert!(escrow.starts_with("install.escrow[1]"), "{escrow}");
        let seed = |key: &str| {
            let address = "address = \"192.0.2.1:4600\"";
            document(&format!("[[overlay.seeds]]\nnode = \"{key}\"\n{address}"))
        };
        assert!(NodeSpec::parse(seed(KEY).as_bytes()).is_ok());
        let (line, said, _) = wrong(&seed(&bad));
        assert_eq!((line, said), (3, format!("overlay.seeds[0].node = \"{bad}\"")));
    }

    #[test]
    fn the_recovery_key_is_sealed_to_eight_at_most() {
        let escrow = |count| {
            let keys = vec![format!("\"{KEY}\""); count].join(", ");
            document(&format!("[install]\nescrow = [{keys}]"))
        };
        assert!(NodeSpec::parse(escrow(8).as_bytes()).is_ok());
        let (line, said, right) = wrong(&escrow(9));
        assert_eq!((line, said.as_str()), (3, "install.escrow"));
        assert_eq!(right, "it names 9 keys; at most 8 are right");
    }

    #[test]
    fn machines_need_an_ipv4_network_with_room() {
        let subnet = |text: &str| document(&format!("[machines]\nsubnet = \"{text}\""));
        for good in ["10.77.0.0/30", "10.77.3.9/22", "0.0.0.0/0"] {
            assert!(NodeSpec::parse(subnet(good).as_bytes()).is_ok(), "{good}");
        }
        for bad in ["2001:db8::/64", "10.77.0.0/31", "10.77.0.0/32", "10.77.0.0", "10.77.0.0/33"] {
            let (line, said, right) = wrong(&subnet(bad));
            assert_eq!((line, said), (3, format!("machines.subnet = \"{bad}\"")));
            assert!(right.contains("10.77.0.0/16"), "{right}");
        }
    }

    #[test]
    fn wrong_numbers_are_told_with_line_and_key() {
        let (line, said, right) = wrong(&document("[machines]\nnet_mbit = 0"));
        assert_eq!((line, said.as_str()), (3, "machines.net_mbit = 0"));
        assert_eq!(right, "it must be 1 to 400000");
        let (line, said, _) = wrong(&document("network = { trial_s = 29 }"));
        assert_eq!((line, said.as_str()), (2, "network.trial_s = 29"));
        let updates = "[updates]\nmirrors = []\nroot = '{}'\ncheck_s = 4";
        let (line, message) = unreadable(&document(updates));
        assert_eq!((line, message.as_str()), (5, "updates.check_s: found 4; 5 to 604800 is right"));
    }

    #[test]
    fn what_is_no_address_is_told_with_what_would_be_one() {
        let seed = format!("[[overlay.seeds]]\nnode = \"{KEY}\"\naddress = \"gw.example:4600\"");
        let (line, message) = unreadable(&document(&seed));
        assert_eq!(line, 4);
        assert!(message.starts_with("overlay.seeds[0].address: \"gw.example:4600\""), "{message}");
        assert!(message.contains("names are not looked up"), "{message}");
        let (line, message) = unreadable(&document("[network]\ndns = [\"192.0.2.1\", \"ns\"]"));
        assert_eq!(line, 3);
        assert!(message.starts_with("network.dns: \"ns\""), "{message}");
        let (_, message) = unreadable(&document("[metrics]\nlisten = \":9100\""));
        assert!(message.starts_with("metrics.listen: \":9100\""), "{message}");
    }

    #[test]
    fn static_mode_needs_addresses() {
        let (line, said, _) = wrong(&document("[network]\nmode = \"static\""));
        assert_eq!((line, said.as_str()), (2, "network.addresses is left out"));
        let (line, said, _) = wrong(&document("[network]\naddresses = [\"192.0.2.5/24\"]"));
        assert_eq!((line, said.as_str()), (3, "network.addresses"));
    }

    #[test]
    fn a_gateway_needs_an_address_of_its_family() {
        let gateways = |gateways: &str| {
            document(&format!(
                "[network]\nmode = \"static\"\naddresses = [\"192.0.2.5/24\"]\ngateways = [{gateways}]"
            ))
        };
        assert!(NodeSpec::parse(gateways("\"192.0.2.1\"").as_bytes()).is_ok());
        let (line, said, _) = wrong(&gateways("\"192.0.2.1\", \"2001:db8::1\""));
        assert_eq!((line, said.as_str()), (5, "network.gateways[1] = \"2001:db8::1\""));
    }

    #[test]
    fn other_encodings_are_told_what_is_read() {
        // As some editors save: UTF-16 with a byte order mark.
        let refusal = NodeSpec::parse(b"\xff\xfev\0e\0").expect_err("UTF-16");
        assert_eq!(refusal, ConfigError::Encoding { line: 1, found: "it is UTF-16" });
        assert!(refusal.to_string().contains("save it as UTF-8"), "{refusal}");
        // The same without the mark; and in Latin-1; and a text that somebody padded.
        let told = |bytes: &[u8]| NodeSpec::parse(bytes).expect_err("refused").to_string();
        assert!(told(b"v\0e\0").contains("UTF-16"));
        assert!(
            told(b"version = 1\nname = \"K\xf6ln\"\n").contains("line 2: it holds a character")
        );
        assert!(told(b"version = 1\n\0\0").contains("line 2: it holds a zero byte"));
        // A mark before UTF-8 and the ends of lines of Windows are none of the provider's business.
        let text = document("name = \"x\"").replace('\n', "\r\n");
        assert!(NodeSpec::parse(format!("\u{feff}{text}").as_bytes()).is_ok());
    }

    #[test]
    fn only_routed_machines_can_be_open() {
        let parse = |text: &str| NodeSpec::parse(document(text).as_bytes());
        let routed =
            "[machines]\nnetwork = \"routed\"\nsubnet = \"192.0.2.0/24\"\ninbound = \"open\"";
        assert_eq!(parse(routed).expect("valid").machines.inbound, Inbound::Open);
        assert!(parse("[machines]\ninbound = \"open\"\nipv6 = \"2001:db8:1::/48\"").is_ok());
        for text in ["", "ipv6 = \"off\"\n"] {
            let refusal = parse(&format!("[machines]\n{text}inbound = \"open\"")).expect_err("nat");
            assert!(refusal.to_string().contains("machines.network"), "{refusal}");
        }
    }

    #[test]
    fn machines_ipv6_has_room_for_a_network_each() {
        let open = document("[machines]\nipv6 = \"delegated\"\ninbound = \"open\"");
        let spec = NodeSpec::parse(open.as_bytes()).expect("valid");
        assert_eq!(spec.machines.ipv6.as_deref(), Some(DELEGATED));
        let parse = |prefix: &str| {
            let text = document(&format!("[machines]\nipv6 = \"{prefix}\""));
            NodeSpec::parse(text.as_bytes()).map_err(|refusal| refusal.to_string())
        };
        for prefix in ["off", "2001:db8::/48", "2001:db8::/56", "2001:db8::/57", "2001:db8::/63"] {
            assert_eq!(parse(prefix).expect("valid").machines.ipv6.as_deref(), Some(prefix));
        }
        for prefix in ["2001:db8::/64", "2001:db8::/80", "2001:db8::1/128"] {
            let refusal = parse(prefix).expect_err("one network");
            assert!(refusal.contains("machines.ipv6") && refusal.contains("/60"), "{refusal}");
        }
        for prefix in ["2001:db8::/47", "192.0.2.0/24", "on"] {
            let refusal = parse(prefix).expect_err("no such prefix");
            assert!(refusal.contains("48 to 63"), "{refusal}");
        }
    }

    #[test]
    fn bridged_machines_need_an_uplink_of_their_own() {
        let parse = |machines: &str, uplink: &str| {
            let card = "card = { name = \"eth1\" }";
            let text = format!(
                "[machines]\nnetwork = \"bridged\"\n{machines}\n[[network.uplinks]]\nname = \"guests\"\n{card}\n{uplink}"
            );
            NodeSpec::parse(document(&text).as_bytes())
        };
        let off = "ipv4 = \"off\"\nipv6 = \"off\"";
        let spec = parse("uplink = \"guests\"", off).expect("valid");
        assert_eq!(spec.machines.network, MachineNetwork::Bridged);
        assert_eq!(spec.machines.neighbours, Neighbours::Apart);
        let told = |machines: &str, uplink: &str| {
            parse(machines, uplink).expect_err("refused").to_string()
        };
        assert!(told("", off).contains("set machines.uplink"));
        assert!(told("uplink = \"eth1\"", off).contains("[[network.uplinks]]"));
        assert!(told("uplink = \"guests\"", "ipv4 = \"off\"").contains("ipv6 = \"off\""));
        assert!(told("uplink = \"guests\"\nipv6 = \"off\"", off).contains("leave it out"));
        let alone = NodeSpec::parse(document("[machines]\nneighbours = \"together\"").as_bytes());
        assert!(alone.expect_err("nat").to_string().contains("bridged"));
    }

    #[test]
    fn texts_that_name_what_they_must_be_are_refused() {
        let (line, said, right) = wrong(&document("[time]\nnts = [\"https://time.example\"]"));
        assert_eq!((line, said.as_str()), (3, "time.nts[0] = \"https://time.example\""));
        assert!(right.contains("no URL"), "{right}");
        assert_eq!(wrong(&document("[time]\nntp = [\"\"]")).1, "time.ntp[0] = \"\"");
        let roots = wrong(&document("[time]\nnts_roots = \"/etc/ca.pem\""));
        assert_eq!(roots.1, "time.nts_roots = \"/etc/ca.pem\"");
        let root = wrong(&document("[updates]\nmirrors = []\nroot = \"root.json\""));
        assert_eq!((root.0, root.1.as_str()), (4, "updates.root = \"root.json\""));
        let time = "[time]\nntp = [\"192.0.2.1\", \"2001:db8::1\"]\nnts = [\"a.example:4461\"]\n";
        assert!(NodeSpec::parse(document(time).as_bytes()).is_ok());
        let root = "[updates]\nmirrors = []\nroot = '''\n{}'''";
        assert!(NodeSpec::parse(document(root).as_bytes()).is_ok());
    }

    #[test]
    fn faults_of_uplinks_name_their_key() {
        let card = "[[network.uplinks]]\nname = \"a\"\ncard = { name = \"eth0\" }\n";
        let vlan = |rest: &str| format!("{card}[[network.uplinks]]\nname = \"b\"\n{rest}");
        let bond = |rest: &str| {
            format!(
                "[[network.uplinks]]\nname = \"a\"\n[network.uplinks.bond]\nmode = \"802.3ad\"\n{rest}"
            )
        };
        let cases = [
            (vlan("over = \"a\"\nvlan = 4095"), "network.uplinks[1].vlan = 4095"),
            (vlan("over = \"a\""), "network.uplinks[1].vlan is left out"),
            (vlan("over = \"c\"\nvlan = 7"), "network.uplinks[1].over = \"c\""),
            (format!("{card}vlan = 7"), "network.uplinks[0].over is left out"),
            (bond("cards = []"), "network.uplinks[0].bond.cards"),
            (
                bond("cards = [{ mac = \"02-00-00-00-00-01\" }]"),
                "network.uplinks[0].bond.cards[0].mac = \"02-00-00-00-00-01\"",
            ),
            (format!("{card}ipv4 = \"static\""), "network.uplinks[0].ipv4 = \"static\""),
            (
                format!("{card}addresses = [\"192.0.2.1\"]"),
                "network.uplinks[0].addresses[0] = \"192.0.2.1\"",
            ),
            (
                format!("{card}gateways = [\"192.0.2.1\"]"),
                "network.uplinks[0].gateways[0] = \"192.0.2.1\"",
            ),
            (
                format!("{card}routes = [{{ to = \"192.0.2.0\" }}]"),
                "network.uplinks[0].routes[0].to = \"192.0.2.0\"",
            ),
        ];
        let found = cases.each_ref().map(|(text, _)| wrong(&document(text)).1);
        assert_eq!(found.each_ref().map(String::as_str), cases.each_ref().map(|(_, said)| *said));
    }

    #[test]
    fn other_versions_are_refused() {
        let refusal = NodeSpec::parse(b"version = 2\n").expect_err("unknown version");
        assert!(matches!(refusal, ConfigError::Document { line: 1, .. }), "{refusal}");
    }
}
