//! Start and end of a machine, as all its threads see them.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use types::{
    operations::VmEventKind,
    vm::{Deadline, exit},
};

use super::deadline::{Press, Timer};
use crate::sys::clock::boot_ms;

/// Longest sleep until a deadline is looked at again: what a sleep is counted by stands still while the
/// host sleeps, and deadlines do not.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

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
    /// Its deadline passed.
    Deadline,
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

    fn deadline() -> Self {
        let reason = "its deadline passed, which nobody had put off".to_owned();
        Self { kind: Kind::Deadline, reason }
    }

    /// Returns the ending of a machine that left `failures` devices behind which did not come back.
    /// Its kind stays: who starts the next machine with them resets them first, and refuses one that
    /// does not answer.
    #[must_use]
    pub fn despite(mut self, failures: usize) -> Self {
        if failures > 0 {
            self.reason = format!("{}; {failures} devices did not come back", self.reason);
        }
        self
    }

    /// Returns the event that stands for this ending.
    pub fn event(&self) -> VmEventKind {
        match self.kind {
            Kind::PoweredOff | Kind::GuestFault | Kind::HostFault | Kind::Deadline => {
                VmEventKind::Stopped
            }
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
            Kind::Deadline => exit::DEADLINE,
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
    timer: Timer,
}

/// The machine is ending, and that cannot be put off.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine is ending")]
pub struct EndingError;

/// What came first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// The power button is due.
    Press(Press),
    /// The machine ends.
    End,
}

impl Control {
    /// Starts with a deadline, or with none.
    pub fn new(deadline: Option<Deadline>) -> Self {
        let state = State { timer: Timer::new(deadline), ..State::default() };
        Self { state: Mutex::new(state), ..Self::default() }
    }

    /// Lets threads that wait for the start go. When the deadline has passed, they go to the end.
    pub fn start(&self) {
        let mut state = self.state();
        self.judge(&mut state);
        state.started = true;
        drop(state);
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

    /// Waits for the end, which is the deadline at the latest, but no longer than `limit`.
    pub fn wait(&self, limit: Duration) -> Option<Ending> {
        let begin = Instant::now();
        let mut state = self.state();
        loop {
            let left = self.judge(&mut state);
            if state.ending.is_some() {
                return state.ending.clone();
            }
            let rest = limit.saturating_sub(begin.elapsed());
            if rest.is_zero() {
                return None;
            }
            state = self.sleep(state, Some(left.map_or(rest, |left| left.min(rest))));
        }
    }

    /// Returns the deadline, if there is one.
    pub fn deadline(&self) -> Option<Deadline> {
        self.state().timer.deadline()
    }

    /// Replaces the deadline.
    pub fn set_deadline(&self, deadline: Deadline) -> Result<(), EndingError> {
        let mut state = self.state();
        self.judge(&mut state);
        if state.ending.is_some() {
            return Err(EndingError);
        }
        state.timer.set(deadline);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that the guest's power button was pressed.
    pub fn note_press(&self) {
        self.state().timer.handle_pressed(boot_ms());
    }

    /// Waits until the power button is due because the deadline is near, and notes that it is pressed.
    pub fn wait_for_press(&self) -> First {
        let mut state = self.state();
        while state.ending.is_none() {
            let now_ms = boot_ms();
            let left = state.timer.until_press(now_ms);
            if left == Some(Duration::ZERO) {
                return First::Press(state.timer.handle_due(now_ms));
            }
            state = self.sleep(state, left);
        }
        First::End
    }

    /// Ends the machine if its deadline has passed. Returns how long it has until then.
    fn judge(&self, state: &mut State) -> Option<Duration> {
        let left = state.timer.until_end(boot_ms())?;
        if left.is_zero() {
            state.ending.get_or_insert_with(Ending::deadline);
            self.ended.store(true, Ordering::Release);
            self.changed.notify_all();
        }
        Some(left)
    }

    /// Waits for a change, and no longer than `most`.
    fn sleep<'a>(
        &self,
        state: MutexGuard<'a, State>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        let Some(most) = most else {
            return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let slept = self.changed.wait_timeout(state, most.min(LONGEST_SLEEP));
        slept.unwrap_or_else(PoisonError::into_inner).0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that starts anew does so, whatever became of its devices.
    #[test]
    fn devices_that_do_not_come_back_change_no_kind_of_ending() {
        for kind in [Kind::Reset, Kind::PoweredOff, Kind::Deadline] {
            let ending = Ending { kind, reason: "the end".to_owned() };
            assert_eq!(ending.clone().despite(0), ending);
            let reason = "the end; 2 devices did not come back".to_owned();
            assert_eq!(ending.despite(2), Ending { kind, reason });
        }
    }

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

    fn within(ms: u64, grace_ms: u64) -> Deadline {
        Deadline { at_boot_ms: boot_ms() + ms, grace_ms }
    }

    #[test]
    fn a_deadline_ends_the_machine_and_not_before() {
        let deadline = within(300, 250);
        let control = Control::new(Some(deadline));
        control.start();
        assert!(!control.is_ended());
        assert_eq!(control.wait_for_press(), First::Press(Press::First));
        assert!(boot_ms() + 250 >= deadline.at_boot_ms);
        let ending = control.wait(Duration::MAX).expect("it ended");
        assert_eq!(ending.status(), exit::DEADLINE);
        assert!(boot_ms() >= deadline.at_boot_ms);
        assert_eq!(control.wait_for_press(), First::End);
        assert_eq!(control.set_deadline(within(60_000, 0)), Err(EndingError));
    }

    #[test]
    fn one_that_is_put_off_ends_nothing_and_one_that_comes_nearer_does_at_once() {
        let begin = boot_ms();
        let control = Control::new(Some(within(10_000, 0)));
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| control.wait(Duration::MAX));
            control.set_deadline(within(600_000, 0)).expect("it runs");
            assert!(!control.is_ended());
            control.set_deadline(within(0, 0)).expect("it runs still");
            let ending = ending.join().expect("nothing panics").expect("it ends");
            assert_eq!(ending.kind, Kind::Deadline);
        });
        assert!(boot_ms() < begin + 10_000, "nobody was woken");
    }

    #[test]
    fn what_was_built_too_late_never_runs() {
        let control = Control::new(Some(within(0, 0)));
        control.start();
        control.wait_for_start();
        assert!(control.is_ended());
    }
}
