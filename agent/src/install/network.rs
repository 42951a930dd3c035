//! The running release from a web server, for a node that was started from the network and has no
//! medium to install from.
//!
//! What firmware loaded is gone from memory by now, so it is fetched once more. It has to be pinned by
//! its digest, and to say of itself that it is what runs: what comes to the disk is started for years.

use std::{sync::Arc, time::Duration};

use types::config::Network;
use update::{
    disk::medium::{self, PROGRAM_LIMIT},
    shell::{FetchError, Fetcher},
};

use super::Elsewhere;
use crate::{
    config::reference::{Facts, Reference, ReferenceFault},
    net::{UplinkError, Uplinks, resolve::Names},
    time::nts::establish::Roots,
};

/// How long an address is waited for: DHCP, spanning tree and a switch that negotiates take their time.
const ONLINE_LIMIT: Duration = Duration::from_secs(90);
/// Longest time for the exchange: 24 MiB over the slowest of links.
const FETCH_LIMIT: Duration = Duration::from_secs(900);
/// Most attempts, and the pause between them.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(5);

/// Why the release was not fetched.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ProgramError {
    #[error("`program` in [install] names no file")]
    Reference(#[from] ReferenceFault),
    #[error(
        "`program` in [install] has to end in #sha256= and the file's digest, which the image's SHA256SUMS has: what is installed must not depend on who answers"
    )]
    NotPinned,
    #[error(transparent)]
    Uplinks(#[from] UplinkError),
    #[error("no address on any uplink within {} s; check the cables, the DHCP server, or [network]", ONLINE_LIMIT.as_secs())]
    Offline,
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(
        "{url}: there is no such file, or the server does not give it away; put it there, or correct `program` in [install]"
    )]
    Gone { url: String },
    #[error(
        "{url} is not what was named: its SHA-256 is another one; is the file of another build than the digest in [install]?"
    )]
    Digest { url: String },
    #[error(
        "{url} is another release than the one that runs; start the node from the one that is to be installed"
    )]
    OtherRelease { url: String },
}

/// Fetches the release whose `os-release` has the text `release`. Blocks.
pub(super) fn fetch(
    named: &str,
    elsewhere: &Elsewhere,
    release: &str,
) -> Result<Vec<u8>, ProgramError> {
    let reference = pinned(named)?;
    let program = elsewhere.runtime.block_on(download(&reference, &elsewhere.network))?;
    judge(&reference, program, release)
}

fn pinned(named: &str) -> Result<Reference, ProgramError> {
    let reference = Reference::parse(named.as_bytes())?;
    if reference.is_pinned() { Ok(reference) } else { Err(ProgramError::NotPinned) }
}

async fn download(reference: &Reference, network: &Network) -> Result<Vec<u8>, ProgramError> {
    // The addresses stay when these end; whoever comes next takes them over.
    let uplinks = Uplinks::start(network)?;
    let mut status = uplinks.status();
    let online = tokio::time::timeout(ONLINE_LIMIT, status.wait_for(|now| now.is_online())).await;
    if !online.is_ok_and(|found| found.is_ok()) {
        return Err(ProgramError::Offline);
    }
    let mut fetcher = Fetcher::new(None)
        .with_roots(Roots::public().store().clone())
        .with_resolver(Arc::new(Names(uplinks.resolver())));
    let url = reference.url(&Facts::default());
    let mut attempt = 1;
    loop {
        match fetcher.whole(&url, PROGRAM_LIMIT, FETCH_LIMIT).await {
            Ok(Some(program)) => return Ok(program),
            Ok(None) => return Err(ProgramError::Gone { url }),
            Err(error) if attempt == ATTEMPTS => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "install"),
        }
        attempt += 1;
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether this is what was named, and what runs.
fn judge(reference: &Reference, program: Vec<u8>, release: &str) -> Result<Vec<u8>, ProgramError> {
    let url = || reference.url(&Facts::default());
    if !reference.is_named(&program) {
        return Err(ProgramError::Digest { url: url() });
    }
    if medium::os_release(&program).as_deref() != Some(release) {
        return Err(ProgramError::OtherRelease { url: url() });
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// A boot program with a section `.osrel`.
    fn program(text: &str) -> Vec<u8> {
        let mut bytes = vec![0; 0x400];
        bytes[0x3c] = 0x80;
        bytes[0x80..0x84].copy_from_slice(b"PE\0\0");
        bytes[0x86] = 1;
        bytes[0x98..0x9e].copy_from_slice(b".osrel");
        bytes[0xa0] = u8::try_from(text.len()).expect("short");
        bytes[0xac..0xb0].copy_from_slice(&0x300_u32.to_le_bytes());
        bytes[0x300..0x300 + text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    fn naming(content: &[u8]) -> Reference {
        let digits: String =
            Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
        pinned(&format!("https://a/holdfast.efi#sha256={digits}")).expect("pinned")
    }

    #[test]
    fn only_what_is_pinned_is_asked_for() {
        assert!(matches!(pinned("https://a/holdfast.efi"), Err(ProgramError::NotPinned)));
        assert!(matches!(pinned("/dev/sda"), Err(ProgramError::Reference(_))));
    }

    #[test]
    fn only_the_running_release_is_installed() {
        let (good, other) = (program("ID=holdfast\n"), program("ID=other\n"));
        let judged =
            |named: &[u8], got: &[u8]| judge(&naming(named), got.to_vec(), "ID=holdfast\n");
        assert_eq!(judged(&good, &good).expect("installed"), good);
        assert!(matches!(judged(&good, &other), Err(ProgramError::Digest { .. })));
        assert!(matches!(judged(&other, &other), Err(ProgramError::OtherRelease { .. })));
        assert!(matches!(judged(b"x", b"x"), Err(ProgramError::OtherRelease { .. })));
    }
}
