//! What a gateway is told: a TOML file, flags over it, defaults below.

use std::{
    fs::File,
    io::Read,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer, de};
use types::config::{Authority, Explained, MAX_CONFIG, NodeSpec, Seed, explain};

use crate::prefix::Prefix;

/// Settings of a gateway. Every key of the file may be left out.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    /// Folder of everything that is kept.
    pub data_dir: PathBuf,
    /// TCP address of the HTTP API.
    #[serde(deserialize_with = "listen")]
    pub http: SocketAddr,
    /// UDP address of the overlay.
    #[serde(deserialize_with = "listen")]
    pub overlay: SocketAddr,
    /// File of the gateway's private key; `gateway.key` in the data folder when left out. Made at
    /// the first start.
    pub key_file: Option<PathBuf>,
    /// Members of the overlay with a well-known address.
    pub seeds: Vec<Seed>,
    /// Whose leases open this gateway: needed to start. Nodes decide by their own configuration
    /// in any case.
    pub authority: Option<Authority>,
    /// Largest upload, in bytes.
    #[serde(deserialize_with = "some")]
    pub max_content: u64,
    /// Space for the uploads of one renter, in bytes.
    #[serde(deserialize_with = "some")]
    pub max_per_renter: u64,
    /// Space for all uploads, in bytes.
    #[serde(deserialize_with = "some")]
    pub max_store: u64,
    /// What HTTP clients may take up.
    pub limits: HttpLimits,
    /// Which nodes must prove what they run, and how that is judged.
    pub attestation: AttestationConfig,
}

/// What nodes are asked to prove by their TPMs. Nobody is asked without a release.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttestationConfig {
    /// Files that describe the releases that count: `measurements.json`, as it lies beside an image.
    pub releases: Vec<PathBuf>,
    /// TPMs that count, each by the SHA-256 of its endorsement key's public area as `holdfast node
    /// attest` shows it.
    pub tpms: Vec<String>,
    /// Files with certificates of makers' authorities (PEM or DER). A TPM counts that one of them vouches
    /// for, beside those in `tpms`. Where both lists are empty any TPM does, also one that is a program.
    pub tpm_authorities: Vec<PathBuf>,
    /// Time from one question to the next, in seconds.
    #[serde(deserialize_with = "some")]
    pub every_s: u64,
    /// Whether machines are made only on nodes that proved their release.
    pub required: bool,
}

impl Default for AttestationConfig {
    fn default() -> Self {
        let (tpms, tpm_authorities) = (Vec::new(), Vec::new());
        Self { releases: Vec::new(), tpms, tpm_authorities, every_s: 600, required: false }
    }
}

/// Bounds on what HTTP clients and nodes may take up.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpLimits {
    /// Connections open at a time.
    #[serde(deserialize_with = "some")]
    pub connections: usize,
    /// The same of one source: an IPv4 address, or the /64 of an IPv6 address.
    #[serde(deserialize_with = "some")]
    pub connections_per_source: usize,
    /// Proxies before this gateway, by address or prefix. Who asks through one is told by its field
    /// `x-forwarded-for`, whose last address that is no proxy's counts; its connections are bounded by
    /// `connections` alone. Without this all clients of a proxy are one source.
    pub proxies: Vec<Prefix>,
    /// How long the head of a request may take, in milliseconds. A connection on which none
    /// comes is closed after this time too.
    #[serde(deserialize_with = "some")]
    pub head_ms: u64,
    /// How long a body may take, in milliseconds; of uploaded content, each next piece.
    #[serde(deserialize_with = "some")]
    pub body_ms: u64,
    /// How long a client may leave an answer unread, in milliseconds.
    #[serde(deserialize_with = "some")]
    pub unread_ms: u64,
    /// How long a node may take to answer, in milliseconds.
    #[serde(deserialize_with = "some")]
    pub node_ms: u64,
    /// How long a tunnel may be without a byte in either direction, in milliseconds.
    #[serde(deserialize_with = "some")]
    pub idle_ms: u64,
    /// How often something moves between a tunnel's client and the gateway at least, in milliseconds: proxies
    /// end a connection on which nothing does (nginx after a minute).
    #[serde(deserialize_with = "some")]
    pub ping_ms: u64,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections: 4096,
            connections_per_source: 256,
            proxies: Vec::new(),
            head_ms: 15_000,
            body_ms: 30_000,
            unread_ms: 300_000,
            node_ms: 30_000,
            idle_ms: 3_600_000,
            ping_ms: 30_000,
        }
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            data_dir: "/var/lib/holdfast-gateway".into(),
            http: ([127, 0, 0, 1], 8460).into(),
            overlay: ([0; 8], types::config::Overlay::DEFAULT_PORT).into(),
            key_file: None,
            seeds: Vec::new(),
            authority: None,
            max_content: 32 << 30,
            max_per_renter: 64 << 30,
            max_store: 256 << 30,
            limits: HttpLimits::default(),
            attestation: AttestationConfig::default(),
        }
    }
}

