//! HTTP/1.1 (RFC 9112) on the socket and, where it is wanted, on TCP. One request per connection;
//! connections are counted and have a time limit, so that readers that are slow, silent or many
//! take nothing from the node.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Incoming, header, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
};

use super::{
    Local,
    exposition::MEDIA_TYPE,
    metrics,
    routes::{MAX_WAIT_MS, Route, RouteError},
};

/// Connections at the same time: on the socket, and on TCP.
const MAX_READERS: usize = 32;
/// On TCP.
const MAX_SCRAPES: usize = 8;

/// Largest head of a request, in bytes; hyper wants at least 8 KiB.
const MAX_HEAD: usize = 8 << 10;

/// A request's head comes within this time.
const HEAD_LIMIT: Duration = Duration::from_secs(5);

/// A connection ends after this time: the longest wait, and room to spare.
const LIFE: Duration = Duration::from_millis(MAX_WAIT_MS + 30_000);

/// Pause after a connection could not be taken, which is for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a door opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    /// Everything.
    Socket,
    /// Metrics.
    Metrics,
}

/// Serves the socket for ever.
pub(super) async fn serve_socket(local: Local, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(MAX_READERS));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => admit(&local, &places, stream, Door::Socket),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves metrics on TCP for ever.
pub(super) async fn serve_metrics(local: Local, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MAX_SCRAPES));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => admit(&local, &places, stream, Door::Metrics),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Speaks with a reader if there is a place for it; otherwise the connection ends, and the reader
/// comes again.
fn admit<S>(local: &Local, places: &Arc<Semaphore>, stream: S, door: Door)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Ok(place) = Arc::clone(places).try_acquire_owned() else { return };
    let local = local.clone();
    tokio::spawn(async move {
        let service = service_fn(|request: Request<Incoming>| {
            let local = local.clone();
            async move { Ok::<_, Infallible>(answer(&local, &request, door).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_LIMIT)
            .max_buf_size(MAX_HEAD)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        // A reader that hangs up or says nonsense ends its own connection only.
        let _ = tokio::time::timeout(LIFE, connection).await;
        drop(place);
    });
}

async fn answer(local: &Local, request: &Request<Incoming>, door: Door) -> Response<Full<Bytes>> {
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let route = match Route::parse(request.method().as_str(), target) {
        Ok(route) if door == Door::Socket || route == Route::Metrics => route,
        Ok(_) => {
            let path = "only /metrics is served here".to_owned();
            return refusal(&RouteError::Path { path });
        }
        Err(error) => return refusal(&error),
    };
    let logs = &local.shared.config.logs;
    match route {
        Route::Status => json(&local.status().await),
        Route::Metrics => {
            let status = local.status().await;
            let text = metrics::text(&status, &local.counted(&status).await);
            response(StatusCode::OK, MEDIA_TYPE, text.into())
        }
        Route::Logs { filter, wait_ms } => {
            let mut from = filter.from;
            let fits = async {
                loop {
                    let found = logs.book().logs(filter);
                    if !found.lines.is_empty() {
                        return found;
                    }
                    from = from.max(found.next);
                    logs.wait(from).await;
                }
            };
            let found = tokio::time::timeout(Duration::from_millis(wait_ms), fits).await;
            json(&found.unwrap_or_else(|_| logs.book().logs(filter)))
        }
        Route::Events { from, wait_ms } => {
            let mut next = from;
            let fits = async {
                loop {
                    let found = logs.book().events(from);
                    if !found.events.is_empty() {
                        return found;
                    }
                    next = next.max(found.next);
                    logs.wait(next).await;
                }
            };
            let found = tokio::time::timeout(Duration::from_millis(wait_ms), fits).await;
            json(&found.unwrap_or_else(|_| logs.book().events(from)))
        }
    }
}

fn json<T: Serialize>(document: &T) -> Response<Full<Bytes>> {
    let bytes = serde_json::to_vec(document).expect("answers hold nothing that JSON cannot");
    response(StatusCode::OK, "application/json", bytes.into())
}

fn refusal(error: &RouteError) -> Response<Full<Bytes>> {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    response(status, "text/plain; charset=utf-8", format!("{error}\n").into())
}

fn response(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(header::ALLOW, header::HeaderValue::from_static("GET"));
    }
    response
}
