//! Documents at the start of an overlay stream: u32 length, big-endian, then JSON.

use std::io;

use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use types::forward::MAX_BODY;

/// Largest document, in bytes: a forwarded request with its body in base64.
pub const MAX_FRAME: usize = 2 * MAX_BODY;

/// Writes one document.
pub async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    document: &T,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(document)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&bytes).await?;
    stream.flush().await
}

/// Reads one document.
pub async fn read<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await?;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_FRAME {
        let text = format!("a document of {length} bytes; at most {MAX_FRAME} are read");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn documents_round_trip_and_long_ones_are_refused() {
        let (mut near, mut far) = tokio::io::duplex(1024);
        write(&mut near, &vec![1, 2, 3]).await.expect("written");
        assert_eq!(read::<Vec<u8>>(&mut far).await.expect("read"), [1, 2, 3]);
        near.write_all(&u32::MAX.to_be_bytes()).await.expect("written");
        let refusal = read::<Vec<u8>>(&mut far).await.expect_err("too long");
        assert_eq!(refusal.kind(), io::ErrorKind::InvalidData);
    }
}