/// Why a file is no gateway configuration.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ConfigError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot read {}", path.display())]
    Text { path: PathBuf, source: types::config::ConfigError },
    #[error("{} is not a gateway configuration", path.display())]
    Form { path: PathBuf, source: Explained },
}

impl GatewayConfig {
    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let mut bytes = Vec::new();
        let file = File::open(path);
        let limit = MAX_CONFIG as u64 + 1;
        file.and_then(|file| file.take(limit).read_to_end(&mut bytes))
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let text = NodeSpec::text(&bytes)
            .map_err(|source| ConfigError::Text { path: path.to_owned(), source })?;
        Self::parse(text).map_err(|source| ConfigError::Form { path: path.to_owned(), source })
    }

    /// Reads the text of such a file.
    pub fn parse(text: &str) -> Result<Self, Explained> {
        toml::from_str(text).map_err(|error| explain(text, &error))
    }

    /// Returns where the private key is.
    pub fn key_path(&self) -> PathBuf {
        self.key_file.clone().unwrap_or_else(|| self.data_dir.join("gateway.key"))
    }
}

/// Reads an address to listen at; the command line has the same ones.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("{text:?} is not an IP address and port, as 0.0.0.0:8080 or [::]:8080")
    })
}

fn listen<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    address(&String::deserialize(from)?).map_err(de::Error::custom)
}

/// Reads a number that cannot be nothing: nobody would be served.
fn some<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + From<u8> + PartialOrd,
{
    let found = T::deserialize(from)?;
    let wrong = || de::Error::custom("found 0; 1 or more is right");
    if found < T::from(1) { Err(wrong()) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let refusal = GatewayConfig::parse("htpp = \"127.0.0.1:1\"").expect_err("typo").to_string();
        assert!(refusal.contains("`htpp`") && refusal.contains("is `http` meant?"), "{refusal}");
        let config = GatewayConfig::parse("http = \"127.0.0.1:1\"").expect("valid");
        assert_eq!(config.http.port(), 1);
    }

    #[test]
    fn values_with_which_nobody_is_served_are_refused() {
        let told = |text: &str| GatewayConfig::parse(text).expect_err("refused").to_string();
        for key in ["connections", "node_ms", "ping_ms"] {
            let told = told(&format!("[limits]\n{key} = 0"));
            assert!(told.contains("line 2") && told.contains("1 or more is right"), "{told}");
        }
        assert!(told("max_store = 0").contains("1 or more is right"));
        let word = told("max_store = \"1 GB\"");
        assert!(
            word.contains("max_store: found string \"1 GB\"; a whole number, 0 or more"),
            "{word}"
        );
        let port = told("http = \"8080\"");
        assert!(port.contains("line 1") && port.contains("0.0.0.0:8080"), "{port}");
        assert!(told("overlay = \"gw.example:4600\"").contains("is not an IP address and port"));
    }

    #[test]
    fn what_notepad_saves_is_told() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"\xff\xfeh\0t\0").expect("written");
        let told = lease::problem::chain(&GatewayConfig::read(file.path()).expect_err("UTF-16"));
        assert!(told.contains("UTF-16") && told.contains("save it as UTF-8"), "{told}");
        assert!(GatewayConfig::read(Path::new("/dev/zero")).is_err());
    }
}
