//! The folder of a repository, and what is done to it.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use aws_lc_rs::digest;
use jiff::Timestamp;

use super::{
    keys::{KeyError, PublicKey, Signer},
    write::{self, Draft},
};
use crate::{
    channel::{Channel, DocumentError, File, Manifest, Release, Sha256, Waves},
    delta::{self, Chunks},
    json::Json,
    metadata::{Envelope, Keys, MetadataError, RoleKeys, Root, TOP_LEVEL, Targets},
    pattern,
    shell::{Store, StoreError},
    target::TargetError,
    verify::UpdateError,
};

/// Days that root is good for.
const ROOT_DAYS: i64 = 365;
/// Days that targets and channels are good for.
const TARGETS_DAYS: i64 = 180;

/// Why something cannot be done to a repository.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ReleaseError {
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Refusal(#[from] Refusal),
    #[error("{file} is missing or damaged")]
    Damaged { file: String },
    #[error("{file} cannot be read")]
    Metadata { file: String, source: MetadataError },
    #[error("clients would refuse the repository")]
    Refused(#[from] UpdateError),
    #[error("the repository's file of target {path:?} is wrong")]
    Target { path: String, source: TargetError },
    #[error("nodes could not read {target}")]
    Document { target: String, source: DocumentError },
}

/// What cannot be asked of a repository.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum Refusal {
    #[error("there is a repository already")]
    Exists,
    #[error("{name:?} names no channel; a-z, 0-9 and - do, up to 64 of them")]
    ChannelName { name: String },
    #[error("the repository has no role or channel {role:?}; `release init` names its channels")]
    NoRole { role: String },
    #[error(
        "{role} has {keys} keys, and its threshold asks for more, or for none; give more keys, or another threshold"
    )]
    TooFewKeys { role: String, keys: usize },
    #[error("{release} is withdrawn, or older than the channel's minimum")]
    NotPermitted { release: Release },
    #[error("{release} is withdrawn already")]
    Withdrawn { release: Release },
    #[error("{role} has no {what}")]
    Lacks { role: String, what: String },
    #[error("{} has no file name in UTF-8", path.display())]
    FileName { path: PathBuf },
    #[error("target {target:?} has no SHA-256 digest")]
    Digest { target: String },
    #[error("no role that is trusted for target {target:?} describes it")]
    Untrusted { target: String },
}

/// The keys of a new repository.
#[derive(Debug, Clone)]
pub struct TopKeys {
    /// Offline keys of root, and how many must sign.
    pub root: (Vec<PublicKey>, u64),
    /// Offline keys of targets, and how many must sign.
    pub targets: (Vec<PublicKey>, u64),
    /// Keys of snapshot and timestamp; any one of them signs.
    pub online: Vec<PublicKey>,
}

/// A new repository.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Keys of the top-level roles.
    pub keys: TopKeys,
    /// Channels by name, each with its keys and how many must sign.
    pub channels: BTreeMap<String, (Vec<PublicKey>, u64)>,
}

/// A release to be staged.
#[derive(Debug, Clone)]
pub struct Staging {
    /// The channel that gets it.
    pub channel: String,
    /// The release.
    pub release: Release,
    /// Its files, by kind.
    pub files: BTreeMap<String, PathBuf>,
    /// Raises what nodes of the channel may run at least.
    pub minimum: Option<Release>,
    /// Who may update when.
    pub waves: Option<Waves>,
}

/// Other keys for a role.
#[derive(Debug, Clone)]
pub struct Rotation {
    /// A top-level role or a channel.
    pub role: String,
    /// Keys that may sign from then on.
    pub added: Vec<PublicKey>,
    /// Ids of keys that may not sign any longer.
    pub removed: Vec<String>,
    /// How many must sign, if that changes.
    pub threshold: Option<u64>,
}

/// A repository's folder, held by this process.
#[derive(Debug)]
pub struct Repository {
    folder: PathBuf,
    pub(super) metadata: Store,
    pub(super) staged: Store,
}

impl Repository {
    /// Opens a repository, and makes its folders if they are missing.
    pub fn open(folder: &Path) -> Result<Self, ReleaseError> {
        let targets = folder.join("targets");
        fs::create_dir_all(&targets).map_err(|source| failed("make", &targets, source))?;
        let metadata = Store::open(&folder.join("metadata"))?;
        Ok(Self {
            folder: folder.to_owned(),
            metadata,
            staged: Store::open(&folder.join("staged"))?,
        })
    }

