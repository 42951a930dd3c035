//! The node's answers: documents, and refusals that say what was wrong and what would be right.

use std::{io, net::IpAddr};

use lease::{
    api::{MachineEvent, MachineState},
    problem::{Kind, chain},
};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use types::{
    forward::{ForwardedRequest, ForwardedResponse, Problem},
    ids::{MachineId, NodeId},
    units::UnixSeconds,
};

use crate::inventory::rules::DeviceError;
use crate::machines::{
    keeper::{RefusedError, State, View},
    plan::Failed,
    store::{Answered, StoreError},
    vmm::{self, VmmError},
};

/// What is to be said of a machine whose process answers nothing.
const SILENT: &str = "its process answers nothing: `stop` ends it by force after a moment, and it can be \
                      started again; its lease ends it in any case";

/// Answers with a document.
pub fn json<T: Serialize>(status: u16, document: &T) -> ForwardedResponse {
    ForwardedResponse {
        status,
        content_type: "application/json".to_owned(),
        headers: Vec::new(),
        body: serde_json::to_vec(document).expect("answers hold nothing that JSON cannot"),
    }
}

/// Answers with a refusal.
pub fn problem(problem: &Problem) -> ForwardedResponse {
    let content_type = Problem::MEDIA_TYPE.to_owned();
    ForwardedResponse { content_type, ..json(problem.status, problem) }
}

/// Answers that it is done, and nothing is to be said of it.
pub fn done() -> ForwardedResponse {
    ForwardedResponse { status: 204, body: Vec::new(), ..json(204, &()) }
}

/// Answers with a piece of console output.
pub fn console(console: &vmm::Console) -> ForwardedResponse {
    // A forwarded answer is bounded; the reader asks again from where this one ends.
    let limit = types::forward::MAX_BODY.min(console.bytes.len());
    let body = console.bytes[..limit].to_vec();
    let end = console.from + u64::try_from(limit).unwrap_or(0);
    ForwardedResponse {
        status: 200,
        content_type: "application/octet-stream".to_owned(),
        headers: vec![
            ("holdfast-console-from".to_owned(), console.from.to_string()),
            ("holdfast-console-end".to_owned(), end.to_string()),
        ],
        body,
    }
}

/// Answers as before.
pub fn kept(answered: &Answered) -> ForwardedResponse {
    ForwardedResponse {
        status: answered.status,
        content_type: "application/json".to_owned(),
        headers: vec![("idempotency-replayed".to_owned(), "true".to_owned())],
        body: answered.body.clone().into_bytes(),
    }
}

/// Returns a machine as renters see it.
pub fn machine(node: NodeId, now: UnixSeconds, view: &View) -> lease::api::Machine {
    let View { record, state, address, silent } = view;
    let lease = &record.lease;
    let ends_soon = record.end().since(now) <= crate::machines::plan::WARN_S;
    let state = match state {
        State::Starting if now < lease.start => MachineState::Pending,
        State::Starting => MachineState::Starting,
        State::Running if ends_soon => MachineState::Warned,
        State::Running => MachineState::Running,
        State::Stopping => MachineState::Stopping,
        State::Stopped if record.failed == Failed::Yes => MachineState::Failed,
        State::Stopped => MachineState::Stopped,
        State::Ended => MachineState::Retained,
    };
    lease::api::Machine {
        id: lease.id,
        node,
        renter: lease.renter,
        serial: lease.serial,
        start: lease.start,
        end: record.end(),
        shape: lease.shape.clone(),
        image: record.image.clone(),
        hardware: record.hardware.clone(),
        placement: record.placement.clone(),
        state,
        detail: if *silent { SILENT.to_owned() } else { record.last_stop.clone() },
        addresses: address.map(IpAddr::V4).into_iter().collect(),
        created: record.created,
        events: record
            .events
            .iter()
            .map(|event| MachineEvent { at: event.at, what: event.what.clone() })
            .collect(),
    }
}

/// Parses a request's body.
pub fn body<T: DeserializeOwned>(request: &ForwardedRequest) -> Result<T, Problem> {
    serde_json::from_slice(&request.body)
        .map_err(|error| Kind::Malformed.because(format!("body: {error}")))
}

/// Returns what tells a request from another one under the same idempotency key.
pub fn digest(request: &ForwardedRequest) -> String {
    let mut digest = Sha256::new();
    for part in [request.method.as_bytes(), request.target.as_bytes(), &request.body] {
        digest.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
        digest.update(part);
    }
    types::hex::encode(&digest.finalize())
}

