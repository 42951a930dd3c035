//! Replays the fuzz corpora of the log, of devices' product data, of firmware's console, of drives' answers, and of
//! guests' readings.

use std::{fs, path::Path};

use agent::{
    assign::erase::nvme::{self, Method},
    gpu::show,
    init::serial::{self, Line, Place},
    inventory::facts,
    local::exposition::Exposition,
    logs::book::{Book, Filter},
};
use types::{gpu::GpuReading, logs::Level};

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let entries = fs::read_dir(folder).expect("the corpus is committed");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read(path).expect("a file"))
        })
        .collect();
    files.sort();
    files
}

#[test]
fn every_record_of_the_corpus_is_kept_or_ignored() {
    let all = Filter { from: 0, level: Level::Debug, source: None };
    let kept = |bytes: &[u8]| {
        let mut book = Book::default();
        bytes.split(|byte| *byte == 0).for_each(|record| book.handle_record(record));
        let lines = book.logs(all).lines;
        assert!(lines.iter().all(|line| !line.text.chars().any(char::is_control)), "{lines:?}");
        (lines.len(), book.events(0).events.len())
    };
    let found: Vec<_> =
        corpus("kmsg").into_iter().map(|(name, bytes)| (name, kept(&bytes))).collect();
    let named = |name: &str| found.iter().find(|(found, _)| found == name).map(|(_, kept)| *kept);
    assert_eq!(named("kernel"), Some((1, 0)));
    assert_eq!(named("event"), Some((1, 1)));
    assert_eq!(named("no-record"), Some((0, 0)));
    assert_eq!(named("watchdog"), Some((2, 2)));
    assert_eq!(named("escaped"), Some((2, 1)));
}

#[test]
fn every_product_data_of_the_corpus_is_read_as_far_as_it_goes() {
    let found: Vec<_> =
        corpus("vpd").into_iter().map(|(name, bytes)| (name, facts::words(&bytes))).collect();
    let named = |name: &str| found.iter().find(|(found, _)| found == name).map(|(_, words)| words);
    let good = (Some("H200".to_owned()), Some("1234567".to_owned()));
    assert_eq!(named("good"), Some(&good));
    let printable = (Some("[2Jab".to_owned()), None);
    assert_eq!(named("control"), Some(&printable));
    assert_eq!(named("keyword-past-end"), Some(&(None, None)));
}

#[test]
fn every_table_of_the_corpus_is_read_or_is_nothing() {
    let found: Vec<_> =
        corpus("spcr").into_iter().map(|(name, bytes)| (name, serial::parse(&bytes))).collect();
    let named = |name: &str| found.iter().find(|(found, _)| found == name).map(|(_, line)| *line);
    let line = |place, speed| Some(Some(Line { place, speed }));
    assert_eq!(named("port"), line(Place::Port(0x2f8), Some(115_200)));
    assert_eq!(named("memory"), line(Place::Memory(0xfedc_9000), None));
    assert_eq!(named("in-full"), line(Place::Port(0x3f8), Some(921_600)));
    assert_eq!(named("in-full-cut"), line(Place::Port(0x3f8), Some(115_200)));
    assert_eq!(named("none"), Some(None));
    assert_eq!(named("short"), Some(None));
}

#[test]
fn every_answer_of_the_corpus_is_read_or_refused() {
    let found: Vec<_> = corpus("nvme_answer")
        .into_iter()
        .map(|(name, bytes)| (name, nvme::everything(&bytes)))
        .collect();
    let named = |name: &str| {
        let (_, (method, formats)) = found.iter().find(|(found, _)| found == name)?;
        Some((method.map(Method::name), *formats))
    };
    assert_eq!(named("controller"), Some((Some("sanitize-crypto-erase"), 0)));
    assert_eq!(named("formats"), Some((Some("format-user-data-erase"), 0)));
    assert_eq!(named("list"), Some((None, 3)));
    // Its numbers, read as a controller's data, say that it can be sanitized.
    assert_eq!(named("list-full").map(|(_, namespaces)| namespaces), Some(0));
    assert_eq!(named("cut-short"), Some((None, 0)));
}

#[test]
fn every_reading_of_the_corpus_is_taken_or_refused() {
    let read = |(name, bytes): (String, Vec<u8>)| {
        let lines = GpuReading::parse(&bytes).ok().map(|reading| {
            let mut out = Exposition::default();
            show::metrics(&mut out, &[show::Told { machine: "", reading: &reading }]);
            assert!(!out.finish().contains('\u{1b}'));
            show::lines(&reading)
        });
        (name, lines)
    };
    let found: Vec<_> = corpus("gpu_reading").into_iter().map(read).collect();
    let taken: Vec<_> =
        found.iter().filter(|(_, lines)| lines.is_some()).map(|(name, _)| name.as_str()).collect();
    // What a later release adds keeps nothing out.
    assert_eq!(taken, ["empty", "good", "hostile-name", "largest", "unknown-field"]);
}
