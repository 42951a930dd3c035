//! Start and end of a machine, as all its threads see them.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use types::{operations::VmEventKind, vm::exit};

/// Kinds of ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The guest powered off, or somebody stopped it.
    PoweredOff,
    /// The guest wants to start anew.
    Reset,
    /// The guest did something that has no meaning.
    GuestFault,
    /// The host failed under the guest.
    HostFault,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// What kind of ending it is.
    pub kind: Kind,
    /// What happened, for the log.
    pub reason: String,
}

impl Ending {
    /// Ends by the guest's fault.
    pub fn guest_fault(reason: impl Into<String>) -> Self {
        Self { kind: Kind::GuestFault, reason: reason.into() }
    }

    /// Ends by the host's fault.
    pub fn host_fault(reason: impl Into<String>) -> Self {
        Self { kind: Kind::HostFault, reason: reason.into() }
    }

    /// Returns the event that stands for this ending.
    pub fn event(&self) -> VmEventKind {
        match self.kind {
            Kind::PoweredOff | Kind::GuestFault | Kind::HostFault => VmEventKind::Stopped,
            Kind::Reset => VmEventKind::Reset,
        }
    }

    /// Returns the exit status that stands for this ending.
    pub fn status(&self) -> i32 {
        match self.kind {
            Kind::PoweredOff => exit::POWERED_OFF,
            Kind::Reset => exit::RESET,
            Kind::GuestFault => exit::GUEST_FAULT,
            Kind::HostFault => exit::HOST_FAULT,
        }
    }
}

/// Shared by all threads.
#[derive(Default)]
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
    ended: AtomicBool,
}

#[derive(Default)]
struct State {
    started: bool,
    ending: Option<Ending>,
}

impl Control {
    /// Lets threads that wait for the start go.
    pub fn start(&self) {
        self.state().started = true;
        self.changed.notify_all();
    }

    /// Waits for [`Self::start`], or for the end.
    pub fn wait_for_start(&self) {
        let state = self.state();
        let waiting = |state: &mut State| !state.started && state.ending.is_none();
        drop(self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the machine. The first ending counts.
    pub fn end(&self, ending: Ending) {
        self.state().ending.get_or_insert(ending);
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Returns whether the machine is ending.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns whether the machine runs.
    pub fn is_started(&self) -> bool {
        self.state().started
    }

    /// Waits for the end, but no longer than `limit`.
    pub fn wait(&self, limit: Duration) -> Option<Ending> {
        let going_on = |state: &mut State| state.ending.is_none();
        let waited = self.changed.wait_timeout_while(self.state(), limit, going_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.ending.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ending_counts() {
        let control = Control::default();
        assert_eq!(control.wait(Duration::ZERO), None);
        control.end(Ending { kind: Kind::Reset, reason: String::new() });
        control.end(Ending::host_fault("later"));
        control.wait_for_start();
        let ending = control.wait(Duration::MAX).expect("it ended");
        assert_eq!(ending.status(), exit::RESET);
    }
}
