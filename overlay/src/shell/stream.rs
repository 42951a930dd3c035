//! The byte stream between two nodes, whatever path it takes.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio_util::sync::DropGuard;

use super::pump::BROKEN;

/// A bidirectional byte stream to another node. Shutting it down ends the sending half only;
/// dropping it ends both. Writing waits when the other end does not read.
#[derive(Debug)]
pub struct OverlayStream {
    path: StreamPath,
}

#[derive(Debug)]
enum StreamPath {
    /// Over a connection to the other node itself, which authenticates and encrypts.
    Direct { send: quinn::SendStream, receive: quinn::RecvStream },
    /// Through a relay: the far end of this pipe is a task that seals and opens.
    /// It says why it failed before the pipe ends. The guard tells it when nobody reads any more, which
    /// the pipe does not.
    Sealed {
        pipe: DuplexStream,
        failure: Arc<OnceLock<String>>,
        broken: Arc<AtomicBool>,
        _reader: DropGuard,
    },
}

impl OverlayStream {
    pub(super) fn direct(send: quinn::SendStream, receive: quinn::RecvStream) -> Self {
        Self { path: StreamPath::Direct { send, receive } }
    }

    pub(super) fn sealed(
        pipe: DuplexStream,
        failure: Arc<OnceLock<String>>,
        broken: Arc<AtomicBool>,
        reader: DropGuard,
    ) -> Self {
        Self { path: StreamPath::Sealed { pipe, failure, broken, _reader: reader } }
    }

    /// Drops the stream so that the other node sees a failure where it would see an end. What is under way may be
    /// lost.
    pub fn abort(self) {
        match self.path {
            StreamPath::Direct { mut send, .. } => {
                // One that the other node has stopped, or that is ended, needs no reset.
                let _ = send.reset(BROKEN);
            }
            // Set before the pipe ends.
            StreamPath::Sealed { broken, .. } => broken.store(true, Ordering::Release),
        }
    }

    /// Says whether the bytes pass through another node, which cannot read them.
    pub fn is_relayed(&self) -> bool {
        matches!(self.path, StreamPath::Sealed { .. })
    }
}

impl AsyncRead for OverlayStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.path {
            StreamPath::Direct { receive, .. } => {
                AsyncRead::poll_read(Pin::new(receive), cx, buffer)
            }
            StreamPath::Sealed { pipe, failure, .. } => {
                let before = buffer.filled().len();
                ready!(Pin::new(pipe).poll_read(cx, buffer))?;
                match failure.get() {
                    Some(reason) if buffer.filled().len() == before && buffer.remaining() > 0 => {
                        let kind = io::ErrorKind::ConnectionReset;
                        Poll::Ready(Err(io::Error::new(kind, reason.as_str())))
                    }
                    Some(_) | None => Poll::Ready(Ok(())),
                }
            }
        }
    }
}

impl AsyncWrite for OverlayStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.path {
            StreamPath::Direct { send, .. } => AsyncWrite::poll_write(Pin::new(send), cx, bytes),
            StreamPath::Sealed { pipe, .. } => Pin::new(pipe).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.path {
            StreamPath::Direct { send, .. } => AsyncWrite::poll_flush(Pin::new(send), cx),
            StreamPath::Sealed { pipe, .. } => Pin::new(pipe).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.path {
            StreamPath::Direct { send, .. } => AsyncWrite::poll_shutdown(Pin::new(send), cx),
            StreamPath::Sealed { pipe, .. } => Pin::new(pipe).poll_shutdown(cx),
        }
    }
}
