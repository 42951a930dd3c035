//! Which network configuration to use: the new one on trial, or the last one that worked. Pure.
//!
//! A configuration that reached the gateway once is good and is kept. Another one is on trial: when
//! it does not reach the gateway within its time, the good one comes back and the other is refused
//! from then on, also after a restart, until the document changes. When the good one does not reach
//! the gateway either, the outside is to blame, and both are tried in turn.
//!
//! What must survive a restart is [`Record`]; whoever owns a disk writes it down.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use types::config::Network;

/// A configuration whose trials ended in so many restarts of the node, without an answer either way,
/// is refused: it may be what restarts it.
const MAX_STARTS: u32 = 3;
/// Longest time that one of two configurations, none of which works, is tried.
const MAX_TURN: Duration = Duration::from_secs(3600);

/// What is remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The last configuration that reached the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub good: Option<Network>,
    /// The configuration that was tried last and has not reached it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tried: Option<Tried>,
}

/// A configuration on trial, or after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tried {
    /// The configuration.
    pub network: Network,
    /// In how many lives of the node a trial of it has begun.
    pub starts: u32,
    /// The kernel's name for the last of them.
    pub boot: String,
    /// Whether it was given up.
    pub verdict: Verdict,
}

/// What a trial has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing yet.
    Open,
    /// It cut the node off.
    Refused,
}

/// Which configuration is in use, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// There is none to fall back to.
    Only,
    /// It has worked before, or works now.
    Good,
    /// It is new.
    Trial,
    /// The document's does not work; this is the last one that did.
    Fallback,
}

/// Decides which configuration is used.
#[derive(Debug)]
pub struct Trials {
    wanted: Network,
    record: Record,
    stage: Stage,
    /// When the one in use is given up; never when `None`.
    deadline: Option<Instant>,
    turn: Duration,
    /// Since when the gateway is reached without a break.
    reached_since: Option<Instant>,
    /// Whether the record has changed since it was asked for.
    unsaved: Option<Record>,
}

impl Trials {
    /// Begins with what the document wants and what is remembered. `boot` names this life of the
    /// node: a restart of the agent alone is no sign of trouble.
    pub fn new(wanted: Network, record: Record, boot: &str, now: Instant) -> Self {
        let turn = Duration::from_secs(wanted.trial_s);
        let mut trials = Self {
            wanted,
            record,
            stage: Stage::Only,
            deadline: None,
            turn,
            reached_since: None,
            unsaved: None,
        };
        trials.begin(boot, now);
        trials
    }

    /// Returns the configuration to use now.
    pub fn network(&self) -> &Network {
        match (self.stage, &self.record.good) {
            (Stage::Fallback, Some(good)) => good,
            (Stage::Only | Stage::Good | Stage::Trial | Stage::Fallback, _) => &self.wanted,
        }
    }

    /// Returns which one that is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns what people should know; `None` while all is as configured.
    pub fn notice(&self) -> Option<String> {
        match self.stage {
            Stage::Only | Stage::Good => None,
            Stage::Trial => Some(format!(
                "the network configuration is new; the last good one comes back unless the overlay is reached within {} s",
                self.turn.as_secs()
            )),
            Stage::Fallback => Some(
                "the configured network did not reach the overlay in time; the last good one is in use until the document's [network] changes"
                    .to_owned(),
            ),
        }
    }

    /// Takes what a look has shown. The gateway counts as reached when it was at every look for a third
    /// of the trial's time: connections and addresses of an earlier configuration live on for a while.
    pub fn handle_look(&mut self, now: Instant, found: Contact) {
        match found {
            Contact::Lost => self.reached_since = None,
            Contact::Reached => {
                let since = *self.reached_since.get_or_insert(now);
                if now.saturating_duration_since(since) >= self.hold() {
                    self.accept();
                }
            }
        }
    }

    /// Returns how long the gateway must be reached to count.
    fn hold(&self) -> Duration {
        Duration::from_secs(self.wanted.trial_s) / 3
    }

    /// The gateway is reached with what is in use.
    fn accept(&mut self) {
        self.deadline = None;
        if self.stage == Stage::Fallback {
            // The outside works, so the other one does not.
            return self.judge(Verdict::Refused);
        }
        self.stage = Stage::Good;
        if self.record.good.as_ref() != Some(&self.wanted) || self.record.tried.is_some() {
            self.record = Record { good: Some(self.wanted.clone()), tried: None };
            self.unsaved = Some(self.record.clone());
        }
    }

