//! What the node proves of itself when somebody asks (`lease::attestation` says how it is judged): the
//! question goes to the TPM, in a thread of its own, one at a time.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use ed25519_dalek::SigningKey;
use lease::{
    attestation::{self, Challenge, Evidence, MAX_LOG, REGISTERS},
    problem::Kind,
};
use tokio::sync::{Mutex, Semaphore};
use types::{forward::Problem, hex, ids::NodeId};

use crate::seal::{
    tpm::{Certificates, Question, Tpm, TpmError},
    unlock,
};

/// Questions that wait for the TPM. Slow ones need a second for each, and anybody may ask.
const WAITING: usize = 4;
/// Longest part of a credential, in bytes; that of a P-256 key has 70 and 68.
const MAX_CREDENTIAL: usize = 512;

/// The firmware's log of what it measured, as the kernel keeps it.
pub(crate) const LOG: &str = "sys/kernel/security/tpm0/binary_bios_measurements";

/// Answers challenges.
#[derive(Debug)]
pub struct Attestor {
    key: SigningKey,
    node: NodeId,
    root: PathBuf,
    waiting: Semaphore,
    turn: Arc<Mutex<()>>,
}

impl Attestor {
    /// Answers for the node with this key; the TPM is below `root`.
    pub fn new(key: SigningKey, root: PathBuf) -> Self {
        let node = NodeId::from_bytes(key.verifying_key().to_bytes());
        Self { key, node, root, waiting: Semaphore::new(WAITING), turn: Arc::default() }
    }

    /// Answers a challenge.
    pub async fn answer(&self, challenge: Challenge) -> Result<Evidence, Problem> {
        let nonce = hex::decode::<32>(&challenge.nonce);
        nonce.map_err(|error| Kind::Unprocessable.because(format!("nonce: {error}")))?;
        let long = |part: &[u8]| part.len() > MAX_CREDENTIAL;
        if challenge.credential.as_ref().is_some_and(|c| long(&c.blob) || long(&c.secret)) {
            let detail = format!("credential: a part is longer than {MAX_CREDENTIAL} bytes");
            return Err(Kind::Unprocessable.because(detail));
        }
        let busy = "the node's TPM has as many questions as it takes; ask again in a few seconds";
        let _place = self.waiting.try_acquire().map_err(|_| Kind::TooManyRequests.because(busy))?;
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let (key, node, root) = (self.key.clone(), self.node, self.root.clone());
        // The turn goes with the work: it may outlast who asked.
        let work = tokio::task::spawn_blocking(move || {
            let answer = Tpm::open(&root)
                .and_then(|mut tpm| evidence(&mut tpm, &key, &challenge, unlock::measured(&root)));
            drop(turn);
            let mut evidence = answer.map_err(|error| refused(node, &error))?;
            if challenge.credential.is_none() {
                evidence.log = firmware_log(&root);
            }
            Ok(evidence)
        });
        work.await.map_err(|error| Kind::Internal.caused_by(&error))?
    }
}

/// Reads the firmware's log. A server whose firmware writes none, or too much, proves by registers alone.
fn firmware_log(root: &Path) -> Vec<u8> {
    let mut log = Vec::new();
    let limit = u64::try_from(MAX_LOG).unwrap_or(u64::MAX);
    let read = File::open(root.join(LOG))
        .and_then(|file| file.take(limit.saturating_add(1)).read_to_end(&mut log));
    if read.is_err() || log.len() > MAX_LOG {
        log.clear();
    }
    log
}

fn refused(node: NodeId, error: &TpmError) -> Problem {
    match error {
        TpmError::Absent { .. } => {
            Kind::Conflict.because(format!("node {node} cannot prove what it runs: {error}"))
        }
        TpmError::Refused { command: 0x147, .. } => Kind::Unprocessable.because(format!(
            "the credential is not for this TPM and this node's key in it: {error}"
        )),
        TpmError::Io { .. }
        | TpmError::Late
        | TpmError::Short
        | TpmError::Forged
        | TpmError::Strange { .. }
        | TpmError::Refused { .. }
        | TpmError::Unsigned { .. }
        | TpmError::Unmeasured
        | TpmError::Latched => Kind::Internal.caused_by(error),
    }
}

/// Has a TPM answer, and signs what it says as the node. `volumes` is what was measured of them.
pub fn evidence(
    tpm: &mut Tpm,
    key: &SigningKey,
    challenge: &Challenge,
    volumes: String,
) -> Result<Evidence, TpmError> {
    let node = NodeId::from_bytes(key.verifying_key().to_bytes());
    let quoted = tpm.quote(&Question {
        node,
        qualifying: attestation::qualifying(node, &challenge.nonce, &volumes),
        registers: &REGISTERS,
        credential: challenge.credential.as_ref().map(|c| (&c.blob[..], &c.secret[..])),
    })?;
    let certificates = match challenge.credential {
        None => certificates(tpm),
        Some(_) => Certificates::default(),
    };
    let values = quoted.registers.iter().map(|value| hex::encode(value));
    Ok(Evidence {
        node,
        registers: REGISTERS.into_iter().zip(values).collect(),
        node_signature: attestation::sign(key, &quoted.quote, &quoted.attestation_key),
        quote: quoted.quote,
        signature: quoted.signature,
        attestation_key: quoted.attestation_key,
        endorsement_key: quoted.endorsement_key,
        endorsement_certificate: certificates.own,
        endorsement_chain: certificates.chain,
        volumes,
        log: Vec::new(),
        activated: quoted.activated.map(|secret| hex::encode(&secret)),
    })
}

/// Reads what vouches for the TPM. Without it the node proves what it runs as well, so a failure is only told.
fn certificates(tpm: &mut Tpm) -> Certificates {
    tpm.certificates().unwrap_or_else(|error| {
        let reason = lease::problem::chain(&error);
        tracing::warn!(reason, "the TPM's certificate cannot be read; none is shown");
        Certificates::default()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_firmwares_log_is_read_whole_or_not_at_all() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(firmware_log(root.path()), b"", "there is none");
        let path = root.path().join(LOG);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, b"measured").expect("written");
        assert_eq!(firmware_log(root.path()), b"measured");
        fs::write(&path, vec![1; MAX_LOG]).expect("written");
        assert_eq!(firmware_log(root.path()).len(), MAX_LOG);
        fs::write(&path, vec![1; MAX_LOG + 1]).expect("written");
        assert_eq!(firmware_log(root.path()), b"", "it is too long to be sent");
    }
}
