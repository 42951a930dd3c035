//! The `holdfast` command: keys, leases, nodes, content, machines, consoles, tunnels.
//!
//! | Exit status | Meaning                                                       |
//! |-------------|---------------------------------------------------------------|
//! | 0           | done                                                          |
//! | 1           | a file, a key, a lease or an argument is wrong, or a node did not prove what it runs |
//! | 2           | wrong command line                                            |
//! | 3           | the gateway or the node refused; standard error says why      |
//! | 4           | the gateway or the node cannot be reached, or answered something else; `tunnel`: it broke off; `machines list`: a node did not answer, and the list lacks its machines |
//! | 141         | whoever read standard output closed it before the end         |
//! | other       | `ssh`: the status of ssh; `console -i` and `machines dump`: 128 and the number of the signal that ended it |
//!
//! Results go to standard output, as tables or with `--json` as JSON; everything else to standard
//! error.

mod arguments;
mod attest;
mod bounds;
mod calls;
mod claim;
mod connection;
mod curl;
mod dump;
mod files;
mod hardware;
mod http;
mod images;
mod leases;
mod push;
mod receipts;
mod recovery;
mod show;
mod terminal;
mod tunnel;

use std::{fmt, io, path::PathBuf, process::ExitCode};

use clap::Parser;
use http_body_util::BodyExt;
use lease::{SigningKey, authority::public_key};
use serde_json::{Value, json};
use types::{forward::Problem, ids::MachineId};

use crate::{
    api::forwarding::REPLAYED,
    import::{self, ImportError},
    keyfile::{self, KeyFileError},
};
use arguments::{Arguments, Command, ContentCommand, ImageCommand, MachinesCommand, NodeCommand};
use calls::{Call, Signing};
use http::Client;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum CliError {
    #[error(transparent)]
    Key(#[from] KeyFileError),
    #[error("cannot {operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cannot import {}", path.display())]
    Image { path: PathBuf, source: ImportError },
    #[error("cannot write to standard output")]
    Output { source: std::io::Error },
    #[error("{message}")]
    Usage { message: String },
    #[error("{what}")]
    Lease { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{}: {}", problem.title, problem.detail)]
    Refused { problem: Problem },
    #[error("cannot reach {peer} at {url}: {message}")]
    Unreachable { peer: Peer, url: String, message: String },
    #[error("{peer} at {url} answered something else than expected: {message}")]
    Answer { peer: Peer, url: String, message: String },
    #[error("cannot start ssh; is OpenSSH's client installed?")]
    Ssh { source: std::io::Error },
    #[error("cannot make this terminal raw")]
    Terminal { source: std::io::Error },
}

/// Exit status where somebody does not answer.
const UNREACHABLE: u8 = 4;

impl CliError {
    fn status(&self) -> u8 {
        match self {
            Self::Refused { .. } => 3,
            Self::Unreachable { .. } | Self::Answer { .. } => UNREACHABLE,
            Self::Key(_)
            | Self::Image { .. }
            | Self::File { .. }
            | Self::Output { .. }
            | Self::Usage { .. }
            | Self::Lease { .. }
            | Self::Ssh { .. }
            | Self::Terminal { .. } => 1,
        }
    }
}

/// Who is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A gateway.
    Gateway,
    /// A node, by itself.
    Node,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gateway => "the gateway",
            Self::Node => "the node",
        })
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

    /// Sends a request, signed if it is to be, and returns the body of the answer.
    async fn ask(&self, call: &Call) -> Result<bytes::Bytes, CliError> {
        match call.signing {
            Signing::Key => self.client.ask(call, Some(&self.key()?)).await,
            Signing::Nobody => self.client.ask(call, None).await,
        }
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

/// Status of a process that SIGPIPE ended, as shells count it.
const READER_GONE: u8 = 128 + 13;

/// Runs the command line and returns the exit status.
pub async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(status) => ExitCode::from(status),
        // Whoever read what was printed has had enough of it, as `head` has.
        Err(CliError::Output { source }) if source.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::from(READER_GONE)
        }
        Err(error) => {
            eprintln!("holdfast: {}", show::harmless(&lease::problem::chain(&error)));
            ExitCode::from(error.status())
        }
    }
}

