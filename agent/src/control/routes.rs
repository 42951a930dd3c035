//! Which operation a forwarded request is. Pure.
//!
//! A path may be percent-encoded where it need not be, as on its way through the gateway, which reads it the same way.

use lease::problem::Kind;
use types::{
    forward::{self, ForwardedRequest, Problem},
    ids::{MachineId, NodeId},
    node::Bdf,
    query::Query,
};

use crate::{
    machines::keeper::{Leaving, Switch},
    updates::Word,
};

/// An operation of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// `GET /v1/node`: what the node offers. This and the next need no signature.
    Node,
    /// `POST /v1/node/attestation`, or `/v1/nodes/NODE/attestation`: what it proves of itself.
    Attest {
        /// The node, where the path names one.
        node: Option<NodeId>,
    },
    /// `GET /v1/node/recovery-key`, or `/v1/nodes/NODE/recovery-key`: as it was sealed to operators.
    RecoveryKey {
        /// The node, where the path names one.
        node: Option<NodeId>,
    },
    /// `POST /v1/node/restart-agent`, or `/v1/nodes/NODE/restart-agent`.
    RestartAgent {
        /// The node, where the path names one.
        node: Option<NodeId>,
    },
    /// `POST /v1/node/devices/ADDRESS/release`, or `/v1/nodes/NODE/devices/ADDRESS/release`.
    ReleaseDevice {
        /// The node, where the path names one.
        node: Option<NodeId>,
        /// The device.
        device: Bdf,
    },
    /// `POST /v1/node/updates/WORD`, or `/v1/nodes/NODE/updates/WORD`: `apply`, `check`, `forget`, `hold`,
    /// `resume`.
    Update {
        /// The node, where the path names one.
        node: Option<NodeId>,
        /// What it is to do.
        word: Word,
    },
    /// `POST /v1/machines`
    CreateMachine,
    /// `GET /v1/machines`
    ListMachines,
    /// `GET /v1/machines/ID`
    ShowMachine {
        /// Which.
        machine: MachineId,
    },
    /// `POST /v1/machines/ID/start`, `stop`, `restart`
    SwitchMachine {
        /// Which.
        machine: MachineId,
        /// How.
        switch: Switch,
    },
    /// `DELETE /v1/machines/ID`
    DeleteMachine {
        /// Which.
        machine: MachineId,
    },
    /// `PUT /v1/machines/ID/lease`
    RenewLease {
        /// Which.
        machine: MachineId,
    },
    /// `POST /v1/machines/ID/nmi`, `pause`, `resume`
    Handle {
        /// Which.
        machine: MachineId,
        /// What is done to the guest.
        handling: Handling,
    },
    /// `GET /v1/machines/ID/counters`, `metrics`, `events[?from=NUMBER]`
    Watch {
        /// Which.
        machine: MachineId,
        /// What is wanted.
        what: Watched,
    },
    /// `…/v1/machines/ID/devices…`
    Attachments {
        /// Which.
        machine: MachineId,
        /// What is done.
        what: Attaching,
    },
    /// `POST /v1/machines/ID/dump`
    Dump {
        /// Which.
        machine: MachineId,
    },
    /// `GET /v1/machines/ID/console?previous=1`: of the process before the latest.
    ReadPrevious {
        /// Which.
        machine: MachineId,
    },
    /// `GET /v1/machines/ID/console[?from=OFFSET][&follow=1]`
    ReadConsole {
        /// Which.
        machine: MachineId,
        /// First byte wanted.
        from: u64,
        /// Whether what comes later is wanted too.
        follow: Follow,
    },
    /// `GET /v1/machines/ID/receipts[?after=NUMBER]`
    ReadReceipts {
        /// Which.
        machine: MachineId,
        /// Number of the last receipt that the reader has; 0 for none.
        after: u64,
    },
    /// `POST /v1/machines/ID/console`
    WriteConsole {
        /// Which.
        machine: MachineId,
    },
    /// `GET /v1/machines/ID/terminal[?from=OFFSET]`: the console, to be read and typed at.
    Terminal {
        /// Which.
        machine: MachineId,
        /// First byte wanted; without it, what comes from now on, behind the last lines before.
        from: Option<u64>,
    },
    /// `GET /v1/machines/ID/tunnel/PORT`
    Tunnel {
        /// Which.
        machine: MachineId,
        /// TCP port of the guest.
        port: u16,
    },
}

/// What is done with disks and devices that come and go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attaching {
    /// `GET /v1/machines/ID/devices`
    List,
    /// `POST /v1/machines/ID/devices`
    Attach,
    /// `DELETE /v1/machines/ID/devices/NAME[?pull=1][&erase=1]`
    Detach {
        /// Name of what was attached.
        name: String,
        /// How it leaves.
        how: Leaving,
    },
}