    /// To be called when [`Trials::poll_timeout`] has passed. Returns whether another configuration
    /// is to be used.
    pub fn handle_timeout(&mut self, now: Instant) -> Change {
        // While it is reached, the verdict is only a matter of time.
        if self.reached_since.is_some() || self.deadline.is_none_or(|deadline| now < deadline) {
            return Change::None;
        }
        match self.stage {
            Stage::Trial => {
                self.judge(Verdict::Refused);
                self.stage = Stage::Fallback;
            }
            // Nor does the good one work: the outside may be to blame.
            Stage::Fallback => {
                self.judge(Verdict::Open);
                self.stage = Stage::Trial;
                self.turn = (self.turn * 2).min(MAX_TURN.max(self.turn));
            }
            Stage::Only | Stage::Good => {
                self.deadline = None;
                return Change::None;
            }
        }
        self.deadline = Some(now + self.turn);
        Change::Other
    }

    /// Returns when to call [`Trials::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns what to write down, when that has changed.
    pub fn poll_record(&mut self) -> Option<Record> {
        self.unsaved.take()
    }

    fn begin(&mut self, boot: &str, now: Instant) {
        let Some(good) = &self.record.good else { return };
        if *good == self.wanted {
            self.stage = Stage::Good;
            return;
        }
        let before = self.record.tried.take().filter(|tried| tried.network == self.wanted);
        let starts =
            before.as_ref().map_or(1, |tried| tried.starts + u32::from(tried.boot != boot));
        let refused = before.is_some_and(|tried| tried.verdict == Verdict::Refused);
        let verdict = if refused || starts > MAX_STARTS { Verdict::Refused } else { Verdict::Open };
        self.stage = match verdict {
            Verdict::Refused => Stage::Fallback,
            Verdict::Open => Stage::Trial,
        };
        self.record.tried =
            Some(Tried { network: self.wanted.clone(), starts, boot: boot.to_owned(), verdict });
        self.unsaved = Some(self.record.clone());
        self.deadline = Some(now + self.turn);
    }

    fn judge(&mut self, verdict: Verdict) {
        if let Some(tried) = &mut self.record.tried
            && tried.verdict != verdict
        {
            tried.verdict = verdict;
            self.unsaved = Some(self.record.clone());
        }
    }
}

/// Whether the node is in touch with the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contact {
    /// It is not.
    Lost,
    /// It is.
    Reached,
}