    /// Stages the first version of everything.
    pub fn init(&self, plan: &Plan, now: Timestamp) -> Result<(), ReleaseError> {
        if self.latest("root")?.is_some() || self.staged.load("root.json")?.is_some() {
            return Err(Refusal::Exists.into());
        }
        let keys = &plan.keys;
        let online = (keys.online.clone(), 1);
        let roles = [
            ("root", &keys.root),
            ("targets", &keys.targets),
            ("snapshot", &online),
            ("timestamp", &online),
        ];
        let mut root = Draft::new("root").renew(1, now, ROOT_DAYS);
        root.set("consistent_snapshot", Json::Bool(true));
        for (name, (members, threshold)) in roles {
            enough(name, members, *threshold)?;
            add_keys(&mut root, &["keys"], members);
            put(&mut root, &["roles"], name, write::role(members, *threshold));
        }
        self.save("root", &root)?;
        let mut targets = Draft::new("targets").renew(1, now, TARGETS_DAYS);
        put(&mut targets, &[], "targets", Json::object([]));
        put(&mut targets, &["delegations"], "keys", Json::object([]));
        let mut listed = Vec::new();
        for (name, (members, threshold)) in &plan.channels {
            if !plain(name) {
                return Err(Refusal::ChannelName { name: name.clone() }.into());
            }
            enough(name, members, *threshold)?;
            add_keys(&mut targets, &["delegations", "keys"], members);
            listed.push(delegation(name, members, *threshold));
            let mut channel = Draft::new("targets").renew(1, now, TARGETS_DAYS);
            put(&mut channel, &[], "targets", Json::object([]));
            self.describe(&mut channel, &Channel::new(name))?;
            self.save(name, &channel)?;
        }
        put(&mut targets, &["delegations"], "roles", Json::List(listed));
        self.save("targets", &targets)
    }

