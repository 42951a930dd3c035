//! A machine's process for tests: its control socket, a console that is written and typed at, and a dump that is
//! refused.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixListener, sync::watch};
use types::{forward::Problem, ids::MachineId};

use crate::machines::vmm;

/// Everything that should happen happens within this time, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(45);

/// What bytes for the console are said to be.
const TYPED: &str = "application/octet-stream";

/// A process that answers until the test ends.
pub(super) struct Guest {
    state: watch::Sender<State>,
}

/// What it is asked and does.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) output: Vec<u8>,
    pub(super) typed: Vec<u8>,
    /// Polls that wait for output now.
    pub(super) waiting: usize,
    /// Polls that could wait, so far.
    pub(super) polls: usize,
    /// Whether input is refused, and how often it was.
    pub(super) full: bool,
    pub(super) refused: usize,
    /// Whether polls are answered at once.
    pub(super) hasty: bool,
}

impl Guest {
    /// Puts the machine's socket where the agent looks for it.
    pub(super) fn listen(machine: MachineId) -> Arc<Self> {
        let path = vmm::socket_path(machine);
        std::fs::create_dir_all(vmm::sockets()).expect("a folder");
        // One that an earlier process of this id left.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("bound");
        let guest = Arc::new(Self { state: watch::Sender::default() });
        let served = Arc::clone(&guest);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let guest = Arc::clone(&served);
                let answer = service_fn(move |request| {
                    let guest = Arc::clone(&guest);
                    async move { Ok::<_, Infallible>(guest.answer(request).await) }
                });
                let http = hyper::server::conn::http1::Builder::new();
                tokio::spawn(http.serve_connection(TokioIo::new(stream), answer));
            }
        });
        guest
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        self.state.send_modify(change);
    }

    pub(super) fn print(&self, bytes: &[u8]) {
        self.change(|state| state.output.extend_from_slice(bytes));
    }

    pub(super) fn polls(&self) -> usize {
        self.state.borrow().polls
    }

    /// Waits until it is so.
    pub(super) async fn until(&self, holds: impl FnMut(&State) -> bool) {
        let mut state = self.state.subscribe();
        let waited = tokio::time::timeout(PATIENCE, state.wait_for(holds)).await;
        assert!(waited.is_ok(), "not in time: {:?}", self.state.borrow());
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let query = head.uri.query().unwrap_or_default().to_owned();
        match (head.method.as_str(), head.uri.path()) {
            ("GET", "/v1/console") => {
                self.read(number(&query, "from"), number(&query, "wait_ms")).await
            }
            ("POST", "/v1/console")
                if head.headers.get("content-type").is_none_or(|of| of != TYPED) =>
            {
                refuse(415, "another media type")
            }
            ("POST", "/v1/console") => self.take(&body.collect().await.expect("a body").to_bytes()),
            ("POST", "/v1/dump") => refuse(409, "it is being done already"),
            (_, _) => refuse(404, "no such thing"),
        }
    }

    async fn read(&self, from: u64, wait_ms: u64) -> Response<Full<Bytes>> {
        let place = usize::try_from(from).unwrap_or(usize::MAX);
        if wait_ms > 0 {
            let _waits = Waits::begin(self);
            let mut state = self.state.subscribe();
            let output = state.wait_for(|state| state.hasty || state.output.len() > place);
            // Without output in time, the answer is empty.
            let _ = tokio::time::timeout(Duration::from_millis(wait_ms), output).await;
        }
        let state = self.state.borrow();
        let place = place.min(state.output.len());
        let piece = Bytes::copy_from_slice(&state.output[place..]);
        let response = Response::builder()
            .header("holdfast-console-from", place.to_string())
            .header("holdfast-console-end", state.output.len().to_string());
        response.body(Full::new(piece)).expect("valid")
    }

    fn take(&self, bytes: &[u8]) -> Response<Full<Bytes>> {
        if self.state.borrow().full {
            self.change(|state| state.refused += 1);
            return refuse(429, "the guest has not read earlier input");
        }
        self.change(|state| state.typed.extend_from_slice(bytes));
        Response::new(Full::new(Bytes::from_static(b"{}")))
    }
}

/// A poll that waits, until it is answered or its connection is closed.
struct Waits<'a>(&'a Guest);

impl<'a> Waits<'a> {
    fn begin(guest: &'a Guest) -> Self {
        guest.change(|state| {
            state.waiting += 1;
            state.polls += 1;
        });
        Self(guest)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.waiting -= 1);
    }
}

fn number(query: &str, name: &str) -> u64 {
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

fn refuse(status: u16, detail: &str) -> Response<Full<Bytes>> {
    let (kind, title) = ("about:blank".to_owned(), "not possible now".to_owned());
    let problem = Problem { kind, title, status, detail: detail.to_owned() };
    let body = serde_json::to_vec(&problem).expect("plain data");
    let response = Response::builder().status(status).header("content-type", Problem::MEDIA_TYPE);
    response.body(Full::new(body.into())).expect("valid")
}
