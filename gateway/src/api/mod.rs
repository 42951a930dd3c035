//! The HTTP API: `server` takes connections, `routes` reads method and path, `machines` checks and
//! forwards what renters ask, `nodes`, `leases` and `content` answer from what the gateway has, `tunnel` and `terminal` carry bytes both ways,
//! `openapi` describes it all. Every refusal is a problem document (RFC 9457).

pub mod bodies;
pub(crate) mod content;
pub(crate) mod forwarding;
mod leases;
mod machines;
mod nodes;
pub mod openapi;
pub mod routes;
pub mod server;
mod terminal;
mod tunnel;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, Version, header, request::Parts, uri::Authority},
    response::Response,
};
use lease::{
    attestation::Challenge,
    problem::Kind,
    request::{CARRIED_FIELDS, MAX_AGE_S, VerifiedRequest, verify},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use types::{
    forward::{ForwardedRequest, MAX_BODY, Problem},
    ids::{MachineId, NodeId},
    query::Query,
};

use crate::{
    limits::{Signer, client},
    service::{Gateway, now},
    store::{Store, StoreError},
};
use routes::{MachineAction, Route, RouteError};

/// Answers a request of `client`.
async fn answer(gateway: &Arc<Gateway>, client: SocketAddr, request: Request) -> Response {
    let began = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let peer = client.ip();
    let source = source(gateway, peer, &request);
    let client = if source == peer { client.to_string() } else { source.to_string() };
    let mut response = if gateway.limits().admit(source.into(), began).is_some() {
        dispatch(gateway, request).await.unwrap_or_else(|problem| problem_response(&problem))
    } else {
        let mut response =
            problem_response(&Kind::TooManyRequests.because(
                "at most 100 requests a second are answered to one address; wait a second",
            ));
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        response
    };
    // Signed requests carry no field by which a cache tells people apart (RFC 9111 §3.5).
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let (status, ms) = (response.status().as_u16(), began.elapsed().as_millis());
    tracing::info!(event = "request", %client, %method, path, status, ms);
    response
}

/// Returns the address of whoever asks.
fn source(gateway: &Gateway, peer: IpAddr, request: &Request) -> IpAddr {
    let fields = request.headers().get_all("x-forwarded-for");
    let fields: Vec<&str> = fields.iter().filter_map(|field| field.to_str().ok()).collect();
    client(peer, &gateway.http.proxies, &fields)
}

/// Checks that a request names one host (RFC 9112 §3.2): what is between could take two for different ones.
fn one_host(parts: &Parts) -> Result<(), Problem> {
    let hosts = parts.headers.get_all(header::HOST);
    match hosts.iter().count() {
        0 if parts.version < Version::HTTP_11 => Ok(()),
        1 => match hosts.iter().find(|host| !is_host(host.as_bytes())) {
            None => Ok(()),
            Some(host) => {
                let detail =
                    format!("field host is {host:?}; a host is right, with or without a port");
                Err(Kind::Malformed.because(detail))
            }
        },
        count => {
            Err(Kind::Malformed.because(format!("field host comes {count} times; once is right")))
        }
    }
}

/// Whether field host can be this (RFC 9110 §7.2): a host, with or without a port, or nothing.
fn is_host(value: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(value) else { return value.is_empty() };
    let digits = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    // Before the host there would be somebody's name.
    let behind = authority.as_str().strip_prefix(authority.host());
    behind.is_some_and(|text| text.is_empty() || text.strip_prefix(':').is_some_and(digits))
}

async fn dispatch(gateway: &Arc<Gateway>, request: Request) -> Result<Response, Problem> {
    let (mut parts, body) = request.into_parts();
    one_host(&parts)?;
    let route = match routes::route(parts.method.as_str(), parts.uri.path()) {
        Ok(route) => route,
        Err(RouteError::Method { problem, allow }) => {
            let mut response = problem_response(&problem);
            let allow = HeaderValue::try_from(allow).map_err(|e| Kind::Internal.caused_by(&e))?;
            response.headers_mut().insert(header::ALLOW, allow);
            return Ok(response);
        }
        Err(RouteError::Malformed(problem) | RouteError::Unknown(problem)) => return Err(problem),
    };
    match route {
        Route::Health => Ok(nodes::health(gateway)),
        Route::OpenApi => Ok(json_response(StatusCode::OK, &openapi::document())),
        Route::Options => Ok(methods()),
        Route::Nodes => Ok(nodes::list(gateway)),
        Route::Node(node) => nodes::show(gateway, node),
        Route::Attest(node) => attest(gateway, node, &parts, body).await,
        Route::ReadContent(content) => {
            let who = authenticate(gateway, &forwarded(&parts, Vec::new())?)?;
            content::read(gateway, content, &who, body_wanted(&parts)).await
        }
        Route::WriteContent(content) => {
            let who = authenticate(gateway, &forwarded(&parts, Vec::new())?)?;
            content::write(gateway, content, &who, &parts, body).await
        }
        Route::RemoveContent(content) => {
            let (_, who) = signed(gateway, &parts, body).await?;
            content::remove(gateway, content, &who).await
        }
        Route::ShowLease(lease) => {
            json_only(&parts)?;
            let (request, who) = signed(gateway, &parts, body).await?;
            leases::show(gateway, lease, &request, &who).await
        }
        Route::RecoveryKey(node)
        | Route::RestartAgent(node)
        | Route::ReleaseDevice(node)
        | Route::Update(node) => {
            let (request, _) = signed(gateway, &parts, body).await?;
            nodes::known(gateway, node)?;
            forwarding::ask(gateway, node, &request).await.map(forwarding::response)
        }
        Route::Machines => {
            let (request, who) = signed(gateway, &parts, body).await?;
            machines::list(gateway, &request, &who).await
        }
        Route::CreateMachine => {
            json_only(&parts)?;
            let (request, who) = signed(gateway, &parts, body).await?;
            machines::create(gateway, &request, &who).await
        }
        Route::Machine(machine, action) => {
            of_machine(gateway, (machine, action), &mut parts, body).await
        }
    }
}

/// Serves what is asked of one machine.
async fn of_machine(
    gateway: &Arc<Gateway>,
    (machine, action): (MachineId, MachineAction),
    parts: &mut Parts,
    body: Body,
) -> Result<Response, Problem> {
    if matches!(action, MachineAction::Renew | MachineAction::Attach) {
        json_only(parts)?;
    }
    let (request, who) = signed(gateway, parts, body).await?;
    match action {
        MachineAction::Tunnel => tunnel::open(gateway, machine, &request, &who, parts).await,
        MachineAction::Terminal => {
            tunnel::open_terminal(gateway, machine, &request, &who, parts).await
        }
        MachineAction::Console if follows(&request)? => {
            tunnel::follow(gateway, machine, &request, &who).await
        }
        MachineAction::Dump => tunnel::dump(gateway, machine, &request, &who).await,
        MachineAction::Renew => machines::renew(gateway, machine, &request, &who).await,
        MachineAction::Attach => machines::attach(gateway, machine, &request, &who).await,
        MachineAction::Console
        | MachineAction::Delete
        | MachineAction::Devices
        | MachineAction::Power
        | MachineAction::Receipts
        | MachineAction::Show
        | MachineAction::TypeIn
        | MachineAction::Watch => machines::act(gateway, machine, &request, &who).await,
    }
}

/// Whether a console is wanted as it grows. The node reads the same.
fn follows(request: &ForwardedRequest) -> Result<bool, Problem> {
    Query::of(&request.target).flag("follow").map_err(|error| Kind::Malformed.caused_by(&error))
}

fn body_wanted(parts: &Parts) -> content::Wanted {
    if parts.method == "HEAD" { content::Wanted::Head } else { content::Wanted::Body }
}

/// Says which methods there are (RFC 9110 §9.3.7).
fn methods() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(routes::METHODS));
    response
}

