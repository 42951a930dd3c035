//! Replays the corpora of the core's fuzz targets.

#[path = "../fuzz/core_cases.rs"]
mod cases;

fn replay(target: &str, case: fn(&[u8])) {
    let corpus = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(&corpus).expect("the corpus is in the repository");
    let files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    assert!(files.len() >= 8, "{} files in {corpus}", files.len());
    for file in files {
        case(&std::fs::read(file).expect("a file"));
    }
}

#[test]
fn specifications_are_survived() {
    replay("spec", cases::specification);
}

#[test]
fn kernel_images_are_survived() {
    replay("kernel", cases::kernel);
}

#[test]
fn requests_are_survived() {
    replay("http", cases::request);
}

#[test]
fn ports_are_survived() {
    replay("ports", cases::ports);
}

#[test]
fn accesses_are_survived() {
    replay("pci", cases::accesses);
}
