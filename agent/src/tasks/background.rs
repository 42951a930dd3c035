//! Long work that nobody waits for: it leaves the processors to whatever serves.

use std::thread;

use rustix::process::nice;
use tokio::sync::oneshot;

/// How much less than others its thread counts: as little as there is (sched(7), "The nice value"; Linux
/// keeps it for each thread).
const LEAST: i32 = 19;

/// Runs `work` on a thread of its own, which has a processor when little else wants it, and returns what
/// it returns.
///
/// # Panics
///
/// When `work` does, or the kernel has no thread to give.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = oneshot::channel();
    thread::spawn(move || {
        if let Err(error) = nice(LEAST) {
            tracing::debug!(%error, "background work has the same priority as any other");
        }
        // Whoever asked may be gone.
        let _ = tell.send(work());
    });
    told.await.expect("the thread ends by telling, unless the work panicked")
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn it_counts_least_and_nothing_else_does() {
        let own = || getpriority_process(None).expect("always there");
        let before = own();
        assert_eq!(run(own).await, LEAST);
        assert_eq!(own(), before);
    }
}
