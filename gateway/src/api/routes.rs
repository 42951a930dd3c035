//! Method and path to what is asked. Pure.
//!
//! A path may be percent-encoded where it need not be; here it is read as if it were not. What signatures cover and
//! nodes get is the target as it came.

use std::str::FromStr;

use lease::problem::Kind;
use types::{
    forward::{self, Problem},
    ids::{ContentId, MachineId, NodeId},
};

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// `POST /v1/nodes/{id}/attestation`.
    Attest(NodeId),
    /// `POST /v1/machines`.
    CreateMachine,
    /// `GET` or `HEAD /v1/healthz`.
    Health,
    /// Something with one machine.
    Machine(MachineId, MachineAction),
    /// `GET /v1/machines`.
    Machines,
    /// `GET` or `HEAD /v1/nodes/{id}`.
    Node(NodeId),
    /// `GET` or `HEAD /v1/nodes`.
    Nodes,
    /// `GET` or `HEAD /v1/openapi.json`.
    OpenApi,
    /// `OPTIONS *`: which methods there are at all.
    Options,
    /// `GET` or `HEAD /v1/content/{sha256}`.
    ReadContent(ContentId),
    /// `DELETE /v1/content/{sha256}`.
    RemoveContent(ContentId),
    /// `POST /v1/nodes/{id}/devices/{address}/release`.
    ReleaseDevice(NodeId),
    /// `POST /v1/nodes/{id}/updates/{word}`.
    Update(NodeId),
    /// `GET /v1/nodes/{id}/recovery-key`.
    RecoveryKey(NodeId),
    /// `POST /v1/nodes/{id}/restart-agent`.
    RestartAgent(NodeId),
    /// `PUT /v1/leases/{id}`.
    ShowLease(MachineId),
    /// `PUT /v1/content/{sha256}`.
    WriteContent(ContentId),
}

/// What is asked of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineAction {
    /// `POST …/devices`.
    Attach,
    /// `GET …/console`.
    Console,
    /// `DELETE`.
    Delete,
    /// `GET …/devices`, `DELETE …/devices/{name}`.
    Devices,
    /// `POST …/dump`.
    Dump,
    /// `POST …/start`, `…/stop`, `…/restart`, `…/nmi`, `…/pause` or `…/resume`.
    Power,
    /// `GET …/receipts`.
    Receipts,
    /// `PUT …/lease`.
    Renew,
    /// `GET`.
    Show,
    /// `GET …/terminal`.
    Terminal,
    /// `GET …/tunnel/{port}`.
    Tunnel,
    /// `POST …/console`.
    TypeIn,
    /// `GET …/counters`, `…/events` or `…/metrics`.
    Watch,
}

/// All methods that some path knows, and the one of [`Route::Options`], as field `allow` lists them.
pub const METHODS: &str = "DELETE, GET, HEAD, OPTIONS, POST, PUT";

/// Why nothing is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteError {
    /// The target is none that the method can have.
    Malformed(Problem),
    /// The path exists, the method does not.
    Method {
        /// What to answer.
        problem: Problem,
        /// The methods that exist, as field `allow` lists them (RFC 9110 §10.2.1).
        allow: String,
    },
    /// There is no such path.
    Unknown(Problem),
}

