//! Holding virtual CPUs: they leave the guest, show their registers and wait.
//!
//! Somebody who wants them to wait is a [`Holder`]; they go on when the last one has let go. What a
//! virtual CPU does on its way in and out is in `vcpu`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{sys::signal::Thread, vcpu::Registers};

/// How often virtual CPUs that are still in the guest are interrupted.
const KICK_EVERY: Duration = Duration::from_millis(10);

/// Who wants virtual CPUs to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// `POST /v1/pause`, until `POST /v1/resume`.
    Request,
    /// A dump of guest memory, while it is read.
    Dump,
}

/// Why virtual CPUs do not wait.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum HoldError {
    #[error("it is being done already")]
    Held,
    #[error("virtual CPU {id} did not leave the guest within {limit_ms} ms")]
    Late { id: u32, limit_ms: u128 },
    #[error("a device did not finish its work within {limit_ms} ms")]
    Devices { limit_ms: u128 },
    #[error("the guest's power button was pressed meanwhile")]
    Cut,
    #[error("the machine is ending")]
    Ended,
}

/// The virtual CPUs of a machine, as somebody sees them who wants them to wait.
#[derive(Debug, Default)]
pub struct Pauses {
    state: Mutex<State>,
    changed: Condvar,
    wanted: AtomicBool,
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    holders: BTreeSet<Holder>,
    /// Threads that run virtual CPUs, by the CPU's number.
    threads: BTreeMap<u32, Thread>,
    /// What those that wait were doing.
    parked: BTreeMap<u32, Registers>,
}

impl Pauses {
    /// The calling thread runs virtual CPU `id` from now on.
    pub fn enlist(&self, id: u32) {
        self.state().threads.insert(id, Thread::current());
    }

    /// Returns whether virtual CPUs should come to [`Self::park`].
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// Returns whether `holder` holds.
    pub fn is_held_by(&self, holder: Holder) -> bool {
        self.state().holders.contains(&holder)
    }

    /// Returns how many hold.
    pub fn holders(&self) -> usize {
        self.state().holders.len()
    }

    /// Waits, as virtual CPU `id` with `registers`, until nobody holds or the machine ends.
    pub fn park(&self, id: u32, registers: Registers) {
        let mut state = self.state();
        state.parked.insert(id, registers);
        self.changed.notify_all();
        let waiting = |state: &mut State| !state.holders.is_empty() && !self.is_ended();
        let mut state =
            self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
        state.parked.remove(&id);
    }

    /// Makes all virtual CPUs wait, and returns when they do.
    pub fn hold(&self, holder: Holder, limit: Duration) -> Result<(), HoldError> {
        let mut state = self.state();
        if !state.holders.insert(holder) {
            return Err(HoldError::Held);
        }
        self.wanted.store(true, Ordering::Release);
        let deadline = Instant::now() + limit;
        loop {
            let late = state.threads.keys().find(|id| !state.parked.contains_key(id)).copied();
            let Some(id) = late else { return Ok(()) };
            let error = if self.is_ended() {
                HoldError::Ended
            } else if Instant::now() >= deadline {
                HoldError::Late { id, limit_ms: limit.as_millis() }
            } else {
                for (id, thread) in &state.threads {
                    if !state.parked.contains_key(id) {
                        thread.kick();
                    }
                }
                let wait = self.changed.wait_timeout(state, KICK_EVERY);
                (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            self.release(holder);
            return Err(error);
        }
    }

    /// Lets virtual CPUs go on as far as `holder` is concerned. Returns whether it held.
    pub fn release(&self, holder: Holder) -> bool {
        let mut state = self.state();
        let held = state.holders.remove(&holder);
        self.wanted.store(!state.holders.is_empty(), Ordering::Release);
        drop(state);
        self.changed.notify_all();
        held
    }

    /// Returns the registers of the virtual CPUs that wait, in order.
    pub fn registers(&self) -> Vec<Registers> {
        self.state().parked.values().cloned().collect()
    }

    /// The machine ends: nobody waits any more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        // Whoever looked before the store waits by the time the lock is free.
        drop(self.state());
        self.changed.notify_all();
    }

    fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, atomic::AtomicU64},
        thread,
    };

    use super::*;

    /// A thread that counts until the end, and parks when asked, as a virtual CPU does.
    fn counting(pauses: &Arc<Pauses>, count: &Arc<AtomicU64>) -> thread::JoinHandle<()> {
        let (pauses, count) = (Arc::clone(pauses), Arc::clone(count));
        crate::sys::signal::catch_kicks().expect("a handler");
        thread::spawn(move || {
            pauses.enlist(0);
            while !pauses.is_ended() {
                if pauses.is_wanted() {
                    pauses.park(0, Registers::default());
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
    }

    fn started(count: &AtomicU64) {
        while count.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn they_wait_until_the_last_holder_lets_go() {
        let (pauses, count) = (Arc::new(Pauses::default()), Arc::new(AtomicU64::new(0)));
        let thread = counting(&pauses, &count);
        started(&count);
        pauses.hold(Holder::Request, Duration::from_secs(20)).expect("it parks");
        pauses.hold(Holder::Dump, Duration::from_secs(20)).expect("it is parked");
        assert_eq!(pauses.hold(Holder::Dump, Duration::ZERO), Err(HoldError::Held));
        assert_eq!(pauses.registers().len(), 1);
        let before = count.load(Ordering::Relaxed);
        assert!(pauses.release(Holder::Dump));
        thread::sleep(Duration::from_millis(20));
        assert_eq!(count.load(Ordering::Relaxed), before);
        assert!(pauses.release(Holder::Request) && !pauses.release(Holder::Request));
        while count.load(Ordering::Relaxed) == before {
            thread::yield_now();
        }
        pauses.end();
        thread.join().expect("it ends");
    }

    #[test]
    fn the_end_frees_those_who_wait() {
        let (pauses, count) = (Arc::new(Pauses::default()), Arc::new(AtomicU64::new(0)));
        let thread = counting(&pauses, &count);
        started(&count);
        pauses.hold(Holder::Request, Duration::from_secs(20)).expect("it parks");
        pauses.end();
        thread.join().expect("it ends");
    }

    #[test]
    fn one_that_does_not_come_is_told_and_nobody_holds() {
        let pauses = Pauses::default();
        crate::sys::signal::catch_kicks().expect("a handler");
        pauses.enlist(3);
        let limit = Duration::from_millis(30);
        let late = HoldError::Late { id: 3, limit_ms: 30 };
        assert_eq!(pauses.hold(Holder::Request, limit), Err(late));
        assert!(!pauses.is_wanted() && !pauses.is_held_by(Holder::Request));
    }
}
