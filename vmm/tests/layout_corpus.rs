//! Replays the corpus of the address map's fuzz target.

#[path = "../fuzz/layout_case.rs"]
mod case;

#[test]
fn the_corpus_is_survived() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/layout");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is in the repository") {
        case::run(&std::fs::read(entry.expect("an entry").path()).expect("a file"));
        files += 1;
    }
    assert!(files >= 6, "{files} files in {corpus}");
}
