//! `holdfast-gateway`: serves the HTTP API until SIGTERM or SIGINT.
//!
//! Exit status: 0 after an orderly stop, 1 when it cannot start or broke down, 2 for a wrong
//! command line. The first line on standard output tells key and addresses; logs are JSON lines
//! on standard error, `RUST_LOG` filters them.

#![forbid(unsafe_code)]

use std::{io::Write, net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::Parser;
use gateway::{
    config::{ConfigError, GatewayConfig, address},
    service::{Running, ServiceError},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use types::{
    config::{Authority, Seed},
    ids::PublicKey,
};

/// The client end of Holdfast: an HTTP API for renters.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Configuration file (TOML); flags win over it.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Folder of everything that is kept.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// TCP address of the HTTP API.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = address)]
    http: Option<SocketAddr>,
    /// UDP address of the overlay.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = address)]
    overlay: Option<SocketAddr>,
    /// File of the private key, made at the first start.
    #[arg(long)]
    key_file: Option<PathBuf>,
    /// Public key of the lease authority; repeat for each.
    #[arg(long = "authority", value_name = "KEY")]
    authority: Vec<PublicKey>,
    /// How many of these keys must have signed a lease; all of them unless given.
    #[arg(long, requires = "authority")]
    threshold: Option<u32>,
    /// Member to join through, as KEY@ADDRESS:PORT; may be repeated.
    #[arg(long = "seed", value_name = "KEY@ADDRESS:PORT", value_parser = seed)]
    seeds: Vec<Seed>,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Service(#[from] ServiceError),
    #[error("cannot wait for signals")]
    Signals(#[from] std::io::Error),
}

fn seed(text: &str) -> Result<Seed, String> {
    let expected = "expected KEY@ADDRESS:PORT, the key as 64 hexadecimal digits";
    let (node, address) = text.split_once('@').ok_or(expected)?;
    Ok(Seed {
        node: node.parse().map_err(|error| format!("{error}; {expected}"))?,
        address: address.parse().map_err(|error| format!("{error}; {expected}"))?,
    })
}

impl Arguments {
    fn into_config(self) -> Result<GatewayConfig, ConfigError> {
        let file = self.config.as_deref().map(GatewayConfig::read).transpose()?;
        let mut config = file.unwrap_or_default();
        config.data_dir = self.data_dir.unwrap_or(config.data_dir);
        config.http = self.http.unwrap_or(config.http);
        config.overlay = self.overlay.unwrap_or(config.overlay);
        config.key_file = self.key_file.or(config.key_file);
        if !self.authority.is_empty() {
            let all = u32::try_from(self.authority.len()).unwrap_or(u32::MAX);
            let threshold = self.threshold.unwrap_or(all);
            config.authority = Some(Authority { threshold, keys: self.authority });
        }
        config.seeds.extend(self.seeds);
        Ok(config)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info".to_owned());
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|error| {
        let variable = EnvFilter::DEFAULT_ENV;
        eprintln!("holdfast-gateway: {variable}={filter:?} is no filter, as info or debug is; info counts: {error}");
        EnvFilter::new("info")
    });
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    raise_file_limit();
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("holdfast-gateway: {}", lease::problem::chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Raises the soft limit of open files to the hard one: every connection is a file.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // With the limit as it was the gateway serves fewer clients at a time.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

async fn run(arguments: Arguments) -> Result<(), Failure> {
    let config = arguments.into_config()?;
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let running = Running::start(&config).await?;
    let overlay = &running.gateway().overlay;
    let (node, udp, http) = (overlay.node_id(), overlay.local_addr(), running.http_addr()?);
    // Nobody may be reading; the gateway serves all the same.
    let _ = writeln!(
        std::io::stdout(),
        "holdfast-gateway: http=http://{http} overlay={udp} node={node}"
    );
    tracing::info!(event = "gateway-started", %node, %http, overlay = %udp);
    running
        .serve(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await;
    Ok(())
}