async fn run(arguments: Arguments) -> Result<u8, CliError> {
    let form = if arguments.json { Form::Json } else { Form::Human };
    let client = Client::new(arguments.gateway, arguments.ca_file);
    let context = Context { client, key_path: arguments.key, form };
    let calls = calls::of(&arguments.command).await?;
    if arguments.curl {
        return print_curl(&context, &calls).map(|()| 0);
    }
    if let Command::Node { command: NodeCommand::Attest(wanted) } = &arguments.command {
        return attest::run(&context, wanted).await.map(|()| 0);
    }
    if let Command::Node { command: NodeCommand::Claim(wanted) } = &arguments.command {
        return claim::run(&context, wanted).await.map(|()| 0);
    }
    if let Command::Node { command: NodeCommand::RecoveryKey(wanted) } = &arguments.command {
        return recovery::run(&context, wanted).await.map(|()| 0);
    }
    if let Command::Receipts { machine, leases, saved } = &arguments.command {
        let wanted = receipts::Wanted { machine: *machine, leases, saved: saved.as_deref() };
        return receipts::run(&context, &wanted).await.map(|()| 0);
    }
    if let Some((last, before)) = calls.split_last() {
        for call in before {
            context.ask(call).await?;
        }
        return answer(&context, &arguments.command, last).await;
    }
    match arguments.command {
        Command::Keygen { out } => keygen(&context, out)?,
        Command::Image { command: ImageCommand::Import { file, format, out } } => {
            import_image(&context, &file, format, out)?;
        }
        Command::Lease { command } => leases::run(&context, command)?,
        Command::Tunnel { machine, port } => tunnel::tunnel(&context, machine, port).await?,
        Command::Ssh { machine, arguments } => {
            return tunnel::ssh(&context, machine, &arguments).await;
        }
        Command::Console { machine, escape, .. } => {
            return terminal::run(&context, machine, escape).await;
        }
        Command::Nodes
        | Command::Node { .. }
        | Command::Content { .. }
        | Command::Machines { .. }
        | Command::Receipts { .. } => {}
    }
    Ok(0)
}

/// Sends a command's last request and prints what is answered; returns the exit status.
async fn answer(context: &Context, command: &Command, call: &Call) -> Result<u8, CliError> {
    match command {
        Command::Console { follow: true, .. } => return console(context, call).await.map(|()| 0),
        Command::Console { follow: false, .. }
        | Command::Machines { command: MachinesCommand::Counters { prometheus: true, .. } } => {
            return write_out(&context.ask(call).await?).map(|()| 0);
        }
        Command::Machines { command: MachinesCommand::List } => return list(context, call).await,
        Command::Machines { command: MachinesCommand::Create { .. } } => {
            return create(context, call).await.map(|()| 0);
        }
        Command::Machines { command: MachinesCommand::Dump { out, .. } } => {
            return dump::save(context, call, out).await;
        }
        Command::Keygen { .. }
        | Command::Image { .. }
        | Command::Lease { .. }
        | Command::Nodes
        | Command::Node { .. }
        | Command::Content { .. }
        | Command::Machines { .. }
        | Command::Receipts { .. }
        | Command::Tunnel { .. }
        | Command::Ssh { .. } => {}
    }
    let answer = context.client.parse(&context.ask(call).await?)?;
    let printed = context.print(&answer, |answer| match command {
        Command::Nodes => show::nodes(answer),
        Command::Node { command: NodeCommand::Show { .. } } => show::node(answer),
        Command::Node { command: NodeCommand::ReleaseDevice { device, .. } } => {
            format!("{device} is being reset; `holdfast node show` tells how it went\n")
        }
        Command::Node { command: NodeCommand::Update { word, .. } } => {
            format!("the node was told to {} about updates\n", word.name())
        }
        Command::Node { command: NodeCommand::RestartAgent { .. } } => {
            "the node's service restarts\n".to_owned()
        }
        Command::Content { command: ContentCommand::Push { file, .. } } => {
            show::content(answer, file)
        }
        Command::Lease { .. } => show::standing(answer),
        Command::Machines { command: MachinesCommand::Devices { .. } } => show::attachments(answer),
        Command::Machines {
            command: MachinesCommand::Attach(_) | MachinesCommand::Detach { .. },
        } => show::attachment(answer),
        Command::Machines { command: MachinesCommand::Events { .. } } => show::events(answer),
        Command::Machines { command: MachinesCommand::Counters { .. } } => show::counters(answer),
        Command::Keygen { .. }
        | Command::Image { .. }
        | Command::Content { command: ContentCommand::Remove { .. } }
        | Command::Machines { .. }
        | Command::Console { .. }
        | Command::Tunnel { .. }
        | Command::Receipts { .. }
        | Command::Node {
            command: NodeCommand::Attest(_) | NodeCommand::Claim(_) | NodeCommand::RecoveryKey(_),
        }
        | Command::Ssh { .. } => show::machine(answer),
    });
    printed.map(|()| 0)
}

