//! The one place where ended children are collected. Nothing else in PID 1 may wait for a child.

use rustix::process::{Pid, WaitOptions};

use crate::spawn::Ending;

/// Most children collected in one go, so that a storm of them cannot keep init from its loop.
const MAX_PER_TURN: usize = 256;

/// Collects the children, in whatever process group they are, that have ended, adopted orphans included.
pub fn collect() -> Vec<(Pid, Ending)> {
    let mut ended = Vec::new();
    while ended.len() < MAX_PER_TURN {
        let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) else {
            break;
        };
        let ending = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Ending::Exit { code },
            (None, Some(number)) => Ending::Signal { number },
            (None, None) => continue,
        };
        ended.push((pid, ending));
    }
    ended
}
