//! A serial line's output: kept whole, shown if asked, and waited upon.

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// What to do with output as it comes, besides keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// Nothing.
    Quiet,
    /// Also print it, each line behind this prefix.
    Lines(&'static str),
}

#[derive(Default)]
struct Log {
    text: String,
    closed: bool,
}

/// The output of a serial line from its first byte, growing while its source is open.
#[derive(Clone)]
pub struct Serial {
    shared: Arc<(Mutex<Log>, Condvar)>,
}

impl Serial {
    /// Starts collecting from `source`, with a copy in the file at `path`.
    pub fn collect(
        mut source: impl Read + Send + 'static,
        path: &Path,
        echo: Echo,
    ) -> Result<Self> {
        let mut copy = File::create(path).with_context(|| format!("{}", path.display()))?;
        let shared = Arc::new((Mutex::new(Log::default()), Condvar::new()));
        let writer = Arc::clone(&shared);
        std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            let mut line = String::new();
            loop {
                let count = source.read(&mut buffer).unwrap_or(0);
                let (log, changed) = &*writer;
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                if count == 0 {
                    log.closed = true;
                    changed.notify_all();
                    return;
                }
                // A copy that cannot be written costs evidence, not the test.
                copy.write_all(&buffer[..count]).ok();
                let text = String::from_utf8_lossy(&buffer[..count]).replace('\r', "");
                log.text.push_str(&text);
                changed.notify_all();
                drop(log);
                show(echo, &mut line, &text);
            }
        });
        Ok(Self { shared })
    }

    /// Returns everything so far.
    pub fn text(&self) -> String {
        self.lock().text.clone()
    }

    /// Returns the number of bytes so far: a place to wait from.
    pub fn mark(&self) -> usize {
        self.lock().text.len()
    }

    /// Waits until a line at or after byte `from` contains `pattern`, and returns that line whole.
    pub fn wait_from(&self, from: usize, pattern: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        let (_, changed) = &*self.shared;
        let mut log = self.lock();
        loop {
            let found = log.text.get(from..).unwrap_or_default();
            if let Some(line) = complete_lines(found).find(|line| line.contains(pattern)) {
                return Ok(line.to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if log.closed || left.is_zero() {
                let why = if log.closed { "the line closed" } else { "the time is up" };
                let tail = tail(&log.text, 40);
                bail!("no {pattern:?} within {limit:?}: {why}; the last lines were\n{tail}");
            }
            log = changed.wait_timeout(log, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits as [`Self::wait_from`] does, from the first byte.
    pub fn wait(&self, pattern: &str, limit: Duration) -> Result<String> {
        self.wait_from(0, pattern, limit)
    }

    /// Returns the last `lines` lines.
    pub fn tail(&self, lines: usize) -> String {
        tail(&self.lock().text, lines)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn complete_lines(text: &str) -> impl Iterator<Item = &str> {
    let end = text.rfind('\n').map_or(0, |end| end + 1);
    text[..end].lines()
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn show(echo: Echo, line: &mut String, text: &str) {
    let Echo::Lines(prefix) = echo else { return };
    line.push_str(text);
    while let Some(end) = line.find('\n') {
        println!("{prefix}{}", &line[..end]);
        line.drain(..=end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_whole_lines_and_tells_why_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let source: &[u8] = b"one\r\ntwo partial";
        let serial = Serial::collect(source, &folder.path().join("log"), Echo::Quiet).expect("log");
        let line = serial.wait("one", Duration::from_secs(5)).expect("whole line");
        assert_eq!(line, "one");
        let refusal = serial.wait("two", Duration::from_secs(5)).expect_err("no line end");
        assert!(refusal.to_string().contains("the line closed"), "{refusal}");
    }
}
