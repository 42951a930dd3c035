//! Installing: from a medium that the node runs from to a disk that it will run from.
//!
//! `disks`, `probe` and `source` look, `plan` chooses or refuses, `ask` lets somebody at the console say the
//! last word, `handover` gives people the recovery key, `write` writes, `entry` tells firmware. Nothing happens unless the configuration has
//! a section `[install]` and the node keeps its state in memory.

pub mod ask;
pub mod disks;
pub mod entry;
#[cfg(test)]
pub(crate) mod failing;
pub mod grow;
pub mod handover;
pub mod network;
pub mod plan;
pub mod probe;
pub mod session;
pub(crate) mod source;
pub mod unfinished;
pub mod write;

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tokio::runtime::Handle;
use types::{
    config::Network,
    install::{Confirm, Install},
    volumes::Protection,
};
use update::{
    disk::{
        esp,
        gpt::Table,
        layout::{self, Identities},
    },
    efi::Place,
};

use self::{
    ask::Answer,
    handover::Handed,
    plan::Choice,
    write::{Content, Step},
};
use crate::{
    config, efivars,
    events::Event,
    init::{boot::chain, own_disks, partitions},
    local::host,
    seal::{
        keys::NewVolumes,
        luks::HeaderError,
        unlock,
        volume::{self, Volume},
    },
    sys,
};

/// The templates in the image.
const EMPTY_STATE: &str = "/usr/share/holdfast/empty-state";
const EMPTY_DATA: &str = "/usr/share/holdfast/empty-data";
/// Where the new STATE is mounted while it gets its first files.
const NEW_STATE: &str = "/run/holdfast/install";
/// Name of its mapping meanwhile.
const NEW_MAPPING: &str = "holdfast-new-state";
/// How long the last page is shown before the node restarts.
const LAST_PAGE: Duration = Duration::from_secs(3);
/// How long the kernel may take to make the new partitions' device files.
const PARTITIONS_LIMIT: Duration = Duration::from_secs(20);

/// Why an installation was not finished.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum InstallError {
    #[error(transparent)]
    Refused(#[from] plan::Refusal),
    #[error(
        "no disk, stick or CD of this server holds the running release, so there is nothing to install from; attach the medium that the node was started from (what Ventoy starts is a file on its stick, which is not found: write the image itself to a stick), or name the release's holdfast.efi as `program` in [install]"
    )]
    NoMedium,
    #[error("there is no medium to install from, and the network gives none")]
    Network(#[from] network::ProgramError),
    #[error("nobody typed {word} at the console within {} seconds; nothing was written, and the next start asks again", ask::LIMIT.as_secs())]
    Silence { word: String },
    #[error(
        "somebody at the console said no: what was typed is not {word}; nothing was written, and the next start asks again"
    )]
    Declined { word: String },
    #[error("cannot write to {disk}")]
    Write { disk: String, source: write::WriteError },
    #[error("{disk} was written, but its new partitions cannot be used: cannot {action}")]
    Partitions { disk: String, action: &'static str, source: io::Error },
    #[error("cannot make keys for the disk's encryption")]
    Keys { source: HeaderError },
    #[error("cannot read {path}")]
    Template { path: &'static str, source: io::Error },
}

/// What was installed where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The disk.
    pub disk: String,
    /// Why firmware has no entry for it; the disk's fallback path is what it starts from then.
    pub entry: Result<u16, String>,
    /// How long what is on the consoles stays there before the restart.
    pub shown: Duration,
}

/// Where the running release comes from when no medium has it.
#[derive(Debug, Clone)]
pub struct Elsewhere {
    /// What the configuration says of the network.
    pub network: Network,
    /// The runtime that fetches.
    pub runtime: Handle,
}

/// What goes into the new STATE.
#[derive(Debug, Clone)]
pub struct Keepsakes {
    /// The configuration's text.
    pub document: Vec<u8>,
    /// The folder with the node's key.
    pub state: PathBuf,
}