/// Reads method and path.
pub fn route(method: &str, path: &str) -> Result<Route, RouteError> {
    if path == "*" {
        return server(method);
    }
    let plain = forward::plain(path).ok_or_else(|| {
        let detail =
            format!("path {path} has a percent sign without two hexadecimal digits behind it");
        RouteError::Malformed(Kind::Malformed.because(detail))
    })?;
    let rest = plain.strip_prefix("/v1/").ok_or_else(|| unknown(path))?;
    let segments: Vec<&str> = rest.split('/').collect();
    match segments.as_slice() {
        ["healthz"] => only(method, path, &read(Route::Health)),
        ["openapi.json"] => only(method, path, &read(Route::OpenApi)),
        ["nodes"] => only(method, path, &read(Route::Nodes)),
        ["nodes", node, rest @ ..] => of_node(method, path, (name(node)?, rest)),
        ["content", content] => {
            let content = name(content)?;
            let (get, write) = (Route::ReadContent(content), Route::WriteContent(content));
            let remove = Route::RemoveContent(content);
            let known = [("DELETE", remove), ("GET", get), ("HEAD", get), ("PUT", write)];
            only(method, path, &known)
        }
        ["leases", lease] => only(method, path, &[("PUT", Route::ShowLease(name(lease)?))]),
        ["machines"] => {
            only(method, path, &[("GET", Route::Machines), ("POST", Route::CreateMachine)])
        }
        ["machines", machine, rest @ ..] => of_machine(method, path, (name(machine)?, rest)),
        _ => Err(unknown(path)),
    }
}

/// What is asked of the server as a whole (RFC 9112 §3.2.4).
fn server(method: &str) -> Result<Route, RouteError> {
    if method == "OPTIONS" {
        return Ok(Route::Options);
    }
    let detail = format!("{method} needs a path; OPTIONS alone is asked of *");
    Err(RouteError::Malformed(Kind::Malformed.because(detail)))
}

/// What is asked of one machine.
fn of_machine(
    method: &str,
    path: &str,
    (machine, rest): (MachineId, &[&str]),
) -> Result<Route, RouteError> {
    let of = |action| Route::Machine(machine, action);
    match rest {
        [] => {
            let (show, delete) = (of(MachineAction::Show), of(MachineAction::Delete));
            only(method, path, &[("DELETE", delete), ("GET", show)])
        }
        ["start" | "stop" | "restart" | "nmi" | "pause" | "resume"] => {
            only(method, path, &[("POST", of(MachineAction::Power))])
        }
        ["lease"] => only(method, path, &[("PUT", of(MachineAction::Renew))]),
        ["counters" | "events" | "metrics"] => {
            only(method, path, &[("GET", of(MachineAction::Watch))])
        }
        ["devices"] => {
            let (list, attach) = (of(MachineAction::Devices), of(MachineAction::Attach));
            only(method, path, &[("GET", list), ("POST", attach)])
        }
        ["devices", _] => only(method, path, &[("DELETE", of(MachineAction::Devices))]),
        ["dump"] => only(method, path, &[("POST", of(MachineAction::Dump))]),
        ["console"] => {
            let (read, write) = (of(MachineAction::Console), of(MachineAction::TypeIn));
            only(method, path, &[("GET", read), ("POST", write)])
        }
        ["terminal"] => only(method, path, &[("GET", of(MachineAction::Terminal))]),
        ["receipts"] => only(method, path, &[("GET", of(MachineAction::Receipts))]),
        ["tunnel", port] => {
            // What reads numbers would take a sign as well.
            let valid = port.starts_with(|first: char| matches!(first, '1'..='9'))
                && port.parse::<u16>().is_ok();
            if !valid {
                let detail = format!("{port:?} is no TCP port; expected 1 to 65535");
                return Err(RouteError::Unknown(Kind::NotFound.because(detail)));
            }
            only(method, path, &[("GET", of(MachineAction::Tunnel))])
        }
        _ => Err(unknown(path)),
    }
}

/// What is asked of one node.
fn of_node(method: &str, path: &str, (node, rest): (NodeId, &[&str])) -> Result<Route, RouteError> {
    let (allowed, route) = match rest {
        [] => return only(method, path, &read(Route::Node(node))),
        ["attestation"] => ("POST", Route::Attest(node)),
        ["devices", _, "release"] => ("POST", Route::ReleaseDevice(node)),
        ["updates", _] => ("POST", Route::Update(node)),
        ["recovery-key"] => ("GET", Route::RecoveryKey(node)),
        ["restart-agent"] => ("POST", Route::RestartAgent(node)),
        _ => return Err(unknown(path)),
    };
    only(method, path, &[(allowed, route)])
}

