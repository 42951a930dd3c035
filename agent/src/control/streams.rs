//! Long-lived requests: `console`s that are followed or typed at, TCP to a guest, and its memory.

use std::{net::SocketAddr, time::Duration};

use lease::problem::Kind;
use overlay::{InboundStream, Place, Places};
use tokio::{
    io::{AsyncRead, AsyncWriteExt},
    net::TcpStream,
};
use types::{
    forward::{Problem, StreamAnswer, StreamHeader},
    ids::{MachineId, PublicKey},
};
use update::shell::Span;

use super::{
    Control, answers,
    console::Start,
    routes::{Follow, Route},
};
use crate::{machines::vmm, tasks::frames};

/// The opener must say what it wants within this time, and take a refusal. Gateways and nodes say it at
/// once; until then a stream counts among the few of its opener that are unread.
const HEADER_LIMIT: Duration = Duration::from_secs(5);

/// Consoles, tunnels and dumps at a time: a sixteenth of them, 32, may be one renter's, whichever
/// gateways they come through: a gateway carries many renters' streams. A tunnel has two buffers of
/// [`TUNNEL_BUFFER`], 64 MiB in all, a quarter of what is kept for the node.
pub(super) const RENTERS_STREAMS: usize = 512;

/// A guest on this very node answers a connection within this time or not at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Longest time in which the reader of a dump takes nothing.
const DUMP_STALL: Duration = Duration::from_secs(30);

/// Bytes of one direction of a tunnel that wait for the slower side.
const TUNNEL_BUFFER: usize = 64 << 10;

impl Control {
    /// Serves one stream until it ends. Until it is known which renter it is for, and while a refusal is
    /// sent, it keeps the place that it has among the unread ones of its opener.
    pub async fn serve_stream(self, inbound: InboundStream) {
        let InboundStream { from: _, mut stream, place } = inbound;
        let target = match header(&mut stream).await {
            None => return,
            Some(Ok(StreamHeader::Request(request))) => self.stream_target(&request),
            Some(Ok(StreamHeader::Release { path, from, to })) => {
                // As many as are served have places of their own; the others are refused.
                return self.parts.shelf.serve(stream, &path, Span { from, to }).await;
            }
            Some(Ok(StreamHeader::Content { .. })) => {
                Err(Kind::NotFound.because("nodes serve no content"))
            }
            Some(Err(refusal)) => Err(refusal),
        };
        let counted = target.and_then(|(route, view)| {
            let held = renters_place(&self.streams, view.record.lease.renter)?;
            Ok((route, view, held))
        });
        let (machine, route, address, _held) = match counted {
            Ok((route, view, held)) => (view.record.lease.id, route, view.address, held),
            Err(refusal) => return refuse(&mut stream, refusal).await,
        };
        drop(place);
        // The other end may hang up at any time; that ends the stream and is no error of ours.
        let _ = match (route, address) {
            (Route::Tunnel { port, .. }, Some(address)) => {
                tunnel(stream, SocketAddr::from((address, port))).await
            }
            (Route::Tunnel { .. }, None) => {
                let detail = format!(
                    "machine {machine} has no address yet; one that is bridged is given it by the DHCP server of its network, when it asks; try again"
                );
                refuse(&mut stream, Kind::Conflict.because(detail)).await;
                Ok(())
            }
            (Route::ReadConsole { from, follow, .. }, _) => {
                self.follow_console(stream, machine, (Start::At(from), follow)).await
            }
            (Route::Terminal { from, .. }, _) => {
                let start = from.map_or(Start::Now, Start::At);
                self.follow_console(stream, machine, (start, Follow::Yes)).await
            }
            (Route::Dump { .. }, _) => dump(stream, machine).await,
            (_, _) => {
                refuse(&mut stream, Kind::Unprocessable.because("this is no stream")).await;
                Ok(())
            }
        };
    }
}

