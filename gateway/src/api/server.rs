//! HTTP/1.1 over TCP (RFC 9112): who may connect, how long each part may take, how it all ends.
//!
//! A head, a body and an answer each have a time limit, and connections are counted for each
//! source and in all, so that a client that is slow, silent or many takes nothing from others.
//! Bytes that are no HTTP get hyper's bare 400 instead of a problem document.

use std::{
    convert::Infallible,
    io::{self, Write},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::{Timestamp, fmt::rfc2822::DateTimePrinter};
use lease::problem::Kind;
use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use types::forward::Problem;

use crate::{
    config::HttpLimits,
    limits::{Connections, Slot, SlotError, Source},
    service::Gateway,
};

/// Largest head of a request, in bytes: a target of 2 KiB, five signed fields of 1 KiB, and what
/// browsers and proxies add.
const MAX_HEAD: usize = 64 << 10;

/// Pause after a connection could not be taken, which is for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection on which nothing moves is tried after this time, and as often.
const QUIET: Duration = Duration::from_secs(60);

/// How long running requests may go on after the order to stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(10);

/// Serves until `stop` ends, then lets running requests finish for a while.
pub async fn serve(gateway: Arc<Gateway>, listener: TcpListener, stop: impl Future<Output = ()>) {
    let limits = gateway.http.clone();
    let connections = Connections::new(limits.connections, limits.connections_per_source);
    let (stopping, stopped) = watch::channel(());
    let mut open = JoinSet::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => match connections.admit(source(&limits, client)) {
                    Ok(slot) => {
                        prepare(&stream, &limits);
                        let stream = Counted { stream, _slot: slot };
                        open.spawn(speak(Arc::clone(&gateway), stream, client, stopped.clone()));
                    }
                    Err(error) => turn_away(stream, client, error),
                },
                Err(error) => {
                    tracing::warn!(event = "accept-failed", %error);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = open.join_next() => {}
        }
    }
    drop((listener, stopping));
    let all_ended = async { while open.join_next().await.is_some() {} };
    // What still runs then is cut off when the set is dropped.
    let _ = tokio::time::timeout(DRAIN_DEADLINE, all_ended).await;
}

/// Returns who a connection counts for; nobody where a proxy brings it.
fn source(limits: &HttpLimits, client: SocketAddr) -> Option<Source> {
    let is_proxy = limits.proxies.iter().any(|prefix| prefix.contains(client.ip()));
    (!is_proxy).then(|| client.ip().into())
}

/// Tells the kernel how to treat a connection; one that is gone already will fail by itself.
fn prepare(stream: &TcpStream, limits: &HttpLimits) {
    let _ = stream.set_nodelay(true);
    // RFC 5482: also ends a connection whose other end acknowledges but reads nothing.
    let unread_ms = u32::try_from(limits.unread_ms).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_user_timeout(stream, unread_ms);
    // A console may be quiet for days; a client that is gone without a word is to be noticed all the same.
    let _ = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, QUIET))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, QUIET));
}

/// Answers the requests of one connection.
async fn speak(
    gateway: Arc<Gateway>,
    stream: Counted,
    client: SocketAddr,
    mut stopped: watch::Receiver<()>,
) {
    let head = Duration::from_millis(gateway.http.head_ms);
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let gateway = Arc::clone(&gateway);
        async move {
            let answer = super::answer(&gateway, client, request.map(Body::new)).await;
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        // An error means that the sender is gone: the order to stop was given.
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(event = "connection-broke", %client, error = lease::problem::chain(&error));
    }
}

/// Answers a connection that is one too many, without waiting for its request.
fn turn_away(stream: TcpStream, client: SocketAddr, error: SlotError) {
    let kind = match error {
        SlotError::Source { .. } => Kind::TooManyRequests,
        SlotError::All { .. } => Kind::Unavailable,
    };
    let problem = kind.caused_by(&error);
    tracing::info!(event = "connection-refused", %client, reason = problem.detail);
    let body = serde_json::to_string(&problem).unwrap_or_default();
    let text = format!(
        "HTTP/1.1 {} {}\r\n{}content-type: {}\r\ncontent-length: {}\r\nretry-after: 1\r\n\
         connection: close\r\n\r\n{body}",
        problem.status,
        problem.title,
        date(Timestamp::now()),
        Problem::MEDIA_TYPE,
        body.len(),
    );
    // The empty buffer of a new socket takes it at once; a client that is gone needs no answer.
    let _ = stream.into_std().and_then(|mut stream| stream.write_all(text.as_bytes()));
}

/// Returns field `date` as a line (RFC 9110 §6.6.1), which hyper writes into all other answers. Nothing for a time that
/// has no such form, by a clock that is wrong.
fn date(now: Timestamp) -> String {
    let text = DateTimePrinter::new().timestamp_to_rfc9110_string(&now);
    text.map(|text| format!("date: {text}\r\n")).unwrap_or_default()
}

/// A connection with its place in the count, which a WebSocket takes along.
struct Counted {
    stream: TcpStream,
    _slot: Slot,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_has_the_form_that_is_to_be_sent() {
        // The example of RFC 9110 §5.6.7.
        let now = Timestamp::from_second(784_111_777).expect("a time");
        assert_eq!(date(now), "date: Sun, 06 Nov 1994 08:49:37 GMT\r\n");
    }
}
