//! Fetches the document that DHCP or the kernel's command line names, and keeps it in memory until the
//! node is switched off: an agent that starts again does not depend on the network for what it is.
//!
//! Every wait has a bound, and it is tried again for ever: servers of a rack come back in any order.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use types::config::{ConfigError, MAX_CONFIG, NodeSpec};
use update::shell::{FetchError, Fetcher, Resolve};

use super::{
    Source,
    reference::{Facts, Reference, ReferenceFault},
};
use crate::{
    console::Page,
    events::Event,
    init::boot::chain,
    net::{DocumentServer, NetworkStatus, Resolver, Uplinks, resolve::Names},
    time::nts::establish::Roots,
};

/// What was fetched, below the root.
const KEPT: &str = "run/holdfast/provisioned.json";
/// Longest time for one attempt.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause after the first failure, doubling to the longest one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Where the kernel tells the server's serial number, below the root.
const SERIAL: &str = "sys/class/dmi/id/product_serial";

/// Who named a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Origin {
    /// The kernel's command line.
    CommandLine {
        /// What it says.
        url: String,
    },
    /// A DHCP server, in option 224, or one of DHCPv6, in option 65224.
    Dhcp {
        /// The server.
        server: DocumentServer,
        /// What it says.
        url: String,
    },
}

/// Why a document was not fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ProvisionError {
    #[error("what names the configuration cannot be used")]
    Reference(#[from] ReferenceFault),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(
        "{url}: there is no such file, or the server does not give it away; put it there, or correct what names it"
    )]
    Gone { url: String },
    #[error("{url}: it took longer than {} s; can this network reach that server?", LIMIT.as_secs())]
    Slow { url: String },
    #[error(
        "{url} is not what was named: its SHA-256 is another one; put the document there that #sha256= means, or name the new digest"
    )]
    Digest { url: String },
    #[error("{url} is no configuration")]
    Document { url: String, source: ConfigError },
    #[error("cannot keep the configuration in /{KEPT}")]
    Keep { source: io::Error },
}

#[derive(Serialize, Deserialize)]
struct Kept {
    origin: Origin,
    document: String,
}

/// Returns what was fetched since the node was switched on.
pub fn kept(root: &Path) -> Option<(Origin, String)> {
    let Kept { origin, document } =
        serde_json::from_slice(&fs::read(root.join(KEPT)).ok()?).ok()?;
    Some((origin, document))
}

/// Keeps a document.
fn keep(root: &Path, origin: Origin, document: String) -> io::Result<()> {
    let path = root.join(KEPT);
    let partial = path.with_extension("new");
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut options = File::options();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&partial)?;
    file.write_all(&serde_json::to_vec(&Kept { origin, document })?)?;
    fs::rename(partial, path)
}

/// Fetches what is named, and says what it is.
pub struct Provisioner {
    /// The file system that everything is below.
    pub root: PathBuf,
    /// What the command line names; what DHCP does, when it does not.
    pub named: Option<String>,
    /// Tells whether there is a network, and what DHCP says.
    pub network: watch::Receiver<NetworkStatus>,
    /// Finds servers.
    pub resolver: Resolver,
    /// Whose certificates servers may show.
    pub authorities: Roots,
}

impl Provisioner {
    /// Returns one for a node whose configuration has this source and cannot be used. `None` when no
    /// network changes that.
    pub fn new(root: &Path, source: &Source, uplinks: &Uplinks) -> Option<Self> {
        let named = match source {
            Source::CommandLineUrl(text) => Some(text.clone()),
            Source::Nowhere | Source::Dhcp(..) => None,
            Source::CommandLine
            | Source::Volume(_)
            | Source::Installed
            | Source::Claimed
            | Source::Customised
            | Source::Image => return None,
        };
        let (network, resolver) = (uplinks.status(), uplinks.resolver());
        let (root, authorities) = (root.to_owned(), Roots::public());
        Some(Self { root, named, network, resolver, authorities })
    }