/// Whether the node keeps its state in memory, which is when there is something to install.
pub fn runs_from_memory(mountinfo: &str) -> bool {
    mountinfo.lines().any(|line| {
        let at_state = line.split(' ').nth(4) == Some("/state");
        at_state && line.split(" - ").nth(1).is_some_and(|rest| rest.starts_with("tmpfs "))
    })
}

/// Installs. Blocks: it waits for a person and for disks. `told` gets a line for each step.
pub fn run(
    install: &Install,
    keepsakes: &Keepsakes,
    elsewhere: &Elsewhere,
    told: &mut dyn FnMut(String),
) -> Result<Installed, InstallError> {
    let root = Path::new("/");
    let disks = disks::read(root);
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let found = source::find_medium(root, &release);
    let name = found.as_ref().map(|(name, _)| name.as_str());
    plan::keep_identity(install, &disks, partitions::absent(root))?;
    let choice = plan::choose(install, &disks, name)?;
    let (medium, program) = match (found, &install.program) {
        (Some(found), _) => found,
        (None, Some(named)) => {
            told(format!("fetching the running release from {named}"));
            (named.clone(), network::fetch(named, elsewhere, &release)?)
        }
        (None, None) => return Err(InstallError::NoMedium),
    };
    told(format!("installing from {medium} to {}", choice.disk));
    confirm(&choice, told)?;
    let volumes = NewVolumes::invent(&mut unlock::sealer(root), &install.escrow)
        .map_err(|source| InstallError::Keys { source })?;
    told(format!("{}: {}", choice.disk.name, protection(root, &volumes.protection)));
    // Before the disk can be started from: whatever fails from here on, somebody has had the key.
    let handed = hand_over(root, install, &volumes, told);
    let begin = Instant::now();
    let table = write_disk(root, &choice, (&program, &volumes), told)?;
    keep(&choice, keepsakes, &volumes)?;
    let entry = add_entry(&table, choice.block.bytes()).map_err(|error| chain(&error));
    let disk = choice.disk.to_string();
    let ms = begin.elapsed().as_millis();
    eprintln!("{}", Event::Installed { disk: choice.disk.name.clone(), ms });
    let shown = match handed {
        None | Some(Handed::Confirmed) => LAST_PAGE,
        Some(Handed::Shown | Handed::Unanswered) => {
            handover::show_again(root, &volumes.recovery);
            handover::SHOWN
        }
    };
    Ok(Installed { disk, entry, shown })
}

/// Gives people the recovery key, unless it is sealed to operators.
fn hand_over(
    root: &Path,
    install: &Install,
    volumes: &NewVolumes,
    told: &mut dyn FnMut(String),
) -> Option<Handed> {
    if !install.escrow.is_empty() {
        let keys: Vec<_> = install.escrow.iter().map(ToString::to_string).collect();
        told(format!("the recovery key is sealed to {}", keys.join(", ")));
        return None;
    }
    if install.confirm == Confirm::Console {
        told(
            "waiting for somebody to type the recovery key's last group at the console".to_owned(),
        );
    }
    let handed = handover::hand_over(root, &volumes.recovery, install.confirm, ask::LIMIT);
    if handed == Handed::Unanswered {
        let limit = ask::LIMIT.as_secs();
        told(format!(
            "nobody typed the recovery key's last group within {limit} seconds; installing all the same"
        ));
    }
    Some(handed)
}

fn confirm(choice: &Choice, told: &mut dyn FnMut(String)) -> Result<(), InstallError> {
    if choice.confirm == Confirm::Unattended {
        return Ok(());
    }
    let (disk, word) = (&choice.disk, choice.disk.word().to_owned());
    let question = format!(
        "Install Holdfast on {disk}?\r\nIt holds: {}. Everything on it will be lost.\r\nType {word} \
         and Enter to install; anything else leaves the disk as it is.",
        disk.content
    );
    told(format!("waiting for somebody to type {word} at the console"));
    match ask::ask(Path::new("/"), &question, &word, ask::LIMIT) {
        Answer::Yes => Ok(()),
        Answer::No => Err(InstallError::Declined { word }),
        Answer::Silence => Err(InstallError::Silence { word }),
    }
}

