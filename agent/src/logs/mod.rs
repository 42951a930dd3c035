//! What the node remembers of its log. Everything goes through the kernel's log (the kernel's own
//! lines, init's, the agent's and the machines' processes', which init writes there), so one reader
//! of `/dev/kmsg` sees it all, in order, with times and numbers that survive the agent.
//!
//! `record` and `events` parse, `book` keeps; both are pure. [`Logs`] reads and answers.

pub mod book;
pub mod events;
pub mod record;

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use self::book::Book;
use crate::events::Event;

/// The kernel's log.
pub const KMSG: &str = "/dev/kmsg";

/// Longest record that the kernel hands out, in bytes (`PRINTKRB_RECORD_MAX` and its dictionary).
pub(crate) const MAX_RECORD: usize = 8 << 10;

/// The node's log. Clones share it.
#[derive(Debug, Clone)]
pub struct Logs {
    book: Arc<Mutex<Book>>,
    changed: watch::Receiver<u64>,
}

impl Logs {
    /// Returns an empty log, and what fills it.
    pub fn new() -> (Self, Reader) {
        let (publish, changed) = watch::channel(0);
        let logs = Self { book: Arc::new(Mutex::new(Book::default())), changed };
        (logs.clone(), Reader { logs, publish })
    }

    /// Gives access to what is kept.
    pub fn book(&self) -> MutexGuard<'_, Book> {
        // A line is kept whole or not at all.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a line of number `from` or a later one.
    pub async fn wait(&self, from: u64) {
        let mut changed = self.changed.clone();
        // The reader may be gone, and then nothing comes any more.
        if changed.wait_for(|next| *next > from).await.is_err() {
            std::future::pending().await
        }
    }

    fn missing(&self, path: &Path, error: &io::Error) {
        let reason = format!("cannot read {}: {error}", path.display());
        let event = Event::Trouble { place: "log", reason };
        eprintln!("{event}");
        self.book().handle_record(format!("11,0,0,-;{event}").as_bytes());
    }
}

/// Fills a log.
#[derive(Debug)]
pub struct Reader {
    logs: Logs,
    publish: watch::Sender<u64>,
}

impl Reader {
    /// Reads the kernel's log at `path` from its start, and goes on reading. Without it the log
    /// stays empty, and the reason is its first line. A thread reads: the kernel's log is no file
    /// that a runtime can wait for safely.
    pub fn start(self, path: &Path) {
        let logs = self.logs.clone();
        let started = File::open(path).and_then(|file| {
            let thread = std::thread::Builder::new().name("log".to_owned());
            thread.spawn(move || self.read(file))
        });
        if let Err(error) = started {
            logs.missing(path, &error);
        }
    }

    /// Reads until the log fails, which it does not do before the process ends.
    fn read(self, mut file: File) {
        let mut buffer = vec![0; MAX_RECORD];
        loop {
            let next = match file.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => {
                    let mut book = self.logs.book();
                    book.handle_record(&buffer[..length]);
                    book.next()
                }
                Err(error) => match error.raw_os_error() {
                    // Overwritten before it was read: the next read goes on after the gap.
                    Some(libc::EPIPE) => {
                        self.logs.book().handle_gap();
                        continue;
                    }
                    Some(libc::EINTR) => continue,
                    _ => return self.logs.missing(Path::new(KMSG), &error),
                },
            };
            self.publish.send_if_modified(|old| std::mem::replace(old, next) != next);
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
