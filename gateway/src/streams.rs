//! Streams through the overlay: a length and a JSON head, the other end's answer in the same
//! form, then bytes (`types::forward`).

use std::time::Duration;

use overlay::{Overlay, OverlayStream, RequestError};
use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use types::{
    forward::{MAX_BODY, Problem, StreamAnswer, StreamHeader},
    ids::NodeId,
};

/// Longest head: a forwarded request in base64.
const MAX_HEAD: usize = 2 * MAX_BODY;

/// Bytes copied at a time.
const COPY_CHUNK: usize = 256 << 10;

/// Attempts to open a stream at a node that is busy, which took nothing then.
const ATTEMPTS: u32 = 3;

/// Pause between two attempts: the node reads the heads of other streams meanwhile.
const PAUSE: Duration = Duration::from_millis(300);

/// Why a stream was not opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum StreamError {
    #[error("no stream to the node")]
    Overlay { source: RequestError },
    #[error("the stream broke off")]
    PeerBroke { source: std::io::Error },
    #[error("the head of the stream has {length} bytes; at most {MAX_HEAD} are read")]
    PeerHead { length: usize },
    #[error("the head of the stream is not what was expected")]
    PeerForm { source: serde_json::Error },
    #[error("the other end did not answer within {deadline_ms} ms")]
    PeerSilent { deadline_ms: u128 },
}

/// A stream that the other end agreed to.
pub struct Opened {
    /// What follows.
    pub stream: OverlayStream,
    /// Bytes that follow, when the other end knows.
    pub length: Option<u64>,
}

/// Opens a stream to `node`; `Ok(Err(…))` is the node's own refusal.
pub async fn open(
    overlay: &Overlay,
    node: NodeId,
    header: &StreamHeader,
    deadline: Duration,
) -> Result<Result<Opened, Problem>, StreamError> {
    let ask = async {
        let mut stream = open_at(overlay, node).await?;
        send(&mut stream, header).await?;
        match receive(&mut stream).await? {
            StreamAnswer::Open { length } => Ok(Ok(Opened { stream, length })),
            StreamAnswer::Refused(problem) => Ok(Err(problem)),
        }
    };
    within(deadline, ask).await
}

/// Opens a stream of which nothing is said yet. A node takes a few of them at a time.
async fn open_at(overlay: &Overlay, node: NodeId) -> Result<OverlayStream, StreamError> {
    let mut attempt = 1;
    loop {
        match overlay.open_stream(node).await {
            Ok(stream) => return Ok(stream),
            Err(RequestError::PeerBusy { .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Err(source) => return Err(StreamError::Overlay { source }),
        }
    }
}

/// Reads the head of a stream that another node opened.
pub async fn accept<S: AsyncRead + Unpin>(
    stream: &mut S,
    deadline: Duration,
) -> Result<StreamHeader, StreamError> {
    within(deadline, receive(stream)).await
}

/// Copies all of `from`, then ends `to`. The other end must take each next piece within `stall`.
pub async fn copy<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    from: &mut R,
    to: &mut W,
    stall: Duration,
) -> Result<(), StreamError> {
    let broke = |source| StreamError::PeerBroke { source };
    let mut chunk = vec![0; COPY_CHUNK];
    loop {
        let length = from.read(&mut chunk).await.map_err(broke)?;
        if length == 0 {
            return within(stall, async { to.shutdown().await.map_err(broke) }).await;
        }
        within(stall, async { to.write_all(&chunk[..length]).await.map_err(broke) }).await?;
    }
}

/// Ends what takes longer than the other end may.
pub async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, StreamError>>,
) -> Result<T, StreamError> {
    let silent = StreamError::PeerSilent { deadline_ms: deadline.as_millis() };
    tokio::time::timeout(deadline, work).await.unwrap_or(Err(silent))
}

/// Sends a head or an answer.
pub async fn send<S: AsyncWrite + Unpin, T: Serialize>(
    stream: &mut S,
    message: &T,
) -> Result<(), StreamError> {
    let json = serde_json::to_vec(message).map_err(|source| StreamError::PeerForm { source })?;
    let length =
        u32::try_from(json.len()).map_err(|_| StreamError::PeerHead { length: json.len() })?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(&json);
    stream.write_all(&bytes).await.map_err(|source| StreamError::PeerBroke { source })?;
    stream.flush().await.map_err(|source| StreamError::PeerBroke { source })
}

async fn receive<S: AsyncRead + Unpin, T: DeserializeOwned>(
    stream: &mut S,
) -> Result<T, StreamError> {
    let broke = |source| StreamError::PeerBroke { source };
    let length = usize::try_from(stream.read_u32().await.map_err(broke)?).unwrap_or(usize::MAX);
    if length > MAX_HEAD {
        return Err(StreamError::PeerHead { length });
    }
    let mut json = vec![0; length];
    stream.read_exact(&mut json).await.map_err(broke)?;
    serde_json::from_slice(&json).map_err(|source| StreamError::PeerForm { source })
}