    /// Stages a release: copies its files, makes its manifest, and points the channel to it.
    pub fn stage(&self, staging: &Staging, now: Timestamp) -> Result<(), ReleaseError> {
        let (mut draft, mut channel) = self.channel(&staging.channel, now)?;
        let mut files = BTreeMap::new();
        for (kind, path) in &staging.files {
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| Refusal::FileName { path: path.clone() })?;
            let target = format!("{}/{}/{name}", staging.channel, staging.release);
            let (length, sha256) = self.copy(path, &target)?;
            put(
                &mut draft,
                &["targets"],
                &target,
                write::file(length, &types::hex::encode(&sha256)),
            );
            files.insert(kind.clone(), File { target, length, sha256: Sha256(sha256) });
        }
        if let Some(program) = staging.files.get("uki") {
            let list = self.chunks(&mut draft, staging, program)?;
            files.insert(delta::KIND.to_owned(), list);
        }
        let manifest = Manifest::new(staging.release, files);
        let target = Manifest::target(&staging.channel, staging.release);
        let bytes = serde_json::to_vec(&manifest).expect("a manifest is JSON");
        self.add(&mut draft, &target, &bytes)?;
        channel.release = Some(staging.release);
        channel.minimum = channel.minimum.max(staging.minimum);
        channel.waves = staging.waves.clone();
        if !channel.permits(staging.release) {
            return Err(Refusal::NotPermitted { release: staging.release }.into());
        }
        self.describe(&mut draft, &channel)?;
        self.save(&staging.channel, &draft)
    }

    /// Adds the list of a program's chunks.
    fn chunks(
        &self,
        draft: &mut Draft,
        staging: &Staging,
        program: &Path,
    ) -> Result<File, ReleaseError> {
        let program = fs::read(program).map_err(|source| failed("read", program, source))?;
        let bytes = Chunks::of(&program).bytes();
        let target = format!("{}/{}/{}", staging.channel, staging.release, delta::KIND);
        self.add(draft, &target, &bytes)?;
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(digest::digest(&digest::SHA256, &bytes).as_ref());
        Ok(File { target, length: bytes.len() as u64, sha256: Sha256(sha256) })
    }

    /// Stages the withdrawal of a release: its targets go, the channel names it as withdrawn, and
    /// points to the newest release that is left.
    pub fn withdraw(
        &self,
        name: &str,
        release: Release,
        now: Timestamp,
    ) -> Result<(), ReleaseError> {
        let (mut draft, mut channel) = self.channel(name, now)?;
        if channel.withdrawn.contains(&release) {
            return Err(Refusal::Withdrawn { release }.into());
        }
        channel.withdrawn.push(release);
        let folder = format!("{name}/{release}/");
        let lacks = || Refusal::Lacks { role: name.to_owned(), what: format!("release {release}") };
        let targets = draft.within(&["targets"]).ok_or_else(|| damaged(&format!("{name}.json")))?;
        let before = targets.len();
        targets.retain(|path, _| !path.starts_with(&folder));
        if targets.len() == before {
            return Err(lacks().into());
        }
        if channel.release == Some(release) {
            let manifests = targets.keys().filter_map(|path| {
                let rest = path.strip_prefix(name)?.strip_prefix('/')?;
                rest.strip_suffix("/manifest.json")?.parse::<Release>().ok()
            });
            channel.release = manifests.filter(|left| channel.permits(*left)).max();
            channel.waves = None;
        }
        self.describe(&mut draft, &channel)?;
        self.save(name, &draft)
    }

    /// Stages other keys for a role: some added, some removed by id, perhaps another threshold. The
    /// document that changes is root's, or that of targets for a channel.
    pub fn rotate(&self, rotation: &Rotation, now: Timestamp) -> Result<(), ReleaseError> {
        let Rotation { role, added, removed, threshold } = rotation;
        let role = role.as_str();
        let top = TOP_LEVEL.contains(&role);
        let (owner, days) = if top { ("root", ROOT_DAYS) } else { ("targets", TARGETS_DAYS) };
        let missing = || Refusal::NoRole { role: role.to_owned() };
        let keys: &[&str] = if top { &["keys"] } else { &["delegations", "keys"] };
        let mut draft = self.draft(owner, now, days)?;
        add_keys(&mut draft, keys, added);
        let place = match owner {
            "root" => draft.within(&["roles", role]),
            _ => draft.within(&["delegations"]).and_then(|found| listed_role(found, role)),
        };
        let entry = place.ok_or_else(missing)?;
        let Some(Json::List(ids)) = entry.get_mut("keyids") else {
            return Err(missing().into());
        };
        if let Some(id) = removed.iter().find(|id| !ids.contains(&Json::text(id))) {
            return Err(Refusal::Lacks { role: role.to_owned(), what: format!("key {id}") }.into());
        }
        ids.retain(|id| !matches!(id, Json::Text(id) if removed.contains(id)));
        for key in added {
            let id = Json::Text(key.id());
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        let count = ids.len();
        if let Some(threshold) = *threshold {
            entry.insert("threshold".to_owned(), Json::Number(threshold.into()));
        }
        let fits = matches!(entry.get("threshold"), Some(Json::Number(n)) if (1..=count as i128).contains(n));
        if !fits {
            return Err(Refusal::TooFewKeys { role: role.to_owned(), keys: count }.into());
        }
        self.save(owner, &draft)
    }

    /// Signs whatever is staged and may be signed with this key; returns what that was.
    pub fn sign(&self, signer: &dyn Signer) -> Result<Vec<String>, ReleaseError> {
        let id = signer.public().id();
        let mut signed = Vec::new();
        for role in self.staged_roles()? {
            let delegators = self.delegators(&role)?;
            if !delegators.iter().any(|(signers, _)| signers.keyids.contains(&id)) {
                continue;
            }
            let mut draft = self.staged_draft(&role)?;
            draft.sign(signer)?;
            self.save(&role, &draft)?;
            signed.push(role);
        }
        Ok(signed)
    }

    pub(super) fn target_path(
        &self,
        target: &str,
        hashes: &crate::target::Hashes,
    ) -> Result<PathBuf, ReleaseError> {
        let digest =
            write::sha256(hashes).ok_or_else(|| Refusal::Digest { target: target.to_owned() })?;
        let (folder, name) = target.rsplit_once('/').unwrap_or(("", target));
        Ok(self.folder.join("targets").join(folder).join(format!("{digest}.{name}")))
    }

    /// Copies a file to where mirrors serve it.
    fn copy(&self, from: &Path, target: &str) -> Result<(u64, [u8; 32]), ReleaseError> {
        let mut context = digest::Context::new(&digest::SHA256);
        let mut length = 0;
        each_piece(from, |piece| {
            context.update(piece);
            length += piece.len() as u64;
            Ok(())
        })?;
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(context.finish().as_ref());
        let hashes = crate::target::Hashes { sha256: Some(sha256), sha512: None };
        let to = self.target_path(target, &hashes)?;
        let folder = to.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(|source| failed("make", folder, source))?;
        let copied = fs::copy(from, &to).and_then(|_| fs::File::open(&to)?.sync_all());
        copied.map_err(|source| failed("write", &to, source))?;
        Ok((length, sha256))
    }

    /// Adds a target that is made here.
    fn add(&self, draft: &mut Draft, target: &str, bytes: &[u8]) -> Result<(), ReleaseError> {
        put(draft, &["targets"], target, write::described(bytes));
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
        let hashes = crate::target::Hashes { sha256: Some(sha256), sha512: None };
        let path = self.target_path(target, &hashes)?;
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(|source| failed("make", folder, source))?;
        fs::write(&path, bytes).map_err(|source| failed("write", &path, source))
    }

    fn describe(&self, draft: &mut Draft, channel: &Channel) -> Result<(), ReleaseError> {
        let bytes = serde_json::to_vec(channel).expect("a channel is JSON");
        let target = Channel::target(&channel.channel);
        // What nodes refuse is not staged, let alone signed.
        Channel::parse(&bytes)
            .map_err(|source| ReleaseError::Document { target: target.clone(), source })?;
        self.add(draft, &target, &bytes)
    }

    /// Returns the next version of a channel's role and the channel's state.
    fn channel(&self, name: &str, now: Timestamp) -> Result<(Draft, Channel), ReleaseError> {
        if !plain(name) || TOP_LEVEL.contains(&name) {
            return Err(Refusal::ChannelName { name: name.to_owned() }.into());
        }
        let draft = self.draft(name, now, TARGETS_DAYS)?;
        let file = format!("{name}.json");
        let targets = Targets::read(&envelope(&file, &draft.bytes())?);
        let targets = targets.map_err(|source| ReleaseError::Metadata { file, source })?;
        let target = Channel::target(name);
        let listed = targets
            .targets
            .get(&target)
            .ok_or_else(|| Refusal::NoRole { role: name.to_owned() })?;
        let path = self.target_path(&target, &listed.hashes)?;
        let bytes = fs::read(&path).map_err(|source| failed("read", &path, source))?;
        let channel = Channel::parse(&bytes);
        Ok((draft, channel.map_err(|source| ReleaseError::Document { target, source })?))
    }

    /// Returns what is staged for a role, or else its published version, counted up and unsigned.
    fn draft(&self, role: &str, now: Timestamp, days: i64) -> Result<Draft, ReleaseError> {
        let latest = self.latest(role)?;
        let version = latest.as_ref().map_or(1, |(version, _)| version + 1);
        let staged = self.staged.load(&format!("{}.json", pattern::encode(role)))?;
        let bytes = staged.or_else(|| latest.map(|(_, bytes)| bytes));
        let draft = bytes.and_then(|bytes| Draft::parse(&bytes));
        Ok(draft
            .ok_or_else(|| Refusal::NoRole { role: role.to_owned() })?
            .renew(version, now, days))
    }

    /// Returns the newest published version of a role.
    pub(super) fn latest(&self, role: &str) -> Result<Option<(u64, Vec<u8>)>, ReleaseError> {
        let suffix = format!(".{}.json", pattern::encode(role));
        let mut newest = None;
        for name in names(&self.folder.join("metadata"))? {
            let version =
                name.strip_suffix(&suffix).and_then(|version| version.parse::<u64>().ok());
            newest = newest.max(version);
        }
        let Some(version) = newest else {
            return Ok(None);
        };
        Ok(self.metadata.load(&format!("{version}{suffix}"))?.map(|bytes| (version, bytes)))
    }

    pub(super) fn staged_roles(&self) -> Result<Vec<String>, ReleaseError> {
        let names = names(&self.folder.join("staged"))?;
        let mut roles: Vec<String> =
            names.iter().filter_map(|name| Some(name.strip_suffix(".json")?.to_owned())).collect();
        roles.sort();
        Ok(roles)
    }

    pub(super) fn staged_draft(&self, role: &str) -> Result<Draft, ReleaseError> {
        let bytes = self.staged.load(&format!("{}.json", pattern::encode(role)))?;
        let draft = bytes.and_then(|bytes| Draft::parse(&bytes));
        draft.ok_or_else(|| damaged(&format!("staged/{role}.json")))
    }

    /// Says who must sign a role: for root its keys now and the published ones.
    pub(super) fn delegators(&self, role: &str) -> Result<Vec<(RoleKeys, Keys)>, ReleaseError> {
        let newest = |owner: &str| match self.staged.load(&format!("{owner}.json"))? {
            Some(bytes) => Ok::<_, ReleaseError>(Some(bytes)),
            None => Ok(self.latest(owner)?.map(|(_, bytes)| bytes)),
        };
        let missing = || Refusal::NoRole { role: role.to_owned() };
        if !TOP_LEVEL.contains(&role) {
            let bytes = newest("targets")?.ok_or_else(missing)?;
            let targets = Targets::read(&envelope("targets.json", &bytes)?);
            let file = "targets.json".to_owned();
            let targets = targets.map_err(|source| ReleaseError::Metadata { file, source })?;
            let delegations = targets.delegations.ok_or_else(missing)?;
            let signers = delegations.signers(role).ok_or_else(missing)?.clone();
            return Ok(vec![(signers, delegations.keys)]);
        }
        let mut roots = vec![newest("root")?.ok_or_else(missing)?];
        if role == "root"
            && let Some((_, bytes)) = self.latest("root")?
        {
            roots.push(bytes);
        }
        let mut found = Vec::new();
        for bytes in roots {
            let root = Root::read(&envelope("root.json", &bytes)?);
            let file = "root.json".to_owned();
            let root = root.map_err(|source| ReleaseError::Metadata { file, source })?;
            let signers = root.role(role).ok_or_else(missing)?.clone();
            found.push((signers, root.keys));
        }
        Ok(found)
    }

    fn save(&self, role: &str, draft: &Draft) -> Result<(), ReleaseError> {
        Ok(self.staged.write(&format!("{}.json", pattern::encode(role)), &draft.bytes())?)
    }
}