/// Brings a node a challenge. Whoever may rent it may ask, so nobody has to sign.
async fn attest(
    gateway: &Gateway,
    node: NodeId,
    parts: &Parts,
    body: Body,
) -> Result<Response, Problem> {
    nodes::known(gateway, node)?;
    json_only(parts)?;
    let request = read(gateway, parts, body).await?;
    let _: Challenge = object(&request.body)?;
    forwarding::ask(gateway, node, &request).await.map(forwarding::response)
}

/// Reads the body and checks the signature; each request counts once.
async fn signed(
    gateway: &Gateway,
    parts: &Parts,
    body: Body,
) -> Result<(ForwardedRequest, VerifiedRequest), Problem> {
    let request = read(gateway, parts, body).await?;
    let who = authenticate(gateway, &request)?;
    Ok((request, who))
}

/// Reads a short body in time.
async fn read(gateway: &Gateway, parts: &Parts, body: Body) -> Result<ForwardedRequest, Problem> {
    let limit = || Kind::TooLarge.because(format!("at most {MAX_BODY} bytes are read here"));
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    if declared.and_then(|text| text.parse::<usize>().ok()).is_some_and(|n| n > MAX_BODY) {
        return Err(limit());
    }
    let deadline = Duration::from_millis(gateway.http.body_ms);
    let bytes = tokio::time::timeout(deadline, axum::body::to_bytes(body, MAX_BODY))
        .await
        .map_err(|_| late(gateway))?
        .map_err(|error| {
            let source = std::error::Error::source(&error);
            if source.is_some_and(|s| s.is::<http_body_util::LengthLimitError>()) {
                return limit();
            }
            Kind::Malformed.because(format!("the body broke off: {error}"))
        })?;
    forwarded(parts, bytes.to_vec())
}

