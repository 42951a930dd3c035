//! The node's local interface: how it is, what it counted, what it logged. It changes nothing.
//!
//! Who may read it: root and the screen's program ([`spawn::DASHBOARD_ID`]), through the unix socket
//! [`SOCKET`], which nobody else may open; machines' processes see no file of the node at all.
//! Where the configuration names a TCP address (`[metrics] listen`), whoever reaches that address
//! reads `/metrics` there and nothing else; guests never do, as the packet filter drops what they
//! open to the node. Nothing of it goes over the overlay: gateways and renters ask `crate::control`.
//!
//! | target | answer |
//! |---|---|
//! | `GET /v1/status` | `types::status::NodeStatus` |
//! | `GET /v1/logs?from=&level=&source=&wait_ms=` | `types::logs::Logs` |
//! | `GET /v1/events?from=&wait_ms=` | `types::logs::NodeEvents` |
//! | `GET /metrics` | text for Prometheus, format 0.0.4 |
//!
//! `routes`, `metrics` and `exposition` are pure; `status` and `host` look; `server` speaks HTTP.

pub mod exposition;
pub mod host;
pub mod metrics;
pub mod routes;
#[cfg(test)]
pub(crate) mod sample;
mod server;
mod status;

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use overlay::Overlay;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use types::{config::NodeSpec, ids::NodeId, node::Bdf, status::DeviceFacts};

use crate::{
    console::Page,
    events::Event,
    gpu::{guests::GuestReadings, series::Series},
    init::boot::chain,
    logs::Logs,
    machines::keeper::Machines,
    net::NetworkStatus,
    spawn,
    time::Clock,
};

/// The socket, below `/`.
pub const SOCKET: &str = "run/holdfast/local.sock";

/// Time between two attempts to listen where the configuration says: short beside what brings an address.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// What the interface tells from the start.
#[derive(Debug)]
pub struct LocalConfig {
    /// This node.
    pub node: NodeId,
    /// Release that runs.
    pub release: String,
    /// The node's log.
    pub logs: Logs,
    /// What the page on the serial port says.
    pub pages: watch::Receiver<Page>,
    /// Below `/`.
    pub root: PathBuf,
}

/// What it tells of a node that serves machines.
#[derive(Debug)]
pub struct Serving {
    /// The node's configuration.
    pub spec: NodeSpec,
    /// Its machines.
    pub machines: Machines,
    /// Other nodes.
    pub overlay: Overlay,
    /// The time.
    pub clock: Arc<Clock>,
    /// What guests say of GPUs.
    pub readings: GuestReadings,
}

/// The local interface. Clones share it.
#[derive(Debug, Clone)]
pub struct Local {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: LocalConfig,
    network: OnceLock<watch::Receiver<NetworkStatus>>,
    serving: OnceLock<Serving>,
    devices: Mutex<Known>,
    series: Mutex<Series>,
}

/// Facts of devices that take long to read, or disturb: read now and then.
#[derive(Debug, Default)]
struct Known {
    read: Option<Instant>,
    facts: BTreeMap<Bdf, DeviceFacts>,
    vital: BTreeMap<Bdf, Vital>,
}

/// Vital product data that was read of a device.
#[derive(Debug)]
struct Vital {
    /// Vendor and device: another one may sit there later.
    id: (u16, u16),
    /// Product and serial number, if it tells them.
    words: (Option<String>, Option<String>),
}

/// Why nobody can ask.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum LocalError {
    #[error("cannot make the socket {path}")]
    Socket { path: String, source: io::Error },
    #[error(
        "cannot listen on {address}, which metrics.listen of the configuration names; it is tried again until the node has that address"
    )]
    Listen { address: SocketAddr, source: io::Error },
}

impl Local {
    /// Starts to answer on the socket. A failure is reported; the node goes on without. Must be
    /// called inside a tokio runtime.
    pub fn start(config: LocalConfig) -> Self {
        let path = config.root.join(SOCKET);
        let shared = Shared {
            config,
            network: OnceLock::new(),
            serving: OnceLock::new(),
            devices: Mutex::default(),
            series: Mutex::default(),
        };
        let local = Self { shared: Arc::new(shared) };
        match bind(&path) {
            Ok(listener) => {
                tokio::spawn(server::serve_socket(local.clone(), listener));
            }
            Err(error) => report(&error),
        }
        local
    }

    /// Tells of uplinks from now on.
    pub fn tell_network(&self, network: watch::Receiver<NetworkStatus>) {
        // The first one is this process's only one.
        let _ = self.shared.network.set(network);
    }

    /// Tells of machines and other nodes from now on, and listens where the configuration says. Must be
    /// called inside a tokio runtime.
    pub fn tell_serving(&self, serving: Serving) {
        let listen = serving.spec.metrics.listen;
        let _ = self.shared.serving.set(serving);
        let Some(address) = listen else { return };
        let local = self.clone();
        tokio::spawn(async move {
            let listener = listen_on(address, report).await;
            server::serve_metrics(local, listener).await;
        });
    }
}

/// Listens as soon as that is possible. DHCP, a bond or a tentative address may bring the address late; what
/// is wrong is told once.
async fn listen_on(address: SocketAddr, report: impl Fn(&LocalError)) -> TcpListener {
    let mut told = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(source) if !told => report(&LocalError::Listen { address, source }),
            Err(_) => {}
        }
        told = true;
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}

fn report(error: &LocalError) {
    eprintln!("{}", Event::Trouble { place: "local", reason: chain(error) });
}

/// Makes the socket, which an earlier agent may have left, for its readers only.
fn bind(path: &Path) -> Result<UnixListener, LocalError> {
    let failed = |source| LocalError::Socket { path: path.display().to_string(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        Err(_) | Ok(()) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    // The mode first: the owner alone may use it until the group is right.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    chown(path, None, Some(spawn::DASHBOARD_ID)).map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(failed)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_cannot_be_had_yet_is_tried_again_and_told_once() {
        let occupied = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = occupied.local_addr().expect("bound");
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let listening = tokio::spawn(listen_on(address, move |error| {
            tell.send(error.to_string()).expect("somebody listens");
        }));
        let reason = told.recv().await.expect("told");
        assert!(reason.contains("tried again"), "{reason}");
        drop(occupied);
        let listener = listening.await.expect("no panic");
        assert_eq!(listener.local_addr().expect("bound"), address);
        assert_eq!(told.recv().await, None);
    }
}