fn write_disk(
    root: &Path,
    choice: &Choice,
    (program, volumes): (&[u8], &NewVolumes),
    told: &mut dyn FnMut(String),
) -> Result<Table, InstallError> {
    let template = |path: &'static str| {
        fs::read(path).map_err(|source| InstallError::Template { path, source })
    };
    let (state, data) = (template(EMPTY_STATE)?, template(EMPTY_DATA)?);
    let failed = |source| InstallError::Write { disk: choice.disk.to_string(), source };
    // Exclusive: the kernel refuses when something uses the disk by now.
    let disk = rustix::fs::open(
        &choice.disk.path,
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .map_err(|error| {
        failed(write::WriteError::Disk { step: Step::Clearing, source: error.into() })
    })?;
    let disk = File::from(disk);
    let content = Content { program, state: &state, data: &data, volumes };
    let place = (choice.block, choice.disk.bytes);
    let identities = Identities::random();
    let mut step = |step: Step| {
        told(format!("{}: {step}", choice.disk.name));
        before_step(root, step, &choice.disk, identities);
    };
    let table = write::write(&disk, place, identities, content, &mut step).map_err(failed)?;
    sys::block::reread_partitions(disk.as_fd())
        .map_err(partitions(choice, "read the table again"))?;
    Ok(table)
}

/// Has firmware remember the new disk before it has a table: a power cut after that leaves an installation, and
/// one that nobody remembers would be lost. Until then it is not the server's, whatever fails.
fn before_step(root: &Path, step: Step, disk: &disks::Disk, identities: Identities) {
    if step == Step::Table {
        let (partition, hardware) = (identities.esp.to_string(), Some(disk.hardware.clone()));
        own_disks::remember(root, &own_disks::Disk { partition, hardware });
    }
}

fn partitions(choice: &Choice, action: &'static str) -> impl FnOnce(io::Error) -> InstallError {
    let disk = choice.disk.to_string();
    move |source| InstallError::Partitions { disk, action, source }
}

/// Puts the node's key and configuration into the new STATE: the installed node is the same one.
fn keep(choice: &Choice, keepsakes: &Keepsakes, volumes: &NewVolumes) -> Result<(), InstallError> {
    let partition = state_partition(&choice.disk.name)
        .map_err(partitions(choice, "find the new partition of STATE"))?;
    let volume = Volume::open(&partition)
        .and_then(|volume| volume.ok_or_else(|| io::ErrorKind::InvalidData.into()))
        .map_err(partitions(choice, "read the header of STATE"))?;
    let device = volume
        .map(NEW_MAPPING, &volumes.state.key)
        .map_err(partitions(choice, "map what is encrypted in STATE"))?;
    let kept = copy_to(choice, keepsakes, &device);
    kept.and(volume::unmap(NEW_MAPPING).map_err(partitions(choice, "close STATE")))
}

fn copy_to(choice: &Choice, keepsakes: &Keepsakes, device: &Path) -> Result<(), InstallError> {
    fs::create_dir_all(NEW_STATE).map_err(partitions(choice, "make a mount point"))?;
    mount(device, NEW_STATE, "ext4", MountFlags::NOSUID | MountFlags::NODEV, None)
        .map_err(|error| partitions(choice, "mount STATE")(error.into()))?;
    let copied = copy(keepsakes, Path::new(NEW_STATE));
    let unmounted = unmount(NEW_STATE, UnmountFlags::empty()).map_err(io::Error::from);
    copied.and(unmounted).map_err(partitions(choice, "write to STATE"))
}

fn copy(keepsakes: &Keepsakes, to: &Path) -> io::Result<()> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let key = fs::read(keepsakes.state.join(crate::service::NODE_KEY))?;
    for (name, content) in
        [(crate::service::NODE_KEY, &key), (config::INSTALLED, &keepsakes.document)]
    {
        let mut options = File::options();
        let mut file =
            options.create(true).truncate(true).write(true).mode(0o600).open(to.join(name))?;
        file.write_all(content)?;
        file.sync_all()?;
    }
    File::open(to)?.sync_all()
}

