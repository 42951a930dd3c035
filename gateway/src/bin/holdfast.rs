//! `holdfast`: the renter's, authority's and operator's command line. See `gateway::cli`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    gateway::cli::main().await
}
