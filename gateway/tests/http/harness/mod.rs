//! What the tests stand on: `client` speaks HTTP, `node` is a provider node that keeps its
//! machines in a list.

pub(crate) mod client;
pub(crate) mod node;
pub(crate) mod schema;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use gateway::{
    config::GatewayConfig,
    service::{Gateway, Running, now},
};
use lease::{
    SigningKey,
    api::{CreateMachine, Image},
    authority::{public_key, sign},
    document::{Envelope, LEASE_VERSION, Lease, Price},
    hardware::Hardware,
};
use sha2::{Digest, Sha256};
use tokio::{sync::oneshot, task::JoinHandle, time::Instant};
use types::{
    config::Authority,
    forward::ForwardedRequest,
    ids::{ContentId, MachineId, NodeId},
    node::MachineShape,
    units::Mebibytes,
};

use client::{plain, signed, with_body};

/// Everything that should happen happens within this time, also on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The authority's keys; two of the three must sign.
pub(crate) fn authority() -> Vec<SigningKey> {
    [101, 102, 103].map(|seed| SigningKey::from_bytes(&[seed; 32])).to_vec()
}

/// The renter's key; `seed` tells renters apart.
pub(crate) fn renter(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// A gateway that runs until it is dropped.
pub(crate) struct Serving {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) http: SocketAddr,
    pub(crate) folder: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Serving {
    /// Starts a gateway with small limits in time, so that tests need not wait.
    pub(crate) async fn start() -> Self {
        Self::with(|_| {}).await
    }

    /// The same with settings changed.
    pub(crate) async fn with(change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = GatewayConfig {
            data_dir: folder.path().to_owned(),
            http: ([127, 0, 0, 1], 0).into(),
            overlay: ([127, 0, 0, 1], 0).into(),
            authority: Some(Authority {
                threshold: 2,
                keys: authority().iter().map(public_key).collect(),
            }),
            ..GatewayConfig::default()
        };
        change(&mut config);
        let running = Running::start(&config).await.unwrap();
        let (gateway, http) = (Arc::clone(running.gateway()), running.http_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(running.serve(async {
            // An error means that the test is over.
            let _ = stopped.await;
        }));
        Self { gateway, http, folder, stop: Some(stop), task }
    }

    /// Shows a lease of a renter and uploads the kernel of [`create`].
    pub(crate) async fn with_kernel(&self, renter: &SigningKey) -> ContentId {
        let lease = lease(255, NodeId::from_bytes([255; 32]), renter);
        assert_eq!(self.ask(renter, show(&lease)).await.status, 200);
        self.with_content(renter, KERNEL).await
    }

    /// Uploads content of a renter whose lease was shown.
    pub(crate) async fn with_content(&self, renter: &SigningKey, bytes: &[u8]) -> ContentId {
        let content = ContentId::from_bytes(Sha256::digest(bytes).into());
        let upload = signed(renter, plain("PUT", &format!("/v1/content/{content}")));
        let upload = ForwardedRequest { body: bytes.to_vec(), ..upload };
        assert_eq!(self.send(&upload).await.status, 201);
        content
    }

    /// Stops as SIGTERM does, and returns the folder with what was kept.
    pub(crate) async fn stop(mut self) -> tempfile::TempDir {
        drop(self.stop.take());
        (&mut self.task).await.unwrap();
        self.folder
    }
}

/// Waits until `condition` holds.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Ends a wait that takes too long.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(PATIENCE, work).await;
    waited.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// A lease for an hour from now.
pub(crate) fn lease(id: u8, node: NodeId, renter: &SigningKey) -> Lease {
    Lease {
        version: LEASE_VERSION,
        id: MachineId::from_bytes([id; 16]),
        serial: 1,
        node,
        renter: public_key(renter),
        shape: MachineShape {
            vcpus: 1,
            memory_mib: Mebibytes(256),
            disk_mib: Mebibytes(0),
            devices: Vec::new(),
            disk_limit: None,
        },
        start: now(),
        end: now().plus(3600),
        price: Price::default(),
    }
}

/// The lease signed by two of the authority's keys.
pub(crate) fn signed_lease(lease: &Lease) -> Envelope {
    let keys = authority();
    let once = sign(lease, &keys[0]).unwrap();
    lease::authority::add_signature(&once, &keys[2]).unwrap()
}

/// The request that shows a lease to the gateway.
pub(crate) fn show(lease: &Lease) -> ForwardedRequest {
    let envelope = serde_json::to_vec(&signed_lease(lease)).unwrap();
    with_body("PUT", &format!("/v1/leases/{}", lease.id), &envelope, "show")
}

/// What machines start from here.
const KERNEL: &[u8] = b"kernel";

/// The body that asks for the machine of a lease.
pub(crate) fn create(lease: &Lease) -> CreateMachine {
    let image = Image {
        kernel: Some(ContentId::from_bytes(Sha256::digest(KERNEL).into())),
        initrd: None,
        disk: None,
        cmdline: "console=ttyS0".into(),
        seed: None,
    };
    CreateMachine { lease: signed_lease(lease), image, hardware: Hardware::default() }
}
