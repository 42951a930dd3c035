//! Replays the corpus of the I/O APIC's fuzz target.

#[path = "../fuzz/ioapic_case.rs"]
mod cases;

use proptest::prelude::*;

#[test]
fn registers_pins_and_ends_are_survived() {
    let corpus = format!("{}/fuzz/corpus/ioapic", env!("CARGO_MANIFEST_DIR"));
    let entries = std::fs::read_dir(&corpus).expect("the corpus is in the repository");
    let files: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    assert!(files.len() >= 8, "{} files in {corpus}", files.len());
    for file in files {
        cases::ioapic(&std::fs::read(file).expect("a file"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_guests_are_survived(
        steps in proptest::collection::vec((0u8..5, 0u8..0x42, any::<u32>()), 0..96),
    ) {
        let step = |(what, at, value): &(u8, u8, u32)| {
            let mut bytes = vec![*what, *at];
            // Few vectors, so that they meet.
            bytes.extend((value & !0xf8).to_le_bytes());
            bytes
        };
        cases::ioapic(&steps.iter().flat_map(step).collect::<Vec<_>>());
    }
}