/// What is done to a guest that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handling {
    /// It gets an interrupt that cannot be masked.
    Interrupt,
    /// It waits.
    Pause,
    /// It goes on.
    Resume,
}

/// What is told of a guest that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// Counters, as JSON.
    Counters,
    /// Events from this number on.
    Events(u64),
    /// Counters, as Prometheus reads them.
    Metrics,
}

/// Whether a reader stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// It reads what is there.
    No,
    /// It reads until the machine ends.
    Yes,
}

impl Route {
    /// Finds the operation.
    pub fn parse(request: &ForwardedRequest) -> Result<Self, Problem> {
        let path = forward::plain(request.path()).ok_or_else(|| {
            let detail = "the path has a percent sign without two hexadecimal digits behind it";
            Kind::Malformed.because(detail)
        })?;
        let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
        let method = request.method.as_str();
        let route = match (method, &parts[..]) {
            ("GET", ["v1", "node"]) => Self::Node,
            ("POST", ["v1", "node", "attestation"]) => Self::Attest { node: None },
            ("POST", ["v1", "nodes", node, "attestation"]) => {
                Self::Attest { node: Some(node.parse().map_err(|_| bad("node", node))?) }
            }
            ("GET", ["v1", "node", "recovery-key"]) => Self::RecoveryKey { node: None },
            ("GET", ["v1", "nodes", node, "recovery-key"]) => {
                Self::RecoveryKey { node: Some(node.parse().map_err(|_| bad("node", node))?) }
            }
            ("POST", ["v1", "node", "restart-agent"]) => Self::RestartAgent { node: None },
            ("POST", ["v1", "nodes", node, "restart-agent"]) => {
                let node = node.parse().map_err(|_| bad("node", node))?;
                Self::RestartAgent { node: Some(node) }
            }
            ("POST", ["v1", "node", "devices", device, "release"]) => {
                let device = device.parse().map_err(|_| bad("device", device))?;
                Self::ReleaseDevice { node: None, device }
            }
            ("POST", ["v1", "nodes", node, "devices", device, "release"]) => {
                let device = device.parse().map_err(|_| bad("device", device))?;
                let node = node.parse().map_err(|_| bad("node", node))?;
                Self::ReleaseDevice { node: Some(node), device }
            }
            ("POST", ["v1", "node", "updates", word]) => {
                Self::Update { node: None, word: self::word(request, word)? }
            }
            ("POST", ["v1", "nodes", node, "updates", word]) => {
                let node = node.parse().map_err(|_| bad("node", node))?;
                Self::Update { node: Some(node), word: self::word(request, word)? }
            }
            ("POST", ["v1", "machines"]) => Self::CreateMachine,
            ("GET", ["v1", "machines"]) => Self::ListMachines,
            (_, ["v1", "machines", id, rest @ ..]) => {
                let machine = id.parse().map_err(|_| bad("machine", id))?;
                return Self::of_machine(request, machine, rest);
            }
            (_, _) => return Err(no_such(request)),
        };
        Ok(route)
    }

    fn of_machine(
        request: &ForwardedRequest,
        machine: MachineId,
        rest: &[&str],
    ) -> Result<Self, Problem> {
        let switch = |switch| Self::SwitchMachine { machine, switch };
        let route = match (request.method.as_str(), rest) {
            ("GET", []) => Self::ShowMachine { machine },
            ("DELETE", []) => Self::DeleteMachine { machine },
            ("POST", ["start"]) => switch(Switch::Start),
            ("POST", ["stop"]) => switch(Switch::Stop),
            ("POST", ["restart"]) => switch(Switch::Restart),
            ("PUT", ["lease"]) => Self::RenewLease { machine },
            ("POST", ["nmi"]) => Self::Handle { machine, handling: Handling::Interrupt },
            ("POST", ["pause"]) => Self::Handle { machine, handling: Handling::Pause },
            ("POST", ["resume"]) => Self::Handle { machine, handling: Handling::Resume },
            ("GET", ["counters"]) => Self::Watch { machine, what: Watched::Counters },
            ("GET", ["metrics"]) => Self::Watch { machine, what: Watched::Metrics },
            ("GET", ["events"]) => {
                let from = number(request, "from")?.unwrap_or(0);
                Self::Watch { machine, what: Watched::Events(from) }
            }
            ("GET", ["devices"]) => Self::Attachments { machine, what: Attaching::List },
            ("POST", ["devices"]) => Self::Attachments { machine, what: Attaching::Attach },
            ("DELETE", ["devices", name]) => {
                let how = match (flag(request, "erase")?, flag(request, "pull")?) {
                    (true, _) => Leaving::Erased,
                    (false, true) => Leaving::Pulled,
                    (false, false) => Leaving::Asked,
                };
                let what = Attaching::Detach { name: (*name).to_owned(), how };
                Self::Attachments { machine, what }
            }
            ("POST", ["dump"]) => Self::Dump { machine },
            ("GET", ["console"]) => {
                let from = number(request, "from")?.unwrap_or(0);
                match (flag(request, "previous")?, flag(request, "follow")?) {
                    (true, _) => Self::ReadPrevious { machine },
                    (false, true) => Self::ReadConsole { machine, from, follow: Follow::Yes },
                    (false, false) => Self::ReadConsole { machine, from, follow: Follow::No },
                }
            }
            ("GET", ["receipts"]) => {
                let after = number(request, "after")?.unwrap_or(0);
                Self::ReadReceipts { machine, after }
            }
            ("POST", ["console"]) => Self::WriteConsole { machine },
            ("GET", ["terminal"]) => Self::Terminal { machine, from: number(request, "from")? },
            ("GET", ["tunnel", port]) => {
                // What reads numbers would take a sign as well.
                let number =
                    port.starts_with(|first: char| first.is_ascii_digit()).then_some(*port);
                let port = number.and_then(|port| port.parse().ok()).filter(|port| *port > 0);
                Self::Tunnel { machine, port: port.ok_or_else(|| bad("port", rest[1]))? }
            }
            (_, _) => return Err(no_such(request)),
        };
        Ok(route)
    }
}

