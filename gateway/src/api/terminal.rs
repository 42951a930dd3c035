//! A machine's console over a WebSocket (RFC 6455), to be read and typed at. Frames are pieces of one stream of
//! bytes in each direction: binary ones both ways, and text, as browsers send it, from the client.

use std::time::Duration;

use axum::{
    body::Bytes,
    extract::ws::{CloseCode, CloseFrame, Message, Utf8Bytes, WebSocket, close_code},
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use overlay::OverlayStream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes moved at a time.
const CHUNK: usize = 32 << 10;

/// How often a client is asked whether it is there, by a ping that it answers (RFC 6455 §5.5.2). A console may
/// be quiet for days.
const PING: Duration = Duration::from_secs(30);

/// A client from which nothing came for so long, not even an answer to three pings, is gone.
const GONE: Duration = Duration::from_secs(90);

/// Longest reason in a close frame, in bytes (RFC 6455 §5.5): 125 less the code's two.
const MAX_REASON: usize = 123;

/// Carries bytes until the console ends, or either side is gone; the client is told which.
pub(super) async fn carry(socket: WebSocket, stream: OverlayStream) {
    let (mut to_client, from_client) = socket.split();
    let (from_node, to_node) = tokio::io::split(stream);
    let ended = {
        let (up, down) = (typed(from_client, to_node), shown(from_node, &mut to_client));
        tokio::pin!(up, down);
        tokio::select! {
            ended = &mut down => ended,
            gone = &mut up => match gone {
                Gone::Client => return,
                // What the node still says tells why.
                Gone::Node => down.await,
            },
        }
    };
    // Whoever is gone need not be told.
    let _ = to_client.send(Message::Close(Some(ended.frame()))).await;
}

/// Which side a direction broke off at.
enum Gone {
    Client,
    Node,
}

async fn typed(mut client: SplitStream<WebSocket>, mut node: impl AsyncWrite + Unpin) -> Gone {
    while let Ok(Some(Ok(message))) = tokio::time::timeout(GONE, client.next()).await {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => text.into(),
            Message::Ping(_) | Message::Pong(_) => continue,
            Message::Close(_) => break,
        };
        if node.write_all(&bytes).await.is_err() || node.flush().await.is_err() {
            return Gone::Node;
        }
    }
    Gone::Client
}

async fn shown(
    mut node: impl AsyncRead + Unpin,
    client: &mut SplitSink<WebSocket, Message>,
) -> Ended {
    let mut chunk = vec![0; CHUNK];
    let mut ping = tokio::time::interval(PING);
    loop {
        let message = tokio::select! {
            read = node.read(&mut chunk) => match read {
                Ok(0) => return Ended::Over,
                Ok(length) => Message::Binary(Bytes::copy_from_slice(&chunk[..length])),
                Err(error) => return Ended::Lost(error),
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if client.send(message).await.is_err() {
            return Ended::Over;
        }
    }
}

/// How a console came to its end.
enum Ended {
    /// The node says that there is no more.
    Over,
    /// The node is gone.
    Lost(std::io::Error),
}

impl Ended {
    /// Says so to the client, by a code of RFC 6455 §7.4.1.
    fn frame(&self) -> CloseFrame {
        match self {
            Self::Over => farewell(close_code::NORMAL, "the machine runs no more".to_owned()),
            Self::Lost(error) => lost(error),
        }
    }
}

/// Says that the node is gone, or the guest's connection to it.
pub(super) fn lost(error: &std::io::Error) -> CloseFrame {
    farewell(close_code::ERROR, format!("the machine's node is gone or broke it off: {error}"))
}

/// Says that it ends and why, as far as there is room for that.
pub(super) fn farewell(code: CloseCode, mut reason: String) -> CloseFrame {
    reason.truncate(reason.floor_char_boundary(MAX_REASON));
    CloseFrame { code, reason: Utf8Bytes::from(reason) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_fits_its_frame() {
        let long = Ended::Lost(std::io::Error::other("ü".repeat(200)));
        let reason = long.frame().reason;
        assert!(reason.len() <= MAX_REASON, "{}", reason.len());
        assert!(reason.ends_with('ü'), "{reason}");
    }
}
