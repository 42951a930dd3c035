//! Replays the corpora of the fuzz targets of a passed-through device and of the chipset, and some
//! thousand random cases of each.

#[path = "../fuzz/assigned_case.rs"]
mod assigned;
#[path = "../fuzz/chipset_case.rs"]
mod chipset;

use proptest::prelude::*;

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
fn devices_and_their_guests_are_survived() {
    replay("assigned", assigned::run);
}

#[test]
fn the_chipset_survives_its_guests() {
    replay("chipset", chipset::run);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_guests_of_a_device_are_survived(
        header in any::<[u8; 11]>(),
        patches in proptest::collection::vec(any::<[u8; 3]>(), 0..4),
        steps in proptest::collection::vec(any::<[u8; 8]>(), 0..48),
    ) {
        let count = u8::try_from(patches.len()).expect("few");
        let (patches, steps) = (patches.concat(), steps.concat());
        assigned::run(&[&header[..], &[count], &patches, &steps].concat());
    }

    #[test]
    fn random_guests_of_the_chipset_are_survived(
        steps in proptest::collection::vec(any::<[u8; 8]>(), 0..64),
    ) {
        chipset::run(&steps.concat());
    }
}
