//! A storage device that somebody put into the server: is there a configuration on it?
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some(document)) = agent::config::read_document(std::io::Cursor::new(bytes)) {
        let _ = types::config::NodeSpec::parse(&document);
    }
});
