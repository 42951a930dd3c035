//! A storage device that somebody put into the server: what is it labelled?
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some((_, label))) = agent::config::labels::read(std::io::Cursor::new(bytes)) {
        assert!(label.len() <= 3 * bytes.len());
    }
});
