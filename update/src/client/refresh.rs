//! Root, timestamp, snapshot and targets, in this order (5.3 to 5.6).

use std::collections::VecDeque;

use super::{Client, Limits, Outcome, Reading, State, Step, Write, store_name};
use crate::{
    metadata::{Envelope, Newest, RoleKeys, Root, Snapshot},
    verify::{self, UpdateError},
};

/// Reads a root that its own keys signed (5.2).
pub(super) fn own_root(bytes: &[u8], limits: &Limits) -> Result<Root, UpdateError> {
    let (envelope, root) = read_root(bytes, limits)?;
    signed_by(&envelope, &root)?;
    Ok(root)
}

fn read_root(bytes: &[u8], limits: &Limits) -> Result<(Envelope, Root), UpdateError> {
    let envelope = verify::envelope("root.json", bytes, limits.root_bytes)?;
    let root = Root::read(&envelope).map_err(|e| verify::unreadable("root.json", e))?;
    Ok((envelope, root))
}

fn signed_by(envelope: &Envelope, root: &Root) -> Result<(), UpdateError> {
    verify::threshold("root.json", envelope, top_level(root, "root"), &root.keys)
}

fn top_level<'a>(root: &'a Root, role: &str) -> &'a RoleKeys {
    root.role(role).expect("a root that was read names all top-level roles")
}

/// Whether keys of timestamp or snapshot are gone in `new` (5.3.11).
pub(super) fn revokes(old: &Root, new: &Root) -> bool {
    old.rotates(new, "timestamp") || old.rotates(new, "snapshot")
}

/// 5.3.11: what revoked keys signed is forgotten, so that a version which somebody who had stolen
/// them drove up does not last. This comes before the new root is stored: after a power cut between
/// the two, the new root is fetched again.
pub(super) fn forget(writes: &mut VecDeque<Write>) {
    writes.push_back(Write::Remove("timestamp.json"));
    writes.push_back(Write::Remove("snapshot.json"));
}

impl Client {
    /// 5.3.3, or on to 5.3.10 once as many roots came as one refresh takes.
    pub(super) fn fetch_root(&mut self) -> Result<(), UpdateError> {
        let next = self.root.header.version.checked_add(1);
        let Some(next) = next.filter(|_| self.roots_fetched < self.limits.roots) else {
            return self.load_timestamp();
        };
        let reading = Reading {
            file: "root.json".to_owned(),
            location: format!("{next}.root.json"),
            limit: self.limits.root_bytes,
        };
        self.read(Step::FetchRoot, reading);
        Ok(())
    }

