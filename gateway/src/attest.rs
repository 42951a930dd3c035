//! Asks nodes to prove by their TPMs what they run, and keeps what came of it in the directory. The
//! judging is `lease::attestation`'s; the files that describe releases are read once, at the start.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};
use lease::{
    api::Attestation,
    attestation::{
        Attested, Authority, Challenge, Evidence, Inquiry, Known, MAX_AUTHORITIES,
        MAX_MEASUREMENTS, Measurements,
    },
    problem::chain,
};
use overlay::Overlay;
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::NodeId,
};

use crate::{
    config::AttestationConfig,
    service::{Gateway, ServiceError, now},
};

/// Nodes that are asked at a time.
const AT_ONCE: usize = 16;
/// Shortest time from one question to the next.
const SHORTEST: Duration = Duration::from_secs(10);

/// What nodes are to prove.
#[derive(Debug)]
pub struct Attestor {
    known: Known,
    every: Duration,
    required: bool,
}

impl Attestor {
    /// Reads the files that the configuration names.
    pub fn new(config: &AttestationConfig) -> Result<Self, ServiceError> {
        let release = |path: &PathBuf| {
            let refused = |reason| ServiceError::Release { path: path.clone(), reason };
            let bytes = bounded(path, MAX_MEASUREMENTS).map_err(refused)?;
            Measurements::from_json(&bytes).map_err(refused)
        };
        let releases = config.releases.iter().map(release).collect::<Result<Vec<_>, _>>()?;
        if config.required && releases.is_empty() {
            return Err(ServiceError::NoRelease);
        }
        let authorities = config.tpm_authorities.iter().map(|path| {
            let refused = |reason| ServiceError::TpmAuthority { path: path.clone(), reason };
            if releases.is_empty() {
                return Err(refused(
                    "nodes are asked only where attestation.releases names one".into(),
                ));
            }
            authorities(path).map_err(refused)
        });
        let authorities = authorities.collect::<Result<Vec<_>, _>>()?.concat();
        let tpms = config.tpms.iter().map(|tpm| tpm.to_ascii_lowercase()).collect();
        let every = Duration::from_secs(config.every_s).max(SHORTEST);
        let known = Known { releases, tpms, authorities };
        Ok(Self { known, every, required: config.required })
    }

    /// Returns why no machine is to be made on a node; `found` is what the node proved.
    pub fn objection(&self, found: Option<&Attestation>) -> Option<String> {
        if !self.required || found.is_some_and(|found| found.release.is_some()) {
            return None;
        }
        let reason = found.and_then(|found| found.refused.clone());
        Some(reason.unwrap_or_else(|| "it was not asked yet; try again in a minute".to_owned()))
    }
}

/// Reads the certificates of makers' authorities in a file.
pub(crate) fn authorities(path: &Path) -> Result<Vec<Authority>, String> {
    Authority::read(&bounded(path, MAX_AUTHORITIES)?)
}

/// Reads a file of at most `limit` bytes.
fn bounded(path: &Path, limit: usize) -> Result<Vec<u8>, String> {
    let facts = fs::metadata(path).map_err(|error| error.to_string())?;
    if usize::try_from(facts.len()).is_ok_and(|length| length <= limit) {
        return fs::read(path).map_err(|error| error.to_string());
    }
    Err(format!("it is longer than {limit} bytes"))
}

/// Asks every node from time to time, until the task is ended.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let mut times = tokio::time::interval(gateway.attestation.every);
    loop {
        times.tick().await;
        let asked = stream::iter(gateway.providers()).map(|node| ask(&gateway, node));
        asked.buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}

/// Asks a node, when there are releases to compare its answer with.
pub(crate) async fn ask(gateway: &Gateway, node: NodeId) {
    let attestor = &gateway.attestation;
    if attestor.known.releases.is_empty() {
        return;
    }
    let at = now();
    let found = match inquire(gateway, node).await {
        Ok(attested) => {
            tracing::info!(event = "node-attested", %node, release = attested.release);
            let (release, tpm) = (Some(attested.release), Some(attested.tpm));
            Attestation { at, release, tpm, certificate: attested.certificate, refused: None }
        }
        Err(reason) => {
            tracing::warn!(event = "node-not-attested", %node, reason);
            let refused = Some(reason);
            Attestation { at, release: None, tpm: None, certificate: None, refused }
        }
    };
    gateway.directory().handle_attestation(node, found);
}

