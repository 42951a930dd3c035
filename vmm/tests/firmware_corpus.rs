//! Replays the corpora of the fuzz targets of what firmware talks to.

#[path = "../fuzz/firmware_cases.rs"]
mod cases;

fn replay(target: &str, case: fn(&[u8])) {
    let corpus = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(&corpus).expect("the corpus is in the repository");
    let files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    assert!(files.len() >= 6, "{} files in {corpus}", files.len());
    for file in files {
        case(&std::fs::read(file).expect("a file"));
    }
}

#[test]
fn requests_of_firmware_are_survived() {
    replay("fw_cfg", cases::fw_cfg);
}

#[test]
fn notes_of_guests_are_survived() {
    replay("vmcoreinfo", cases::vmcoreinfo);
}

#[test]
fn commands_to_the_flash_chip_are_survived() {
    replay("flash", cases::flash);
}

#[test]
fn accesses_to_the_clock_are_survived() {
    replay("clock", cases::clock);
}
