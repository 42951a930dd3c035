//! The `holdfast` command: keys, leases, nodes, content, machines, consoles, tunnels.
//!
//! | Exit status | Meaning                                                       |
//! |-------------|---------------------------------------------------------------|
//! | 0           | done                                                          |
//! | 1           | a file, a key, a lease or an argument is wrong                |
//! | 2           | wrong command line                                            |
//! | 3           | the gateway or the node refused; standard error says why      |
//! | 4           | the gateway cannot be reached or answered something else      |
//! | other       | `ssh`: the status of ssh                                      |
//!
//! Results go to standard output, as tables or with `--json` as JSON; everything else to standard
//! error.

mod arguments;
mod http;
mod leases;
mod machines;
mod receipts;
mod show;
mod tunnel;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use lease::{SigningKey, authority::public_key};
use serde_json::{Value, json};
use types::forward::Problem;

use crate::keyfile::{self, KeyFileError};
use arguments::{Arguments, Command, NodeCommand};
use http::Client;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum CliError {
    #[error(transparent)]
    Key(#[from] KeyFileError),
    #[error("cannot {operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cannot write to standard output")]
    Output { source: std::io::Error },
    #[error("{message}")]
    Usage { message: String },
    #[error("{what}")]
    Lease { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{}: {}", problem.title, problem.detail)]
    Refused { problem: Problem },
    #[error("cannot reach the gateway at {url}: {message}")]
    Unreachable { url: String, message: String },
    #[error("the gateway at {url} answered something else than expected: {message}")]
    Answer { url: String, message: String },
    #[error("cannot start ssh; is OpenSSH's client installed?")]
    Ssh { source: std::io::Error },
}

impl CliError {
    fn status(&self) -> u8 {
        match self {
            Self::Refused { .. } => 3,
            Self::Unreachable { .. } | Self::Answer { .. } => 4,
            Self::Key(_)
            | Self::File { .. }
            | Self::Output { .. }
            | Self::Usage { .. }
            | Self::Lease { .. }
            | Self::Ssh { .. } => 1,
        }
    }
}

/// What commands share: where to, by whom, how to print.
pub(crate) struct Context {
    pub(crate) client: Client,
    key_path: Option<PathBuf>,
    form: Form,
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Tables.
    Human,
    /// JSON.
    Json,
}

impl Context {
    /// Reads the key that signs.
    pub(crate) fn key(&self) -> Result<SigningKey, CliError> {
        let path = self.key_path.as_deref().ok_or_else(|| CliError::Usage {
            message: "this needs a key: give --key FILE or set HOLDFAST_KEY; `holdfast keygen --out FILE` makes one".into(),
        })?;
        Ok(keyfile::read(path)?)
    }

    /// Prints a result: `human` makes the table of it.
    pub(crate) fn print(
        &self,
        value: &Value,
        human: impl FnOnce(&Value) -> String,
    ) -> Result<(), CliError> {
        let text = match self.form {
            Form::Json => format!("{value:#}\n"),
            Form::Human => human(value),
        };
        write_out(text.as_bytes())
    }
}

/// Writes to standard output and sees to it that it arrives.
pub(crate) fn write_out(bytes: &[u8]) -> Result<(), CliError> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|source| CliError::Output { source })
}

/// Runs the command line and returns the exit status.
pub async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("holdfast: {}", lease::problem::chain(&error));
            ExitCode::from(error.status())
        }
    }
}

async fn run(arguments: Arguments) -> Result<u8, CliError> {
    let form = if arguments.json { Form::Json } else { Form::Human };
    let client = Client::new(&arguments.gateway);
    let context = Context { client, key_path: arguments.key, form };
    match arguments.command {
        Command::Keygen { out } => keygen(&context, out)?,
        Command::Lease { command } => leases::run(&context, command)?,
        Command::Nodes => {
            let nodes = context.client.get("/v1/nodes").await?;
            context.print(&nodes, show::nodes)?;
        }
        Command::Node { command: NodeCommand::Show { node } } => {
            let node = context.client.get(&format!("/v1/nodes/{node}")).await?;
            context.print(&node, show::node)?;
        }
        Command::Node { command: NodeCommand::RestartAgent { node } } => {
            let target = format!("/v1/nodes/{node}/restart-agent");
            let answer = context.client.signed(&context.key()?, "POST", &target, None).await?;
            context.print(&answer, |_| "the node's service restarts\n".into())?;
        }
        Command::Content { command } => machines::content(&context, command).await?,
        Command::Machines { command } => machines::run(&context, command).await?,
        Command::Console { machine, follow } => {
            machines::console(&context, machine, follow).await?;
        }
        Command::Receipts { machine, leases } => {
            receipts::run(&context, machine, &leases).await?;
        }
        Command::Tunnel { machine, port } => tunnel::tunnel(&context, machine, port).await?,
        Command::Ssh { machine, arguments } => {
            return tunnel::ssh(&context, machine, &arguments).await;
        }
    }
    Ok(0)
}

fn keygen(context: &Context, out: Option<PathBuf>) -> Result<(), CliError> {
    let path = out.or_else(|| context.key_path.clone()).unwrap_or_else(|| "holdfast.key".into());
    let key = keyfile::generate()?;
    keyfile::create(&path, &key)?;
    let public = public_key(&key);
    context.print(&json!({ "file": path, "public": public }), |_| {
        format!("private key  {}\npublic key   {public}\n", path.display())
    })
}
