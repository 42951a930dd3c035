//! Events as the log has them: `holdfast: event=NAME key=value key="quoted" …`. Pure.

use std::collections::BTreeMap;

use types::logs::{Level, LogLine, LogSource, NodeEvent};

use crate::events::PREFIX;

/// Most particulars of one event.
const MAX_FIELDS: usize = 32;

/// Events of PID 1; all others are the agent's.
const OF_INIT: [&str; 14] = [
    "agent-exited",
    "agent-silent",
    "agent-started",
    "init-ready",
    "machine-overdue",
    "mount-wrong",
    "mounts-verified",
    "ram-mode",
    "serial-line",
    "shutdown",
    "shutdown-done",
    "watchdog-absent",
    "watchdog-armed",
    "screen",
];

/// Events that mean a failure.
const ERRORS: [&str; 10] = [
    "agent-exited",
    "agent-silent",
    "config-bad",
    "device-quarantined",
    "machine-failed",
    "machine-overdue",
    "machine-silent",
    "machine-storage",
    "mount-wrong",
    "trouble",
];

/// Events that somebody should look at.
const WARNINGS: [&str; 6] = [
    "config-not-fetched",
    "keys-not-enrolled",
    "machine-forced",
    "not-installed",
    "ram-mode",
    "watchdog-absent",
];

/// Returns the name of the event that a line is.
pub fn name(text: &str) -> Option<&str> {
    let rest = text.strip_prefix(PREFIX)?;
    let name = rest.split(' ').next().unwrap_or_default();
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (!name.is_empty() && name.bytes().all(good)).then_some(name)
}

/// Returns how much an event matters.
pub fn level(name: &str) -> Level {
    if ERRORS.contains(&name) {
        Level::Error
    } else if WARNINGS.contains(&name) {
        Level::Warning
    } else {
        Level::Notice
    }
}

/// Returns who reports an event.
pub fn source(name: &str) -> LogSource {
    if OF_INIT.contains(&name) { LogSource::Init } else { LogSource::Agent }
}

/// Returns the event that a line is.
pub fn parse(line: &LogLine) -> Option<NodeEvent> {
    if line.source == LogSource::Kernel {
        return None;
    }
    let name = name(&line.text)?;
    let rest = line.text.get(PREFIX.len() + name.len()..)?;
    Some(NodeEvent {
        number: line.number,
        at_ms: line.at_ms,
        level: line.level,
        source: line.source,
        name: name.to_owned(),
        fields: fields(rest),
    })
}

fn fields(text: &str) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    let mut rest = text.trim_start();
    while fields.len() < MAX_FIELDS
        && let Some((key, after)) = rest.split_once('=')
    {
        let (value, left) = value(after);
        if !key.contains(' ') {
            fields.insert(key.to_owned(), value);
        }
        rest = left.trim_start();
    }
    fields
}

/// Takes a value from the start of `text`; returns it and what follows.
fn value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = text.split_once(' ').unwrap_or((text, ""));
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => match characters.next() {
                Some((_, 'n' | 'r' | 't')) => value.push(' '),
                Some((_, 'u')) => skip_code(&mut characters),
                Some((_, other)) => value.push(other),
                None => {}
            },
            other => value.push(other),
        }
    }
    // The line was cut off before its closing quote.
    (value, "")
}

/// Skips the `{…}` of an escaped character: only such that no screen should get are escaped.
fn skip_code(characters: &mut std::str::CharIndices<'_>) {
    let mut ahead = characters.clone();
    if ahead.next().is_some_and(|(_, character)| character == '{') {
        *characters = ahead;
        for (_, character) in characters.by_ref() {
            if character == '}' {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use types::ids::MachineId;

    use super::*;
    use crate::{events::Event, testing};

    fn read(event: &Event) -> NodeEvent {
        let record = testing::kmsg("13,7,2000000,-", &event.to_string());
        parse(&super::super::record::parse(&record).expect("a record")).expect("an event")
    }

    #[test]
    fn what_was_written_is_read_back() {
        let reason = "the \"disk\" is\nfull \u{1b}[31m".to_owned();
        let event = read(&Event::Trouble { place: "store", reason });
        assert_eq!((event.name.as_str(), event.level), ("trouble", Level::Error));
        assert_eq!(event.fields["place"], "store");
        assert_eq!(event.fields["reason"], "the \"disk\" is full [31m");
        let reason = "\"C:\\x\" place=elsewhere in der Küche".to_owned();
        let event = read(&Event::Trouble { place: "store", reason: reason.clone() });
        assert_eq!((event.fields["place"].as_str(), &event.fields["reason"]), ("store", &reason));
        let value = Event::ConfigValue {
            key: "name".to_owned(),
            value: "\"rack 7\"".to_owned(),
            source: "volume /dev/vda".to_owned(),
        };
        let event = read(&value);
        assert_eq!(event.fields["value"], "\"rack 7\"");
        assert_eq!(event.fields["source"], "volume /dev/vda");
    }

    #[test]
    fn every_event_that_matters_is_known_by_its_name() {
        let machine = MachineId::from_bytes([1; 16]);
        let reason = || "x".to_owned();
        let address = "0000:01:00.0".parse().expect("an address");
        let errors = [
            Event::Trouble { place: "x", reason: reason() },
            Event::ConfigBad { source: reason(), reason: reason() },
            Event::DeviceQuarantined { address, reason: reason() },
            Event::MachineFailed { machine, reason: reason() },
            Event::MountWrong { path: reason(), reason: reason() },
            Event::AgentExited { status: reason(), restart_ms: 1 },
            Event::AgentSilent { silent_s: 60, threads: "agent:D:io_schedule".to_owned() },
            Event::MachineOverdue { machine },
            Event::MachineSilent { machine, silent_s: 15 },
            Event::MachineStorage { machine, failed: 1 },
        ];
        let levels: Vec<_> = errors.iter().map(|event| read(event).level).collect();
        assert_eq!(levels, [Level::Error; 10]);
        let warnings = [
            Event::RamMode { path: "/state", reason: reason() },
            Event::WatchdogAbsent,
            Event::MachineForced { machine, because: "x" },
        ];
        let levels: Vec<_> = warnings.iter().map(|event| read(event).level).collect();
        assert_eq!(levels, [Level::Warning; 3]);
    }

    #[test]
    fn lines_that_were_cut_are_read_as_far_as_they_go() {
        let line = LogLine {
            number: 1,
            at_ms: 1,
            level: Level::Notice,
            source: LogSource::Agent,
            machine: None,
            text: "holdfast: event=trouble place=x reason=\"cut \\".to_owned(),
        };
        let event = parse(&line).expect("an event");
        assert_eq!(event.fields["reason"], "cut ");
        assert_eq!(name("holdfast: event=Not_One x"), None);
    }
}
