//! `holdfast content …`, `holdfast machines …` and `holdfast console`.

use std::path::Path;

use futures_util::TryStreamExt;
use http_body_util::{BodyExt, StreamBody};
use lease::api::{CreateMachine, Image, LeaseRenewal};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::AsyncReadExt;
use tokio_util::io::ReaderStream;
use types::{
    forward::ForwardedRequest,
    ids::{ContentId, MachineId},
};

use super::{
    CliError, Context,
    arguments::{ContentCommand, MachinesCommand},
    http, leases, show, write_out,
};

pub(super) async fn run(context: &Context, command: MachinesCommand) -> Result<(), CliError> {
    let (method, target, body) = match command {
        MachinesCommand::Create { lease, kernel, initrd, disk, cmdline, idempotency_key } => {
            let image = Image { kernel, initrd, disk, cmdline };
            let lease = leases::read(&lease)?;
            // One lease makes one machine: repeating the command can make no second one.
            let derived = || {
                let digest: [u8; 32] = Sha256::digest(json!([&lease, &image]).to_string()).into();
                types::hex::encode(&digest[..16])
            };
            let key = idempotency_key.unwrap_or_else(derived);
            let body = json!(CreateMachine { lease, image });
            ("POST", "/v1/machines".to_owned(), Some((body, key)))
        }
        MachinesCommand::List => {
            let list = context.client.signed(&context.key()?, "GET", "/v1/machines", None).await?;
            return context.print(&list, show::machines);
        }
        MachinesCommand::Show { machine } => ("GET", format!("/v1/machines/{machine}"), None),
        MachinesCommand::Start { machine } => power(machine, "start"),
        MachinesCommand::Stop { machine } => power(machine, "stop"),
        MachinesCommand::Restart { machine } => power(machine, "restart"),
        MachinesCommand::Delete { machine } => ("DELETE", format!("/v1/machines/{machine}"), None),
        MachinesCommand::Renew { machine, lease } => {
            let body = json!(LeaseRenewal { lease: leases::read(&lease)? });
            ("PUT", format!("/v1/machines/{machine}/lease"), Some((body, http::nonce()?)))
        }
    };
    let answer = context.client.signed(&context.key()?, method, &target, body).await?;
    context.print(&answer, show::machine)
}

type Asked = (&'static str, String, Option<(Value, String)>);

fn power(machine: MachineId, word: &str) -> Asked {
    ("POST", format!("/v1/machines/{machine}/{word}"), None)
}

pub(super) async fn content(context: &Context, command: ContentCommand) -> Result<(), CliError> {
    let ContentCommand::Push { file: path } = command;
    let fail = |operation, source| CliError::File { operation, path: path.clone(), source };
    let (content, length) = digest(&path).await.map_err(|source| fail("read", source))?;
    let file = tokio::fs::File::open(&path).await.map_err(|source| fail("open", source))?;
    let mut request = ForwardedRequest {
        method: "PUT".into(),
        target: format!("/v1/content/{content}"),
        headers: Vec::new(),
        body: Vec::new(),
    };
    http::sign_now(&context.key()?, &mut request)?;
    let chunks = ReaderStream::with_capacity(file, 256 << 10).map_ok(hyper::body::Frame::data);
    let body = BodyExt::boxed(StreamBody::new(chunks));
    context.client.send(&request, body).await?;
    context.print(&json!({ "content": content, "bytes": length }), |_| {
        format!("{content}  {} ({length} bytes)\n", path.display())
    })
}

async fn digest(path: &Path) -> std::io::Result<(ContentId, u64)> {
    let mut file = tokio::fs::File::open(path).await?;
    let (mut hash, mut length) = (Sha256::new(), 0u64);
    let mut chunk = vec![0; 256 << 10];
    loop {
        match file.read(&mut chunk).await? {
            0 => return Ok((ContentId::from_bytes(hash.finalize().into()), length)),
            read => {
                hash.update(&chunk[..read]);
                length += read as u64;
            }
        }
    }
}

pub(super) async fn console(
    context: &Context,
    machine: MachineId,
    follow: bool,
) -> Result<(), CliError> {
    let (key, path) = (context.key()?, format!("/v1/machines/{machine}/console"));
    if !follow {
        let bytes = context.client.signed_bytes(&key, "GET", &path, None).await?;
        return write_out(&bytes);
    }
    let mut request = ForwardedRequest {
        method: "GET".into(),
        target: format!("{path}?follow=1"),
        headers: Vec::new(),
        body: Vec::new(),
    };
    http::sign_now(&key, &mut request)?;
    let nothing = http_body_util::Empty::new().map_err(|never| match never {}).boxed();
    let mut body = context.client.send(&request, nothing).await?.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| context.client.unreachable(error))?;
        if let Some(bytes) = frame.data_ref() {
            write_out(bytes)?;
        }
    }
    Ok(())
}