/// Turns a refusal of the keeper into one for renters.
pub fn refused(error: &RefusedError) -> Problem {
    let kind = match error {
        RefusedError::Vmm(error) => return of_process(error),
        RefusedError::Unknown { .. } => Kind::NotFound,
        RefusedError::Exists { .. } | RefusedError::Serial { .. } | RefusedError::Renewal(_) => {
            Kind::Conflict
        }
        RefusedError::Ended { .. } => Kind::LeaseRefused,
        RefusedError::Room { .. } => Kind::NoCapacity,
        RefusedError::LargeDisk { .. }
        | RefusedError::Device(
            DeviceError::Twice { .. }
            | DeviceError::SharedGroup { .. }
            | DeviceError::SharedLater { .. }
            | DeviceError::Linked { .. },
        ) => Kind::Unprocessable,
        RefusedError::Device(DeviceError::Absent { .. }) => Kind::NotFound,
        RefusedError::Device(_) => Kind::NoCapacity,
        RefusedError::Draining | RefusedError::Store(StoreError::Full { .. }) => Kind::Unavailable,
        RefusedError::Store(_) | RefusedError::Note(_) => Kind::Internal,
    };
    kind.caused_by(error)
}

/// No such machine, or it is another renter's.
pub fn unknown_machine(machine: MachineId) -> Problem {
    let detail = format!("this node has no machine {machine} for the key that signed the request");
    Kind::NotFound.because(detail)
}

/// Says what a failure of a machine's process means to the renter: a refusal is passed on with its reason.
pub fn of_process(error: &VmmError) -> Problem {
    match error {
        VmmError::Connect { .. } => {
            Kind::Conflict.because(format!("the machine does not run: {}", chain(error)))
        }
        VmmError::Silent => Kind::Conflict.caused_by(error),
        VmmError::Http { .. } => Kind::Unavailable.caused_by(error),
        VmmError::Late => Kind::NodeTimeout.caused_by(error),
        VmmError::Status { status, .. } => of_status(*status).caused_by(error),
        VmmError::Body { .. } => Kind::Internal.caused_by(error),
    }
}

fn of_status(status: u16) -> Kind {
    match status {
        400 => Kind::Malformed,
        404 => Kind::NotFound,
        409 => Kind::Conflict,
        413 => Kind::TooLarge,
        429 => Kind::TooManyRequests,
        401..=499 => Kind::Unprocessable,
        _ => Kind::Internal,
    }
}

/// The guest did not take the connection.
pub fn no_connection(port: u16, error: &io::Error) -> Problem {
    Kind::NodeUnreachable
        .because(format!("nothing in the guest answers on TCP port {port}: {error}"))
}

#[cfg(test)]
mod tests {
    use types::node::Bdf;

    use super::*;

    #[test]
    fn devices_that_are_asked_for_wrongly_are_told_from_those_that_are_not_free() {
        let device = Bdf { segment: 0, bus: 1, device: 0, function: 0 };
        let (group, other) = (4, Bdf { function: 1, ..device });
        let status = |error| refused(&RefusedError::Device(error)).status;
        let wrong = [
            DeviceError::Twice { device },
            DeviceError::SharedGroup { device, group, other },
            DeviceError::SharedLater { device, group, other },
            DeviceError::Linked { device, other },
        ];
        assert_eq!(wrong.map(status), [422; 4]);
        let taken = DeviceError::NotFree { device, state: "leased".into() };
        assert_eq!([DeviceError::Absent { device }, taken].map(status), [404, 409]);
    }

    #[test]
    fn a_refusal_of_a_machines_process_is_passed_on_with_its_reason() {
        let said = |status| {
            let detail = "it is being done already".to_owned();
            let problem = of_process(&VmmError::Status { status, detail });
            assert!(problem.detail.contains("it is being done already"), "{problem:?}");
            assert!(!problem.detail.contains("does not run"), "{problem:?}");
            problem.status
        };
        assert_eq!([400, 404, 409, 413, 429, 500].map(said), [400, 404, 409, 413, 429, 500]);
        assert_eq!([405, 411, 503].map(said), [422, 422, 500]);
    }

    #[test]
    fn only_a_process_that_is_not_there_does_not_run() {
        let source = io::ErrorKind::ConnectionRefused.into();
        let gone = of_process(&VmmError::Connect { source });
        assert_eq!(gone.status, 409);
        assert!(gone.detail.starts_with("the machine does not run: "), "{gone:?}");
        let late = of_process(&VmmError::Late);
        assert_eq!(late.status, 504);
        assert!(late.detail.contains("did not answer in time"), "{late:?}");
        assert!(!late.detail.contains("does not run"), "{late:?}");
    }
}