pub(super) fn envelope(file: &str, bytes: &[u8]) -> Result<Envelope, ReleaseError> {
    let file = || file.to_owned();
    Envelope::parse(bytes).map_err(|source| ReleaseError::Metadata { file: file(), source })
}

pub(super) fn put(draft: &mut Draft, way: &[&str], name: &str, value: Json) {
    if let Some(fields) = draft.within(way) {
        fields.insert(name.to_owned(), value);
    }
}

fn add_keys(draft: &mut Draft, way: &[&str], keys: &[PublicKey]) {
    for key in keys {
        put(draft, way, &key.id(), key.json());
    }
}

/// A delegation of everything below the channel's name.
fn delegation(name: &str, keys: &[PublicKey], threshold: u64) -> Json {
    let mut role = write::role(keys, threshold);
    let paths = [format!("{name}/*"), format!("{name}/*/*")].map(Json::Text);
    let fields = [
        ("name", Json::text(name)),
        ("paths", Json::List(paths.to_vec())),
        ("terminating", Json::Bool(true)),
    ];
    for (field, value) in fields {
        if let Some(place) = role.at(field) {
            *place = value;
        }
    }
    role
}

/// Finds a role in a list of delegations.
fn listed_role<'a>(
    delegations: &'a mut BTreeMap<String, Json>,
    role: &str,
) -> Option<&'a mut BTreeMap<String, Json>> {
    let Some(Json::List(roles)) = delegations.get_mut("roles") else {
        return None;
    };
    let is = |entry: &&mut Json| entry.get("name") == Some(&Json::text(role));
    match roles.iter_mut().find(is) {
        Some(Json::Map(fields)) => Some(fields),
        _ => None,
    }
}

