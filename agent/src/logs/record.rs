//! Records of the kernel's log, and who wrote them. Pure.
//! Source: Documentation/ABI/testing/dev-kmsg; syslog(3) for facilities and levels.
//!
//! `PRIORITY,NUMBER,MICROSECONDS,FLAGS[,…];TEXT\n[ KEY=VALUE\n…]`. In TEXT the kernel writes as `\xHH`
//! every byte that is no printable ASCII, and the backslash (kernel/printk/printk.c,
//! `msg_add_ext_text`). It gives what programs write another facility than its own, so no program can
//! write in its name.

use types::logs::{Level, LogLine, LogSource};

use super::events;

/// Longest text that is kept, in bytes.
pub const MAX_TEXT: usize = 1000;

/// How lines of the status page begin: they say again what the log says anyway.
const PAGE: &str = "agent: status| ";

/// A record as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Level, and above its three bits the facility.
    pub priority: u32,
    /// Its number, one more than that of the record before it.
    pub number: u64,
    /// When it was written, in microseconds since the start.
    pub micros: u64,
    /// Its text without control characters, at most [`MAX_TEXT`] bytes of it.
    pub text: String,
}

/// Takes a record apart. Returns `None` for what is none.
pub fn split(record: &[u8]) -> Option<Record> {
    let end = record.iter().position(|byte| *byte == b';')?;
    let mut head = std::str::from_utf8(&record[..end]).ok()?.split(',');
    let text = record[end + 1..].split(|byte| *byte == b'\n').next().unwrap_or_default();
    Some(Record {
        priority: head.next()?.parse().ok()?,
        number: head.next()?.parse().ok()?,
        micros: head.next()?.parse().ok()?,
        text: clean(&String::from_utf8_lossy(&written(text))),
    })
}

/// Returns the bytes that were written, given how the kernel hands them out. What is no escape of the
/// kernel's stays as it is, but for the beginning of one at the end, where a long record was cut.
fn written(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        rest = after;
        match (first, after) {
            (b'\\', [b'x', high, low, left @ ..]) if let Some(byte) = hex(*high, *low) => {
                bytes.push(byte);
                rest = left;
            }
            (b'\\', [] | [b'x'] | [b'x', _]) => break,
            _ => bytes.push(*first),
        }
    }
    bytes
}

/// Returns the byte that two digits are; the kernel writes small ones.
fn hex(high: u8, low: u8) -> Option<u8> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    Some(digit(high)? << 4 | digit(low)?)
}

/// Parses a record. Returns `None` for what is none, and for lines of the status page.
pub fn parse(record: &[u8]) -> Option<LogLine> {
    let Record { priority, number, micros, text } = split(record)?;
    let line = LogLine {
        number,
        at_ms: micros / 1000,
        level: level(priority & 7),
        source: LogSource::Kernel,
        machine: None,
        text,
    };
    if priority >> 3 == 0 { Some(line) } else { of_program(line) }
}

const fn level(number: u32) -> Level {
    match number {
        0..=3 => Level::Error,
        4 => Level::Warning,
        5 => Level::Notice,
        6 => Level::Info,
        _ => Level::Debug,
    }
}

/// Returns the text without control characters, at most [`MAX_TEXT`] bytes of it.
fn clean(text: &str) -> String {
    let mut clean: String = text
        .chars()
        .take(MAX_TEXT)
        .map(|character| if character.is_control() { ' ' } else { character })
        .collect();
    while clean.len() > MAX_TEXT {
        clean.pop();
    }
    clean
}

