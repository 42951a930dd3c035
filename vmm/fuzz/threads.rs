//! Threads of devices, for which nobody waits: they end by themselves. To a sanitizer one that begins or ends
//! looks like a leak.

use std::{fs, thread, time::Duration};

/// Does `work`, and waits until there are no more threads than before.
pub fn alone(work: impl FnOnce()) {
    let before = count();
    work();
    while count() > before {
        thread::sleep(Duration::from_micros(50));
    }
}

fn count() -> usize {
    fs::read_dir("/proc/self/task").expect("threads").count()
}