/// The client did not send in time what it announced.
fn late(gateway: &Gateway) -> Problem {
    let limit = gateway.http.body_ms;
    Kind::TooSlow.because(format!("the body did not arrive within {limit} ms"))
}

fn authenticate(gateway: &Gateway, request: &ForwardedRequest) -> Result<VerifiedRequest, Problem> {
    let who = verify(request, now(), MAX_AGE_S)
        .map_err(|error| Kind::Unauthenticated.caused_by(&error))?;
    let known = gateway.store.last_end(who.key).map_err(|e| Kind::Internal.caused_by(&e))?;
    let signer = if known.is_some() { Signer::Renter } else { Signer::Stranger };
    gateway.replay().admit(now(), signer, &who).map_err(|error| match error {
        lease::request::ReplayError::Replayed { .. } => Kind::Replayed.caused_by(&error),
        lease::request::ReplayError::TooMany { .. } | lease::request::ReplayError::Full => {
            Kind::TooManyRequests.caused_by(&error)
        }
    })?;
    Ok(who)
}

/// Keeps of a request what its signature covers or carries.
fn forwarded(parts: &Parts, body: Vec<u8>) -> Result<ForwardedRequest, Problem> {
    let mut headers = Vec::new();
    for name in CARRIED_FIELDS {
        for value in parts.headers.get_all(name) {
            let text = value.to_str().map_err(|_| {
                Kind::Malformed.because(format!("field {name} holds other than visible characters"))
            })?;
            headers.push((name.to_owned(), text.to_owned()));
        }
    }
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
    Ok(ForwardedRequest { method: parts.method.as_str().to_owned(), target, headers, body })
}

fn json_only(parts: &Parts) -> Result<(), Problem> {
    let media = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = media.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Kind::UnsupportedMediaType
        .because(format!("content-type is {essence:?}; expected \"application/json\"")))
}

/// Reads a JSON object; a refusal names the field.
fn object<T: DeserializeOwned + Serialize>(body: &[u8]) -> Result<T, Problem> {
    if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err(Kind::Malformed.because("the body: expected a JSON object"));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let value: T = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." { "the body".to_owned() } else { format!("field {path}") };
        Kind::Malformed.because(format!("{place}: {}", error.inner()))
    })?;
    json.end().map_err(|error| Kind::Malformed.because(format!("the body: {error}")))?;
    let read = serde_json::to_value(&value).map_err(|error| Kind::Internal.caused_by(&error))?;
    let sent: Value = serde_json::from_slice(body)
        .map_err(|error| Kind::Malformed.because(format!("the body: {error}")))?;
    match other_form(&sent, &read) {
        None => Ok(value),
        Some(found) => {
            let detail = format!("field {}", found.trim_start_matches('.'));
            Err(Kind::Malformed.because(detail))
        }
    }
}

/// Finds what was sent in a form that nobody describes and was read all the same: serde takes the values of a
/// structure in their order, too, and `{"on": null}` for `"on"`.
fn other_form(sent: &Value, read: &Value) -> Option<String> {
    match (sent, read) {
        (Value::Array(_), Value::Object(_)) => {
            Some(": expected an object, not an array".to_owned())
        }
        (Value::Object(_), Value::String(_)) => {
            Some(": expected a string, not an object".to_owned())
        }
        (Value::Array(sent), Value::Array(read)) => {
            let mut pairs = sent.iter().zip(read).enumerate();
            pairs.find_map(|(at, (sent, read))| Some(format!("[{at}]{}", other_form(sent, read)?)))
        }
        (Value::Object(sent), Value::Object(read)) => read.iter().find_map(|(name, read)| {
            let found = other_form(sent.get(name)?, read)?;
            Some(format!(".{name}{found}"))
        }),
        (_, _) => None,
    }
}

/// Changes the store and returns when that is on disk; off the runtime's threads.
async fn kept<T: Send + 'static>(
    gateway: &Arc<Gateway>,
    change: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, Problem> {
    let gateway = Arc::clone(gateway);
    let changed = tokio::task::spawn_blocking(move || change(&gateway.store)).await;
    changed
        .map_err(|error| Kind::Internal.caused_by(&error))?
        .map_err(|error| Kind::Internal.caused_by(&error))
}

fn json_response<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(json) => response(status, "application/json", json),
        Err(error) => problem_response(&Kind::Internal.caused_by(&error)),
    }
}

fn problem_response(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let json = serde_json::to_vec(problem).unwrap_or_default();
    let mut response = response(status, Problem::MEDIA_TYPE, json);
    if status == StatusCode::UNAUTHORIZED {
        // RFC 9110 §11.6.1 wants a challenge; the scheme is ours.
        let value = HeaderValue::from_static("Signature alg=\"ed25519\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, value);
    }
    response
}

fn response(status: StatusCode, media_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}
