//! A running gateway: its parts, its tasks, its end.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lease::{
    problem::Kind,
    threshold::{AuthoritySet, ThresholdError},
};
use overlay::{
    InboundStream, Inbox, MemberEvent, Overlay, OverlayConfig, OverlayError, Places, Role,
};
use tokio::{io::AsyncWriteExt, net::TcpListener};
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem, StreamAnswer, StreamHeader},
    ids::{ContentId, NodeId, PublicKey},
    node::Offer,
    units::UnixSeconds,
};

use crate::{
    api,
    attest::{self, Attestor},
    config::{GatewayConfig, HttpLimits},
    content::{ContentError, ContentStore},
    directory::Directory,
    keyfile::{self, KeyFileError},
    limits::{Limits, Replays},
    store::{Store, StoreError},
    streams,
    turns::Turns,
};

/// Requests that are remembered against replay: of renters, and as many of strangers.
const REPLAY_CAPACITY: usize = 1 << 18;

/// Content streams at a time: a sixteenth of them, 16, may be one node's, as of so many machines that
/// start together; it asks again for what is refused as too much. Each has a chunk of 256 KiB in memory,
/// 64 MiB in all.
const CONTENT_STREAMS: usize = 256;

/// Whoever opened a stream says what it wants within this time: it did so at once if it is a node.
const HEADER_LIMIT: Duration = Duration::from_secs(5);

/// How long a node may take to tell what it offers.
const OFFER_DEADLINE: Duration = Duration::from_secs(10);

/// How often what nobody can ask for any more is dropped.
const SWEEP_PERIOD: Duration = Duration::from_secs(600);

/// How long neighbours may take to hear that the gateway leaves.
const LEAVE_DEADLINE: Duration = Duration::from_secs(3);

/// Why a gateway does not start or ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ServiceError {
    #[error("cannot make the data folder {path}")]
    HostFolder { path: String, source: std::io::Error },
    #[error(transparent)]
    Key(#[from] KeyFileError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error(
        "the gateway was not told whose leases count; give --authority KEY for each key and \
         --threshold N, or a table [authority] with threshold and keys in the file"
    )]
    NoAuthority,
    #[error("the configuration's authority cannot be used")]
    Authority { source: ThresholdError },
    #[error("the overlay does not start")]
    Overlay { source: OverlayError },
    #[error("cannot listen on TCP {address}")]
    HostListen { address: SocketAddr, source: std::io::Error },
    #[error("cannot tell the address of the HTTP server")]
    HostAddress { source: std::io::Error },
    #[error(
        "attestation.required is true, and attestation.releases names no measurements.json: name one, or leave it out"
    )]
    NoRelease,
    #[error("attestation.releases: {} describes no release: {reason}", path.display())]
    Release { path: PathBuf, reason: String },
    #[error("attestation.tpm_authorities: {} cannot be used: {reason}", path.display())]
    TpmAuthority { path: PathBuf, reason: String },
}

/// What all requests share.
pub struct Gateway {
    /// The way to the nodes.
    pub overlay: Overlay,
    /// Uploaded content.
    pub content: ContentStore,
    /// What was acknowledged.
    pub store: Store,
    /// Who may sign leases.
    pub authority: AuthoritySet,
    /// Bytes that one renter may have in `content`.
    pub max_per_renter: u64,
    /// What clients and nodes may take up.
    pub http: HttpLimits,
    /// Uploads that go on, by renter.
    pub uploads: Turns<PublicKey>,
    /// Creations that go on, by renter and idempotency key.
    pub creations: Turns<(PublicKey, String)>,
    /// What nodes are to prove.
    pub attestation: Attestor,
    directory: Mutex<Directory>,
    replay: Mutex<Replays>,
    limits: Mutex<Limits>,
}

impl Gateway {
    /// Returns the nodes' offers, for a moment: never across an await.
    pub fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the guard against replay, for a moment.
    pub fn replay(&self) -> MutexGuard<'_, Replays> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the limits of clients, for a moment.
    pub fn limits(&self) -> MutexGuard<'_, Limits> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how long a node may take to answer.
    pub fn node_deadline(&self) -> Duration {
        Duration::from_millis(self.http.node_ms)
    }

    /// Returns the members that rent machines.
    pub fn providers(&self) -> Vec<NodeId> {
        let members = self.overlay.members();
        members.iter().filter(|m| m.role == Role::Provider).map(|m| m.id).collect()
    }
}

/// Returns the time of the system's clock.
pub fn now() -> UnixSeconds {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixSeconds(since.as_secs())
}

