//! Asks the agent's local interface, on threads of its own, so that an agent that hangs never keeps
//! the screen from answering keys.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

use serde::de::DeserializeOwned;
use types::{
    logs::{Level, Logs},
    status::NodeStatus,
};

use super::pages::Known;
use crate::local::SOCKET;

/// Pause between two questions how the node is.
const PAUSE: Duration = Duration::from_secs(2);

/// How long the agent waits for new lines, in milliseconds; a change of the level is noticed then.
const WAIT_MS: u64 = 1_000;

/// An answer comes within this time.
const LIMIT: Duration = Duration::from_secs(10);

/// Largest answer that is read: thousands of devices and lines.
const MAX_ANSWER: u64 = 8 << 20;

/// News that wait to be drawn.
const QUEUE: usize = 16;

/// Something that was answered.
#[derive(Debug)]
pub(super) enum News {
    /// How the node is.
    Status(Box<NodeStatus>),
    /// Nothing, and why.
    Silent(String),
    /// Lines of the log, of another level than those before.
    OtherLines(Logs),
    /// Lines that follow those before.
    MoreLines(Logs),
}

impl News {
    /// Adds the news to what is known.
    pub(super) fn tell(self, known: &mut Known) {
        match self {
            Self::Status(status) => known.handle_status(*status),
            Self::Silent(reason) => known.handle_silence(reason),
            Self::OtherLines(logs) => {
                known.lines.clear();
                known.handle_lines(logs.lines);
            }
            Self::MoreLines(logs) => known.handle_lines(logs.lines),
        }
    }
}

/// What is asked for.
#[derive(Debug, Clone)]
pub(super) struct Asking {
    level: Arc<Mutex<Level>>,
}

impl Asking {
    /// Asks for lines of this level and more important ones from now on.
    pub(super) fn ask_level(&self, level: Level) {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner) = level;
    }

    fn level(&self) -> Level {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts to ask.
pub(super) fn start() -> io::Result<(Receiver<News>, Asking)> {
    let (tell, news) = sync_channel(QUEUE);
    let asking = Asking { level: Arc::new(Mutex::new(super::keys::View::default().level)) };
    let (tell_lines, of_lines) = (tell.clone(), asking.clone());
    std::thread::Builder::new().name("status".into()).spawn(move || ask_status(&tell))?;
    std::thread::Builder::new()
        .name("log".into())
        .spawn(move || ask_lines(&tell_lines, &of_lines))?;
    Ok((news, asking))
}

fn ask_status(tell: &SyncSender<News>) {
    loop {
        let news = match get("/v1/status") {
            Ok(status) => News::Status(Box::new(status)),
            Err(error) => News::Silent(error.to_string()),
        };
        // Without a drawer the process is about to end.
        if tell.send(news).is_err() {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

fn ask_lines(tell: &SyncSender<News>, asking: &Asking) {
    let (mut from, mut level) = (0, asking.level());
    loop {
        let wanted = asking.level();
        if wanted != level {
            (from, level) = (0, wanted);
        }
        let target = format!("/v1/logs?from={from}&level={}&wait_ms={WAIT_MS}", level.name());
        let Ok(logs) = get::<Logs>(&target) else {
            std::thread::sleep(PAUSE);
            continue;
        };
        let first = from == 0;
        from = logs.next.max(1);
        let news = if first { News::OtherLines(logs) } else { News::MoreLines(logs) };
        if tell.send(news).is_err() {
            return;
        }
    }
}

fn get<T: DeserializeOwned>(target: &str) -> io::Result<T> {
    let mut stream = UnixStream::connect(Path::new("/").join(SOCKET))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    write!(stream, "GET {target} HTTP/1.1\r\nhost: node\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
    Ok(serde_json::from_slice(body(&answer)?)?)
}

/// Returns the body of an answer that went well. The agent ends the connection after it.
fn body(answer: &[u8]) -> io::Result<&[u8]> {
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(end) = end else { return refuse("the agent gave no answer".to_owned()) };
    let (head, body) = (&answer[..end], &answer[end + 4..]);
    if head.starts_with(b"HTTP/1.1 200 ") {
        return Ok(body);
    }
    refuse(format!("the agent refused: {}", String::from_utf8_lossy(body).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_good_answers_have_a_body() {
        assert_eq!(body(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{}").ok(), Some(&b"{}"[..]));
        let refused = body(b"HTTP/1.1 404 Not Found\r\n\r\nno such\n").map_err(|e| e.to_string());
        assert_eq!(refused, Err("the agent refused: no such".to_owned()));
        assert!(body(b"").is_err());
    }
}