/// Waits until the kernel shows the second partition of a disk, and returns its device file.
fn state_partition(disk: &str) -> io::Result<PathBuf> {
    let begin = Instant::now();
    loop {
        let entries = fs::read_dir(Path::new("/sys/class/block").join(disk))?.flatten();
        for entry in entries {
            let uevent = fs::read_to_string(entry.path().join("uevent")).unwrap_or_default();
            let device = Path::new("/dev").join(entry.file_name());
            if uevent.lines().any(|line| line.strip_prefix("PARTNAME=") == Some(layout::STATE))
                && device.exists()
            {
                return Ok(device);
            }
        }
        if begin.elapsed() > PARTITIONS_LIMIT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn protection(root: &Path, protection: &Protection) -> String {
    let notice = protection.notice(host::starts(root));
    if notice.is_empty() { "encrypted, and sealed to this server's TPM".to_owned() } else { notice }
}

/// Tells firmware how to start the new disk.
fn add_entry(table: &Table, block: u64) -> io::Result<u16> {
    let Some((start, partition)) = table.placed.first() else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let place = Place {
        number: 1,
        first: start / block,
        blocks: partition.bytes / block,
        partition: partition.id,
        path: esp::FALLBACK,
    };
    let folder = Path::new(efivars::FOLDER);
    efivars::writable(folder, || entry::put_first(folder, &place))?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use update::disk::{gpt::BlockSize, template};

    use super::*;
    use crate::{
        seal::{keys::Sealer, tpm::TpmError},
        testing,
    };

    #[test]
    fn firmware_remembers_a_disk_as_soon_as_it_has_a_table_and_no_sooner() {
        let root = testing::root(&[
            ("sys/firmware/efi/efivars/BootOrder-1", b"123456"),
            ("sys/class/block/sda/size", b"8\n"),
            ("sys/class/block/sda/device/serial", b"S1\n"),
            ("dev/sda", b""),
        ]);
        let disk = disks::read(root.path()).pop().expect("a disk");
        File::options()
            .write(true)
            .open(&disk.path)
            .and_then(|file| file.set_len(layout::SMALLEST_DISK))
            .expect("made longer");
        let file = File::options().read(true).write(true).open(&disk.path).expect("opened");
        let tpm = Err(TpmError::Absent { path: "dev/tpmrm0".into() });
        let volumes = NewVolumes::invent(&mut Sealer { tpm, release: None, additions: None }, &[])
            .expect("keys");
        let empty = template::capture(&vec![1; template::BLOCK]);
        let content = Content { program: b"x", state: &empty, data: &empty, volumes: &volumes };
        let identities = Identities::random();
        let efi = efivars::folder(root.path()).expect("there is firmware");
        let has_table = || {
            let mut end = [0; 2];
            file.read_exact_at(&mut end, 510).expect("read");
            end == [0x55, 0xaa]
        };
        let mut states = Vec::new();
        let mut step = |step| {
            before_step(root.path(), step, &disk, identities);
            states.push((step == Step::Table, has_table(), efivars::read(&efi, "Disk")));
        };
        let place = (BlockSize::B512, layout::SMALLEST_DISK);
        write::write(&file, place, identities, content, &mut step).expect("written");
        let remembered = format!("{} S1", identities.esp).into_bytes();
        let (last, before) = states.split_last().expect("steps");
        assert!(before.iter().all(|state| *state == (false, false, None)), "{before:?}");
        assert_eq!(*last, (true, false, Some(remembered)));
        assert!(has_table());
    }

    #[test]
    fn only_a_state_in_memory_asks_for_an_installation() {
        let line = |kind| format!("31 1 0:30 / /state rw,nosuid - {kind} /dev/vda2 rw\n");
        assert!(runs_from_memory(&line("tmpfs")));
        assert!(!runs_from_memory(&line("ext4")));
        assert!(!runs_from_memory("31 1 0:30 / /run rw - tmpfs tmpfs rw\n"));
    }
}