/// Whether another configuration is to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The one in use stays.
    None,
    /// [`Trials::network`] is another one now.
    Other,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn network(name: &str) -> Network {
        Network { interface: Some(name.to_owned()), trial_s: 60, ..Network::default() }
    }

    fn good(name: &str) -> Record {
        Record { good: Some(network(name)), tried: None }
    }

    struct World {
        now: Instant,
        trials: Trials,
        disk: Record,
    }

    impl World {
        /// The node boots, each time into another life.
        fn new(wanted: &str, disk: Record) -> Self {
            static BOOTS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            let boot = BOOTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
            Self::within(&boot, wanted, disk)
        }

        fn within(boot: &str, wanted: &str, disk: Record) -> Self {
            let now = Instant::now();
            let mut trials = Trials::new(network(wanted), disk.clone(), boot, now);
            let disk = trials.poll_record().unwrap_or(disk);
            Self { now, trials, disk }
        }

        fn wait(&mut self) -> Change {
            self.now = self.trials.poll_timeout().expect("it waits");
            let change = self.trials.handle_timeout(self.now);
            self.save();
            change
        }

        fn reach(&mut self) {
            let end = self.now + self.trials.hold();
            self.trials.handle_look(self.now, Contact::Reached);
            self.trials.handle_look(end, Contact::Reached);
            self.trials.handle_look(end, Contact::Lost);
            self.now = end;
            self.save();
        }

        fn save(&mut self) {
            self.disk = self.trials.poll_record().unwrap_or(self.disk.clone());
        }

        fn state(&self) -> (Stage, &str) {
            (self.trials.stage(), self.trials.network().interface.as_deref().expect("named"))
        }
    }

    #[test]
    fn the_first_one_has_no_deadline_and_is_good_once_it_works() {
        let mut world = World::new("a", Record::default());
        assert_eq!((world.state(), world.trials.poll_timeout()), ((Stage::Only, "a"), None));
        world.reach();
        assert_eq!((world.state(), &world.disk), ((Stage::Good, "a"), &good("a")));
    }

    #[test]
    fn one_that_cuts_the_node_off_is_undone_and_stays_undone() {
        let mut world = World::new("b", good("a"));
        assert_eq!(world.state(), (Stage::Trial, "b"));
        assert_eq!((world.wait(), world.state()), (Change::Other, (Stage::Fallback, "a")));
        world.reach();
        assert_eq!(world.trials.poll_timeout(), None);
        let mut again = World::new("b", world.disk.clone());
        assert_eq!(again.state(), (Stage::Fallback, "a"));
        again.reach();
        assert!(again.trials.notice().expect("told").contains("[network]"));
        assert_eq!(World::new("c", again.disk.clone()).state(), (Stage::Trial, "c"));
        assert_eq!(World::new("a", again.disk).state(), (Stage::Good, "a"));
    }

    #[test]
    fn one_that_works_becomes_the_good_one() {
        let mut world = World::new("b", good("a"));
        world.reach();
        assert_eq!((world.state(), &world.disk), ((Stage::Good, "b"), &good("b")));
        assert_eq!(world.trials.notice(), None);
    }

    #[test]
    fn what_is_left_of_the_old_network_makes_no_new_one_good() {
        let mut world = World::new("b", good("a"));
        let end = world.now + world.trials.hold();
        world.trials.handle_look(world.now, Contact::Reached);
        assert_eq!(world.trials.handle_timeout(world.now + Duration::from_secs(999)), Change::None);
        world.trials.handle_look(end, Contact::Lost);
        world.trials.handle_look(end, Contact::Reached);
        assert_eq!(world.state(), (Stage::Trial, "b"));
        world.trials.handle_look(end, Contact::Lost);
        assert_eq!((world.wait(), world.state()), (Change::Other, (Stage::Fallback, "a")));
    }

    #[test]
    fn an_outage_refuses_nothing_for_good() {
        let mut world = World::new("b", good("a"));
        world.wait();
        assert_eq!((world.wait(), world.state()), (Change::Other, (Stage::Trial, "b")));
        world.reach();
        assert_eq!(world.disk, good("b"));
    }

    #[test]
    fn one_that_restarts_the_node_each_time_is_given_up() {
        let mut disk = good("a");
        for _ in 0..MAX_STARTS {
            let world = World::new("b", disk);
            assert_eq!(world.state(), (Stage::Trial, "b"));
            disk = world.disk;
        }
        assert_eq!(World::new("b", disk).state(), (Stage::Fallback, "a"));
    }

    #[test]
    fn a_restart_of_the_agent_is_no_restart_of_the_node() {
        let mut disk = good("a");
        for _ in 0..9 {
            let world = World::within("now", "b", disk);
            assert_eq!(world.state(), (Stage::Trial, "b"));
            disk = world.disk;
        }
    }

    #[test]
    fn the_record_survives_being_written() {
        let world = World::new("b", good("a"));
        let text = toml::to_string(&world.disk).expect("written");
        assert_eq!(toml::from_str::<Record>(&text), Ok(world.disk));
    }

    proptest! {
        /// Whatever happens, a good configuration is on record as soon as one worked, and a node
        /// whose good one works ends there.
        #[test]
        fn the_node_never_stays_cut_off(
            steps in prop::collection::vec((0_usize..3, any::<bool>()), 0..40), works in 0_usize..3
        ) {
            let names = ["a", "b", "c"];
            let mut world = World::new(names[works], Record::default());
            world.reach();
            for (name, restart) in steps {
                if restart {
                    world = World::new(names[name], world.disk.clone());
                }
                if world.state().1 == names[works] {
                    world.reach();
                } else {
                    world.wait();
                }
            }
            for _ in 0..3 {
                if world.state().1 != names[works] {
                    world.wait();
                }
            }
            prop_assert_eq!(world.state().1, names[works]);
            prop_assert_eq!(world.disk.good, Some(network(names[works])));
        }
    }
}