/// A gateway that listens.
pub struct Running {
    gateway: Arc<Gateway>,
    listener: TcpListener,
    inbox: Inbox,
}

impl Running {
    /// Opens everything that the configuration names.
    pub async fn start(config: &GatewayConfig) -> Result<Self, ServiceError> {
        let folder = |path: &Path| {
            std::fs::create_dir_all(path).map_err(|source| ServiceError::HostFolder {
                path: path.display().to_string(),
                source,
            })
        };
        folder(&config.data_dir)?;
        let key = keyfile::read_or_create(&config.key_path())?;
        let authority = config.authority.as_ref().ok_or(ServiceError::NoAuthority)?;
        let authority =
            AuthoritySet::new(authority).map_err(|source| ServiceError::Authority { source })?;
        let attestation = Attestor::new(&config.attestation)?;
        let store = Store::open(&config.data_dir.join("store.redb"))?;
        let content = ContentStore::open(
            &config.data_dir.join("content"),
            config.max_content,
            config.max_store,
        )?;
        let listener = TcpListener::bind(config.http)
            .await
            .map_err(|source| ServiceError::HostListen { address: config.http, source })?;
        let seeds = config.seeds.iter().map(|seed| (seed.node, seed.address)).collect();
        let overlay = OverlayConfig { key, listen: config.overlay, seeds, role: Role::Gateway };
        let (overlay, inbox) =
            Overlay::start(overlay).await.map_err(|source| ServiceError::Overlay { source })?;
        let gateway = Arc::new(Gateway {
            overlay,
            content,
            store,
            authority,
            http: config.limits.clone(),
            max_per_renter: config.max_per_renter,
            uploads: Turns::default(),
            creations: Turns::default(),
            attestation,
            directory: Mutex::default(),
            replay: Mutex::new(Replays::new(REPLAY_CAPACITY)),
            limits: Mutex::default(),
        });
        Ok(Self { gateway, listener, inbox })
    }

    /// Returns what the requests share.
    pub fn gateway(&self) -> &Arc<Gateway> {
        &self.gateway
    }

    /// Returns the TCP address that was bound.
    pub fn http_addr(&self) -> Result<SocketAddr, ServiceError> {
        self.listener.local_addr().map_err(|source| ServiceError::HostAddress { source })
    }

    /// Serves until `stop` ends, lets running requests finish for a while, and leaves.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { gateway, listener, inbox } = self;
        let inbox = tokio::spawn(serve_inbox(Arc::clone(&gateway), inbox));
        let sweeper = tokio::spawn(sweep(Arc::clone(&gateway)));
        let asker = tokio::spawn(attest::run(Arc::clone(&gateway)));
        api::server::serve(Arc::clone(&gateway), listener, stop).await;
        inbox.abort();
        sweeper.abort();
        asker.abort();
        // Neighbours that hear nothing notice by themselves.
        let _ = tokio::time::timeout(LEAVE_DEADLINE, gateway.overlay.leave()).await;
        tracing::info!(event = "gateway-stopped");
    }
}

/// Drops, from time to time, what nobody can ask for any more.
async fn sweep(gateway: Arc<Gateway>) {
    let mut times = tokio::time::interval(SWEEP_PERIOD);
    loop {
        times.tick().await;
        if let Err(problem) = api::content::clean(&gateway).await {
            tracing::warn!(event = "sweep-failed", error = problem.detail);
        }
    }
}

async fn serve_inbox(gateway: Arc<Gateway>, mut inbox: Inbox) {
    let places = Places::new(CONTENT_STREAMS);
    loop {
        tokio::select! {
            Some(request) = inbox.requests.recv() => request.reply(refusal()),
            Some(stream) = inbox.streams.recv() => {
                let (gateway, places) = (Arc::clone(&gateway), places.clone());
                tokio::spawn(async move {
                    let node = stream.from;
                    if let Err(error) = serve_stream(&gateway, &places, stream).await {
                        let error = lease::problem::chain(&error);
                        tracing::info!(event = "content-stream-broke", %node, %error);
                    }
                });
            }
            Some(broadcast) = inbox.broadcasts.recv() => {
                take_offer(&gateway, broadcast.origin, &broadcast.payload);
            }
            Some(event) = inbox.events.recv() => match event {
                MemberEvent::Joined(node) => {
                    tracing::info!(event = "member-joined", %node);
                    gateway.directory().handle_seen(node);
                    tokio::spawn(ask_offer(Arc::clone(&gateway), node));
                }
                MemberEvent::Left(node) | MemberEvent::Died(node) => {
                    tracing::info!(event = "member-gone", %node);
                    gateway.directory().handle_gone(node);
                }
            },
            else => return,
        }
    }
}

