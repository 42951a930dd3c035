//! What the fuzz target and the replay of its corpus do with bytes that firmware has as a boot option.

use update::efi;

pub(crate) fn boot_option(bytes: &[u8]) {
    let Some(found) = efi::target(bytes) else { return };
    assert!(found.path.len() <= 3 * bytes.len());
    assert!(efi::description(bytes).is_none_or(|name| name.len() <= 3 * bytes.len()));
    // What firmware appends is not part of what is started.
    assert_eq!(efi::target(&[bytes, b"data"].concat()).as_ref(), Some(&found));
}
