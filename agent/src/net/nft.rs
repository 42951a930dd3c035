//! Commits packet filter batches to the kernel.

use std::{io, time::Duration};

use bytes::BytesMut;
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_netfilter::NetfilterMessage;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER,
};

use super::ruleset::encode::{Batch, forget_flows};

/// The kernel answers at once; when it does not, something is badly wrong.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Room for one error message, which repeats the offending request.
const ANSWER_SIZE: usize = 64 << 10;

/// Why the packet filter was not changed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum NftError {
    #[error("cannot talk to the kernel's packet filter")]
    Socket(#[source] io::Error),
    #[error("the kernel refuses message {sequence} of a packet filter change")]
    Refused { sequence: u32, source: io::Error },
    #[error("the kernel did not answer a packet filter change within {ANSWER_TIMEOUT:?}")]
    Silent,
}

impl NftError {
    /// Returns whether what was to be deleted is not there.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Commits a batch: all of it, or nothing and an error.
pub async fn commit(batch: &Batch) -> Result<(), NftError> {
    let (bytes, last) = batch.to_bytes();
    exchange(&bytes, last).await
}

/// Ends the flows that a guest opened: the one whose sources have these four bytes.
pub async fn forget(guest: [u8; 4]) -> Result<(), NftError> {
    match exchange(&forget_flows(guest), 1).await {
        Err(error) if error.is_absent() => Ok(()),
        result => result,
    }
}

async fn exchange(bytes: &[u8], last: u32) -> Result<(), NftError> {
    let mut socket = TokioSocket::new(NETLINK_NETFILTER).map_err(NftError::Socket)?;
    socket.socket_mut().bind_auto().map_err(NftError::Socket)?;
    socket.send_to(bytes, &SocketAddr::new(0, 0)).await.map_err(NftError::Socket)?;
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, answer(&mut socket, last)).await;
    answer.map_err(|_| NftError::Silent)?
}

/// Waits for the acknowledgement of message `last`, or for the first refusal.
async fn answer(socket: &mut TokioSocket, last: u32) -> Result<(), NftError> {
    loop {
        let mut buffer = BytesMut::with_capacity(ANSWER_SIZE);
        socket.recv(&mut buffer).await.map_err(NftError::Socket)?;
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            let invalid = |_| NftError::Socket(io::ErrorKind::InvalidData.into());
            let message = NetlinkMessage::<NetfilterMessage>::deserialize(rest).map_err(invalid)?;
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            if let NetlinkPayload::Error(error) = &message.payload {
                let sequence = message.header.sequence_number;
                if error.code.is_some() {
                    return Err(NftError::Refused { sequence, source: error.to_io() });
                }
                if sequence == last {
                    return Ok(());
                }
            }
            // Messages are padded to four bytes.
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        }
    }
}
