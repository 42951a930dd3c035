//! Moves bytes between streams: sealed at one end of a relayed stream, as they are at the relay.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use quinn::{RecvStream, SendStream, VarInt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf},
    sync::Notify,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{node::Node, stream::OverlayStream};
use crate::tunnel::{CHUNK, TunnelReceiver, TunnelSender};

/// Bytes that wait between the user of a sealed stream and its seal.
const PIPE: usize = 16 * CHUNK;
/// Code with which a broken stream is reset.
pub(super) const BROKEN: VarInt = VarInt::from_u32(1);

/// Starts to seal and open, and returns the plain end.
pub(super) fn sealed_stream(
    node: &Node,
    (sender, receiver): (TunnelSender, TunnelReceiver),
    (send, receive): (SendStream, RecvStream),
) -> OverlayStream {
    let (user, inner) = tokio::io::duplex(PIPE);
    let (from_user, to_user) = tokio::io::split(inner);
    let failure = Arc::new(OnceLock::new());
    let broken = Arc::new(AtomicBool::new(false));
    let is_broken = Arc::clone(&broken);
    let stop = node.stop.clone();
    node.tasks.spawn(async move {
        tokio::select! {
            () = seal_all(sender, from_user, send, &is_broken) => {}
            () = stop.cancelled() => {}
        }
    });
    // A receiving stream that is dropped is stopped, which the sender sees (RFC 9000 §3.5).
    let (stop, unread) = (node.stop.clone(), CancellationToken::new());
    let (failed, reader) = (failure.clone(), unread.clone().drop_guard());
    node.tasks.spawn(async move {
        tokio::select! {
            () = open_all(receiver, receive, to_user, &failed) => {}
            () = unread.cancelled() => {}
            () = stop.cancelled() => {}
        }
    });
    OverlayStream::sealed(user, failure, broken, reader)
}

async fn seal_all(
    mut sender: TunnelSender,
    mut from_user: ReadHalf<DuplexStream>,
    mut send: SendStream,
    broken: &AtomicBool,
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
    if broken.load(Ordering::Acquire) {
        // Without the last piece the other end knows that something is missing.
        return;
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

/// Hands bytes on in both directions until both have ended, or nothing has moved in either for the time
/// `idle`; then both are reset.
pub(super) async fn relay(
    (mut left_send, mut left_receive): (SendStream, RecvStream),
    (mut right_send, mut right_receive): (SendStream, RecvStream),
    idle: Duration,
) {
    let moved = Notify::new();
    let both = async {
        tokio::join!(
            copy(&mut left_receive, &mut right_send, &moved),
            copy(&mut right_receive, &mut left_send, &moved),
        );
    };
    let quiet = async { while timeout(idle, moved.notified()).await.is_ok() {} };
    tokio::select! {
        () = both => return,
        () = quiet => {}
    }
    for mut send in [left_send, right_send] {
        let _ = send.reset(BROKEN);
    }
    for mut receive in [left_receive, right_receive] {
        let _ = receive.stop(BROKEN);
    }
}

async fn copy(receive: &mut RecvStream, send: &mut SendStream, moved: &Notify) {
    loop {
        let stopped = send.stopped();
        tokio::select! {
            chunk = receive.read_chunk(4 * CHUNK, true) => match chunk {
                Ok(Some(chunk)) => {
                    if send.write_chunk(chunk.bytes).await.is_err() {
                        let _ = receive.stop(BROKEN);
                        return;
                    }
                    moved.notify_one();
                }
                Ok(None) => return finish_now(send).await,
                Err(_) => {
                    let _ = send.reset(BROKEN);
                    return;
                }
            },
            _ = stopped => {
                let _ = receive.stop(BROKEN);
                return;
            }
        }
    }
}

/// Ends a stream and waits until the peer has all of it or the connection ends.
pub(super) async fn finish(mut send: SendStream) {
    finish_now(&mut send).await;
}

async fn finish_now(send: &mut SendStream) {
    if send.finish().is_ok() {
        let _ = send.stopped().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ed25519_dalek::SigningKey;
    use quinn::{Connection, Endpoint};

    use super::*;
    use crate::{identity::Identity, shell::tls::Tls};

    fn endpoint(key: u8) -> (Identity, Tls, Endpoint) {
        let identity = Identity::new(SigningKey::from_bytes(&[key; 32]));
        let tls = Tls::new(&identity).expect("a key");
        let address = "127.0.0.1:0".parse().expect("an address");
        let endpoint = crate::shell::node::bind(&tls, address).expect("bound");
        (identity, tls, endpoint)
    }

    /// Connects a node with the relay, and returns both ends.
    async fn connect(key: u8, relay: &(Identity, Tls, Endpoint)) -> (Endpoint, [Connection; 2]) {
        let (_, tls, own) = endpoint(key);
        let config = tls.client(relay.0.id()).expect("a key");
        let address = relay.2.local_addr().expect("bound");
        let near = own.connect_with(config, address, "holdfast").expect("begun");
        let far = async { relay.2.accept().await.expect("an attempt").await };
        let (near, far) = tokio::join!(near, far);
        (own, [near.expect("connected"), far.expect("connected")])
    }

    #[tokio::test]
    async fn a_relayed_stream_in_which_nothing_moves_is_reset() {
        let relay_end = endpoint(181);
        let (_left, [source, from_source]) = connect(182, &relay_end).await;
        let (_right, [target, to_target]) = connect(183, &relay_end).await;
        let (mut send, mut receive) = source.open_bi().await.expect("opened");
        send.write_all(b"first").await.expect("written");
        let left = from_source.accept_bi().await.expect("a stream");
        let right = to_target.open_bi().await.expect("opened");
        let idle = Duration::from_millis(500);
        let relaying = tokio::spawn(relay(left, right, idle));
        let (_answer, mut question) = target.accept_bi().await.expect("a stream");
        let mut first = [0; 5];
        question.read_exact(&mut first).await.expect("handed on");
        assert_eq!(&first, b"first");
        let broken = receive.read_to_end(1).await.expect_err("reset");
        let reset = quinn::ReadError::Reset(BROKEN);
        assert!(matches!(broken, quinn::ReadToEndError::Read(error) if error == reset));
        assert_eq!(question.read_to_end(1).await, Err(quinn::ReadToEndError::Read(reset)));
        relaying.await.expect("it ended");
    }
}
