//! Lines into the kernel's log, from where they reach every console in order.
//! Source: Documentation/ABI/testing/dev-kmsg.

use std::{fs::File, io::Write, sync::OnceLock};

use crate::events::Event;

/// Longest line: the kernel refuses records of more than about 1,000 bytes.
pub const MAX_LINE: usize = 900;

/// Severity of a line, as syslog(3) numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The node cannot do its work.
    Error = 3,
    /// Somebody should look.
    Warning = 4,
    /// Worth a line on the console.
    Notice = 5,
}

static LOG: OnceLock<File> = OnceLock::new();

/// Opens the log. Lines before it, and without it, go to standard error.
pub fn open() {
    if let Ok(file) = File::options().write(true).open("/dev/kmsg") {
        // A second call finds the log open, which is what it wants.
        let _ = LOG.set(file);
    }
}

/// Writes `event`.
pub fn event(event: &Event) {
    line(Level::Notice, &event.to_string());
}

/// Writes one line; what exceeds [`MAX_LINE`] is cut off.
pub fn line(level: Level, text: &str) {
    let text = cut(text, MAX_LINE);
    match LOG.get() {
        Some(mut file) => {
            // There is nowhere left to report that the log failed.
            let _ = file.write_all(format!("<{}>{text}\n", level as u8).as_bytes());
        }
        None => eprintln!("{text}"),
    }
}

/// Returns the longest part of `text` from its start that has at most `limit` bytes.
fn cut(text: &str, limit: usize) -> &str {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut_between_characters() {
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("aé", 3), "aé");
        assert_eq!(cut("", 3), "");
    }
}
