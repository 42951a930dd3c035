//! Requests that wait for something new: how many may at the same time, and until when each does. Each
//! holds a thread while it waits, and the other threads answer what cannot wait.
//!
//! A wait is made of slices, between which it looks whether its client is there.
//! Source: poll(2), POLLHUP; unix(7). A client that only ends what it sends (shutdown(2), SHUT_WR) is
//! there.

use std::{
    os::unix::net::UnixStream,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};

/// Requests that may wait for something new at the same time.
pub(super) const MOST: usize = 12;
/// Devices that may be attached and detached at the same time: those of every port that a machine can have.
pub(super) const MOST_PLUGS: usize = 16;
/// How long a client that is gone holds a thread.
const SLICE: Duration = Duration::from_millis(250);

/// How many wait.
#[derive(Debug)]
pub(super) struct Waits {
    waiting: AtomicUsize,
    most: usize,
}

/// A place among those that wait, until it is dropped.
struct Place<'a>(&'a Waits);

impl Waits {
    pub(super) fn up_to(most: usize) -> Self {
        Self { waiting: AtomicUsize::new(0), most }
    }

    fn take(&self) -> Option<Place<'_>> {
        let more = |waiting: usize| (waiting < self.most).then_some(waiting + 1);
        let taken = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Place(self))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whoever asks, and may wait for an answer.
pub struct Client<'a> {
    stream: &'a UnixStream,
    waits: &'a Waits,
    plugs: &'a Waits,
}

impl<'a> Client<'a> {
    pub(super) fn new(stream: &'a UnixStream, waits: &'a Waits, plugs: &'a Waits) -> Self {
        Self { stream, waits, plugs }
    }

    /// Returns what `act` does with a device, which may last; it is told whether the client is gone. `None` when
    /// [`MOST_PLUGS`] are at that already.
    pub(super) fn plug<T>(&self, act: impl FnOnce(&dyn Fn() -> bool) -> T) -> Option<T> {
        let _place = self.plugs.take()?;
        Some(act(&|| self.is_gone()))
    }

    /// Returns what `read`, which waits as long as it is told, returns first that is new. Returns what there
    /// is when `wait` is over, when the client is gone, and at once when [`MOST`] wait already.
    pub(super) fn wait<T>(
        &self,
        wait: Duration,
        mut read: impl FnMut(Duration) -> T,
        is_new: impl Fn(&T) -> bool,
    ) -> T {
        let place = if wait.is_zero() { None } else { self.waits.take() };
        let Some(_place) = place else { return read(Duration::ZERO) };
        let deadline = Instant::now() + wait;
        loop {
            if self.is_gone() {
                return read(Duration::ZERO);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let found = read(left.min(SLICE));
            if is_new(&found) || left <= SLICE {
                return found;
            }
        }
    }

    /// Returns whether nobody reads the answer.
    fn is_gone(&self) -> bool {
        // A hang-up is told without being asked for.
        let mut polled = [PollFd::new(self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let told = rustix::event::poll(&mut polled, Some(&now));
        told.is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    /// Waits for what never comes; before each read but the first, `meanwhile` happens. Returns how long
    /// each read was to wait.
    fn reads(client: &Client<'_>, mut meanwhile: impl FnMut(usize)) -> Vec<Duration> {
        let mut reads = Vec::new();
        let read = |slice| {
            reads.push(slice);
            meanwhile(reads.len());
        };
        client.wait(LONG, read, |()| false);
        reads
    }

    #[test]
    fn a_client_that_is_gone_is_not_waited_for() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let (waits, plugs) = (Waits::up_to(MOST), Waits::up_to(1));
        let client = Client::new(&near, &waits, &plugs);
        far.shutdown(Shutdown::Write).expect("shut down");
        let mut far = Some(far);
        // It has said all, and reads on for two slices.
        let hang_up = |read| drop((read == 2).then(|| far.take()));
        assert_eq!(reads(&client, hang_up), [SLICE, SLICE, Duration::ZERO]);
        assert_eq!(reads(&client, |_| {}), [Duration::ZERO], "it was gone before");
        assert_eq!(waits.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_new_ends_a_wait_and_so_does_its_time() {
        let (near, _far) = UnixStream::pair().expect("a pair");
        let (waits, plugs) = (Waits::up_to(MOST), Waits::up_to(1));
        let client = Client::new(&near, &waits, &plugs);
        let mut count = 0;
        let read = |_| {
            count += 1;
            count
        };
        assert_eq!(client.wait(LONG, read, |count| *count == 3), 3);
        let short = SLICE / 2;
        let over = client.wait(short, |slice| slice, |_| false);
        assert!(!over.is_zero() && over <= short, "{over:?}");
        assert_eq!(client.wait(Duration::ZERO, |slice| slice, |_| false), Duration::ZERO);
    }

    #[test]
    fn one_too_many_does_not_wait() {
        let (near, _far) = UnixStream::pair().expect("a pair");
        let (waits, plugs) = (Waits::up_to(MOST), Waits::up_to(1));
        let client = Client::new(&near, &waits, &plugs);
        let mut places: Vec<_> = std::iter::from_fn(|| waits.take()).collect();
        assert_eq!(places.len(), MOST);
        let first = |slice: &Duration| !slice.is_zero();
        assert_eq!(client.wait(LONG, |slice| slice, first), Duration::ZERO);
        places.pop();
        assert_eq!(client.wait(LONG, |slice| slice, first), SLICE);
    }

    #[test]
    fn one_too_many_is_not_plugged() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let (waits, plugs) = (Waits::up_to(MOST), Waits::up_to(1));
        let client = Client::new(&near, &waits, &plugs);
        let mut far = Some(far);
        let found = client.plug(|gone| {
            let second = client.plug(|_| ());
            let before = gone();
            far.take();
            (second, before, gone())
        });
        assert_eq!(found, Some((None, false, true)));
        assert_eq!(client.plug(|gone| gone()), Some(true));
    }
}
