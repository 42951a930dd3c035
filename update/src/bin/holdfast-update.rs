//! `holdfast-update`: reads a TUF repository from the command line.
//!
//! ```text
//! holdfast-update --root FILE --metadata-url U --targets-url U --store DIR refresh
//! holdfast-update … get [--into DIR] NAME…
//! holdfast-update … list
//! ```
//!
//! | status | meaning |
//! |---|---|
//! | 0 | done |
//! | 2 | the command line is wrong |
//! | 3 | the store, the root file or a target's file cannot be read or written |
//! | 4 | another process uses the store |
//! | 5 | the repository cannot be reached, stalls, or answers what nobody can use |
//! | 6 | the repository lacks a file that its metadata promises |
//! | 7 | metadata is malformed, altered, or not signed by enough keys |
//! | 8 | metadata goes back to an older version |
//! | 9 | metadata expired: the mirror or this clock is behind |
//! | 10 | no role that is trusted for the target describes it |
//! | 11 | what the repository has for a target is not what its metadata says |
//! | 12 | a limit was reached: a file too long, too many roles |
//! | 141 | whoever read standard output closed it before the end |
//!
//! The same program speaks the protocol by which the conformance suite for TUF clients
//! (theupdateframework/tuf-conformance, `CLIENT-CLI.md`) drives a client: with `--metadata-dir`, the
//! commands are `init ROOT`, `refresh` and `download`, and every failure has status 1.

#![forbid(unsafe_code)]

use std::{
    error::Error,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{CommandFactory as _, Parser, Subcommand, error::ErrorKind};
use jiff::Timestamp;
use update::{
    shell::{FetchError, Fetcher, Session, SessionError, Store, StoreError},
    verify::UpdateError,
};

/// Reads a TUF repository: refreshes its metadata, lists and gets its targets.
#[derive(Parser)]
#[command(name = "holdfast-update", version)]
struct Arguments {
    /// Trusted root metadata, which came by another way than the repository
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,
    /// Below this the metadata is: https, http or file
    #[arg(long, value_name = "URL")]
    metadata_url: Option<String>,
    /// Below this the targets are
    #[arg(long, value_name = "URL", alias = "target-base-url")]
    targets_url: Option<String>,
    /// Folder that keeps trusted metadata between calls
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// PEM file of the certificate authorities for https; without it the system's
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// As --store, for the conformance suite
    #[arg(long, value_name = "DIR", conflicts_with = "store")]
    metadata_dir: Option<PathBuf>,
    /// The target of `download`
    #[arg(long, value_name = "NAME")]
    target_name: Option<String>,
    /// Where `download` puts it
    #[arg(long, value_name = "DIR")]
    target_dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring the metadata up to date
    Refresh,
    /// Get targets; what is there and right is not fetched again
    Get {
        /// Folder for the files, named as the targets with `/` as `%2F`
        #[arg(long, value_name = "DIR", default_value = ".")]
        into: PathBuf,
        /// Target paths
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// List all targets: length, path, and the role that describes it; control characters and
    /// backslashes escaped
    List,
    /// Take a trusted root into --metadata-dir
    Init {
        /// The root metadata
        root: PathBuf,
    },
    /// Get --target-name into --target-dir
    Download,
}

/// Why the program ends.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot read {}", path.display())]
    Root { path: PathBuf, source: std::io::Error },
    #[error("{} is no folder: make it, or name one with --into", path.display())]
    Into { path: PathBuf },
    #[error("{what} is missing")]
    Usage { what: &'static str },
    #[error("cannot write to standard output")]
    Output { source: std::io::Error },
}

/// Status of a process that SIGPIPE ended, as shells count it.
const READER_GONE: u8 = 128 + 13;

/// Prints a line. A reader that has had enough, as `head` has, ends the program and is no panic.
fn say(line: &dyn std::fmt::Display) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(|source| Failure::Output { source })
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let suite = arguments.metadata_dir.is_some();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run(arguments)),
        Err(source) => Err(Failure::Root { path: PathBuf::from("/dev/null"), source }),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage { what }) if !suite => {
            let wrong = format!("{what} is missing");
            Arguments::command().error(ErrorKind::MissingRequiredArgument, wrong).exit()
        }
        Err(Failure::Output { source }) if source.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::from(READER_GONE)
        }
        Err(failure) => {
            eprintln!("holdfast-update: {}", chain(&failure));
            ExitCode::from(if suite { 1 } else { status(&failure) })
        }
    }
}