    /// Returns when a document that can be used was fetched and is kept.
    pub async fn run(mut self, pages: &watch::Sender<Page>) {
        let mut failures: u32 = 0;
        loop {
            let candidates = self.candidates().await;
            let turn = usize::try_from(failures).unwrap_or(0) % candidates.len();
            let origin = &candidates[turn];
            let source = shown(origin);
            pages.send_modify(|page| page.config = format!("being fetched ({source})"));
            match self.fetch(origin).await {
                Ok(bytes) => {
                    eprintln!("{}", Event::ConfigFetched { source, bytes });
                    return;
                }
                Err(error) => {
                    let reason = chain(&error);
                    eprintln!("{}", Event::ConfigNotFetched { source, reason: reason.clone() });
                    pages.send_modify(|page| page.error = reason);
                }
            }
            failures += 1;
            let pause = FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(6)).min(LONGEST_PAUSE);
            let renamed = self.network.wait_for(|now| origins(now) != candidates);
            if self.named.is_some() {
                tokio::time::sleep(pause).await;
            } else if tokio::time::timeout(pause, renamed).await.is_ok() {
                failures = 0;
            }
        }
    }

    /// Waits until there is a network and something is named, best first.
    async fn candidates(&mut self) -> Vec<Origin> {
        let named = self.named.clone();
        let found = self.network.wait_for(|status| {
            status.is_online() && (named.is_some() || !status.documents.is_empty())
        });
        match (found.await.map(|status| origins(&status)), named) {
            (Ok(_), Some(url)) => vec![Origin::CommandLine { url }],
            (Ok(origins), None) => origins,
            // The uplinks are gone, and with them the agent, soon.
            (Err(_), _) => std::future::pending().await,
        }
    }

    /// Fetches and keeps one document; returns its length.
    async fn fetch(&self, origin: &Origin) -> Result<usize, ProvisionError> {
        let (Origin::CommandLine { url } | Origin::Dhcp { url, .. }) = origin;
        let reference = Reference::parse(url.as_bytes())?;
        let url = reference.url(&self.facts());
        let mut fetcher = Fetcher::new(None)
            .with_roots(self.authorities.store().clone())
            .with_resolver(Arc::new(Names(self.resolver.clone())) as Arc<dyn Resolve>);
        let limit = u64::try_from(MAX_CONFIG).unwrap_or(u64::MAX);
        let fetched = tokio::time::timeout(LIMIT, fetcher.metadata(&url, limit)).await;
        let slow = |_| ProvisionError::Slow { url: url.clone() };
        let gone = || ProvisionError::Gone { url: url.clone() };
        let document = fetched.map_err(slow)??.ok_or_else(gone)?;
        if !reference.is_named(&document) {
            return Err(ProvisionError::Digest { url });
        }
        NodeSpec::parse(&document).map_err(|source| ProvisionError::Document { url, source })?;
        let (length, text) = (document.len(), String::from_utf8_lossy(&document).into_owned());
        keep(&self.root, origin.clone(), text).map_err(|source| ProvisionError::Keep { source })?;
        Ok(length)
    }

    fn facts(&self) -> Facts {
        let status = self.network.borrow();
        let first = status.interfaces.iter().find(|interface| interface.lease.is_some());
        let first = first.or(status.interfaces.first());
        let mac = first.map(|interface| interface.hardware.to_string().replace(':', "-"));
        let serial = fs::read_to_string(self.root.join(SERIAL)).unwrap_or_default();
        Facts { mac: mac.unwrap_or_default(), serial: serial.trim().to_owned() }
    }
}

/// What DHCP servers name.
fn origins(status: &NetworkStatus) -> Vec<Origin> {
    let named = status.documents.iter().map(|document| Origin::Dhcp {
        server: document.server.clone(),
        url: String::from_utf8_lossy(&document.url).trim_end_matches('\0').to_owned(),
    });
    named.collect()
}

fn shown(origin: &Origin) -> String {
    match origin.clone() {
        Origin::CommandLine { url } => Source::CommandLineUrl(url).to_string(),
        Origin::Dhcp { server, url } => Source::Dhcp(server, url).to_string(),
    }
}
