//! Who may ask what: signatures of requests, and leases.

use std::sync::{Arc, Mutex, PoisonError};

use lease::{
    document::Envelope,
    problem::Kind,
    request::{self, MAX_AGE_S, ReplayGuard, VerifiedRequest},
    threshold::{AuthoritySet, ThresholdError, VerifiedLease},
};
use types::{
    config::NodeSpec,
    forward::{ForwardedRequest, Problem},
    ids::NodeId,
    units::UnixSeconds,
};

use crate::machines::store::{Store, StoreError};

/// Requests that are remembered, so that none counts twice: those of renters and operators only.
const REMEMBERED: usize = 65_536;

/// Checks what renters, operators and authorities signed.
#[derive(Debug)]
pub struct Authority {
    set: AuthoritySet,
    seen: Mutex<ReplayGuard>,
    /// Requests that were signed earlier are not known any more.
    from: UnixSeconds,
    store: Arc<Store>,
}

/// Why there is no authority.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AuthorityError {
    #[error("the configuration's authority cannot be used")]
    Keys { source: ThresholdError },
    #[error("cannot tell which requests came before")]
    Store { source: StoreError },
}

impl Authority {
    /// Uses the authority of the configuration. Requests that were admitted before a restart are
    /// remembered by `store`; when that was lost, none counts that was signed before `now`.
    pub fn new(
        spec: &NodeSpec,
        store: Arc<Store>,
        now: UnixSeconds,
    ) -> Result<Self, AuthorityError> {
        let set =
            AuthoritySet::new(&spec.authority).map_err(|source| AuthorityError::Keys { source })?;
        let mut guard = ReplayGuard::new(REMEMBERED, MAX_AGE_S);
        let failed = |source| AuthorityError::Store { source };
        for (until, key, nonce) in store.nonces().map_err(failed)? {
            guard.restore(until, key, nonce);
        }
        let from = store.requests_from(now).map_err(failed)?;
        Ok(Self { set, seen: Mutex::new(guard), from, store })
    }

    /// Checks a request's signature and age.
    pub fn verify(
        &self,
        request: &ForwardedRequest,
        now: UnixSeconds,
    ) -> Result<VerifiedRequest, Problem> {
        request::verify(request, now, MAX_AGE_S)
            .map_err(|error| Kind::Unauthenticated.caused_by(&error))
    }

    /// Remembers a request, or refuses one that came before. Only for keys that may ask
    /// something: strangers must not fill the memory.
    pub fn admit(&self, request: &VerifiedRequest, now: UnixSeconds) -> Result<(), Problem> {
        if request.created < self.from {
            let detail = format!(
                "the request was signed at {}, and this node has lost what it knew of requests before {}: sign \
                 it again{}",
                request.created.0,
                self.from.0,
                match self.from.since(now) {
                    0 => String::new(),
                    wait_s => format!(" in {wait_s} s"),
                }
            );
            return Err(Kind::Replayed.because(detail));
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let until = seen.admit(now, request).map_err(|error| match error {
            request::ReplayError::Replayed { .. } => Kind::Replayed.caused_by(&error),
            request::ReplayError::TooMany { .. } | request::ReplayError::Full => {
                Kind::TooManyRequests.caused_by(&error)
            }
        })?;
        // On disk before anything is done: a request counts once, whenever the power goes.
        let kept = self.store.put_nonce(now, until, request.key, &request.nonce);
        remembered(request, kept)
    }

    /// Returns a lease, if enough authority keys signed it for this node.
    pub fn lease(&self, envelope: &Envelope, node: NodeId) -> Result<VerifiedLease, Problem> {
        let verified =
            self.set.verify(envelope).map_err(|error| Kind::LeaseRefused.caused_by(&error))?;
        let wanted = verified.lease().node;
        if wanted != node {
            let detail = format!("the lease is for node {wanted}; this is node {node}");
            return Err(Kind::LeaseRefused.because(detail));
        }
        Ok(verified)
    }
}

/// Judges a request that was, or could not be, `kept`. On a server whose disk is gone, renters still see
/// and reach what runs there: what only asks for something may be answered again after a restart, to
/// whoever could have kept the first answer.
fn remembered(request: &VerifiedRequest, kept: Result<(), StoreError>) -> Result<(), Problem> {
    match kept {
        Err(error) if !request.is_safe => Err(Kind::Internal.caused_by(&error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixSeconds = UnixSeconds(5000);

    fn spec() -> NodeSpec {
        let key = lease::authority::public_key(&lease::SigningKey::from_bytes(&[1; 32]));
        let text = format!("version = 1\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
        NodeSpec::parse(text.as_bytes()).expect("valid")
    }

    #[test]
    fn without_a_disk_only_what_changes_nothing_is_answered() {
        let gone = || {
            let (path, source) = ("agent.redb".to_owned(), std::io::ErrorKind::NotFound.into());
            Err(StoreError::File { path, source })
        };
        let mut request = VerifiedRequest {
            key: types::ids::PublicKey::from_bytes([1; 32]),
            nonce: "1".to_owned(),
            created: NOW,
            idempotency_key: None,
            is_safe: true,
        };
        assert_eq!(remembered(&request, gone()), Ok(()));
        request.is_safe = false;
        assert_eq!(remembered(&request, gone()).expect_err("not remembered").status, 500);
        assert_eq!(remembered(&request, Ok(())), Ok(()));
    }

    #[test]
    fn a_request_counts_once_across_a_restart() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = || {
            let store = Store::open(&folder.path().join("agent.redb")).expect("opened");
            Authority::new(&spec(), Arc::new(store), NOW).expect("made")
        };
        let mut request = ForwardedRequest {
            method: "POST".to_owned(),
            target: "/v1/machines/x/stop".to_owned(),
            headers: Vec::new(),
            body: Vec::new(),
        };
        let key = lease::SigningKey::from_bytes(&[8; 32]);
        request::sign(&key, &mut request, NOW, "0123456789abcdef").expect("signed");

        let authority = open();
        let verified = authority.verify(&request, NOW).expect("signed");
        authority.admit(&verified, NOW).expect("the first time");
        drop(authority);

        let authority = open();
        let later = NOW.plus(MAX_AGE_S);
        let verified = authority.verify(&request, later).expect("young enough");
        let refusal = authority.admit(&verified, later).expect_err("the second time");
        assert_eq!(refusal.status, 401);
        assert!(refusal.detail.contains("used before"), "{}", refusal.detail);
        drop(authority);

        // Nor when what it knew of requests is lost: it does not know whether this one came.
        std::fs::remove_file(folder.path().join("agent.redb")).expect("lost");
        for _ in 0..2 {
            let refusal = open().admit(&verified, later).expect_err("signed before the loss");
            assert_eq!(refusal.status, 401);
            assert!(refusal.detail.contains("sign it again"), "{}", refusal.detail);
        }
        request.headers.clear();
        let after = NOW.plus(request::MAX_AHEAD_S);
        request::sign(&key, &mut request, after, "fedcba9876543210").expect("signed");
        let authority = open();
        let verified = authority.verify(&request, after).expect("signed");
        authority.admit(&verified, after).expect("signed after the loss");
    }
}
