//! What the fuzz target does with updates of firmware's keys; a test replays its corpus through it.

use update::secure_boot::{certificates, list, signatures_of, time, update};

/// An update, or a boot program: certificates that are read come out of an update that sets them again.
pub(crate) fn secure_boot(bytes: &[u8]) {
    if let Some(found) = certificates(bytes) {
        let content: Vec<u8> = found.iter().flat_map(|certificate| list(certificate)).collect();
        let again = update(&time(2026, [1; 5]), b"signature", &content);
        assert_eq!(certificates(&again), Some(found));
    }
    assert!(signatures_of(bytes).is_none_or(|table| !table.is_empty()));
}
