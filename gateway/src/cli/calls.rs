//! What each command asks of the gateway: one or more HTTP requests, not yet signed. Either they
//! are sent or, with `--curl`, printed.

use std::path::{Path, PathBuf};

use lease::api::{CreateMachine, LeaseRenewal};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use types::{
    forward::ForwardedRequest,
    ids::{MachineId, NodeId},
};

use super::{
    CliError,
    arguments::{Command, ContentCommand, LeaseCommand, MachinesCommand, NodeCommand},
    hardware, http, images, leases, push,
};

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Method, target and fields; the body too when it is short.
    pub(crate) request: ForwardedRequest,
    /// A file that is the body.
    pub(crate) file: Option<PathBuf>,
    pub(crate) signing: Signing,
}

/// Whether a request is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signing {
    /// By the key of the command line.
    Key,
    /// Not at all.
    Nobody,
}

impl Call {
    fn get(target: String, signing: Signing) -> Self {
        let (method, headers, body) = ("GET".to_owned(), Vec::new(), Vec::new());
        Self { request: ForwardedRequest { method, target, headers, body }, file: None, signing }
    }

    /// Something that is done at most once under a new name.
    fn act(method: &str, target: String) -> Result<Self, CliError> {
        let mut call = Self::get(target, Signing::Key);
        call.request.method = method.to_owned();
        call.request.headers.push(("idempotency-key".to_owned(), http::nonce()?));
        Ok(call)
    }

    fn json(method: &str, target: String, body: &Value, idempotency_key: String) -> Self {
        let mut call = Self::get(target, Signing::Key);
        call.request.method = method.to_owned();
        call.request.headers = vec![
            ("content-type".to_owned(), "application/json".to_owned()),
            ("idempotency-key".to_owned(), idempotency_key),
        ];
        call.request.body = body.to_string().into_bytes();
        call
    }
}

/// Returns what a command asks, in order; nothing for one that asks nothing, or opens a
/// tunnel or a terminal.
pub(super) async fn of(command: &Command) -> Result<Vec<Call>, CliError> {
    let open = |target: &str| vec![Call::get(target.to_owned(), Signing::Nobody)];
    Ok(match command {
        Command::Lease { command: LeaseCommand::Register { envelope } } => vec![show(envelope)?],
        Command::Image { .. }
        | Command::Keygen { .. }
        | Command::Lease { .. }
        | Command::Node {
            command: NodeCommand::Attest(_) | NodeCommand::Claim(_) | NodeCommand::RecoveryKey(_),
        }
        | Command::Console { interactive: true, .. }
        | Command::Tunnel { .. }
        | Command::Ssh { .. } => Vec::new(),
        Command::Nodes => open("/v1/nodes"),
        Command::Node { command: NodeCommand::Show { node } } => open(&format!("/v1/nodes/{node}")),
        Command::Node { command: NodeCommand::ReleaseDevice { node, device } } => {
            vec![Call::act("POST", format!("/v1/nodes/{node}/devices/{device}/release"))?]
        }
        Command::Node { command: NodeCommand::Update { word, node } } => {
            vec![Call::act("POST", format!("/v1/nodes/{node}/updates/{}", word.name()))?]
        }
        Command::Node { command: NodeCommand::RestartAgent { node } } => {
            vec![Call::act("POST", format!("/v1/nodes/{node}/restart-agent"))?]
        }
        Command::Content { command: ContentCommand::Push { file, lease, as_is } } => {
            if !*as_is {
                push::check(file)?;
            }
            upload(file, lease.as_deref()).await?
        }
        Command::Content { command: ContentCommand::Remove { content } } => {
            vec![Call::act("DELETE", format!("/v1/content/{content}"))?]
        }
        Command::Machines { command } => vec![machines(command)?],
        Command::Receipts { saved: Some(_), .. } => Vec::new(),
        Command::Receipts { machine, .. } => vec![receipts(*machine, None)],
        Command::Console { machine, follow, previous, .. } => {
            let query = match (follow, previous) {
                (true, _) => "?follow=1",
                (_, true) => "?previous=1",
                (false, false) => "",
            };
            let target = format!("/v1/machines/{machine}/console{query}");
            vec![Call::get(target, Signing::Key)]
        }
    })
}

/// Puts a challenge to a node.
pub(super) fn attestation(node: NodeId, challenge: &Value) -> Result<Call, CliError> {
    let target = format!("/v1/nodes/{node}/attestation");
    let call = Call::json("POST", target, challenge, http::nonce()?);
    Ok(Call { signing: Signing::Nobody, ..call })
}

