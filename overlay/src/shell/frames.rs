//! Single frames on streams, with deadlines.

use std::time::Duration;

use quinn::{RecvStream, SendStream};
use tokio::time::timeout;

use crate::wire::{self, WireError};

/// A peer that opened a stream says what for within this time.
pub(super) const OPENING: Duration = Duration::from_secs(10);

/// Why a frame did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the stream ended or broke")]
    Ended,
    #[error("nothing arrived in time")]
    Late,
}

/// Reads one frame's value.
pub(super) async fn read(
    receive: &mut RecvStream,
    limit: usize,
    within: Duration,
) -> Result<Vec<u8>, FrameError> {
    let read = async {
        let mut prefix = [0; 4];
        receive.read_exact(&mut prefix).await.map_err(|_| FrameError::Ended)?;
        let length = wire::frame_length(prefix, limit)?;
        // Grows with what arrives: the length alone makes nobody reserve memory.
        let mut value = Vec::new();
        while value.len() < length {
            let chunk = receive
                .read_chunk(length - value.len(), true)
                .await
                .map_err(|_| FrameError::Ended)?
                .ok_or(FrameError::Ended)?;
            value.extend_from_slice(&chunk.bytes);
        }
        Ok(value)
    };
    timeout(within, read).await.map_err(|_| FrameError::Late)?
}

/// Writes a frame.
pub(super) async fn write<T: minicbor::Encode<()>>(
    send: &mut SendStream,
    value: &T,
    within: Duration,
) -> Result<(), FrameError> {
    let frame = wire::to_frame(value);
    match timeout(within, send.write_all(&frame)).await {
        Err(_) => Err(FrameError::Late),
        Ok(Err(_)) => Err(FrameError::Ended),
        Ok(Ok(())) => Ok(()),
    }
}
