//! The control socket: HTTP/1.1 with JSON over a unix stream socket, one request per connection.
//! `openapi.json` describes the requests; `routes` lists what answers them: `watch` tells, `guest`
//! acts, `devices` attaches and detaches; `waits` bounds what waits for something new, `crew` the threads.
//!
//! Who may connect is decided by the permissions of the socket's path, which the agent holds.

mod answer;
mod crew;
mod devices;
mod guest;
mod http;
mod routes;
mod waits;
mod watch;

use std::{
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    time::{Duration, Instant},
};

pub use answer::{Answer, Body};
use crew::Crew;
pub use http::{MAX_HEAD, Request, RequestError, parse};
pub use routes::{ROUTES, Route, answer};
use waits::{Client, Waits};

use crate::{
    machine::{Board, RunError, Thread, spawn},
    sandbox::ThreadKind,
};

// The others answer what cannot wait, a dump that is being read among it.
const _: () = assert!(waits::MOST + waits::MOST_PLUGS + 4 <= crew::MOST);
/// How long a client may take to send its request, and to take its answer.
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

fn converse(mut stream: UnixStream, desk: &Desk, board: &Board) -> io::Result<()> {
    stream.set_read_timeout(Some(CLIENT_LIMIT))?;
    stream.set_write_timeout(Some(CLIENT_LIMIT))?;
    match receive(&mut stream) {
        Ok((request, files)) => {
            let client = Client::new(&stream, &desk.waits, &desk.plugs);
            let answer = answer(&request, files, &client, board);
            send(&answer, &request.method, &mut stream, board)
        }
        Err(error) => {
            let text = error.to_string();
            let answer = answer::problem(error.status(), "request not understood", &text);
            answer.write_to("", &mut stream)?;
            drain(&mut stream);
            Ok(())
        }
    }
}

fn send(answer: &Answer, method: &str, stream: &mut UnixStream, board: &Board) -> io::Result<()> {
    let Body::Dump(dump) = &answer.body else { return answer.write_to(method, stream) };
    let written =
        stream.set_write_timeout(Some(DUMP_LIMIT)).and_then(|()| answer.write_to(method, stream));
    watch::finish_dump(dump, board);
    written
}

/// Takes what the client of a refused request still sends: closed before, the connection would be one that
/// failed to the client, which sends on and loses the answer (RFC 9112 §9.6).
fn drain(stream: &mut UnixStream) {
    let (end, mut buffer) = (Instant::now() + DRAIN_LIMIT, [0; 4096]);
    if stream.set_read_timeout(Some(DRAIN_LIMIT)).is_ok() {
        while matches!(devices::read(stream, &mut buffer, &mut Vec::new()), Ok(1..))
            && Instant::now() < end
        {}
    }
}

fn receive(stream: &mut UnixStream) -> Result<(Request, Vec<OwnedFd>), RequestError> {
    let deadline = Instant::now() + CLIENT_LIMIT;
    let (mut bytes, mut files) = (Vec::new(), Vec::new());
    let (mut buffer, mut told) = ([0; 4096], false);
    loop {
        if let Some(request) = parse(&bytes, MAX_BODY)? {
            return Ok((request, files));
        }
        if !told && http::awaits_continue(&bytes) {
            told = true;
            let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
            stream.write_all(go_on).map_err(|_| RequestError::Incomplete)?;
        }
        let count =
            devices::read(stream, &mut buffer, &mut files).map_err(|_| RequestError::Incomplete)?;
        if count == 0 || Instant::now() > deadline {
            return Err(RequestError::Incomplete);
        }
        bytes.extend_from_slice(&buffer[..count]);
    }
}
