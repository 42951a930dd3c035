//! Who may ask what: signatures of requests, and leases.

use std::sync::{Mutex, PoisonError};

use lease::{
    document::Envelope,
    problem::Kind,
    request::{self, MAX_AGE_S, ReplayGuard, VerifiedRequest},
    threshold::{AuthoritySet, ThresholdError},
};
use types::{
    config::NodeSpec,
    forward::{ForwardedRequest, Problem},
    ids::NodeId,
    units::UnixSeconds,
};

use crate::machines::plan::Terms;

/// Requests that are remembered, so that none counts twice: those of renters and operators only.
const REMEMBERED: usize = 65_536;

/// Checks what renters, operators and authorities signed.
#[derive(Debug)]
pub struct Authority {
    set: AuthoritySet,
    seen: Mutex<ReplayGuard>,
}

impl Authority {
    /// Uses the authority of the configuration.
    pub fn new(spec: &NodeSpec) -> Result<Self, ThresholdError> {
        let set = AuthoritySet::new(&spec.authority)?;
        Ok(Self { set, seen: Mutex::new(ReplayGuard::new(REMEMBERED, MAX_AGE_S)) })
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
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.admit(now, request).map_err(|error| match error {
            request::ReplayError::Replayed { .. } => Kind::Replayed.caused_by(&error),
            request::ReplayError::TooMany { .. } | request::ReplayError::Full => {
                Kind::TooManyRequests.caused_by(&error)
            }
        })
    }

    /// Returns what a lease says, if enough authority keys signed it for this node.
    pub fn terms(&self, envelope: &Envelope, node: NodeId) -> Result<Terms, Problem> {
        let verified =
            self.set.verify(envelope).map_err(|error| Kind::LeaseRefused.caused_by(&error))?;
        let lease = verified.into_lease();
        if lease.node != node {
            let detail = format!("the lease is for node {}; this is node {node}", lease.node);
            return Err(Kind::LeaseRefused.because(detail));
        }
        Ok(Terms {
            id: lease.id,
            serial: lease.serial,
            renter: lease.renter,
            shape: lease.shape,
            start: lease.start,
            end: lease.end,
        })
    }
}