/// Finds out which program wrote a line: init puts its name before what others wrote.
fn of_program(line: LogLine) -> Option<LogLine> {
    let text = line.text.as_str();
    if text.starts_with(PAGE) {
        return None;
    }
    if let Some(name) = events::name(text) {
        let level = line.level.min(events::level(name));
        return Some(LogLine { source: events::source(name), level, ..line });
    }
    let (prefix, rest) = text.split_once(": ").unwrap_or((text, ""));
    // The agent's and the machines' lines come without a level; a panic is an error of any.
    let failed = rest.contains("panicked at");
    let level = if failed { Level::Error } else { line.level };
    let machine = prefix.strip_prefix("vmm ").and_then(|id| id.parse().ok());
    let source = match prefix {
        "agent" => LogSource::Agent,
        "dashboard" => LogSource::Dashboard,
        _ if machine.is_some() => LogSource::Machine,
        _ => LogSource::Init,
    };
    Some(LogLine { level, source, machine, ..line })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn who(record: &str) -> (LogSource, Level) {
        let line = parse(record.as_bytes()).expect("a record");
        (line.source, line.level)
    }

    #[test]
    fn a_record_is_taken_apart() {
        let line = parse(b"6,339,5140900,-;NET: Registered\n SUBSYSTEM=net\n").expect("a record");
        assert_eq!((line.number, line.at_ms, line.level), (339, 5140, Level::Info));
        assert_eq!((line.source, line.text.as_str()), (LogSource::Kernel, "NET: Registered"));
    }

    #[test]
    fn the_writer_is_told() {
        let machine = "01".repeat(16);
        let vmm = format!("13,1,0,-;vmm {machine}: no disk");
        assert_eq!(who(&vmm), (LogSource::Machine, Level::Notice));
        assert_eq!(who("11,1,0,-;init: phase root failed"), (LogSource::Init, Level::Error));
        assert_eq!(who("13,1,0,-;agent: overlay is up"), (LogSource::Agent, Level::Notice));
        let panic = "13,1,0,-;agent: thread 'main' panicked at x";
        assert_eq!(who(panic), (LogSource::Agent, Level::Error));
        let event = "13,1,0,-;holdfast: event=trouble place=x reason=\"y\"";
        assert_eq!(who(event), (LogSource::Agent, Level::Error));
        let event = "13,1,0,-;holdfast: event=init-ready ms=3";
        assert_eq!(who(event), (LogSource::Init, Level::Notice));
    }

    #[test]
    fn no_program_writes_as_the_kernel_and_the_kernel_makes_no_events() {
        let said = "4,1,0,-;holdfast: event=trouble place=x reason=\"y\"";
        assert_eq!(who(said), (LogSource::Kernel, Level::Warning));
        assert_eq!(who("13,1,0,-;vmm ../../x: hello").0, LogSource::Init);
    }

    #[test]
    fn rubbish_is_none_and_pages_are_left_out() {
        for record in ["", ";", "6,x,1,-;a", "6;a", "6,1;a", "13,1,0,-;agent: status| node x"] {
            assert_eq!(parse(record.as_bytes()), None, "{record}");
        }
    }

    #[test]
    fn what_the_kernel_escapes_is_read_as_it_was_written() {
        let said = |text: &str| {
            let line = parse(&testing::kmsg("13,1,0,-", text)).expect("a record");
            (line.level, line.text)
        };
        for text in ["agent: Küche \\x5c 中", "agent: \\", "agent: \\x", "agent: a\\\\x41"] {
            assert_eq!(said(text).1, text);
        }
        assert_eq!(said("agent: one\ntwo\t\u{7f}").1, "agent: one two  ");
        let event = "holdfast: event=trouble place=x reason=\"the \\\"Küche\\\"\"";
        assert_eq!(said(event), (Level::Error, event.to_owned()));
    }

    #[test]
    fn what_is_no_escape_stays_and_one_that_was_cut_goes() {
        let text = |record: &[u8]| parse(record).expect("a record").text;
        assert_eq!(text(b"6,1,0,-;a\\b \\xZ1 \\xC3 c"), "a\\b \\xZ1 \\xC3 c");
        for cut in ["a\\", "a\\x", "a\\xc", "a\\xc3\\xa"] {
            let text = text(format!("6,1,0,-;{cut}").as_bytes());
            assert_eq!(text.trim_end_matches('\u{fffd}'), "a", "{cut}");
        }
        assert_eq!(text(b"6,1,0,-;\\xff"), "\u{fffd}");
    }

    #[test]
    fn text_has_no_control_characters_and_an_end() {
        let long = format!("\u{1b}[2J{}", "é".repeat(2000));
        let line = parse(&testing::kmsg("6,1,0,-", &long)).expect("a record");
        assert!(line.text.starts_with(" [2J"), "{}", line.text);
        assert!(line.text.len() <= MAX_TEXT && line.text.len() > MAX_TEXT - 2);
    }
}