async fn inquire(gateway: &Gateway, node: NodeId) -> Result<Attested, String> {
    let known = &gateway.attestation.known;
    let mut inquiry = Inquiry::new(node, now(), &random()?);
    let deadline = gateway.node_deadline();
    let first = put(&gateway.overlay, node, &inquiry.first(), deadline).await?;
    let second = inquiry.second(&first, known).map_err(|error| error.to_string())?;
    let second = put(&gateway.overlay, node, &second, deadline).await?;
    inquiry.judge(&second, known).map_err(|error| error.to_string())
}

/// Returns what an [`Inquiry`] is made of.
pub(crate) fn random() -> Result<[[u8; 32]; 3], String> {
    let mut random = [[0; 32]; 3];
    for part in &mut random {
        getrandom::fill(part).map_err(|error| format!("there is no randomness: {error}"))?;
    }
    Ok(random)
}

async fn put(
    overlay: &Overlay,
    node: NodeId,
    challenge: &Challenge,
    deadline: Duration,
) -> Result<Evidence, String> {
    let request = ForwardedRequest {
        method: "POST".into(),
        target: "/v1/node/attestation".into(),
        headers: vec![("content-type".into(), "application/json".into())],
        body: serde_json::to_vec(challenge).map_err(|error| error.to_string())?,
    };
    let body = serde_json::to_vec(&request).map_err(|error| error.to_string())?;
    let answer = overlay.request(node, body.into(), deadline).await;
    let answer = answer.map_err(|error| chain(&error))?;
    let unread = |error: serde_json::Error| format!("its answer cannot be read: {error}");
    let answer: ForwardedResponse = serde_json::from_slice(&answer).map_err(unread)?;
    if answer.status != 200 {
        let problem = serde_json::from_slice::<Problem>(&answer.body);
        return Err(problem.map_or_else(
            |_| format!("it answered with status {}", answer.status),
            |problem| problem.detail,
        ));
    }
    serde_json::from_slice(&answer.body).map_err(unread)
}

#[cfg(test)]
mod tests {
    use types::units::UnixSeconds;

    use super::*;

    fn config(required: bool, releases: &[&Path]) -> AttestationConfig {
        let releases = releases.iter().map(|path| (*path).to_owned()).collect();
        AttestationConfig { required, releases, ..AttestationConfig::default() }
    }

    #[test]
    fn a_file_that_describes_no_release_is_refused_at_the_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("measurements.json");
        let refused =
            |config: &AttestationConfig| Attestor::new(config).expect_err("no release").to_string();
        assert!(refused(&config(false, &[&path])).contains("measurements.json"));
        fs::write(&path, "{}").expect("written");
        assert!(refused(&config(false, &[&path])).contains("tpm"));
        assert!(refused(&config(true, &[])).contains("names no measurements.json"));
    }

    #[test]
    fn a_file_without_authorities_is_refused_at_the_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let (release, maker) = (folder.path().join("release"), folder.path().join("maker.pem"));
        let text = format!(r#"{{"tpm":{{"pcr11_sha256":"{}"}}}}"#, "ab".repeat(32));
        fs::write(&release, text).expect("written");
        let start = |releases: &[&Path]| {
            let tpm_authorities = vec![maker.clone()];
            Attestor::new(&AttestationConfig { tpm_authorities, ..config(false, releases) })
        };
        let refused = |releases: &[&Path]| start(releases).expect_err("refused").to_string();
        let absent = refused(&[&release]);
        assert!(absent.contains("tpm_authorities") && absent.contains("maker.pem"), "{absent}");
        fs::write(&maker, "no certificate").expect("written");
        assert!(refused(&[&release]).contains("it holds no certificate"));
        let authority = include_bytes!("../../lease/fuzz/corpus/certificate/authority-pem");
        fs::write(&maker, authority).expect("written");
        assert!(refused(&[]).contains("attestation.releases"));
        assert_eq!(start(&[&release]).expect("read").known.authorities.len(), 1);
    }

    #[test]
    fn where_proof_is_required_nodes_without_one_get_no_machines() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("measurements.json");
        let text = format!(r#"{{"tpm":{{"pcr11_sha256":"{}"}}}}"#, "ab".repeat(32));
        fs::write(&path, text).expect("written");
        let open = Attestor::new(&config(false, &[&path])).expect("read");
        let strict = Attestor::new(&config(true, &[&path])).expect("read");
        let at = UnixSeconds(1);
        let refused = Some("no TPM".into());
        let none = Attestation { at, release: None, tpm: None, certificate: None, refused };
        let proved = Attestation { release: Some("1".into()), refused: None, ..none.clone() };
        assert_eq!(open.objection(None), None);
        assert_eq!(strict.objection(Some(&none)), Some("no TPM".into()));
        assert!(strict.objection(None).is_some_and(|why| why.contains("not asked")));
        assert_eq!(strict.objection(Some(&proved)), None);
    }
}
