//! The control socket: HTTP/1.1 with JSON over a unix stream socket, one request per connection.
//! `openapi.json` describes the requests; `routes` lists what answers them: `watch` tells, `guest`
//! acts, `devices` attaches and detaches, `body` reads documents; `http` parses, by `target` and `chunks`;
//! `waits` bounds what waits for something new, `timed` how long a client may take, `crew` the threads.
//!
//! Who may connect is decided by the permissions of the socket's path, which the agent holds.

mod answer;
mod body;
mod chunks;
mod crew;
mod devices;
mod guest;
mod http;
mod routes;
mod target;
mod timed;
mod waits;
mod watch;

use std::{
    io::{self, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    time::Duration,
};

pub use answer::{Answer, Body};
use crew::Crew;
pub use http::{BadQuery, MAX_HEAD, Request, RequestError, parse};
pub use routes::{ROUTES, Route, answer};
use timed::Timed;
use waits::{Client, Waits};

use crate::{
    machine::{Board, RunError, Thread, spawn},
    sandbox::ThreadKind,
};

// The others answer what cannot wait, a dump that is being read among it.
const _: () = assert!(waits::MOST + waits::MOST_PLUGS + 4 <= crew::MOST);
/// How long a client may take to send its request, and once there is an answer, to take it.
const CLIENT_LIMIT: Duration = Duration::from_secs(10);
/// How long a client may take to take a piece of a dump: what takes it may be across the world, and the
/// guest waits with it.
const DUMP_LIMIT: Duration = Duration::from_secs(60);
/// How long what a refused request still sends is taken.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);
/// Largest body of a request.
const MAX_BODY: usize = 4096;

/// Starts answering.
pub fn start(listener: UnixListener, board: &Arc<Board>) -> Result<(), RunError> {
    listener.set_nonblocking(false).map_err(|source| RunError::Api { source })?;
    let (waits, plugs) = (Waits::up_to(waits::MOST), Waits::up_to(waits::MOST_PLUGS));
    let desk = Desk { listener, waits, plugs, crew: Crew::default() };
    let (desk, served) = (Arc::new(desk), Arc::clone(board));
    let thread = Thread { name: Crew::name(0), kind: ThreadKind::Api, cpus: Vec::new() };
    spawn(thread, Arc::clone(board), move || serve(&desk, &served)).map(drop)
}

/// What the threads share.
struct Desk {
    listener: UnixListener,
    waits: Waits,
    plugs: Waits,
    crew: Crew,
}

/// Answers connections. Before a thread turns to the last connection that could be answered at once, it
/// starts the next one, behind its own filter: most machines never need a second, and starting all of
/// them takes a sixth of a machine's start.
fn serve(desk: &Arc<Desk>, board: &Arc<Board>) {
    while !board.control.is_ended() {
        // A failed connection is the client's loss; a closed listener ends with the process.
        let Ok((stream, _)) = desk.listener.accept() else { continue };
        if let Some(number) = desk.crew.take_work() {
            let (next, served) = (Arc::clone(desk), Arc::clone(board));
            let builder = std::thread::Builder::new().name(Crew::name(number));
            if let Err(error) = builder.spawn(move || serve(&next, &served)) {
                eprintln!("holdfast-vmm: the API answers slowly: no further thread: {error}");
                desk.crew.lose();
            }
        }
        let _ = converse(stream, desk, board);
        desk.crew.end_work();
    }
}

fn converse(stream: UnixStream, desk: &Desk, board: &Board) -> io::Result<()> {
    let mut bytes = Vec::new();
    match receive(&mut Timed::new(&stream, CLIENT_LIMIT), &mut bytes) {
        Ok((request, files)) => {
            let client = Client::new(&stream, &desk.waits, &desk.plugs);
            let answer = answer(&request, files, &client, board);
            send(&answer, &request.method, &stream, board)
        }
        Err(error) => {
            refuse(&error, &bytes, &stream)?;
            drain(&stream);
            Ok(())
        }
    }
}

/// Says why what came cannot be read, and that nothing follows (RFC 9112 §9.6).
fn refuse(error: &RequestError, bytes: &[u8], stream: &UnixStream) -> io::Result<()> {
    let refusal = answer::problem(error.status(), "request not understood", &error.to_string());
    let method = if http::asks_for_head(bytes) { http::HEAD } else { "" };
    refusal.write_to(method, &mut Timed::new(stream, CLIENT_LIMIT))?;
    stream.shutdown(Shutdown::Write)
}

fn send(answer: &Answer, method: &str, mut stream: &UnixStream, board: &Board) -> io::Result<()> {
    let Body::Dump(dump) = &answer.body else {
        return answer.write_to(method, &mut Timed::new(stream, CLIENT_LIMIT));
    };
    let limited = stream.set_write_timeout(Some(DUMP_LIMIT));
    let written = limited.and_then(|()| answer.write_to(method, &mut stream));
    watch::finish_dump(dump, board);
    written
}

/// Takes what the client of a refused request still sends: closed before, the connection would be one that
/// failed to the client, which sends on and loses the answer (RFC 9112 §9.6).
fn drain(stream: &UnixStream) {
    let (timed, mut buffer) = (Timed::new(stream, DRAIN_LIMIT), [0; 4096]);
    while matches!(timed.read(&mut buffer, &mut Vec::new()), Ok(1..)) {}
}

/// Receives a request; all that came of it is put into `bytes`.
fn receive(
    stream: &mut Timed<'_>,
    bytes: &mut Vec<u8>,
) -> Result<(Request, Vec<OwnedFd>), RequestError> {
    let (mut buffer, mut files, mut told) = ([0; 4096], Vec::new(), false);
    loop {
        if let Some(request) = parse(bytes, MAX_BODY)? {
            return Ok((request, files));
        }
        if !told && http::awaits_continue(bytes) {
            told = true;
            let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
            stream.write_all(go_on).map_err(|_| RequestError::Incomplete)?;
        }
        match stream.read(&mut buffer, &mut files) {
            Ok(count @ 1..) => bytes.extend_from_slice(&buffer[..count]),
            Err(error) if timed::is_late(&error) => return Err(RequestError::Late),
            Ok(0) | Err(_) => return Err(RequestError::Incomplete),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn who_is_late_is_told_apart_from_who_is_gone() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let head = b"POST /v1/console HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n";
        far.write_all(head).expect("written");
        let mut bytes = Vec::new();
        let mut receive = |limit| receive(&mut Timed::new(&near, limit), &mut bytes).err();
        assert_eq!(receive(Duration::from_millis(200)), Some(RequestError::Late));
        far.write_all(b"x").expect("written");
        drop(far);
        assert_eq!(receive(CLIENT_LIMIT), Some(RequestError::Incomplete));
        assert_eq!(bytes, [&head[..], b"x"].concat());
    }

    #[test]
    fn a_refusal_ends_before_what_is_still_sent_is_taken() {
        let (mut near, mut far) = UnixStream::pair().expect("a pair");
        refuse(&RequestError::Host, b"GET / HTTP/1.1\r\n", &near).expect("sent");
        // What there is to read must be there by now, and the end of it.
        far.set_nonblocking(true).expect("set");
        let mut said = String::new();
        far.read_to_string(&mut said).expect("an end");
        assert!(said.starts_with("HTTP/1.1 400 ") && said.ends_with('}'), "{said}");
        far.write_all(&[b'x'; 10_000]).expect("taken");
        drop(far);
        drain(&near);
        assert_eq!(near.read(&mut [0]).expect("an end"), 0, "all of it was taken");
    }

    /// RFC 9110 §9.3.2.
    #[test]
    fn a_refusal_of_a_head_has_no_body() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        refuse(&RequestError::Target, b"HEAD nowhere HTTP/1.1\r\n", &near).expect("sent");
        drop(near);
        let mut said = String::new();
        far.read_to_string(&mut said).expect("an end");
        assert!(said.starts_with("HTTP/1.1 400 ") && said.ends_with("\r\n\r\n"), "{said}");
    }
}
