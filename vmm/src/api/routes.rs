//! Which requests there are. `openapi.json` describes the same for others; a test compares both.

use std::os::fd::OwnedFd;

use types::query::Query;

use super::{Answer, Client, Request, answer::problem, devices, guest, watch};
use crate::machine::Board;

/// One request and what answers it.
pub struct Route {
    /// Method.
    pub method: &'static str,
    /// Path; a segment in braces stands for any.
    pub path: &'static str,
    /// Names of parameters that its query may have.
    pub query: &'static [&'static str],
    /// What answers.
    pub act: Act,
}

/// What answers a request.
#[derive(Clone, Copy)]
pub enum Act {
    /// By the request alone. Descriptors that come along are closed.
    Plain(fn(&Request, &Board) -> Answer),
    /// By the request and the descriptors that come along, after a wait.
    WithFiles(fn(&Request, Vec<OwnedFd>, &Client<'_>, &Board) -> Answer),
    /// By the request, after a wait if there is something to wait for.
    Waiting(fn(&Request, &Client<'_>, &Board) -> Answer),
}

/// Parameters of what waits for something new.
const SPAN: &[&str] = &["from", "wait_ms"];

/// All requests.
pub const ROUTES: &[Route] = &[
    Route { method: "GET", path: "/v1/console", query: SPAN, act: Act::Waiting(guest::console) },
    route("POST", "/v1/console", guest::input),
    route("GET", "/v1/counters", watch::counters),
    route("PUT", "/v1/deadline", guest::put_deadline),
    route("GET", "/v1/devices", devices::list),
    Route { method: "POST", path: "/v1/devices", query: &[], act: Act::WithFiles(devices::attach) },
    Route {
        method: "DELETE",
        path: "/v1/devices/{id}",
        query: &["pull"],
        act: Act::Waiting(devices::detach),
    },
    route("POST", "/v1/dump", watch::dump),
    Route { method: "GET", path: "/v1/events", query: SPAN, act: Act::Waiting(watch::events) },
    route("GET", "/v1/openapi.json", watch::document),
    route("POST", "/v1/pause", guest::pause),
    route("POST", "/v1/power", guest::power),
    route("POST", "/v1/resume", guest::resume),
    route("GET", "/v1/state", watch::state),
];

/// Methods of HTTP (RFC 9110 §9.3, RFC 5789 and draft-ietf-httpbis-safe-method-w-body).
const METHODS: [&str; 10] =
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"];

const fn route(
    method: &'static str,
    path: &'static str,
    act: fn(&Request, &Board) -> Answer,
) -> Route {
    Route { method, path, query: &[], act: Act::Plain(act) }
}

/// Answers a request that came with `files` from `client`.
pub fn answer(
    request: &Request,
    files: Vec<OwnedFd>,
    client: &Client<'_>,
    board: &Board,
) -> Answer {
    match find(request) {
        Ok(Act::Plain(act)) => act(request, board),
        Ok(Act::WithFiles(act)) => act(request, files, client, board),
        Ok(Act::Waiting(act)) => act(request, client, board),
        Err(refusal) => *refusal,
    }
}

/// Returns what answers a request, or why nothing does.
fn find(request: &Request) -> Result<Act, Box<Answer>> {
    let Some(segments) = request.segments() else {
        let detail = "% in a path has two hexadecimal digits behind it, as in 0000%3A41%3A00.0, and \
                      all of it is UTF-8";
        return Err(Box::new(problem(400, "bad path", detail)));
    };
    // The same without the body (RFC 9110 §9.3.2), which is left out when the answer is sent.
    let method = if request.is_head() { "GET" } else { &request.method };
    let mut there = ROUTES.iter().filter(|route| is_at(route.path, &segments));
    let Some(route) = there.find(|route| route.method == method) else {
        return Err(Box::new(refusal(request, &segments)));
    };
    match Query::of(&request.target).only(route.query) {
        Ok(()) => Ok(route.act),
        Err(error) => Err(Box::new(problem(400, "bad query", &error.to_string()))),
    }
}

/// Says why nothing answers a request.
fn refusal(request: &Request, segments: &[String]) -> Answer {
    // The asterisk asks of the server as a whole (RFC 9110 §9.3.7).
    let is_meant = |route: &&Route| request.path() == "*" || is_at(route.path, segments);
    let mut methods: Vec<&str> = ROUTES.iter().filter(is_meant).map(|route| route.method).collect();
    if methods.contains(&"GET") {
        methods.push("HEAD");
    }
    methods.sort_unstable();
    methods.dedup();
    if methods.is_empty() {
        let detail = format!("there is no {}; see /v1/openapi.json", request.path());
        return problem(404, "not found", &detail);
    }
    if !METHODS.contains(&request.method.as_str()) {
        let detail = format!("{} is no method that is known here", request.method);
        return problem(501, "not implemented", &detail);
    }
    let allow = methods.join(", ");
    let detail = format!("{} knows {allow}, not {}", request.path(), request.method);
    let mut refusal = problem(405, "method not allowed", &detail);
    refusal.headers.push(("allow", allow));
    refusal
}

/// Returns whether a path of these segments has the form of `pattern`.
fn is_at(pattern: &str, segments: &[String]) -> bool {
    let fits = |(wanted, found): (&str, &String)| {
        let any = wanted.starts_with('{') && !found.is_empty();
        any || wanted == found
    };
    pattern.split('/').count() == segments.len() && pattern.split('/').zip(segments).all(fits)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::api::Body;

    fn document() -> Value {
        serde_json::from_str(watch::DOCUMENT).expect("the document is JSON")
    }

    #[test]
    fn the_document_describes_every_request_and_no_other() {
        let document = document();
        let mut described = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().expect("paths") {
            for method in methods.as_object().expect("methods").keys() {
                described.insert((method.to_uppercase(), path.clone()));
            }
        }
        let served = ROUTES.iter().map(|route| (route.method.to_owned(), route.path.to_owned()));
        assert_eq!(described, served.collect());
    }

    #[test]
    fn the_document_describes_every_parameter_of_a_query_and_no_other() {
        let document = document();
        for route in ROUTES {
            let request = &document["paths"][route.path][route.method.to_lowercase()];
            let parameters = request["parameters"].as_array().into_iter().flatten();
            let of_query = parameters.filter(|parameter| parameter["in"] == "query");
            let names = of_query.filter_map(|parameter| parameter["name"].as_str());
            let names: Vec<&str> = names.collect();
            assert_eq!(names, route.query, "{} {}", route.method, route.path);
        }
    }

    #[test]
    fn every_reference_in_the_document_leads_somewhere() {
        let document = document();
        let text = document.to_string();
        let references: Vec<&str> =
            text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(references.len() > 10, "{references:?}");
        for reference in references {
            assert!(document.pointer(reference).is_some(), "{reference} leads nowhere");
        }
    }

    fn request(method: &str, target: &str) -> Request {
        let (method, target) = (method.to_owned(), target.to_owned());
        Request { method, target, content_type: None, body: Vec::new() }
    }

    #[test]
    fn segments_in_braces_stand_for_any() {
        let is_at = |pattern: &str, path: &str| {
            is_at(pattern, &request("GET", path).segments().expect("text"))
        };
        assert!(is_at("/v1/things/{name}", "/v1/things/0000:01:00.0"));
        assert!(is_at("/v1/things/{name}", "/v1/things/a%2Fb"));
        assert!(!is_at("/v1/things/{name}", "/v1/things/"));
        assert!(!is_at("/v1/things/{name}", "/v1/things"));
        assert!(!is_at("/v1/state", "/v1/state/x"));
        // Escaped or not, it is the same path (RFC 3986 §6.2.2.2).
        assert!(is_at("/v1/state", "/v1/%73tate?x=1"));
        assert!(!is_at("/v1/state", "/v1%2Fstate"));
    }

    /// Whoever misspells one must not get something else than they asked for.
    #[test]
    fn parameters_have_the_names_that_are_known() {
        let found = |method: &str, target: &str| {
            find(&request(method, target)).map(drop).map_err(|refusal| refusal.status)
        };
        for path in ["/v1/console", "/v1/events"] {
            for right in ["", "?", "?from=1&wait_ms=2", "?fr%6Fm=+", "?&wait_ms"] {
                assert_eq!(found("GET", &format!("{path}{right}")), Ok(()), "{path}{right}");
            }
            for wrong in ["?form=7", "?from=1&From=1", "?pull=1", "?=1", "?%zz", "?x"] {
                assert_eq!(found("HEAD", &format!("{path}{wrong}")), Err(400), "{path}{wrong}");
            }
        }
        assert_eq!(found("DELETE", "/v1/devices/a?pull=1"), Ok(()));
        assert_eq!(found("DELETE", "/v1/devices/a?Pull=1"), Err(400));
        assert_eq!(found("POST", "/v1/power?now"), Err(400));
        assert_eq!(found("POST", "/v1/power?"), Ok(()));
        assert_eq!(found("GET", "/v1/power?now"), Err(405));
        let why = find(&request("GET", "/v1/console?form=7")).err().expect("refused");
        let Body::Bytes(said) = why.body else { panic!("what?") };
        let said: Value = serde_json::from_slice(&said).expect("a problem");
        let detail = "\"form\" in the query is no parameter of this; from, wait_ms is right";
        assert_eq!(said["detail"], detail);
    }

    #[test]
    fn what_is_not_there_is_told_apart_from_what_cannot_be_done_to_it() {
        let refused = |method: &str, target: &str| {
            let request = request(method, target);
            let refusal = refusal(&request, &request.segments().expect("text"));
            let allow: Vec<_> = refusal.headers.into_iter().map(|(_, value)| value).collect();
            (refusal.status, allow)
        };
        let allow = |methods: &str| (405, vec![methods.to_owned()]);
        assert_eq!(refused("PATCH", "/v1/%73tate"), allow("GET, HEAD"));
        assert_eq!(refused("OPTIONS", "/v1/devices"), allow("GET, HEAD, POST"));
        assert_eq!(refused("OPTIONS", "*"), allow("DELETE, GET, HEAD, POST, PUT"));
        assert_eq!(refused("BREW", "/v1/state"), (501, Vec::new()));
        assert_eq!(refused("GET", "/v1/other"), (404, Vec::new()));
    }
}
