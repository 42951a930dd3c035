//! A whole passed-through device, hostile on both sides.
#![no_main]

#[path = "../assigned_case.rs"]
mod case;

use std::{fs, time::Duration};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    case::run(bytes);
    // Nobody waits for a device's thread, which ends by itself: to a sanitizer one that is about to end looks
    // like a leak.
    while resets() {
        std::thread::sleep(Duration::from_micros(50));
    }
});

/// Returns whether a thread is there that resets a device.
fn resets() -> bool {
    let threads = fs::read_dir("/proc/self/task").expect("threads");
    let mut names = threads.flatten().map(|thread| fs::read(thread.path().join("comm")));
    names.any(|name| name.is_ok_and(|name| name.starts_with(b"reset ")))
}
