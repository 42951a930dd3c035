//! Long-lived requests: a console that is followed, and TCP to a guest.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use lease::problem::Kind;
use overlay::InboundStream;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use types::{
    forward::{Problem, StreamAnswer, StreamHeader},
    ids::MachineId,
};
use update::shell::Span;

use super::{
    Control, answers,
    routes::{Follow, Route},
};
use crate::{machines::vmm, tasks::frames};

/// The opener must say what it wants within this time.
const HEADER_LIMIT: Duration = Duration::from_secs(10);

/// A guest on this very node answers a connection within this time or not at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Longest time in which the reader of a dump takes nothing.
const DUMP_STALL: Duration = Duration::from_secs(30);

/// Longest wait for console output before asking again, in milliseconds.
const CONSOLE_WAIT_MS: u32 = 20_000;

/// Bytes of one direction of a tunnel that wait for the slower side.
const TUNNEL_BUFFER: usize = 64 << 10;

impl Control {
    /// Serves one stream until it ends.
    pub async fn serve_stream(self, inbound: InboundStream) {
        let mut stream = inbound.stream;
        let header = tokio::time::timeout(HEADER_LIMIT, frames::read(&mut stream)).await;
        let target = match header {
            Ok(Ok(StreamHeader::Request(request))) => self.stream_target(&request),
            Ok(Ok(StreamHeader::Release { path, from, to })) => {
                return self.parts.shelf.serve(stream, &path, Span { from, to }).await;
            }
            Ok(Ok(StreamHeader::Content { .. })) => {
                Err(Kind::NotFound.because("nodes serve no content"))
            }
            Ok(Err(error)) => Err(Kind::Malformed.because(format!("header: {error}"))),
            Err(_) => return,
        };
        let (machine, route, address) = match target {
            Ok((route, view)) => (view.record.lease.id, route, view.address),
            Err(refusal) => return refuse(&mut stream, refusal).await,
        };
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
                self.follow_console(stream, machine, from, follow).await
            }
            (Route::Dump { .. }, _) => dump(stream, machine).await,
            (_, _) => {
                refuse(&mut stream, Kind::Unprocessable.because("this is no stream")).await;
                Ok(())
            }
        };
    }

    async fn follow_console(
        &self,
        mut stream: overlay::OverlayStream,
        machine: MachineId,
        mut from: u64,
        follow: Follow,
    ) -> std::io::Result<()> {
        frames::write(&mut stream, &StreamAnswer::Open { length: None }).await?;
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut input = [0; 1024];
        loop {
            let wait = if follow == Follow::Yes { CONSOLE_WAIT_MS } else { 0 };
            tokio::select! {
                piece = vmm::console(machine, from, wait) => {
                    let Ok(piece) = piece else {
                        // A machine that restarts has a new process in a moment.
                        if follow == Follow::No || !self.comes_back(machine).await {
                            return writer.shutdown().await;
                        }
                        from = 0;
                        continue;
                    };
                    writer.write_all(&piece.bytes).await?;
                    writer.flush().await?;
                    from = piece.end;
                    if follow == Follow::No {
                        return writer.shutdown().await;
                    }
                }
                // What the renter types goes to the guest; the end of it ends the stream.
                count = reader.read(&mut input) => {
                    let count = count?;
                    if count == 0 {
                        return Ok(());
                    }
                    // A guest that is just gone reads nothing; the next piece says so.
                    let _ = vmm::type_in(machine, Bytes::copy_from_slice(&input[..count])).await;
                }
            }
        }
    }

    async fn comes_back(&self, machine: MachineId) -> bool {
        use crate::machines::keeper::State;
        let mut snapshot = self.parts.machines.snapshot();
        let alive = snapshot.wait_for(|snapshot| {
            let view = snapshot.machines.iter().find(|view| view.record.lease.id == machine);
            view.is_none_or(|view| view.state != State::Starting && view.state != State::Stopping)
        });
        let Ok(Ok(snapshot)) = tokio::time::timeout(Duration::from_secs(60), alive).await else {
            return false;
        };
        let view = snapshot.machines.iter().find(|view| view.record.lease.id == machine);
        view.is_some_and(|view| view.state == State::Running)
    }
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
    tokio::io::copy_bidirectional_with_sizes(
        &mut stream,
        &mut connection,
        TUNNEL_BUFFER,
        TUNNEL_BUFFER,
    )
    .await
    .map(|_| ())
}

/// Reads a guest's memory out to whoever rents it; the guest waits meanwhile.
async fn dump(mut stream: overlay::OverlayStream, machine: MachineId) -> std::io::Result<()> {
    let mut dump = match vmm::dump(machine).await {
        Ok(dump) => dump,
        Err(error) => {
            refuse(&mut stream, answers::not_running(&error)).await;
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
    // Whoever hung up does not want to know.
    let _ = frames::write(stream, &StreamAnswer::Refused(refusal)).await;
    let _ = stream.shutdown().await;
}
