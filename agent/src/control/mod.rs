//! What renters and operators ask of this node: requests that gateways forward as they were
//! signed. The node checks every signature itself; a gateway is only the way they come.
//!
//! `routes` is pure; `authority` checks signatures and leases; `streams` serves what is long-lived, `console` the
//! consoles among that.

pub mod answers;
mod attachments;
pub mod authority;
mod console;
#[cfg(test)]
mod guest_tests;
mod guests;
pub mod routes;
pub mod streams;
#[cfg(test)]
mod streams_tests;

use std::{path::PathBuf, sync::Arc};

use lease::{
    api::{BEGUN, CreateMachine, LeaseRenewal, MAX_RECEIPTS, Receipts},
    problem::Kind,
    request::VerifiedRequest,
};
use overlay::Places;
use tokio::sync::mpsc;
use types::{
    config::NodeSpec,
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::{MachineId, NodeId, PublicKey},
    node::{Bdf, Offer},
};

use self::{
    answers::{json, machine, problem, refused},
    authority::Authority,
    routes::{Attaching, Handling, Route},
};
use crate::{
    attest::Attestor,
    events::Event,
    machines::{
        keeper::{Command, Machines, Order, Snapshot, State, Switch, View},
        store::{Answered, Store},
    },
    net::MachineNetworks,
    seal::unlock,
    time::Clock,
    updates::{Shelf, Word},
};

/// Serves requests. Clones share everything.
#[derive(Debug, Clone)]
pub struct Control {
    parts: Arc<Parts>,
    /// Streams that are served, by renter.
    streams: Places<PublicKey>,
}

/// What the control interface is made of.
#[derive(Debug)]
pub struct Parts {
    /// This node.
    pub node: NodeId,
    /// Its configuration.
    pub spec: NodeSpec,
    /// Its machines.
    pub machines: Machines,
    /// Answers that are given again.
    pub store: Arc<Store>,
    /// The time.
    pub clock: Arc<Clock>,
    /// Where guests are.
    pub networks: Arc<MachineNetworks>,
    /// Who may ask what.
    pub authority: Authority,
    /// What it proves of itself.
    pub attestor: Attestor,
    /// What operators say about updates.
    pub updates: mpsc::Sender<Word>,
    /// What other nodes may have of its releases.
    pub shelf: Arc<Shelf>,
    /// Below `/`.
    pub root: PathBuf,
}

impl Control {
    /// Makes the interface.
    pub fn new(parts: Parts) -> Self {
        Self { parts: Arc::new(parts), streams: Places::new(streams::RENTERS_STREAMS) }
    }

    /// Returns what this node offers now.
    pub fn offer(&self) -> Offer {
        let snapshot = self.parts.machines.snapshot();
        let snapshot = snapshot.borrow();
        crate::tasks::overlay::offer(
            self.parts.node,
            &self.parts.spec.name,
            self.parts.clock.now(),
            &snapshot,
        )
    }

    /// Returns the machines and devices, now and whenever they change.
    pub fn snapshot(&self) -> tokio::sync::watch::Receiver<Snapshot> {
        self.parts.machines.snapshot()
    }

    /// Answers one request that `gateway` forwarded.
    pub async fn answer(&self, gateway: NodeId, request: &ForwardedRequest) -> ForwardedResponse {
        match self.try_answer(gateway, request).await {
            Ok(response) => response,
            Err(refusal) => problem(&refusal),
        }
    }

