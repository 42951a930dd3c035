//! Replays the corpora of the ports' fuzz targets, and a few thousand random cases of each.

#[path = "../fuzz/port_cases.rs"]
mod cases;

use proptest::prelude::*;

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
fn slots_survive_their_guests() {
    replay("port_slot", cases::slot);
}

#[test]
fn trees_are_survived() {
    replay("port_tree", cases::tree);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn slots_survive_random_guests(
        steps in proptest::collection::vec((0u8..8, any::<u8>(), any::<u16>()), 0..64),
    ) {
        let bytes: Vec<u8> =
            steps.iter().flat_map(|(a, b, c)| [*a, *b, c.to_le_bytes()[0], c.to_le_bytes()[1]]).collect();
        cases::slot(&bytes);
    }

    #[test]
    fn random_trees_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        cases::tree(&bytes);
    }
}
