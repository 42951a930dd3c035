//! Records of the kernel's log: guests, peers and devices have their words in many of them.
#![no_main]

use agent::logs::book::{Book, Filter, MAX_ANSWER};
use types::logs::Level;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut book = Book::default();
    bytes.split(|byte| *byte == 0).for_each(|record| book.handle_record(record));
    let logs = book.logs(Filter { from: 0, level: Level::Debug, source: None });
    assert!(logs.lines.len() <= MAX_ANSWER);
    assert!(logs.lines.iter().all(|line| !line.text.chars().any(char::is_control)));
    let events = book.events(0).events;
    assert!(events.iter().all(|event| event.fields.values().all(|value| value.len() <= 1000)));
});