    async fn try_answer(
        &self,
        gateway: NodeId,
        request: &ForwardedRequest,
    ) -> Result<ForwardedResponse, Problem> {
        let route = Route::parse(request)?;
        if let Some(answer) = self.answer_anybody(&route, request).await {
            return answer;
        }
        let signer = &self.parts.authority.verify(request, self.parts.clock.now())?;
        match route {
            Route::Node | Route::Attest { .. } => Ok(json(200, &self.offer())),
            Route::RecoveryKey { node } => self.recovery_key(signer, node),
            Route::RestartAgent { node } => self.restart_agent(signer, node),
            Route::ReleaseDevice { node, device } => {
                self.release_device(signer, node, device).await
            }
            Route::Update { node, word } => self.update(signer, node, word),
            Route::CreateMachine => {
                self.once(signer, request, self.create(signer, gateway, request)).await
            }
            Route::ListMachines => self.list(signer),
            Route::ShowMachine { machine: id } => {
                let view = self.owned(signer, id)?;
                Ok(self.describe_guest(&view).await)
            }
            Route::SwitchMachine { machine: id, switch } => {
                self.owned(signer, id)?;
                self.once(signer, request, self.switch(id, switch)).await
            }
            Route::DeleteMachine { machine: id } => {
                self.owned(signer, id)?;
                self.once(signer, request, self.delete(id)).await
            }
            Route::RenewLease { machine: id } => {
                self.owned(signer, id)?;
                self.once(signer, request, self.renew(id, request)).await
            }
            Route::ReadReceipts { machine: id, after } => self.receipts(signer, id, after),
            Route::ReadConsole { machine: id, from, .. } => {
                self.owned(signer, id)?;
                guests::console(id, from).await
            }
            Route::WriteConsole { machine: id } => {
                self.owned(signer, id)?;
                guests::type_in(id, request.body.clone().into()).await
            }
            Route::Handle { machine: id, handling } => {
                self.owned(signer, id)?;
                self.once(signer, request, self.handle(id, handling)).await
            }
            Route::Watch { machine: id, what } => {
                self.owned(signer, id)?;
                guests::watch(id, what).await
            }
            Route::Attachments { machine: id, what } => {
                let view = self.owned(signer, id)?;
                self.attachments(signer, request, (&view, what)).await
            }
            Route::ReadPrevious { machine: id } => {
                self.owned(signer, id)?;
                guests::previous_console(id)
            }
            Route::Terminal { .. } | Route::Tunnel { .. } | Route::Dump { .. } => {
                let detail = "a terminal, a tunnel or a dump is opened as a stream";
                Err(Kind::Unprocessable.because(detail))
            }
        }
    }

    /// Answers what needs no signature; `None` when it does.
    async fn answer_anybody(
        &self,
        route: &Route,
        request: &ForwardedRequest,
    ) -> Option<Result<ForwardedResponse, Problem>> {
        if let Route::Node = route {
            return Some(Ok(json(200, &self.offer())));
        }
        let Route::Attest { node } = route else { return None };
        let asked = async {
            self.here(*node)?;
            let evidence = self.parts.attestor.answer(answers::body(request)?).await?;
            Ok(json(200, &evidence))
        };
        Some(asked.await)
    }

    /// Serves what is about disks and devices that come and go.
    async fn attachments(
        &self,
        signer: &VerifiedRequest,
        request: &ForwardedRequest,
        (view, what): (&View, Attaching),
    ) -> Result<ForwardedResponse, Problem> {
        let machines = &self.parts.machines;
        match what {
            Attaching::List => Ok(json(200, &attachments::list(view).await)),
            Attaching::Attach => {
                let wanted = answers::body(request)?;
                let act = attachments::attach(machines, view.record.lease.id, wanted);
                self.once(signer, request, act).await
            }
            Attaching::Detach { name, how } => {
                let act = attachments::detach(machines, view, &name, how);
                self.once(signer, request, act).await
            }
        }
    }

    /// Returns a machine of this renter. Another renter's machine looks like none.
    fn owned(&self, signer: &VerifiedRequest, machine: MachineId) -> Result<View, Problem> {
        let view = self.parts.machines.get(machine);
        let view = view
            .filter(|view| view.record.lease.renter == signer.key)
            .ok_or_else(|| answers::unknown_machine(machine))?;
        self.admit(signer)?;
        Ok(view)
    }

    fn admit(&self, signer: &VerifiedRequest) -> Result<(), Problem> {
        self.parts.authority.admit(signer, self.parts.clock.now())
    }

    fn describe(&self, status: u16, view: &View) -> ForwardedResponse {
        json(status, &machine(self.parts.node, self.parts.clock.now(), view))
    }

    /// Carries out what must not be done twice: with an idempotency key, the first answer is
    /// kept and given again.
    async fn once(
        &self,
        signer: &VerifiedRequest,
        request: &ForwardedRequest,
        act: impl Future<Output = Result<ForwardedResponse, Problem>>,
    ) -> Result<ForwardedResponse, Problem> {
        let Some(key) = &signer.idempotency_key else { return act.await };
        let key = format!("{}/{key}", signer.key);
        let digest = answers::digest(request);
        let store = &self.parts.store;
        if let Some(known) = store.answer(&key).map_err(|error| Kind::Internal.caused_by(&error))? {
            if known.digest != digest {
                let detail = "the idempotency key came before with another request; use a new one";
                return Err(Kind::KeyReused.because(detail));
            }
            return Ok(answers::kept(&known));
        }
        // A refusal changed nothing, so the same request may be tried again.
        let response = act.await?;
        let answered = Answered {
            digest,
            status: response.status,
            body: String::from_utf8_lossy(&response.body).into_owned(),
            at: self.parts.clock.now(),
        };
        store.put_answer(&key, &answered).map_err(|error| Kind::Internal.caused_by(&error))?;
        Ok(response)
    }

