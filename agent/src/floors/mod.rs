//! The time and the release below which this server does not go, whatever becomes of its disk.
//!
//! Both are in a file in STATE and, where there is a TPM that takes them, in it: so they outlast a
//! reinstallation and a lost disk. The higher of both counts. Nothing here stops a start: whatever fails
//! is told in one line, and what is known counts.
//!
//! Time rises with a repository's metadata only, which was fresh at that time, so that no time source can
//! drive it further than that metadata's end. The release is the channel's `minimum`, and rises
//! only to what this server runs itself: a mistaken minimum strands nobody for good. A TPM's memory
//! wears out: it is written when the release rises, and for the time once a day at most.

pub mod record;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use types::units::UnixSeconds;
use update::channel::Release;

pub use self::record::{Floors, Held};
use crate::{
    events::Event,
    init::boot::chain,
    seal::tpm::{INDEX, Tpm, TpmError},
};

/// The file in STATE.
const FILE: &str = "floors";
const UNFINISHED: &str = "floors.new";
/// How far the time rises before it is written again, in seconds: a TPM that allows a hundred thousand
/// writes lasts for centuries.
const TIME_STEP_S: u64 = 24 * 3600;

/// How the server's TPM is opened.
pub struct Opener(Box<dyn Fn() -> Result<Tpm, TpmError> + Send + Sync>);

/// Keeps the floors.
pub struct Keeper {
    folder: PathBuf,
    opener: Opener,
    known: Floors,
    /// What was last written to the TPM, or tried to be; `None` when there is nothing yet.
    in_tpm: Option<Floors>,
    /// What the file holds.
    on_disk: Option<(Floors, Held)>,
    held: Held,
    /// What was told last, so that it is told once.
    told: String,
}

impl Opener {
    /// The TPM whose device is below `root`.
    pub fn below(root: &Path) -> Self {
        let root = root.to_owned();
        Self(Box::new(move || Tpm::open(&root)))
    }

    /// Something else that is a TPM.
    pub fn with(open: impl Fn() -> Result<Tpm, TpmError> + Send + Sync + 'static) -> Self {
        Self(Box::new(open))
    }
}

impl Keeper {
    /// Reads the file in `folder` and the TPM. `least` is what holds in any case.
    ///
    /// Nothing is written before the first [`Keeper::raise`]: a server on which something is only tried
    /// keeps nothing of it.
    pub fn load(folder: &Path, opener: Opener, least: Floors) -> Self {
        let mut keeper = Self {
            folder: folder.to_owned(),
            opener,
            known: least,
            in_tpm: None,
            on_disk: None,
            held: Held::OnDiskOnly,
            told: String::new(),
        };
        keeper.read_disk();
        keeper.read_tpm();
        keeper.show();
        keeper
    }

    fn show(&self) {
        let Floors { time, release } = self.known;
        eprintln!("{}", Event::Floors { time: time.0, release, held: self.held });
    }

    /// Returns the floors.
    pub fn floors(&self) -> Floors {
        self.known
    }

    /// Returns whether the TPM holds them.
    pub fn held(&self) -> Held {
        self.held
    }

    /// Raises the floors, and writes them when that is due.
    pub fn raise(&mut self, to: Floors) {
        self.known = self.known.highest(to);
        if due(self.in_tpm, self.known) {
            self.write_tpm();
        }
        let same = self.on_disk.is_some_and(|(_, held)| held == self.held);
        if !same || due(self.on_disk.map(|(floors, _)| floors), self.known) {
            self.write_disk();
        }
    }

    /// Tells when `running` is older than what this server goes down to: somebody installed it anew with
    /// an old medium. It runs all the same, and updates as soon as there is something to update to.
    pub fn judge(&mut self, running: Option<Release>) {
        if let (Some(running), Some(floor)) = (running, self.known.release)
            && running < floor
        {
            self.tell(format!(
                "release {running} runs, which is older than {floor}, this server's floor"
            ));
        }
    }

    fn read_disk(&mut self) {
        let path = self.folder.join(FILE);
        let mut bytes = Vec::new();
        let read = File::open(&path)
            .and_then(|file| file.take(record::LENGTH as u64 + 1).read_to_end(&mut bytes));
        match read {
            Ok(_) => self.on_disk = Floors::from_bytes(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return self.tell(format!("{}: {error}", path.display())),
        }
        match self.on_disk {
            Some((floors, _)) => self.known = self.known.highest(floors),
            None => self.tell(format!("{} is damaged and begins anew", path.display())),
        }
    }

    fn read_tpm(&mut self) {
        let had = self.on_disk.is_some_and(|(_, held)| held == Held::InTpm);
        let kept = (self.opener.0)().and_then(|mut tpm| tpm.kept(INDEX));
        match kept {
            Ok(Some(bytes)) => {
                self.in_tpm = Floors::from_bytes(&bytes).map(|(floors, _)| floors);
                match self.in_tpm {
                    Some(floors) => {
                        self.known = self.known.highest(floors);
                        self.held = Held::InTpm;
                    }
                    None => self.tell("what the TPM holds is damaged and begins anew".to_owned()),
                }
            }
            Ok(None) if had => {
                let reason = "the TPM held the floors and holds none: it was cleared or exchanged";
                self.tell(reason.to_owned());
            }
            Ok(None) => {}
            Err(error) => {
                // No try to write where reading fails, until there is something new.
                self.in_tpm = Some(self.known);
                self.tell_of_tpm(&error, had);
            }
        }
    }

    fn write_tpm(&mut self) {
        let bytes = self.known.to_bytes(Held::OnDiskOnly);
        let kept = (self.opener.0)().and_then(|mut tpm| tpm.keep(INDEX, &bytes));
        let had = self.held == Held::InTpm;
        self.in_tpm = Some(self.known);
        match kept {
            Ok(()) => {
                self.held = Held::InTpm;
                self.show();
            }
            Err(error) => {
                self.held = Held::OnDiskOnly;
                self.tell_of_tpm(&error, had);
            }
        }
    }

    /// A server without a TPM is none that has lost something.
    fn tell_of_tpm(&mut self, error: &TpmError, had: bool) {
        if had || !matches!(error, TpmError::Absent { .. }) {
            self.tell(format!("the TPM does not hold the floors: {}", chain(error)));
        }
    }

    fn write_disk(&mut self) {
        match store(&self.folder, &self.known.to_bytes(self.held)) {
            Ok(()) => self.on_disk = Some((self.known, self.held)),
            Err(error) => self.tell(format!("{}: {error}", self.folder.join(FILE).display())),
        }
    }

    fn tell(&mut self, reason: String) {
        if self.told != reason {
            eprintln!("{}", Event::Trouble { place: "floors", reason: reason.clone() });
            self.told = reason;
        }
    }
}

/// Whether `known` is worth a write where `there` is.
fn due(there: Option<Floors>, known: Floors) -> bool {
    let Some(there) = there else { return true };
    known.release > there.release || known.time.0 >= there.time.0.saturating_add(TIME_STEP_S)
}

/// Replaces the file; once this returns, it is durable.
fn store(folder: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = folder.join(UNFINISHED);
    let mut options = File::options();
    let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&unfinished, folder.join(FILE))?;
    File::open(folder)?.sync_all()
}

/// What a look at a repository raises, which was made at `now` with `minimum` in its channel, on a server
/// that runs `running`.
pub fn risen(now: UnixSeconds, minimum: Option<Release>, running: Option<Release>) -> Floors {
    let release = minimum.filter(|minimum| running.is_some_and(|running| running >= *minimum));
    Floors { time: now, release }
}
