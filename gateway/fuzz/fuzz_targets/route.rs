//! Method and path of a request, with a line feed between them.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (method, path) = text.split_once('\n').unwrap_or((text, ""));
    let _ = gateway::api::routes::route(method, path);
});
