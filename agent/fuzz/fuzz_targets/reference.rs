//! What a DHCP server, or whoever writes a kernel's command line, says where the configuration is.
#![no_main]

use agent::config::reference::{Facts, Reference};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(named) = Reference::parse(bytes) else { return };
    // What was accepted is one line, and stays a URL of the same server whatever firmware says.
    assert!(named.to_string().chars().all(|c| !c.is_control()));
    let facts = Facts { mac: "../@".into(), serial: String::from_utf8_lossy(bytes).into_owned() };
    let url = named.url(&facts);
    assert!(url.starts_with("http://") || url.starts_with("https://"));
    assert!(url.is_ascii() && !url.contains(['@', ' ', '#']));
});