fn plain(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty() && name.len() <= 64 && name.chars().all(fits)
}

fn enough(role: &str, keys: &[PublicKey], threshold: u64) -> Result<(), ReleaseError> {
    if (1..=keys.len() as u64).contains(&threshold) {
        return Ok(());
    }
    Err(Refusal::TooFewKeys { role: role.to_owned(), keys: keys.len() }.into())
}

pub(super) fn each_piece(
    path: &Path,
    mut take: impl FnMut(&[u8]) -> Result<(), ReleaseError>,
) -> Result<(), ReleaseError> {
    let mut file = fs::File::open(path).map_err(|source| failed("open", path, source))?;
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).map_err(|source| failed("read", path, source))? {
            0 => return Ok(()),
            read => take(&piece[..read])?,
        }
    }
}

fn names(folder: &Path) -> Result<Vec<String>, ReleaseError> {
    let list = || -> io::Result<Vec<String>> {
        let entries: io::Result<Vec<fs::DirEntry>> = fs::read_dir(folder)?.collect();
        Ok(entries?.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    };
    list().map_err(|source| failed("list", folder, source))
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> ReleaseError {
    ReleaseError::Io { operation, path: path.to_owned(), source }
}

pub(super) fn damaged(file: &str) -> ReleaseError {
    ReleaseError::Damaged { file: file.to_owned() }
}
