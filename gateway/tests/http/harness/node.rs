//! A provider node: the real overlay, real signatures and documents, and machines that are
//! entries of a list.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use gateway::service::now;
use lease::{
    api::{BEGUN, CreateMachine, Image, Machine, MachineState, Receipts},
    document::Lease,
    hardware::{Attach, Attachment, AttachmentState, Hardware},
    metering::{Receipt, SignedReceipt},
    problem::Kind,
    request::verify,
};
use overlay::{InboundRequest, InboundStream, Overlay, OverlayConfig, Role, SigningKey};
use serde::Serialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem, StreamAnswer, StreamHeader},
    ids::{MachineId, NodeId},
    node::Offer,
    units::Mebibytes,
};

use super::{Serving, until, within};

/// How a node treats renters' requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Answers.
    Prompt,
    /// Takes them and says nothing.
    Silent,
    /// Takes them and lets go of them unanswered.
    Careless,
}

/// A node that takes part until it is dropped.
pub(crate) struct Node {
    pub(crate) overlay: Overlay,
    pub(crate) streams: mpsc::Receiver<InboundStream>,
    /// Creations that reached the node.
    pub(crate) created: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Node {
    /// Joins the overlay and waits until the gateway lists it.
    pub(crate) async fn join(gateway: &Serving, seed: u8, manner: Manner) -> Self {
        let seeds = &gateway.gateway.overlay;
        let (overlay, mut inbox) = Overlay::start(OverlayConfig {
            key: SigningKey::from_bytes(&[seed; 32]),
            listen: ([127, 0, 0, 1], 0).into(),
            seeds: vec![(seeds.node_id(), seeds.local_addr())],
            role: Role::Provider,
        })
        .await
        .unwrap();
        let created = Arc::new(AtomicUsize::new(0));
        let state = State {
            node: overlay.node_id(),
            manner,
            created: Arc::clone(&created),
            machines: Mutex::default(),
            unanswered: Mutex::default(),
        };
        let task = tokio::spawn(async move {
            while let Some(request) = inbox.requests.recv().await {
                state.take(request);
            }
        });
        let node = Self { overlay, streams: inbox.streams, created, task };
        let (path, id) = (format!("/v1/nodes/{}", node.id()), node.id());
        until("the gateway lists the node", async || gateway.get(&path).await.status == 200).await;
        let gateway = gateway.gateway.overlay.node_id();
        let known = || node.overlay.members().iter().any(|member| member.id == gateway);
        until(&format!("{id} knows the gateway"), async || known()).await;
        node
    }

    pub(crate) fn id(&self) -> NodeId {
        self.overlay.node_id()
    }

    pub(crate) fn asked_to_create(&self) -> usize {
        self.created.load(Ordering::SeqCst)
    }

    /// Takes the next stream, reads what is wanted, and opens it.
    pub(crate) async fn accept(&mut self) -> (ForwardedRequest, overlay::OverlayStream) {
        let mut stream = within("a stream", self.streams.recv()).await.unwrap().stream;
        let length = stream.read_u32().await.unwrap();
        let mut head = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut head).await.unwrap();
        let StreamHeader::Request(request) = serde_json::from_slice(&head).unwrap() else {
            panic!("a node is asked for no content");
        };
        answer(&mut stream, &StreamAnswer::Open { length: None }).await;
        (request, stream)
    }
}

/// Sends the first message of a stream.
pub(crate) async fn answer(stream: &mut overlay::OverlayStream, answer: &StreamAnswer) {
    let json = serde_json::to_vec(answer).unwrap();
    stream.write_u32(u32::try_from(json.len()).unwrap()).await.unwrap();
    stream.write_all(&json).await.unwrap();
    stream.flush().await.unwrap();
}

/// An offer of a node that has room.
pub(crate) fn offer(node: NodeId) -> Offer {
    Offer {
        node,
        name: format!("node {}", node.short()),
        release: "1".into(),
        issued: now(),
        expires: now().plus(120),
        vcpus: 4,
        memory_mib: Mebibytes(4096),
        disk_mib: Mebibytes(0),
        devices: Vec::new(),
    }
}

/// The machine of a lease as a node that has just taken it shows it.
pub(crate) fn machine(lease: &Lease, image: Image) -> Machine {
    Machine {
        id: lease.id,
        node: lease.node,
        renter: lease.renter,
        serial: lease.serial,
        start: lease.start,
        end: lease.end,
        shape: lease.shape.clone(),
        image,
        hardware: Hardware::default(),
        placement: None,
        state: MachineState::Pending,
        detail: String::new(),
        addresses: Vec::new(),
        created: now(),
        events: Vec::new(),
    }
}

