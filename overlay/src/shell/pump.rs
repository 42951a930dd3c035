//! Moves bytes between streams: sealed at one end of a relayed stream, as they are at the relay.

use std::sync::{Arc, OnceLock};

use quinn::{RecvStream, SendStream, VarInt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};

use super::{node::Node, stream::OverlayStream};
use crate::tunnel::{CHUNK, TunnelReceiver, TunnelSender};

/// Bytes that wait between the user of a sealed stream and its seal.
const PIPE: usize = 16 * CHUNK;
/// Code with which a broken stream is reset.
const BROKEN: VarInt = VarInt::from_u32(1);

/// Starts to seal and open, and returns the plain end.
pub(super) fn sealed_stream(
    node: &Node,
    (sender, receiver): (TunnelSender, TunnelReceiver),
    (send, receive): (SendStream, RecvStream),
) -> OverlayStream {
    let (user, inner) = tokio::io::duplex(PIPE);
    let (from_user, to_user) = tokio::io::split(inner);
    let failure = Arc::new(OnceLock::new());
    let stop = node.stop.clone();
    node.tasks.spawn(async move {
        tokio::select! {
            () = seal_all(sender, from_user, send) => {}
            () = stop.cancelled() => {}
        }
    });
    let stop = node.stop.clone();
    let failed = failure.clone();
    node.tasks.spawn(async move {
        tokio::select! {
            () = open_all(receiver, receive, to_user, &failed) => {}
            () = stop.cancelled() => {}
        }
    });
    OverlayStream::sealed(user, failure)
}

async fn seal_all(
    mut sender: TunnelSender,
    mut from_user: ReadHalf<DuplexStream>,
    mut send: SendStream,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = from_user.read(&mut buffer).await.unwrap_or(0);
        if count == 0 {
            break;
        }
        let Ok(sealed) = sender.handle_bytes(&buffer[..count]) else { return };
        if send.write_all(&sealed).await.is_err() {
            return;
        }
    }
    if let Ok(last) = sender.handle_end()
        && send.write_all(&last).await.is_ok()
    {
        finish(send).await;
    }
}

async fn open_all(
    mut receiver: TunnelReceiver,
    mut receive: RecvStream,
    mut to_user: WriteHalf<DuplexStream>,
    failure: &OnceLock<String>,
) {
    while !receiver.is_ended() {
        let opened = match receive.read_chunk(4 * CHUNK, true).await {
            Ok(Some(chunk)) => receiver.handle_bytes(&chunk.bytes).map_err(|e| e.to_string()),
            Ok(None) => receiver.handle_end().map(|()| Vec::new()).map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match opened {
            Ok(plain) => {
                if to_user.write_all(&plain).await.is_err() {
                    let _ = receive.stop(BROKEN);
                    return;
                }
            }
            Err(reason) => {
                // Set before the pipe ends, so that the user sees a failure and not an end.
                let _ = failure.set(reason);
                let _ = receive.stop(BROKEN);
                break;
            }
        }
    }
    let _ = to_user.shutdown().await;
}

/// Hands bytes on in both directions until both have ended.
pub(super) async fn relay(
    (left_send, left_receive): (SendStream, RecvStream),
    (right_send, right_receive): (SendStream, RecvStream),
) {
    tokio::join!(copy(left_receive, right_send), copy(right_receive, left_send));
}

async fn copy(mut receive: RecvStream, mut send: SendStream) {
    loop {
        tokio::select! {
            chunk = receive.read_chunk(4 * CHUNK, true) => match chunk {
                Ok(Some(chunk)) => {
                    if send.write_chunk(chunk.bytes).await.is_err() {
                        let _ = receive.stop(BROKEN);
                        return;
                    }
                }
                Ok(None) => return finish(send).await,
                Err(_) => {
                    let _ = send.reset(BROKEN);
                    return;
                }
            },
            _ = send.stopped() => {
                let _ = receive.stop(BROKEN);
                return;
            }
        }
    }
}

/// Ends a stream and waits until the peer has all of it or the connection ends.
pub(super) async fn finish(mut send: SendStream) {
    if send.finish().is_ok() {
        let _ = send.stopped().await;
    }
}