/// Returns a number of the query.
fn number(request: &ForwardedRequest, name: &str) -> Result<Option<u64>, Problem> {
    Query::of(&request.target).number(name).map_err(|error| Kind::Malformed.caused_by(&error))
}

/// Returns whether the query says 1.
fn flag(request: &ForwardedRequest, name: &str) -> Result<bool, Problem> {
    Query::of(&request.target).flag(name).map_err(|error| Kind::Malformed.caused_by(&error))
}

fn bad(what: &str, text: &str) -> Problem {
    Kind::Malformed.because(format!("{what} {text:?} in the path or query is not one"))
}

/// Reads what a node is to do about updates.
fn word(request: &ForwardedRequest, word: &str) -> Result<Word, Problem> {
    match word {
        "apply" => Ok(Word::Apply),
        "check" => Ok(Word::Check),
        "forget" => Ok(Word::Forget),
        "hold" => Ok(Word::Hold),
        "resume" => Ok(Word::Resume),
        _ => Err(no_such(request)),
    }
}

fn no_such(request: &ForwardedRequest) -> Problem {
    let known = "see /v1/openapi.json of the gateway";
    Kind::NotFound.because(format!(
        "a node knows no {} {}; {known}",
        request.method,
        request.path()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(method: &str, target: &str) -> Result<Route, u16> {
        let request = ForwardedRequest {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: Vec::new(),
            body: Vec::new(),
        };
        Route::parse(&request).map_err(|problem| problem.status)
    }

    #[test]
    fn a_node_is_asked_to_prove_itself() {
        let node = NodeId::from_bytes([7; 32]);
        let named = Ok(Route::Attest { node: Some(node) });
        assert_eq!(parse("POST", &format!("/v1/nodes/{node}/attestation")), named);
        assert_eq!(parse("POST", "/v1/node/attestation"), Ok(Route::Attest { node: None }));
        assert_eq!(parse("GET", "/v1/node/attestation"), Err(404));
        assert_eq!(parse("POST", "/v1/nodes/x/attestation"), Err(400));
    }

    #[test]
    fn operators_speak_about_updates() {
        let node = NodeId::from_bytes([7; 32]);
        let told = |word| Ok(Route::Update { node: Some(node), word });
        let path = |word: &str| format!("/v1/nodes/{node}/updates/{word}");
        assert_eq!(parse("POST", &path("apply")), told(Word::Apply));
        assert_eq!(parse("POST", &path("forget")), told(Word::Forget));
        assert_eq!(parse("POST", &path("hold")), told(Word::Hold));
        assert_eq!(parse("POST", &path("resume")), told(Word::Resume));
        let here = Route::Update { node: None, word: Word::Check };
        assert_eq!(parse("POST", "/v1/node/updates/check"), Ok(here));
        assert_eq!(parse("POST", &path("undo")), Err(404));
        assert_eq!(parse("GET", &path("apply")), Err(404));
    }

    #[test]
    fn operations_are_told_apart() {
        let machine = MachineId::from_bytes([0x11; 16]);
        let at = |rest: &str| format!("/v1/machines/{machine}{rest}");
        assert_eq!(parse("GET", "/v1/node"), Ok(Route::Node));
        assert_eq!(parse("GET", &at("")), Ok(Route::ShowMachine { machine }));
        let stop = Route::SwitchMachine { machine, switch: Switch::Stop };
        assert_eq!(parse("POST", &at("/stop")), Ok(stop));
        let console = Route::ReadConsole { machine, from: 7, follow: Follow::Yes };
        assert_eq!(parse("GET", &at("/console?follow=1&from=7")), Ok(console));
        let events = Route::Watch { machine, what: Watched::Events(9) };
        assert_eq!(parse("GET", &at("/events?from=9")), Ok(events));
        let pause = Route::Handle { machine, handling: Handling::Pause };
        assert_eq!(parse("POST", &at("/pause")), Ok(pause));
        assert_eq!(parse("POST", &at("/dump")), Ok(Route::Dump { machine }));
        let attaching = |what| Ok(Route::Attachments { machine, what });
        assert_eq!(parse("POST", &at("/devices")), attaching(Attaching::Attach));
        let name = "0000:01:00.0".to_owned();
        let detach = |how| attaching(Attaching::Detach { name: name.clone(), how });
        let path = at(&format!("/devices/{name}"));
        assert_eq!(parse("DELETE", &path), detach(Leaving::Asked));
        assert_eq!(parse("DELETE", &format!("{path}?pull=1")), detach(Leaving::Pulled));
        assert_eq!(parse("DELETE", &format!("{path}?pull=0&erase=1")), detach(Leaving::Erased));
        let previous = Route::ReadPrevious { machine };
        assert_eq!(parse("GET", &at("/console?previous=1")), Ok(previous));
        let terminal = |from| Ok(Route::Terminal { machine, from });
        assert_eq!(parse("GET", &at("/terminal")), terminal(None));
        assert_eq!(parse("GET", &at("/terminal?from=7")), terminal(Some(7)));
        assert_eq!(parse("POST", &at("/console")), Ok(Route::WriteConsole { machine }));
        let receipts = Route::ReadReceipts { machine, after: 3 };
        assert_eq!(parse("GET", &at("/receipts?after=3")), Ok(receipts));
        assert_eq!(parse("GET", &at("/tunnel/22")), Ok(Route::Tunnel { machine, port: 22 }));
    }

    #[test]
    fn a_flag_is_0_or_1_and_comes_once() {
        let machine = MachineId::from_bytes([0x11; 16]);
        let detach =
            |query: &str| parse("DELETE", &format!("/v1/machines/{machine}/devices/data?{query}"));
        assert_eq!(detach("erase=yes"), Err(400));
        assert_eq!(detach("erase=true"), Err(400));
        assert_eq!(detach("pull=2"), Err(400));
        assert_eq!(detach("pull"), Err(400));
        assert_eq!(detach("pull=1&pull=1"), Err(400));
        let what = Attaching::Detach { name: "data".to_owned(), how: Leaving::Asked };
        assert_eq!(detach("pull=0&erase=0"), Ok(Route::Attachments { machine, what }));
        let console =
            |query: &str| parse("GET", &format!("/v1/machines/{machine}/console?{query}"));
        assert_eq!(console("follow=true"), Err(400));
        assert_eq!(console("follow=1&follow=0"), Err(400));
        assert_eq!(console("previous=yes"), Err(400));
        assert_eq!(console("previous=1&follow=2"), Err(400));
        assert_eq!(console("from=1&from=2"), Err(400));
        let whole = Route::ReadConsole { machine, from: 0, follow: Follow::No };
        assert_eq!(console("previous=0&follow=0"), Ok(whole));
    }

    #[test]
    fn what_need_not_be_percent_encoded_is_the_same_as_it_is() {
        let machine = MachineId::from_bytes([0x11; 16]);
        let path = format!("/v1/m%61chines/{machine}");
        assert_eq!(parse("GET", &path), Ok(Route::ShowMachine { machine }));
        let name = "0000:01:00.0".to_owned();
        let what = Attaching::Detach { name, how: Leaving::Asked };
        let path = format!("/v1/machines/{machine}/d%65vices/0000%3A01%3a00%2E0");
        assert_eq!(parse("DELETE", &path), Ok(Route::Attachments { machine, what }));
        assert_eq!(parse("GET", "/v1/node%"), Err(400));
        assert_eq!(parse("GET", "/v1/node%6"), Err(400));
        assert_eq!(parse("GET", "/v1/node%+f"), Err(400));
        assert_eq!(parse("GET", "/v1/node%ü"), Err(400));
    }

    #[test]
    fn everything_else_is_refused() {
        let machine = MachineId::from_bytes([0x11; 16]);
        assert_eq!(parse("GET", "/"), Err(404));
        assert_eq!(parse("PATCH", "/v1/machines"), Err(404));
        assert_eq!(parse("GET", "/v1/machines/xyz"), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/tunnel/0")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/tunnel/65536")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/tunnel/+22")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/console?from=-1")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/terminal?from=x")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/events?from=x")), Err(400));
        assert_eq!(parse("GET", &format!("/v1/machines/{machine}/dump")), Err(404));
    }
}
