//! A whole passed-through device, hostile on both sides.
#![no_main]

#[path = "../assigned_case.rs"]
mod case;

use std::{fs, time::Duration};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let before = threads();
    case::run(bytes);
    // Nobody waits for a device's thread, which ends by itself: to a sanitizer one that begins or ends looks like
    // a leak.
    while threads() > before {
        std::thread::sleep(Duration::from_micros(50));
    }
});

fn threads() -> usize {
    fs::read_dir("/proc/self/task").expect("threads").count()
}
