//! Output of supervised processes, cut into lines. Pure: bytes in, lines out.
//!
//! A process that writes without end fills the log no faster than [`LINES_PER_SECOND`]; what is
//! beyond is counted and the count is a line.

use std::time::{Duration, Instant};

use super::kmsg::MAX_LINE;

/// Lines of one process that reach the log each second: enough for any start-up, too few to push
/// the reason of a failure out of the kernel's buffer.
pub const LINES_PER_SECOND: u32 = 100;

/// One process's output.
#[derive(Debug)]
pub struct Lines {
    prefix: String,
    pending: Vec<u8>,
    window: Option<Instant>,
    written: u32,
    dropped: u32,
}

impl Lines {
    /// Starts without output. Lines get `prefix`, except events.
    pub fn new(prefix: String) -> Self {
        Self { prefix, pending: Vec::new(), window: None, written: 0, dropped: 0 }
    }

    /// Takes output and returns the lines that became complete.
    pub fn handle_bytes(&mut self, now: Instant, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in bytes {
            if *byte == b'\n' || self.pending.len() >= MAX_LINE {
                self.finish(now, &mut lines);
            }
            if *byte != b'\n' {
                self.pending.push(*byte);
            }
        }
        lines
    }

    /// Returns what the process left without an end of line.
    pub fn handle_end(&mut self, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.pending.is_empty() {
            self.finish(now, &mut lines);
        }
        lines
    }

    fn finish(&mut self, now: Instant, lines: &mut Vec<String>) {
        let bytes = std::mem::take(&mut self.pending);
        let fresh = self.window.is_none_or(|start| now - start >= Duration::from_secs(1));
        if fresh {
            if self.dropped > 0 {
                lines.push(format!("{}({} lines left out)", self.prefix, self.dropped));
            }
            (self.window, self.written, self.dropped) = (Some(now), 0, 0);
        }
        if self.written >= LINES_PER_SECOND {
            self.dropped += 1;
            return;
        }
        self.written += 1;
        let text: String = String::from_utf8_lossy(&bytes)
            .chars()
            .map(|character| if character.is_control() { ' ' } else { character })
            .collect();
        if self.prefix.starts_with("agent") && text.starts_with(crate::events::PREFIX) {
            lines.push(text);
        } else {
            lines.push(format!("{}{text}", self.prefix));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_from_pieces_and_control_characters_vanish() {
        let now = Instant::now();
        let mut lines = Lines::new("vmm: ".into());
        assert!(lines.handle_bytes(now, b"one ").is_empty());
        assert_eq!(lines.handle_bytes(now, b"line\n\x1b[2Jx"), ["vmm: one line"]);
        assert_eq!(lines.handle_end(now), ["vmm:  [2Jx"]);
    }

    #[test]
    fn only_the_agent_may_write_events() {
        let now = Instant::now();
        let event = b"holdfast: event=x\n";
        assert_eq!(Lines::new("agent: ".into()).handle_bytes(now, event), ["holdfast: event=x"]);
        assert_eq!(
            Lines::new("vmm 1: ".into()).handle_bytes(now, event),
            ["vmm 1: holdfast: event=x"]
        );
    }

    #[test]
    fn a_flood_is_counted_instead_of_written() {
        let now = Instant::now();
        let mut lines = Lines::new("vmm: ".into());
        assert_eq!(lines.handle_bytes(now, &b"x\n".repeat(150)).len(), 100);
        let later = lines.handle_bytes(now + Duration::from_secs(1), b"y\n");
        assert_eq!(later, ["vmm: (50 lines left out)", "vmm: y"]);
    }
}