    /// 5.3.4 to 5.3.9, and 5.3.10 when there is no newer root.
    pub(super) fn root_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let Some(bytes) = bytes else {
            return self.load_timestamp();
        };
        let (envelope, new) = read_root(bytes, &self.limits)?;
        signed_by(&envelope, &self.root)?;
        signed_by(&envelope, &new)?;
        let expected = self.root.header.version.saturating_add(1);
        verify::version("root.json", new.header.version, expected)?;
        if revokes(&self.root, &new) {
            forget(&mut self.writes);
        }
        self.writes.push_back(Write::Store("root.json".to_owned(), bytes.to_vec()));
        self.root = new;
        self.roots_fetched += 1;
        self.fetch_root()
    }

    /// 5.3.10, and on to 5.4.
    fn load_timestamp(&mut self) -> Result<(), UpdateError> {
        verify::fresh("root.json", &self.root.header, self.now)?;
        let reading = Reading {
            file: "timestamp.json".to_owned(),
            location: "timestamp.json".to_owned(),
            limit: self.limits.timestamp_bytes,
        };
        self.read(Step::LoadTimestamp, reading);
        Ok(())
    }

    /// The stored timestamp counts while the present keys verify it, expired or not: it is what the
    /// new one must not go back from.
    pub(super) fn timestamp_loaded(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        self.timestamp = bytes.and_then(|bytes| self.read_timestamp(bytes).ok());
        if let State::Read(_, step) = &mut self.state {
            *step = Step::FetchTimestamp;
        }
        Ok(())
    }

    fn read_timestamp(&self, bytes: &[u8]) -> Result<Newest, UpdateError> {
        let envelope = verify::envelope("timestamp.json", bytes, self.limits.timestamp_bytes)?;
        let signers = top_level(&self.root, "timestamp");
        verify::threshold("timestamp.json", &envelope, signers, &self.root.keys)?;
        Newest::read(&envelope).map_err(|e| verify::unreadable("timestamp.json", e))
    }

    /// 5.4.2 to 5.4.5. One of the same version is passed over without an error (5.4.3.1), and the
    /// trusted one's snapshot is brought up to date in its place.
    pub(super) fn timestamp_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let file = || "timestamp.json".to_owned();
        let bytes = bytes.ok_or_else(|| UpdateError::Unavailable { file: file() })?;
        let new = self.read_timestamp(bytes)?;
        if let Some(trusted) = &self.timestamp {
            verify::forward("timestamp.json", trusted.header.version, new.header.version)?;
            if trusted.header.version < new.header.version {
                let (old, new) = (trusted.snapshot.version, new.snapshot.version);
                verify::forward("snapshot.json", old, new)?;
            }
        }
        let same = |trusted: &Newest| trusted.header.version == new.header.version;
        let newest = match self.timestamp.take().filter(same) {
            Some(trusted) => trusted,
            None => {
                verify::fresh("timestamp.json", &new.header, self.now)?;
                self.writes.push_back(Write::Store(file(), bytes.to_vec()));
                new
            }
        };
        verify::fresh("timestamp.json", &newest.header, self.now)?;
        let most = self.limits.snapshot_bytes;
        let reading = Reading {
            file: "snapshot.json".to_owned(),
            location: self.location("snapshot", newest.snapshot.version),
            limit: newest.snapshot.length.map_or(most, |length| length.min(most)),
        };
        self.timestamp = Some(newest);
        self.read(Step::LoadSnapshot, reading);
        Ok(())
    }

    /// The stored snapshot counts while the present keys verify it. It is the newest one if the
    /// timestamp says so, and else what the new one is compared with.
    pub(super) fn snapshot_loaded(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let stored = bytes.and_then(|bytes| Some((bytes, self.read_snapshot(bytes).ok()?)));
        let newest = stored
            .as_ref()
            .is_some_and(|(bytes, snapshot)| self.newest_snapshot(bytes, snapshot).is_ok());
        self.snapshot = stored.map(|(_, snapshot)| snapshot);
        if newest {
            return self.load_targets();
        }
        if let State::Read(_, step) = &mut self.state {
            *step = Step::FetchSnapshot;
        }
        Ok(())
    }

    fn read_snapshot(&self, bytes: &[u8]) -> Result<Snapshot, UpdateError> {
        let envelope = verify::envelope("snapshot.json", bytes, self.limits.snapshot_bytes)?;
        let signers = top_level(&self.root, "snapshot");
        verify::threshold("snapshot.json", &envelope, signers, &self.root.keys)?;
        Snapshot::read(&envelope).map_err(|e| verify::unreadable("snapshot.json", e))
    }

    /// 5.5.2, 5.5.4 and 5.5.6.
    fn newest_snapshot(&self, bytes: &[u8], snapshot: &Snapshot) -> Result<(), UpdateError> {
        let timestamp = self.timestamp.as_ref().expect("a snapshot is read after the timestamp");
        let listed = &timestamp.snapshot;
        verify::described("snapshot.json", bytes, listed)?;
        verify::version("snapshot.json", snapshot.header.version, listed.version)?;
        verify::fresh("snapshot.json", &snapshot.header, self.now)
    }

    /// 5.5.2 to 5.5.7.
    pub(super) fn snapshot_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let file = || "snapshot.json".to_owned();
        let bytes = bytes.ok_or_else(|| UpdateError::Unavailable { file: file() })?;
        let timestamp = self.timestamp.as_ref().expect("a snapshot is read after the timestamp");
        verify::described("snapshot.json", bytes, &timestamp.snapshot)?;
        let new = self.read_snapshot(bytes)?;
        let listed = timestamp.snapshot.version;
        verify::version("snapshot.json", new.header.version, listed)?;
        if let Some(trusted) = &self.snapshot {
            verify::keeps_listed(trusted, &new)?;
        }
        verify::fresh("snapshot.json", &new.header, self.now)?;
        self.writes.push_back(Write::Store(file(), bytes.to_vec()));
        self.snapshot = Some(new);
        self.load_targets()
    }

    fn load_targets(&mut self) -> Result<(), UpdateError> {
        let reading = self.reading("targets")?;
        self.read(Step::LoadTargets, reading);
        Ok(())
    }

    /// The stored targets document is used if it is the one that the snapshot lists.
    pub(super) fn targets_loaded(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        if bytes.is_some_and(|bytes| self.take_targets(bytes).is_ok()) {
            return Ok(());
        }
        if let State::Read(_, step) = &mut self.state {
            *step = Step::FetchTargets;
        }
        Ok(())
    }

    /// 5.6.2 to 5.6.6.
    pub(super) fn targets_fetched(&mut self, bytes: Option<&[u8]>) -> Result<(), UpdateError> {
        let file = store_name("targets");
        let bytes = bytes.ok_or_else(|| UpdateError::Unavailable { file: file.clone() })?;
        self.take_targets(bytes)?;
        self.writes.push_back(Write::Store(file, bytes.to_vec()));
        Ok(())
    }

    fn take_targets(&mut self, bytes: &[u8]) -> Result<(), UpdateError> {
        let signers = top_level(&self.root, "targets");
        let targets = self.check_targets("targets", bytes, signers, &self.root.keys)?;
        self.targets = Some(targets);
        self.state = State::Answer(Outcome::Refreshed);
        Ok(())
    }
}
