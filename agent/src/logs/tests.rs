use types::logs::{Level, LogSource};

use super::{
    book::{Book, Filter, MAX_ANSWER, MAX_BYTES, MAX_LINES},
    *,
};

const ALL: Filter = Filter { from: 0, level: Level::Debug, source: None };

fn book(records: &[&str]) -> Book {
    let mut book = Book::default();
    records.iter().for_each(|record| book.handle_record(record.as_bytes()));
    book
}

#[test]
fn lines_are_found_by_number_level_and_source() {
    let book = book(&[
        "6,1,1000,-;kernel one",
        "3,4,2000,-;kernel two",
        "13,5,3000,-;agent: three",
        "13,9,4000,-;holdfast: event=trouble place=overlay reason=\"four\"",
    ]);
    let numbers =
        |filter| -> Vec<u64> { book.logs(filter).lines.iter().map(|line| line.number).collect() };
    assert_eq!(numbers(ALL), [1, 4, 5, 9]);
    assert_eq!(numbers(Filter { from: 5, ..ALL }), [5, 9]);
    assert_eq!(numbers(Filter { level: Level::Error, ..ALL }), [4, 9]);
    assert_eq!(numbers(Filter { source: Some(LogSource::Agent), ..ALL }), [5, 9]);
    let logs = book.logs(Filter { from: 50, ..ALL });
    assert_eq!((logs.next, logs.oldest), (50, 1));
    let newest: Vec<_> = book.newest(ALL, 2).iter().map(|line| line.number).collect();
    assert_eq!(newest, [5, 9]);
    let errors: Vec<_> = book.errors(9).iter().map(|line| line.number).collect();
    assert_eq!(errors, [9, 4]);
    assert_eq!(book.troubles().collect::<Vec<_>>(), [("overlay", 1)]);
}

#[test]
fn a_long_log_is_read_in_pieces_without_a_gap() {
    let mut book = Book::default();
    for number in 0..1200 {
        book.handle_record(format!("6,{number},0,-;x").as_bytes());
    }
    let (mut from, mut seen) = (0, Vec::new());
    for _ in 0..3 {
        let piece = book.logs(Filter { from, ..ALL });
        assert!(piece.lines.len() <= MAX_ANSWER);
        seen.extend(piece.lines.iter().map(|line| line.number));
        from = piece.next;
    }
    assert_eq!(seen, (0..1200).collect::<Vec<_>>());
    assert_eq!(from, 1200);
}

#[test]
fn what_is_kept_is_bounded_and_events_outlive_floods() {
    let mut book = book(&["13,0,5000000,-;holdfast: event=init-ready ms=41"]);
    let text = "x".repeat(900);
    for number in 1..20_000 {
        book.handle_record(format!("6,{number},0,-;{text}").as_bytes());
    }
    let oldest = book.logs(ALL).oldest;
    let kept = 20_000 - oldest;
    assert!(kept <= MAX_LINES as u64 && kept * 900 <= MAX_BYTES as u64, "{kept}");
    assert!(kept * 900 > MAX_BYTES as u64 / 2, "{kept}");
    assert_eq!(book.events(0).events.len(), 1);
    assert_eq!(book.phases()[0].at_ms, 5000);
    let kernel = book.counts().find(|(source, ..)| *source == LogSource::Kernel);
    assert_eq!(kernel, Some((LogSource::Kernel, Level::Info, 19_999)));
}

#[test]
fn a_phase_is_the_first_of_its_kind_and_watchdogs_are_listed() {
    let book = book(&[
        "13,1,1000000,-;holdfast: event=agent-started pid=7 starts=1",
        "13,2,2000000,-;holdfast: event=watchdog-armed device=\"Software Watchdog\" timeout_s=60",
        "13,3,9000000,-;holdfast: event=agent-started pid=9 starts=2",
    ]);
    let phases = book.phases();
    assert_eq!((phases[0].name.as_str(), phases[0].at_ms), ("agent-started", 1000));
    assert_eq!(phases.len(), 1);
    assert_eq!(book.agent_starts(), Some(2));
    let watchdogs = book.watchdogs();
    assert_eq!((watchdogs[0].name.as_str(), watchdogs[0].timeout_s), ("Software Watchdog", 60));
}

#[test]
fn records_that_come_again_are_not_kept_twice() {
    let book = book(&["6,5,0,-;a", "6,5,0,-;a", "6,4,0,-;b"]);
    assert_eq!(book.logs(ALL).lines.len(), 1);
}

#[tokio::test]
async fn a_log_that_cannot_be_read_says_so() {
    let (logs, reader) = Logs::new();
    reader.start(Path::new("/nonexistent/kmsg"));
    let errors = logs.book().errors(1);
    assert!(errors[0].text.contains("/nonexistent/kmsg"), "{errors:?}");
}
