//! The way down, in steps that each have a deadline. Pure: `serve` carries the steps out.

use std::time::{Duration, Instant};

use crate::spawn::Action;

/// Machines have this long after their power button was pressed.
pub const MACHINES_GRACE: Duration = Duration::from_secs(30);

/// Killed machines have this long to vanish: the kernel unpins their memory and resets devices.
pub const MACHINES_KILL: Duration = Duration::from_secs(10);

/// The agent has this long after SIGTERM: it closes its store and leaves the overlay.
pub const AGENT_GRACE: Duration = Duration::from_secs(5);

/// And this long after SIGKILL.
pub const AGENT_KILL: Duration = Duration::from_secs(2);

/// Writing everything to disk has this long.
pub const SYNC_LIMIT: Duration = Duration::from_secs(20);

// Feeding stops when the way down begins to take longer than all its steps, and the watchdog
// ends it.
const TOTAL: Duration = Duration::from_secs(30 + 10 + 5 + 2 + 20 + 30);

/// What is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Machines whose VMM runs.
    pub machines: usize,
    /// Whether the agent runs.
    pub agent: Presence,
}

/// Whether a process is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It runs.
    Running,
    /// It does not.
    Gone,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Tell the agent, which presses the machines' power buttons.
    TellAgent,
    /// Kill every machine.
    KillMachines,
    /// Ask the agent to end.
    TerminateAgent,
    /// End the agent.
    KillAgent,
    /// Write everything, unmount, and leave to the kernel.
    Finish,
}

/// The way down.
#[derive(Debug)]
pub struct Shutdown {
    action: Action,
    stage: Stage,
    deadline: Instant,
    give_up: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    MachinesAsked,
    MachinesKilled,
    AgentAsked,
    AgentKilled,
    Finished,
}

impl Shutdown {
    /// Begins.
    pub fn new(now: Instant, action: Action) -> Self {
        Self { action, stage: Stage::Begin, deadline: now, give_up: now + TOTAL }
    }

    /// Returns how the node goes down.
    pub fn action(&self) -> Action {
        self.action
    }

    /// Returns whether the watchdog is still to be fed.
    pub fn is_in_time(&self, now: Instant) -> bool {
        now < self.give_up
    }

    /// Returns when to look again at the latest.
    pub fn poll_timeout(&self) -> Instant {
        self.deadline
    }

    /// Returns the next step, if the present one is over.
    pub fn poll_step(&mut self, now: Instant, facts: Facts) -> Option<Step> {
        let late = now >= self.deadline;
        let (next, step, limit) = match self.stage {
            Stage::Begin if facts.machines > 0 && facts.agent == Presence::Running => {
                (Stage::MachinesAsked, Step::TellAgent, MACHINES_GRACE)
            }
            Stage::MachinesAsked
                if facts.machines > 0 && !late && facts.agent == Presence::Running =>
            {
                return None;
            }
            Stage::Begin | Stage::MachinesAsked if facts.machines > 0 => {
                (Stage::MachinesKilled, Step::KillMachines, MACHINES_KILL)
            }
            Stage::MachinesKilled if facts.machines > 0 && !late => return None,
            Stage::Begin | Stage::MachinesAsked | Stage::MachinesKilled
                if facts.agent == Presence::Running =>
            {
                (Stage::AgentAsked, Step::TerminateAgent, AGENT_GRACE)
            }
            Stage::AgentAsked if facts.agent == Presence::Running && late => {
                (Stage::AgentKilled, Step::KillAgent, AGENT_KILL)
            }
            Stage::AgentAsked | Stage::AgentKilled if facts.agent == Presence::Running && !late => {
                return None;
            }
            Stage::Finished => return None,
            Stage::Begin
            | Stage::MachinesAsked
            | Stage::MachinesKilled
            | Stage::AgentAsked
            | Stage::AgentKilled => (Stage::Finished, Step::Finish, Duration::ZERO),
        };
        self.stage = next;
        self.deadline = now + limit;
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Facts = Facts { machines: 2, agent: Presence::Running };

    #[test]
    fn everything_stuck_still_ends() {
        let mut now = Instant::now();
        let begin = now;
        let mut shutdown = Shutdown::new(now, Action::Reboot);
        let mut steps = Vec::new();
        for _ in 0..5 {
            steps.push(shutdown.poll_step(now, BUSY).expect("the deadline is over"));
            now = shutdown.poll_timeout();
        }
        let expected = [
            Step::TellAgent,
            Step::KillMachines,
            Step::TerminateAgent,
            Step::KillAgent,
            Step::Finish,
        ];
        assert_eq!(steps, expected);
        assert!(now - begin < Duration::from_secs(60));
        assert!(shutdown.is_in_time(now));
    }

    #[test]
    fn each_step_ends_as_soon_as_it_can() {
        let now = Instant::now();
        let mut shutdown = Shutdown::new(now, Action::PowerOff);
        assert_eq!(shutdown.poll_step(now, BUSY), Some(Step::TellAgent));
        assert_eq!(shutdown.poll_step(now, BUSY), None);
        let idle = Facts { machines: 0, agent: Presence::Running };
        assert_eq!(shutdown.poll_step(now, idle), Some(Step::TerminateAgent));
        let empty = Facts { machines: 0, agent: Presence::Gone };
        assert_eq!(shutdown.poll_step(now, empty), Some(Step::Finish));
        assert_eq!(shutdown.poll_step(now, empty), None);
    }

    #[test]
    fn machines_without_an_agent_are_not_waited_for() {
        let now = Instant::now();
        let mut shutdown = Shutdown::new(now, Action::PowerOff);
        let orphaned = Facts { machines: 1, agent: Presence::Gone };
        assert_eq!(shutdown.poll_step(now, orphaned), Some(Step::KillMachines));
    }

    #[test]
    fn a_node_whose_agent_is_gone_and_whose_machines_ended_goes_down_at_once() {
        let now = Instant::now();
        let mut shutdown = Shutdown::new(now, Action::Reboot);
        let deserted = Facts { machines: 0, agent: Presence::Gone };
        assert_eq!(shutdown.poll_step(now, deserted), Some(Step::Finish));
    }
}