    async fn create(
        &self,
        signer: &VerifiedRequest,
        gateway: NodeId,
        request: &ForwardedRequest,
    ) -> Result<ForwardedResponse, Problem> {
        let body: CreateMachine = answers::body(request)?;
        let lease = self.parts.authority.lease(&body.lease, self.parts.node)?.into_lease();
        if lease.renter != signer.key {
            let detail = "the request is signed by another key than the lease names as its renter";
            return Err(Kind::Forbidden.because(detail));
        }
        self.admit(signer)?;
        body.image.check().map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
        if body.image.disk.is_some() && lease.shape.disk_mib.0 == 0 {
            let detail = "image.disk names a disk's content, and the lease grants no disk";
            return Err(Kind::Unprocessable.because(detail));
        }
        let (hardware, shape) = (body.hardware, &lease.shape);
        hardware.check(shape).map_err(|error| Kind::Unprocessable.because(error.to_string()))?;
        // The same lease asked for again by its renter, as after an answer that got lost.
        if let Some(view) = self.parts.machines.get(lease.id)
            && view.record.lease == lease
            && view.record.deleted.is_none()
            && view.record.image == body.image
            && view.record.hardware == hardware
        {
            return Ok(self.describe(201, &view));
        }
        let order = Order { image: body.image, hardware, lease, gateway };
        let ask = |answer| Command::Create(Box::new(order), answer);
        let view = self.parts.machines.ask(ask).await.map_err(|error| refused(&error))?;
        Ok(self.describe(201, &view))
    }

    async fn renew(
        &self,
        id: MachineId,
        request: &ForwardedRequest,
    ) -> Result<ForwardedResponse, Problem> {
        let body: LeaseRenewal = answers::body(request)?;
        let lease = self.parts.authority.lease(&body.lease, self.parts.node)?;
        let found = lease.lease().id;
        if found != id {
            let detail = format!("the path names {id}, the lease is for {found}");
            return Err(Kind::Unprocessable.because(detail));
        }
        let ask = |answer| Command::Renew(Box::new(lease), answer);
        let view = self.parts.machines.ask(ask).await.map_err(|error| refused(&error))?;
        Ok(self.describe(200, &view))
    }

    async fn switch(&self, id: MachineId, to: Switch) -> Result<ForwardedResponse, Problem> {
        let ask = |answer| Command::Power(id, to, answer);
        let view = self.parts.machines.ask(ask).await.map_err(|error| refused(&error))?;
        Ok(self.describe(BEGUN, &view))
    }

    async fn delete(&self, id: MachineId) -> Result<ForwardedResponse, Problem> {
        let ask = |answer| Command::Delete(id, answer);
        let view = self.parts.machines.ask(ask).await.map_err(|error| refused(&error))?;
        Ok(self.describe(BEGUN, &view))
    }

    fn list(&self, signer: &VerifiedRequest) -> Result<ForwardedResponse, Problem> {
        let snapshot = self.parts.machines.snapshot();
        let (node, now) = (self.parts.node, self.parts.clock.now());
        let own = |view: &&View| view.record.lease.renter == signer.key;
        // Nothing of it is held while the request is written down.
        let machines: Vec<_> = snapshot
            .borrow()
            .machines
            .iter()
            .filter(own)
            .map(|view| machine(node, now, view))
            .collect();
        if !machines.is_empty() {
            self.admit(signer)?;
        }
        Ok(json(200, &machines))
    }

    async fn handle(&self, id: MachineId, how: Handling) -> Result<ForwardedResponse, Problem> {
        guests::handle(id, how).await?;
        let view = self.parts.machines.get(id).ok_or_else(|| answers::unknown_machine(id))?;
        Ok(self.describe_guest(&view).await)
    }

    /// Describes a machine, with what its guest does at this moment.
    async fn describe_guest(&self, view: &View) -> ForwardedResponse {
        let mut machine = machine(self.parts.node, self.parts.clock.now(), view);
        if view.state == State::Running
            && !view.silent
            && let Some(detail) = guests::detail(view.record.lease.id).await
        {
            machine.detail = detail.to_owned();
        }
        json(200, &machine)
    }

    /// Receipts outlive their machine, so they are found by renter and not by what runs.
    fn receipts(
        &self,
        signer: &VerifiedRequest,
        id: MachineId,
        after: u64,
    ) -> Result<ForwardedResponse, Problem> {
        let found = self.parts.store.receipts(id, signer.key, after, MAX_RECEIPTS + 1);
        let mut found = found.map_err(|error| Kind::Internal.caused_by(&error))?;
        let view = self.parts.machines.get(id);
        let owned = view.is_some_and(|view| view.record.lease.renter == signer.key);
        if found.is_empty() && !owned {
            return Err(answers::unknown_machine(id));
        }
        self.admit(signer)?;
        let more = found.len() > MAX_RECEIPTS;
        found.truncate(MAX_RECEIPTS);
        let next = found.last().filter(|_| more).map(|(number, _)| *number);
        let receipts = found.into_iter().map(|(_, signed)| signed).collect();
        Ok(json(200, &Receipts { receipts, next }))
    }