/// Has a machine made and prints it. An answer that was given before tells of a machine that may be gone since, so its
/// node is asked.
async fn create(context: &Context, call: &Call) -> Result<(), CliError> {
    let answer = context.client.ask_whole(call, Some(&context.key()?)).await?;
    let mut machine = context.client.parse(answer.body())?;
    if answer.headers().contains_key(REPLAYED) {
        let id = machine.get("id").and_then(Value::as_str);
        let id = id.and_then(|id| id.parse::<MachineId>().ok());
        let id = id.ok_or_else(|| context.client.answer("it names no machine"))?;
        eprintln!("holdfast: an earlier try created machine {id}");
        machine = context.client.parse(&context.ask(&calls::machine(id)).await?)?;
    }
    context.print(&machine, show::machine)
}

/// Prints a renter's machines, and says which nodes may have others: a list that lacks some is no list for scripts.
async fn list(context: &Context, call: &Call) -> Result<u8, CliError> {
    let answer = context.client.ask_whole(call, Some(&context.key()?)).await?;
    context.print(&context.client.parse(answer.body())?, show::machines)?;
    let silent = answer.headers().get("holdfast-unreachable-nodes");
    let silent = silent.and_then(|nodes| nodes.to_str().ok()).unwrap_or_default();
    for node in silent.split_whitespace() {
        eprintln!(
            "holdfast: node {} did not answer; its machines are not in this list",
            show::harmless(node)
        );
    }
    Ok(if silent.is_empty() { 0 } else { UNREACHABLE })
}

/// Prints a console as it comes.
async fn console(context: &Context, call: &Call) -> Result<(), CliError> {
    let mut body = context.client.begin(call, Some(&context.key()?)).await?.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| context.client.broken(&error))?;
        if let Some(bytes) = frame.data_ref() {
            write_out(bytes)?;
        }
    }
    Ok(())
}

fn print_curl(context: &Context, calls: &[Call]) -> Result<(), CliError> {
    if calls.is_empty() {
        return Err(CliError::Usage {
            message: "--curl is for commands that make HTTP calls; a tunnel and a console that is typed at are WebSockets".into(),
        });
    }
    for call in calls {
        write_out(format!("{}\n", curl::line(context, call)?).as_bytes())?;
    }
    Ok(())
}

/// Makes a raw disk. Nothing else goes on meanwhile, so that the runtime may wait.
fn import_image(
    context: &Context,
    file: &std::path::Path,
    format: Option<import::Format>,
    out: PathBuf,
) -> Result<(), CliError> {
    bounds::set();
    let failed = |source| CliError::Image { path: file.to_owned(), source };
    let made = import::import(file, format, &out).map_err(failed)?;
    if !import::efi::is_found(&import::Input::open(&out).map_err(failed)?).map_err(failed)? {
        eprintln!(
            "holdfast: {} has no EFI system partition, and UEFI is the only firmware of machines: nothing starts from \
             this disk by itself. Import an image that is made for UEFI, or start its kernel with --kernel",
            show::harmless(&out.display().to_string())
        );
    }
    let value = json!({
        "file": out.display().to_string(),
        "content": made.content,
        "format": made.format.name(),
        "bytes": made.size,
        "data_bytes": made.data,
    });
    context.print(&value, |_| {
        format!(
            "{}  {} ({} bytes, {} of them data, from {})\n",
            made.content,
            out.display(),
            made.size,
            made.data,
            made.format.name()
        )
    })
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn keygen(context: &Context, out: Option<PathBuf>) -> Result<(), CliError> {
    let path = out.or_else(|| context.key_path.clone()).unwrap_or_else(|| "holdfast.key".into());
    let key = keyfile::generate()?;
    keyfile::create(&path, &key)?;
    let public = public_key(&key);
    context.print(&json!({ "file": path.display().to_string(), "public": public }), |_| {
        format!("private key  {}\npublic key   {public}\n", path.display())
    })
}