/// A gateway answers requests of no node.
fn refusal() -> bytes::Bytes {
    let problem = Kind::NotFound.because("a gateway answers no forwarded requests");
    let response = ForwardedResponse {
        status: problem.status,
        content_type: types::forward::Problem::MEDIA_TYPE.to_owned(),
        headers: Vec::new(),
        body: serde_json::to_vec(&problem).unwrap_or_default(),
    };
    serde_json::to_vec(&response).unwrap_or_default().into()
}

fn take_offer(gateway: &Gateway, sender: NodeId, json: &[u8]) {
    let offer = match serde_json::from_slice::<Offer>(json) {
        Ok(offer) => offer,
        Err(error) => {
            tracing::info!(event = "offer-refused", node = %sender, %error);
            return;
        }
    };
    let taken = gateway.directory().handle_offer(now(), sender, offer);
    if let Err(error) = taken {
        tracing::info!(event = "offer-refused", node = %sender, %error);
    }
}

/// Asks a node that has just come what it offers, so that it is listed before its next broadcast.
async fn ask_offer(gateway: Arc<Gateway>, node: NodeId) {
    if !gateway.providers().contains(&node) {
        return;
    }
    let request = ForwardedRequest {
        method: "GET".into(),
        target: "/v1/node".into(),
        headers: Vec::new(),
        body: Vec::new(),
    };
    let body = serde_json::to_vec(&request).unwrap_or_default();
    let Ok(answer) = gateway.overlay.request(node, body.into(), OFFER_DEADLINE).await else {
        return;
    };
    match serde_json::from_slice::<ForwardedResponse>(&answer) {
        Ok(response) if response.status == 200 => take_offer(&gateway, node, &response.body),
        Ok(_) | Err(_) => {}
    }
    attest::ask(&gateway, node).await;
}

/// Opens content for a node where a machine may start from it. Whoever else takes part in the overlay and knows a
/// digest gets nothing, and for a digest of nothing nobody is looked up.
async fn wanted(
    gateway: &Arc<Gateway>,
    node: NodeId,
    content: ContentId,
) -> Result<Option<(tokio::fs::File, u64)>, Problem> {
    let found = gateway.content.read(content).await;
    let found = found.map_err(|error| Kind::Internal.caused_by(&error))?;
    let Some(found) = found else { return Ok(None) };
    let gateway = Arc::clone(gateway);
    let may = move || gateway.store.may_fetch(node, content, now());
    let may = tokio::task::spawn_blocking(may)
        .await
        .map_err(|error| Kind::Internal.caused_by(&error))?
        .map_err(|error| Kind::Internal.caused_by(&error))?;
    Ok(may.then_some(found))
}

/// Serves a stream. Until it is known what the stream is for, and while a refusal is sent, it keeps the
/// place that it has among the unread ones of its node; content takes one of its own.
async fn serve_stream(
    gateway: &Arc<Gateway>,
    places: &Places<NodeId>,
    inbound: InboundStream,
) -> Result<(), streams::StreamError> {
    let InboundStream { from, mut stream, place } = inbound;
    let refused = match streams::accept(&mut stream, HEADER_LIMIT).await? {
        StreamHeader::Request(_) | StreamHeader::Release { .. } => {
            Kind::NotFound.because("a gateway runs no machines; it serves content")
        }
        StreamHeader::Content { content } => match wanted(gateway, from, content).await {
            Ok(Some((mut file, length))) => match places.take(from) {
                Ok(_place) => {
                    drop(place);
                    let stall = gateway.node_deadline();
                    let open = StreamAnswer::Open { length: Some(length) };
                    streams::within(stall, streams::send(&mut stream, &open)).await?;
                    return streams::copy(&mut file, &mut stream, stall).await;
                }
                Err(error) => Kind::TooManyRequests.because(format!(
                    "node {from} cannot fetch content {content} now, because others are served: {error}"
                )),
            },
            Ok(None) => Kind::NotFound.because(format!(
                "content {content} is not here, or nobody who uploaded it has a lease of node {from} that this gateway \
                 was shown; upload it first"
            )),
            Err(problem) => problem,
        },
    };
    streams::within(HEADER_LIMIT, async {
        streams::send(&mut stream, &StreamAnswer::Refused(refused)).await?;
        stream.shutdown().await.map_err(|source| streams::StreamError::PeerBroke { source })
    })
    .await
}