/// What the machine of a lease used, as a node tells it.
pub(crate) fn receipts(lease: &Lease) -> Receipts {
    let receipt = Receipt {
        lease: lease.id,
        serial: lease.serial,
        node: lease.node,
        from: lease.start,
        to: lease.start.plus(60),
        running_s: 60,
        micro: 0,
        unit: lease.price.unit.clone(),
    };
    Receipts {
        receipts: vec![SignedReceipt { receipt, signature: "00".repeat(64) }],
        next: Some(1),
    }
}

struct State {
    node: NodeId,
    manner: Manner,
    created: Arc<AtomicUsize>,
    machines: Mutex<BTreeMap<MachineId, Machine>>,
    unanswered: Mutex<Vec<InboundRequest>>,
}

impl State {
    fn take(&self, inbound: InboundRequest) {
        let request: ForwardedRequest = serde_json::from_slice(&inbound.body).unwrap();
        let response = if request.target == "/v1/node" {
            json(200, &offer(self.node))
        } else {
            match self.manner {
                Manner::Prompt => {
                    self.respond(&request).unwrap_or_else(|problem| ForwardedResponse {
                        content_type: Problem::MEDIA_TYPE.into(),
                        ..json(problem.status, &problem)
                    })
                }
                Manner::Silent => return self.unanswered.lock().unwrap().push(inbound),
                Manner::Careless => return,
            }
        };
        inbound.reply(serde_json::to_vec(&response).unwrap().into());
    }

    fn respond(&self, request: &ForwardedRequest) -> Result<ForwardedResponse, Problem> {
        if request.path().ends_with("/attestation") {
            return Err(Kind::Conflict.because("the server has no TPM"));
        }
        let who = verify(request, now(), 300).map_err(|e| Kind::Unauthenticated.caused_by(&e))?;
        let mut machines = self.machines.lock().unwrap();
        let words: Vec<&str> = request.path().split('/').skip(3).collect();
        match (request.method.as_str(), words.as_slice()) {
            ("POST", []) => {
                self.created.fetch_add(1, Ordering::SeqCst);
                let wanted: CreateMachine = serde_json::from_slice(&request.body).unwrap();
                let made = machine(&wanted.lease.unverified_lease().unwrap(), wanted.image);
                machines.insert(made.id, made.clone());
                Ok(json(201, &made))
            }
            ("GET", []) => {
                let own = machines.values().filter(|machine| machine.renter == who.key);
                Ok(json(200, &own.collect::<Vec<_>>()))
            }
            (method, [id, rest @ ..]) => {
                let unknown = || Kind::NotFound.because(format!("no machine {id}"));
                let found = machines.get_mut(&id.parse().unwrap()).ok_or_else(unknown)?;
                if found.renter != who.key {
                    return Err(Kind::Forbidden.because("another renter's machine"));
                }
                if (method, rest) == ("POST", &["console"][..]) {
                    // Says what was typed, so that it is seen to arrive.
                    found.detail = String::from_utf8(request.body.clone()).unwrap();
                    return Ok(ForwardedResponse {
                        status: 204,
                        body: Vec::new(),
                        ..json(204, &())
                    });
                }
                if (method, rest) == ("POST", &["devices"][..]) {
                    let device: Attach = serde_json::from_slice(&request.body).unwrap();
                    let (id, state) = (device.id(), AttachmentState::Pending);
                    let made = Attachment { id, device, state, detail: String::new() };
                    return Ok(json(BEGUN, &made));
                }
                let status = match (method, rest) {
                    ("DELETE", []) | ("POST", ["start" | "stop" | "restart"]) => BEGUN,
                    _ => 200,
                };
                found.state = match (method, rest) {
                    ("DELETE", []) => MachineState::Destroyed,
                    ("POST", ["start" | "restart"]) => MachineState::Starting,
                    ("POST", ["stop"]) => MachineState::Stopping,
                    ("GET", ["console"]) => {
                        let (content_type, body) = ("application/octet-stream", b"so far\n");
                        let headers = [("from", "0"), ("end", "7")];
                        let headers = headers.map(|(name, value)| {
                            (format!("holdfast-console-{name}"), value.to_owned())
                        });
                        let headers = headers.to_vec();
                        let (content_type, body) = (content_type.into(), body.to_vec());
                        return Ok(ForwardedResponse { status: 200, content_type, headers, body });
                    }
                    _ => found.state,
                };
                Ok(json(status, &*found))
            }
            (method, path) => Err(Kind::NotFound.because(format!("{method} {path:?}"))),
        }
    }
}

fn json<T: Serialize>(status: u16, value: &T) -> ForwardedResponse {
    ForwardedResponse {
        status,
        content_type: "application/json".into(),
        headers: Vec::new(),
        body: serde_json::to_vec(value).unwrap(),
    }
}