/// Escapes what would make a line of a list into something else; a repository names targets as it likes.
fn printable(text: &str) -> String {
    let escape = |c: char| match c {
        '\\' => "\\\\".to_owned(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

/// Joins an error and its sources.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

async fn run(arguments: Arguments) -> Result<(), Failure> {
    match &arguments.command {
        Command::Init { root } => {
            let bytes = read(root)?;
            let folder = needed(arguments.metadata_dir.as_ref(), "--metadata-dir")?;
            Ok(Store::open(folder)?.write("root.json", &bytes)?)
        }
        Command::Refresh => Ok(session(&arguments, Targets::Unused)?.refresh().await?),
        Command::List => {
            let mut session = session(&arguments, Targets::Unused)?;
            session.refresh().await?;
            for target in session.list().await? {
                let (path, role) = (printable(&target.path), printable(&target.role));
                say(&format_args!("{}\t{path}\t{role}", target.length))?;
            }
            Ok(())
        }
        Command::Get { into, names } => {
            // Said before anything is fetched.
            if !into.is_dir() {
                return Err(Failure::Into { path: into.clone() });
            }
            let mut session = session(&arguments, Targets::Fetched)?;
            session.refresh().await?;
            for name in names {
                let target = session.look_up(name).await?;
                say(&session.get(&target, into).await?.display())?;
            }
            Ok(())
        }
        Command::Download => {
            let name = needed(arguments.target_name.as_ref(), "--target-name")?;
            let folder = needed(arguments.target_dir.as_ref(), "--target-dir")?;
            let mut session = session(&arguments, Targets::Fetched)?;
            session.refresh().await?;
            let target = session.look_up(name).await?;
            session.get(&target, folder).await?;
            Ok(())
        }
    }
}

/// Whether a command gets targets.
#[derive(PartialEq, Eq)]
enum Targets {
    Fetched,
    Unused,
}

fn session(arguments: &Arguments, use_of: Targets) -> Result<Session, Failure> {
    let metadata = needed(arguments.metadata_url.as_ref(), "--metadata-url")?;
    let targets = match use_of {
        Targets::Fetched => needed(arguments.targets_url.as_ref(), "--targets-url")?,
        Targets::Unused => metadata,
    };
    let (store, root) = match &arguments.metadata_dir {
        Some(folder) => {
            let store = Store::open(folder)?;
            let path = folder.join("root.json");
            (store, read(&path)?)
        }
        None => {
            let root = read(needed(arguments.root.as_ref(), "--root")?)?;
            (Store::open(needed(arguments.store.as_ref(), "--store")?)?, root)
        }
    };
    let fetcher = Fetcher::new(arguments.ca.clone());
    let session = Session::new(store, fetcher, &root, Timestamp::now())?;
    Ok(session.with_urls(metadata, targets))
}

fn needed<'a, T>(value: Option<&'a T>, what: &'static str) -> Result<&'a T, Failure> {
    value.ok_or(Failure::Usage { what })
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|source| Failure::Root { path: path.to_owned(), source })
}

fn status(failure: &Failure) -> u8 {
    match failure {
        Failure::Usage { .. } => 2,
        Failure::Root { .. } | Failure::Into { .. } | Failure::Output { .. } => 3,
        Failure::Store(error) | Failure::Session(SessionError::Store(error)) => match error {
            StoreError::Io { .. } => 3,
            StoreError::Busy { .. } => 4,
        },
        Failure::Session(error) => match error {
            SessionError::Io { .. } | SessionError::Store(_) => 3,
            SessionError::Fetch(FetchError::TooLong { .. }) => 12,
            SessionError::Fetch(_) => 5,
            SessionError::Missing { .. } => 6,
            SessionError::Update(error) => refused(error),
            SessionError::NotFound { .. } => 10,
            SessionError::Target { .. } => 11,
            SessionError::TooLarge { .. } => 12,
        },
    }
}

fn refused(error: &UpdateError) -> u8 {
    match error {
        UpdateError::Unavailable { .. } => 6,
        UpdateError::Altered { .. }
        | UpdateError::NotListed { .. }
        | UpdateError::Signatures { .. }
        | UpdateError::Unreadable { .. }
        | UpdateError::Version { .. } => 7,
        UpdateError::Rollback { .. } => 8,
        UpdateError::Expired { .. } => 9,
        UpdateError::TooLong { .. } | UpdateError::TooManyRoles { .. } => 12,
    }
}