    async fn release_device(
        &self,
        signer: &VerifiedRequest,
        node: Option<NodeId>,
        device: Bdf,
    ) -> Result<ForwardedResponse, Problem> {
        self.operator(signer, node)?;
        let recover = |answer| Command::Recover(device, answer);
        self.parts.machines.ask(recover).await.map_err(|error| refused(&error))?;
        Ok(json(202, &lease::api::Releasing { releasing: device.to_string() }))
    }

    fn update(
        &self,
        signer: &VerifiedRequest,
        node: Option<NodeId>,
        word: Word,
    ) -> Result<ForwardedResponse, Problem> {
        self.operator(signer, node)?;
        let busy = |_| Kind::Internal.because("the node is still at what it was told before");
        self.parts.updates.try_send(word).map_err(busy)?;
        let updating = match word {
            Word::Apply => "apply",
            Word::Check => "check",
            Word::Forget => "forget",
            Word::Hold => "hold",
            Word::Resume => "resume",
        };
        Ok(json(202, &lease::api::Updating { updating: updating.to_owned() }))
    }

    /// Checks that an operator of this node signed.
    fn operator(&self, signer: &VerifiedRequest, node: Option<NodeId>) -> Result<(), Problem> {
        if !self.parts.spec.operators.contains(&signer.key) {
            let detail = "the key that signed is not among `operators` of the node's configuration";
            return Err(Kind::Forbidden.because(detail));
        }
        self.admit(signer)?;
        self.here(node)
    }

    /// Refuses what is for another node.
    fn here(&self, node: Option<NodeId>) -> Result<(), Problem> {
        if node.is_some_and(|node| node != self.parts.node) {
            return Err(Kind::NotFound.because(format!("this is node {}", self.parts.node)));
        }
        Ok(())
    }

    /// Returns the disk's recovery key as it was sealed to operators.
    fn recovery_key(
        &self,
        signer: &VerifiedRequest,
        node: Option<NodeId>,
    ) -> Result<ForwardedResponse, Problem> {
        self.operator(signer, node)?;
        let keys = unlock::escrowed(&self.parts.root);
        if keys.is_empty() {
            let detail = "the disk's recovery key was sealed to nobody: the node runs from memory, or \
                          its [install] named no operator in escrow";
            return Err(Kind::NotFound.because(detail));
        }
        Ok(json(200, &lease::api::RecoveryKeys { keys }))
    }

    fn restart_agent(
        &self,
        signer: &VerifiedRequest,
        node: Option<NodeId>,
    ) -> Result<ForwardedResponse, Problem> {
        self.operator(signer, node)?;
        let reason = "restart asked by an operator".to_owned();
        eprintln!("{}", Event::Trouble { place: "agent", reason });
        tokio::spawn(async {
            // The answer leaves first.
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        });
        Ok(json(202, &lease::api::Restarting { restarting: "agent".to_owned() }))
    }

    /// Returns the machine a stream is for, if its renter signed the request.
    fn stream_target(&self, request: &ForwardedRequest) -> Result<(Route, View), Problem> {
        let route = Route::parse(request)?;
        let signer = self.parts.authority.verify(request, self.parts.clock.now())?;
        let id = match route {
            Route::ReadConsole { machine, .. }
            | Route::Terminal { machine, .. }
            | Route::Tunnel { machine, .. }
            | Route::Dump { machine } => machine,
            Route::Node
            | Route::Attest { .. }
            | Route::RecoveryKey { .. }
            | Route::RestartAgent { .. }
            | Route::Update { .. }
            | Route::ReleaseDevice { .. }
            | Route::CreateMachine
            | Route::ListMachines
            | Route::ShowMachine { .. }
            | Route::SwitchMachine { .. }
            | Route::DeleteMachine { .. }
            | Route::RenewLease { .. }
            | Route::ReadReceipts { .. }
            | Route::ReadPrevious { .. }
            | Route::Handle { .. }
            | Route::Watch { .. }
            | Route::Attachments { .. }
            | Route::WriteConsole { .. } => {
                let detail = "only consoles, terminals, tunnels and dumps of machines are streams";
                return Err(Kind::Unprocessable.because(detail));
            }
        };
        let view = self.owned(&signer, id)?;
        if matches!(view.state, State::Stopped | State::Ended) {
            let detail = format!("machine {id} is {}; start it first", view.state.name());
            return Err(Kind::Conflict.because(detail));
        }
        Ok((route, view))
    }
}