/// Reads what a stream is for; `None` when its opener does not say so in time.
async fn header(stream: &mut (impl AsyncRead + Unpin)) -> Option<Result<StreamHeader, Problem>> {
    let read = tokio::time::timeout(HEADER_LIMIT, frames::read(stream)).await.ok()?;
    Some(read.map_err(|error| Kind::Malformed.because(format!("header: {error}"))))
}

/// Takes a place for a stream of a renter who may have one.
fn renters_place(
    places: &Places<PublicKey>,
    renter: PublicKey,
) -> Result<Place<PublicKey>, Problem> {
    places.take(renter).map_err(|error| {
        Kind::TooManyRequests.because(format!(
            "no console, tunnel or dump of renter {renter} is opened on this node now; close one: {error}"
        ))
    })
}

async fn tunnel(mut stream: overlay::OverlayStream, guest: SocketAddr) -> std::io::Result<()> {
    let mut connection = match tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(guest)).await
    {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => {
            refuse(&mut stream, answers::no_connection(guest.port(), &error)).await;
            return Ok(());
        }
        Err(_) => {
            let late = std::io::ErrorKind::TimedOut.into();
            refuse(&mut stream, answers::no_connection(guest.port(), &late)).await;
            return Ok(());
        }
    };
    connection.set_nodelay(true)?;
    frames::write(&mut stream, &StreamAnswer::Open { length: None }).await?;
    let copied = tokio::io::copy_bidirectional_with_sizes(
        &mut stream,
        &mut connection,
        TUNNEL_BUFFER,
        TUNNEL_BUFFER,
    )
    .await;
    if copied.is_err() {
        // Dropped, it would end, as if the guest had closed the connection.
        stream.abort();
    }
    copied.map(|_| ())
}

/// Reads a guest's memory out to whoever rents it; the guest waits meanwhile.
async fn dump(mut stream: overlay::OverlayStream, machine: MachineId) -> std::io::Result<()> {
    let mut dump = match vmm::dump(machine).await {
        Ok(dump) => dump,
        Err(error) => {
            refuse(&mut stream, answers::of_process(&error)).await;
            return Ok(());
        }
    };
    frames::write(&mut stream, &StreamAnswer::Open { length: Some(dump.length) }).await?;
    while let Some(piece) = dump.next().await.map_err(std::io::Error::other)? {
        // A reader that stands still would keep the guest waiting.
        let written = tokio::time::timeout(DUMP_STALL, stream.write_all(&piece)).await;
        written.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    }
    stream.shutdown().await
}

async fn refuse(stream: &mut overlay::OverlayStream, refusal: Problem) {
    let refuse = async {
        frames::write(stream, &StreamAnswer::Refused(refusal)).await?;
        stream.shutdown().await
    };
    // Whoever hung up or takes nothing does not want to know.
    let _ = tokio::time::timeout(HEADER_LIMIT, refuse).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: PublicKey = PublicKey::from_bytes([1; 32]);
    const SECOND: PublicKey = PublicKey::from_bytes([2; 32]);

    #[test]
    fn a_renter_with_all_its_streams_leaves_room_for_its_neighbours() {
        let places = Places::new(RENTERS_STREAMS);
        let held: Vec<_> = std::iter::from_fn(|| renters_place(&places, FIRST).ok())
            .take(RENTERS_STREAMS)
            .collect();
        assert_eq!(held.len(), RENTERS_STREAMS / 16);
        let refusal = renters_place(&places, FIRST).expect_err("it has its share");
        assert_eq!(refusal.status, 429);
        assert!(refusal.detail.contains("it holds 32 of 512 places"), "{}", refusal.detail);
        assert!(renters_place(&places, SECOND).is_ok());
        drop(held);
        assert!(renters_place(&places, FIRST).is_ok());
    }

    #[tokio::test]
    async fn what_is_no_header_is_said_to_be_none() {
        let (mut near, mut far) = tokio::io::duplex(64);
        frames::write(&mut near, &"console").await.expect("written");
        let refusal = header(&mut far).await.expect("in time").expect_err("no header");
        assert_eq!(refusal.status, 400);
    }
}
