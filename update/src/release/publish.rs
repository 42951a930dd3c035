//! From staged documents to what clients read.
//!
//! Nothing is written that the client of this crate would refuse, and `timestamp.json`, by which
//! clients see the rest, is written last.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::{
    keys::{KeyError, Signer},
    repository::{Refusal, ReleaseError, Repository, damaged, each_piece, envelope, put},
    write::{self, Draft},
};
use crate::{
    channel::{Channel, MAX_BYTES},
    client::{Client, Limits, Outcome, Request},
    json::Json,
    metadata::Snapshot,
    pattern,
    shell::StoreError,
    target::Target,
    verify,
};

/// How the paths of channels' documents end.
const CHANNEL: &str = "/channel.json";
/// Days that the snapshot is good for.
const SNAPSHOT_DAYS: i64 = 14;
/// Days that the timestamp is good for, unless it is published with other ones.
pub const TIMESTAMP_DAYS: i64 = 2;

impl Repository {
    /// Publishes what is staged and signed by enough keys, with a new snapshot where something
    /// changed and a new timestamp, good for `days`, signed by `online`.
    ///
    /// # Errors
    /// Nothing is written if the client would refuse what came out.
    pub fn publish(
        &self,
        online: &[Box<dyn Signer>],
        days: i64,
        now: Timestamp,
    ) -> Result<Vec<String>, ReleaseError> {
        let roles = self.staged_roles()?;
        let mut files = BTreeMap::new();
        for role in &roles {
            let draft = self.staged_draft(role)?;
            let bytes = draft.bytes();
            let file = format!("{role}.json");
            let envelope = envelope(&file, &bytes)?;
            for (signers, keys) in self.delegators(role)? {
                verify::threshold(&file, &envelope, &signers, &keys)?;
            }
            let version = version_of(&draft);
            files.insert(format!("{version}.{}.json", pattern::encode(role)), bytes);
        }
        let snapshot = self.snapshot(&roles, online, now)?;
        let (version, bytes) = &snapshot;
        files.insert(format!("{version}.snapshot.json"), bytes.clone());
        let mut timestamp = match self.metadata.load("timestamp.json")? {
            Some(bytes) => Draft::parse(&bytes).ok_or_else(|| damaged("timestamp.json"))?,
            None => Draft::new("timestamp"),
        };
        let next = version_of(&timestamp) + 1;
        timestamp = timestamp.renew(next, now, days);
        put(
            &mut timestamp,
            &[],
            "meta",
            Json::object([("snapshot.json", write::listed(*version, bytes))]),
        );
        sign_all(&mut timestamp, online)?;
        let timestamp = timestamp.bytes();
        self.read(&files, &timestamp, now)?;
        for (file, bytes) in &files {
            self.metadata.write(file, bytes)?;
        }
        self.metadata.write("timestamp.json", &timestamp)?;
        for role in &roles {
            self.staged.remove(&format!("{}.json", pattern::encode(role)))?;
        }
        Ok(roles)
    }

    /// Reads the published repository as clients do, and every target's file.
    pub fn verify(&self, now: Timestamp) -> Result<Vec<Target>, ReleaseError> {
        let timestamp = self.metadata.load("timestamp.json")?;
        self.read(&BTreeMap::new(), &timestamp.ok_or_else(|| damaged("timestamp.json"))?, now)
    }

    /// The snapshot that goes with what is staged: the published one if nothing changed and it is
    /// good for another half of its time.
    fn snapshot(
        &self,
        staged: &[String],
        online: &[Box<dyn Signer>],
        now: Timestamp,
    ) -> Result<(u64, Vec<u8>), ReleaseError> {
        let latest = self.latest("snapshot")?;
        if let Some((version, bytes)) = &latest
            && staged.is_empty()
            && let Ok(snapshot) = Snapshot::read(&envelope("snapshot.json", bytes)?)
            && snapshot.header.expires.as_second() - now.as_second() > SNAPSHOT_DAYS * 12 * 3600
        {
            return Ok((*version, bytes.clone()));
        }
        let version = latest.as_ref().map_or(1, |(version, _)| version + 1);
        let mut draft = latest.and_then(|(_, bytes)| Draft::parse(&bytes));
        let mut draft = draft.take().unwrap_or_else(|| Draft::new("snapshot"));
        draft = draft.renew(version, now, SNAPSHOT_DAYS);
        for role in staged.iter().filter(|role| *role != "root") {
            let staged = self.staged_draft(role)?;
            let listed = write::listed(version_of(&staged), &staged.bytes());
            put(&mut draft, &["meta"], &format!("{role}.json"), listed);
        }
        sign_all(&mut draft, online)?;
        Ok((version, draft.bytes()))
    }

    /// Lets the client read everything, with `files` in place of what is not written yet.
    fn read(
        &self,
        files: &BTreeMap<String, Vec<u8>>,
        timestamp: &[u8],
        now: Timestamp,
    ) -> Result<Vec<Target>, ReleaseError> {
        let load = &|location: &str| match files.get(location) {
            _ if location == "timestamp.json" => Ok(Some(timestamp.to_vec())),
            Some(bytes) => Ok(Some(bytes.clone())),
            None => self.metadata.load(location),
        };
        let root = load("1.root.json")?.ok_or_else(|| damaged("1.root.json"))?;
        let mut client = Client::new(&root, None, now, Limits::default())?;
        run(&mut client, load)?;
        client.walk()?;
        run(&mut client, load)?;
        let Outcome::Names(names) = client.outcome() else {
            return Err(damaged("targets.json"));
        };
        let mut targets = Vec::new();
        for name in names {
            client.look_up(&name)?;
            run(&mut client, load)?;
            let Outcome::Found(target) = client.outcome() else {
                return Err(Refusal::Untrusted { target: name }.into());
            };
            self.check(&target)?;
            targets.push(*target);
        }
        Ok(targets)
    }

    fn check(&self, target: &Target) -> Result<(), ReleaseError> {
        let path = self.target_path(&target.path, &target.file.hashes)?;
        let mut check = target.check();
        let refused = |source| ReleaseError::Target { path: target.path.clone(), source };
        let is_channel = target.path.ends_with(CHANNEL);
        let mut document = Vec::new();
        each_piece(&path, |piece| {
            if is_channel && document.len() <= MAX_BYTES {
                document.extend_from_slice(piece);
            }
            check.update(piece).map_err(refused)
        })?;
        check.finish().map_err(refused)?;
        if is_channel {
            let target = target.path.clone();
            Channel::parse(&document)
                .map_err(|source| ReleaseError::Document { target, source })?;
        }
        Ok(())
    }
}

/// Answers a client's requests; it has no store.
fn run(
    client: &mut Client,
    load: impl Fn(&str) -> Result<Option<Vec<u8>>, StoreError>,
) -> Result<(), ReleaseError> {
    while let Some(request) = client.next() {
        match request {
            Request::Load { .. } => client.handle_loaded(None)?,
            Request::Fetch { location, .. } => {
                let bytes = load(location)?;
                client.handle_fetched(bytes.as_deref())?;
            }
            Request::Store { .. } | Request::Remove { .. } => client.handle_written(),
        }
    }
    Ok(())
}

fn sign_all(draft: &mut Draft, signers: &[Box<dyn Signer>]) -> Result<(), KeyError> {
    signers.iter().try_for_each(|signer| draft.sign(signer.as_ref()))
}

fn version_of(draft: &Draft) -> u64 {
    match draft.signed.get("version") {
        Some(Json::Number(number)) => u64::try_from(*number).unwrap_or(0),
        _ => 0,
    }
}
