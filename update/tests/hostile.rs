//! Mirrors that lie, stall and never end, as bytes on a socket: each costs bounded time, and what it says
//! is an error.

#[allow(dead_code, reason = "these tests use a part of it")]
mod fixture;

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use fixture::{now, root};
use update::shell::{FetchError, Fetcher, Session, SessionError, Store};

/// Most bytes that are asked for.
const LIMIT: u64 = 16 << 10;
/// Longest time for a file that comes in drops.
const TIME: Duration = Duration::from_secs(2);

/// What a mirror answers to every request.
#[derive(Clone, Copy)]
struct Answer {
    /// First this.
    begin: &'static [u8],
    /// Then this, without end; the connection ends if it is empty.
    forever: &'static [u8],
    pause: Duration,
}

const fn once(begin: &'static [u8]) -> Answer {
    Answer { begin, forever: b"", pause: Duration::ZERO }
}

const fn endless(begin: &'static [u8], forever: &'static [u8]) -> Answer {
    Answer { begin, forever, pause: Duration::ZERO }
}

const fn drops(begin: &'static [u8], forever: &'static [u8]) -> Answer {
    Answer { begin, forever, pause: Duration::from_millis(50) }
}

fn mirror(answer: Answer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream, answer));
        }
    });
    url
}

/// Ends with the connection.
fn serve(mut stream: TcpStream, answer: Answer) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    while !lines.next()?.ok()?.is_empty() {}
    stream.write_all(answer.begin).ok()?;
    while !answer.forever.is_empty() {
        stream.write_all(answer.forever).ok()?;
        thread::sleep(answer.pause);
    }
    Some(())
}

async fn fetch(answer: Answer) -> Result<Option<Vec<u8>>, FetchError> {
    let begin = Instant::now();
    let url = format!("{}/timestamp.json", mirror(answer));
    let fetched = Fetcher::new(None).whole(&url, LIMIT, TIME).await;
    assert!(begin.elapsed() < TIME * 4, "{:?}", begin.elapsed());
    fetched
}

const SPACES: &[u8] = &[b' '; 4096];
const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

#[tokio::test]
async fn what_is_no_answer_is_an_error() {
    for (name, answer) in [
        (
            "headers without end",
            endless(b"HTTP/1.1 200 OK\r\n", b"X-A: aaaaaaaaaaaaaaaaaaaaaaaaa\r\n"),
        ),
        ("a header without end", endless(b"HTTP/1.1 200 OK\r\nX: ", SPACES)),
        (
            "an extension of a chunk without end",
            endless(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
                b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            ),
        ),
        (
            "extensions without end",
            endless(CHUNKED, b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n \r\n"),
        ),
        (
            "trailers without end",
            endless(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
                b"X-A: aaaaaaaaaaaaaaa\r\n",
            ),
        ),
        (
            "a chunk of more than 2^64 bytes",
            once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}"),
        ),
        (
            "more than 2^64 bytes",
            once(b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551617\r\n\r\n{}"),
        ),
        ("less than no bytes", once(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}")),
        (
            "two lengths",
            once(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} "),
        ),
        ("less than was said", once(b"HTTP/1.1 200 OK\r\nContent-Length: 4294967297\r\n\r\n{}")),
        ("no head", once(b"{\"signed\":{}}\r\n\r\n")),
        ("nothing", once(b"")),
    ] {
        let fetched = fetch(answer).await;
        assert!(matches!(fetched, Err(FetchError::Exchange { .. })), "{name}: {fetched:?}");
    }
}

#[tokio::test]
async fn what_is_longer_than_it_may_be_is_cut_off() {
    for answer in [
        endless(b"HTTP/1.1 200 OK\r\nContent-Length: 4294967297\r\n\r\n", SPACES),
        endless(b"HTTP/1.1 200 OK\r\n\r\n", SPACES),
        endless(b"HTTP/1.0 200 OK\r\n\r\n", SPACES),
        endless(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n",
            SPACES,
        ),
        endless(CHUNKED, b"10\r\n                \r\n"),
    ] {
        let fetched = fetch(answer).await;
        assert!(matches!(fetched, Err(FetchError::TooLong { limit: LIMIT, .. })), "{fetched:?}");
    }
}

#[tokio::test]
async fn what_comes_in_drops_has_its_time() {
    for answer in [
        drops(b"", b"H"),
        drops(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        drops(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b" "),
        drops(CHUNKED, b"1\r\n \r\n"),
        drops(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    ] {
        let fetched = fetch(answer).await;
        let late = matches!(fetched, Err(FetchError::Stalled { .. } | FetchError::Exchange { .. }));
        assert!(late, "{fetched:?}");
    }
}

#[tokio::test]
async fn no_answer_leads_elsewhere() {
    for (location, followed) in [
        (
            &b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: file:///etc/passwd\r\n\r\n"[..],
            false,
        ),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: ftp://127.0.0.1/x\r\n\r\n", false),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: \xff\r\n\r\n", false),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", false),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: timestamp.json\r\n\r\n", true),
        (b"HTTP/1.1 308 Permanent\r\nContent-Length: 0\r\nLocation: /timestamp.json\r\n\r\n", true),
    ] {
        let fetched = fetch(once(location)).await;
        // One that is followed leads to itself, without end.
        assert!(matches!(fetched, Err(FetchError::Redirect { .. })), "{followed}: {fetched:?}");
    }
    for status in [
        &b"HTTP/1.1 204 No Content\r\n\r\n"[..],
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
        b"HTTP/1.1 300 Multiple Choices\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ] {
        let fetched = fetch(once(status)).await;
        assert!(matches!(fetched, Err(FetchError::Status { .. })), "{fetched:?}");
    }
}

/// Compressed bytes were not asked for, and are bytes.
#[tokio::test]
async fn nothing_is_unpacked() {
    let answer = once(
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    );
    assert_eq!(fetch(answer).await.expect("bytes"), Some(b"\x1f\x8b\x08\x00".to_vec()));
    let old = fetch(once(b"HTTP/1.0 200 OK\r\n\r\n{}")).await;
    assert_eq!(old.expect("bytes"), Some(b"{}".to_vec()), "HTTP/1.0 has no lengths");
}

#[tokio::test]
async fn a_refresh_ends_however_slowly_a_mirror_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = mirror(drops(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b" "));
    let store = Store::open(folder.path()).expect("a store");
    let session = Session::new(store, Fetcher::new(None), &root(1, 2), now()).expect("a root");
    let mut session = session.with_urls(&url, &url).with_patience(Duration::from_secs(1));
    let begin = Instant::now();
    let refreshed = session.refresh().await;
    let late = matches!(refreshed, Err(SessionError::Fetch(FetchError::Stalled { .. })));
    assert!(late && begin.elapsed() < TIME * 4, "{refreshed:?}");
}
