//! A file system that is said to be clean, and that whoever had the disk can have written.
#![no_main]

use std::time::{Duration, Instant};

#[path = "../sparse.rs"]
mod sparse;

use agent::seal::{
    glance::{Budget, glance},
    inodes::settle,
};

libfuzzer_sys::fuzz_target!(|records: &[u8]| {
    let volume = sparse::Sparse::new(records);
    let budget = Budget { until: Instant::now() + Duration::from_secs(5), bytes: 8 << 20 };
    // Whatever it is, it ends, and says the same again.
    assert_eq!(glance(&volume, budget), glance(&volume, budget));
    // And whatever it is, its inodes can be looked at, as they are behind e2fsck.
    let _ = settle(&volume, budget.until);
});