/// What anybody may read, whole or its head (RFC 9110 §9.1). Other reading is signed, and the node that checks the
/// signature knows no HEAD.
fn read(route: Route) -> [(&'static str, Route); 2] {
    [("GET", route), ("HEAD", route)]
}

fn unknown(path: &str) -> RouteError {
    RouteError::Unknown(Kind::NotFound.because(format!("no path {path}; see /v1/openapi.json")))
}

fn only(method: &str, path: &str, known: &[(&str, Route)]) -> Result<Route, RouteError> {
    if let Some((_, route)) = known.iter().find(|(name, _)| *name == method) {
        return Ok(*route);
    }
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let allow = names.join(", ");
    let detail = format!("{path} knows {allow}, not {method}");
    Err(RouteError::Method { problem: Kind::MethodNotAllowed.because(detail), allow })
}

fn name<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, RouteError> {
    text.parse().map_err(|error| {
        let detail = format!("{text:?} names nothing: {error}");
        RouteError::Unknown(Kind::NotFound.because(detail))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_paths_are_told_apart() {
        let id = "00112233445566778899aabbccddeeff";
        let status = |method: &str, path: &str| match route(method, path) {
            Ok(_) => 200,
            Err(
                RouteError::Malformed(problem)
                | RouteError::Method { problem, .. }
                | RouteError::Unknown(problem),
            ) => problem.status,
        };
        assert_eq!(status("GET", "/v1/nodes"), 200);
        assert_eq!(status("DELETE", &format!("/v1/machines/{id}")), 200);
        assert_eq!(status("POST", &format!("/v1/machines/{id}/restart")), 200);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/tunnel/22")), 200);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/terminal")), 200);
        assert_eq!(status("POST", &format!("/v1/machines/{id}/terminal")), 405);
        assert_eq!(status("POST", &format!("/v1/machines/{id}/console")), 200);
        assert_eq!(status("PUT", &format!("/v1/machines/{id}/console")), 405);
        assert_eq!(status("POST", &format!("/v1/machines/{id}/pause")), 200);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/events")), 200);
        assert_eq!(status("DELETE", &format!("/v1/machines/{id}/devices/data")), 200);
        assert_eq!(status("DELETE", &format!("/v1/machines/{id}/devices")), 405);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/dump")), 405);
        assert_eq!(status("PATCH", "/v1/nodes"), 405);
        assert_eq!(status("HEAD", "/v1/healthz"), 200);
        assert_eq!(status("HEAD", "/v1/machines"), 405);
        assert_eq!(status("GET", "/v2/nodes"), 404);
        assert_eq!(status("GET", "/v1/nodes/"), 404);
        assert_eq!(status("GET", "/v1/machines/xyz"), 404);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/tunnel/0")), 404);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/tunnel/65536")), 404);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/tunnel/+22")), 404);
        assert_eq!(status("GET", &format!("/v1/machines/{id}/start")), 405);
        assert_eq!(status("GET", "*"), 400);
        assert_eq!(status("GET", "/v1/nodes%"), 400);
        assert_eq!(status("GET", "/v1/nodes%7"), 400);
        assert_eq!(status("GET", "/v1/nodes%+f"), 400);
        assert_eq!(status("GET", "/v1/nodes%ü"), 400);
    }

    #[test]
    fn what_need_not_be_percent_encoded_is_the_same_as_it_is() {
        let long = "ab".repeat(32);
        assert_eq!(route("GET", "/v1/%6e%6Fdes"), Ok(Route::Nodes));
        let encoded = format!("/v1/nodes/%61{}/d%65vices/0000%3A01%3A00%2E0/release", &long[1..]);
        let node = NodeId::from_bytes([0xab; 32]);
        assert_eq!(route("POST", &encoded), Ok(Route::ReleaseDevice(node)));
    }

    #[test]
    fn the_server_as_a_whole_is_asked_for_its_methods() {
        assert_eq!(route("OPTIONS", "*"), Ok(Route::Options));
    }
}