/// Asks a node for its disk's recovery key.
pub(super) fn recovery_key(node: NodeId) -> Call {
    Call::get(format!("/v1/nodes/{node}/recovery-key"), Signing::Key)
}

/// Asks how a machine is.
pub(super) fn machine(machine: MachineId) -> Call {
    Call::get(format!("/v1/machines/{machine}"), Signing::Key)
}

/// Asks for the receipts of a machine that come behind `after`.
pub(super) fn receipts(machine: MachineId, after: Option<u64>) -> Call {
    let query = after.map(|after| format!("?after={after}")).unwrap_or_default();
    Call::get(format!("/v1/machines/{machine}/receipts{query}"), Signing::Key)
}

fn machines(command: &MachinesCommand) -> Result<Call, CliError> {
    let path = |machine: &MachineId| format!("/v1/machines/{machine}");
    match command {
        MachinesCommand::Create { lease, image, hardware, idempotency_key } => {
            let image = images::of(image)?;
            let hardware = hardware::of(hardware);
            let lease = leases::read(lease)?;
            // One lease makes one machine: repeating the command can make no second one.
            let derived = || {
                let all = json!([&lease, &image, &hardware]).to_string();
                let digest: [u8; 32] = Sha256::digest(all).into();
                types::hex::encode(&digest[..16])
            };
            let key = idempotency_key.clone().unwrap_or_else(derived);
            let body = json!(CreateMachine { lease, image, hardware });
            Ok(Call::json("POST", "/v1/machines".to_owned(), &body, key))
        }
        MachinesCommand::List => Ok(Call::get("/v1/machines".to_owned(), Signing::Key)),
        MachinesCommand::Show { machine: shown } => Ok(machine(*shown)),
        MachinesCommand::Start { machine } => Call::act("POST", path(machine) + "/start"),
        MachinesCommand::Stop { machine } => Call::act("POST", path(machine) + "/stop"),
        MachinesCommand::Restart { machine } => Call::act("POST", path(machine) + "/restart"),
        MachinesCommand::Pause { machine } => Call::act("POST", path(machine) + "/pause"),
        MachinesCommand::Resume { machine } => Call::act("POST", path(machine) + "/resume"),
        MachinesCommand::Nmi { machine } => Call::act("POST", path(machine) + "/nmi"),
        MachinesCommand::Counters { machine, prometheus } => {
            let last = if *prometheus { "/metrics" } else { "/counters" };
            Ok(Call::get(path(machine) + last, Signing::Key))
        }
        MachinesCommand::Events { machine, from } => {
            Ok(Call::get(path(machine) + &format!("/events?from={from}"), Signing::Key))
        }
        MachinesCommand::Dump { machine, .. } => Call::act("POST", path(machine) + "/dump"),
        MachinesCommand::Attach(wanted) => {
            let (machine, wanted) = (wanted.machine, hardware::attach(wanted)?);
            Ok(Call::json("POST", path(&machine) + "/devices", &json!(wanted), http::nonce()?))
        }
        MachinesCommand::Detach { machine, name, pull, erase } => {
            let query = match (pull, erase) {
                (true, _) => "?pull=1",
                (_, true) => "?erase=1",
                (false, false) => "",
            };
            Call::act("DELETE", path(machine) + &format!("/devices/{name}{query}"))
        }
        MachinesCommand::Devices { machine } => {
            Ok(Call::get(path(machine) + "/devices", Signing::Key))
        }
        MachinesCommand::Delete { machine } => Call::act("DELETE", path(machine)),
        MachinesCommand::Renew { machine, lease } => {
            let body = json!(LeaseRenewal { lease: leases::read(lease)? });
            Ok(Call::json("PUT", path(machine) + "/lease", &body, http::nonce()?))
        }
    }
}

/// Shows the gateway a lease.
fn show(envelope: &Path) -> Result<Call, CliError> {
    let envelope = leases::read(envelope)?;
    let id = leases::inside(&envelope)?.id;
    Ok(Call::json("PUT", format!("/v1/leases/{id}"), &json!(envelope), http::nonce()?))
}

async fn upload(file: &Path, lease: Option<&Path>) -> Result<Vec<Call>, CliError> {
    let mut calls = Vec::new();
    if let Some(path) = lease {
        calls.push(show(path)?);
    }
    let content = push::digest(file).await.map_err(|source| CliError::File {
        operation: "read",
        path: file.to_owned(),
        source,
    })?;
    let mut upload = Call::get(format!("/v1/content/{content}"), Signing::Key);
    upload.request.method = "PUT".to_owned();
    upload.file = Some(file.to_owned());
    calls.push(upload);
    Ok(calls)
}
