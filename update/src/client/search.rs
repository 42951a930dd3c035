//! The search for a target through delegations (5.6.7).
//!
//! Pre-order, depth first, in the order in which each role lists its delegations; no role is looked
//! into twice; a terminating delegation that covers the path drops all that was still to come. Only
//! the roles that a search comes to are fetched, and each is verified with the keys that the
//! delegator on *this* way names, whether it comes from the repository or from the store.

use std::{
    collections::{BTreeSet, VecDeque},
    mem,
};

use super::{Client, Outcome, State, Step, Write, delegations, store_name};
use crate::{
    metadata::{Ending, Targets, Visit},
    target::{self, Target},
    verify::UpdateError,
};

/// A search in progress.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// The path that is looked for; `None` visits everything.
    wanted: Option<String>,
    /// Roles to look into, the next one first.
    ahead: VecDeque<Visit>,
    visited: BTreeSet<String>,
    /// Paths that were seen, for a walk.
    names: BTreeSet<String>,
    /// The role whose file is being read.
    current: Option<Visit>,
}

impl Client {
    pub(super) fn begin_search(&mut self, wanted: Option<String>) -> Result<(), UpdateError> {
        self.search = Search { wanted, ..Search::default() };
        self.search.visited.insert("targets".to_owned());
        let Some(targets) = self.targets.take() else {
            return Ok(());
        };
        self.state = State::Answer(Outcome::Refreshed);
        let result = self.look_into("targets", &targets);
        self.targets = Some(targets);
        result
    }

    /// Looks into a verified role, and goes on with the next one if it has no answer.
    fn look_into(&mut self, role: &str, targets: &Targets) -> Result<(), UpdateError> {
        match self.search.wanted.clone() {
            Some(path) => {
                if let Some(file) = targets.targets.get(&path) {
                    let location = target::location(&path, &file.hashes, self.naming());
                    let file = file.clone();
                    let found = Target { path, role: role.to_owned(), file, location };
                    self.state = State::Answer(Outcome::Found(Box::new(found)));
                    return Ok(());
                }
                if let Some(delegations) = delegations(targets) {
                    let (visits, ending) = delegations.covering(&path);
                    if ending == Ending::Terminates {
                        self.search.ahead.clear();
                    }
                    self.push(visits);
                }
            }
            None => {
                self.search.names.extend(targets.targets.keys().cloned());
                if let Some(delegations) = delegations(targets) {
                    self.push(delegations.all(self.limits.roles + 1));
                }
            }
        }
        self.next_role()
    }

    fn push(&mut self, visits: Vec<Visit>) {
        for visit in visits.into_iter().rev() {
            self.search.ahead.push_front(visit);
        }
    }

    fn next_role(&mut self) -> Result<(), UpdateError> {
        while let Some(visit) = self.search.ahead.pop_front() {
            if !self.search.visited.insert(visit.role.clone()) {
                continue;
            }
            if self.search.visited.len() > self.limits.roles {
                return Err(UpdateError::TooManyRoles { limit: self.limits.roles });
            }
            let reading = self.reading(&visit.role)?;
            self.search.current = Some(visit);
            self.read(Step::LoadRole, reading);
            return Ok(());
        }
        self.state = State::Answer(match self.search.wanted {
            Some(_) => Outcome::NotFound,
            None => Outcome::Names(mem::take(&mut self.search.names).into_iter().collect()),
        });
        Ok(())
    }

    pub(super) fn role_loaded(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        if let Some(targets) = bytes.and_then(|bytes| self.check_role(bytes).ok()) {
            return self.enter(&targets);
        }
        if let State::Read(_, step) = &mut self.state {
            *step = Step::FetchRole;
        }
        Ok(())
    }

    /// 5.6.2 to 5.6.6 for a delegated role; a role that cannot be verified ends the search.
    pub(super) fn role_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let file = self.search.current.as_ref().map(|visit| store_name(&visit.role));
        let file = file.expect("a role is read for a visit");
        let bytes = bytes.ok_or_else(|| UpdateError::Unavailable { file: file.clone() })?;
        let targets = self.check_role(bytes)?;
        self.writes.push_back(Write::Store(file, bytes.to_vec()));
        self.enter(&targets)
    }

    fn check_role(&self, bytes: &[u8]) -> Result<Targets, UpdateError> {
        let visit = self.search.current.as_ref().expect("a role is read for a visit");
        self.check_targets(&visit.role, bytes, &visit.signers, &visit.keys)
    }

    fn enter(&mut self, targets: &Targets) -> Result<(), UpdateError> {
        let visit = self.search.current.take().expect("a role is read for a visit");
        self.look_into(&visit.role, targets)
    }
}
