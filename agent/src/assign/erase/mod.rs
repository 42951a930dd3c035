//! Erases an NVMe drive that comes back from a renter, before anybody else can have it.
//!
//! The kernel's own driver gets the drive for that long, and only its admin queue is used: nothing here
//! opens the block devices, whose content the renter chose. That the kernel looks for partitions on them
//! cannot be helped; that nothing of the node takes them for its own is [`lent`]'s. What is said to the
//! drive is in [`nvme`].
//!
//! A drive that cannot be erased is the caller's to quarantine, with the reason that this gives. What is
//! not erased with the namespaces stays: firmware, its slots, and boot partitions.

pub mod nvme;

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nvme::{
    About, Action, Command, Controller, Erase, IDENTIFY, Layout, Method, SANITIZE_LOG, Sanitized,
};
use types::node::Bdf;

use super::{AssignError, bind, bind_group, class_of, device_path, driver_of, lent};
use crate::sys::nvme::{Admin, admin};

/// The kernel's driver of NVMe drives.
const NVME: &str = "nvme";

/// PCI class and subclass of drives that are erased: mass storage, non-volatile memory controllers.
/// Source: PCI Code and ID Assignment 1.11 §1.2.
const CLASS: u32 = 0x01_08;

/// Longest wait until the driver's controller is at work: CAP.TO allows a drive 127.5 s.
const CONTROLLER_LIMIT: Duration = Duration::from_secs(130);

/// No command is begun after this time. Erasing by key takes seconds, erasing all blocks of a large
/// drive minutes.
const BEGIN_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Longest that one Format NVM may take.
const FORMAT_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Longest that erasing one drive takes: [`BEGIN_LIMIT`], and a command that was begun just before
/// its half, is aborted, and takes as long again until the kernel gives its controller up.
pub const ERASE_LIMIT: Duration = Duration::from_secs(60 * 60);

const _: () = assert!(
    ERASE_LIMIT.as_secs() >= BEGIN_LIMIT.as_secs() + FORMAT_LIMIT.as_secs()
        && FORMAT_LIMIT.as_secs() <= BEGIN_LIMIT.as_secs()
);

/// Pause between two looks at what goes on.
const POLL: Duration = Duration::from_millis(200);

/// Status of a command that succeeded, and the part of it that is status code type and status code.
const SUCCESS: u16 = 0;
const STATUS: u16 = 0x7ff;

/// A drive that was erased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Erased {
    /// How.
    pub method: Method,
    /// How long it took.
    pub took: Duration,
}

/// Why a drive was not erased.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum EraseError {
    #[error("the driver {NVME} did not take it")]
    Bind { source: Box<AssignError> },
    #[error("its controller was not at work within {} s", CONTROLLER_LIMIT.as_secs())]
    NoController,
    #[error("its serial number cannot be kept, by which it is known")]
    Serial { source: io::Error },
    #[error("cannot use {path}")]
    Open { path: String, source: io::Error },
    #[error("it did not answer {command}")]
    Unanswered { command: &'static str, source: io::Error },
    #[error("it refused {command} with status {status:#05x}")]
    Refused { command: &'static str, status: u16 },
    #[error("its answer to {command} has no meaning")]
    Meaningless { command: &'static str },
    #[error("it can neither be sanitized by crypto or block erase, nor be formatted")]
    NoMethod,
    #[error(
        "it has {active} namespaces that are attached and {unattached} that are not; \
         all must be, and one is least"
    )]
    Namespaces { active: usize, unattached: usize },
    #[error("its sanitize operation failed")]
    Failed,
    #[error("it was not erased within {} s", BEGIN_LIMIT.as_secs())]
    Late,
}

/// Returns whether a device is a drive that has to be erased after a renter had it.
pub fn is_drive(root: &Path, device: Bdf) -> bool {
    class_of(root, device).is_some_and(|class| class >> 8 == CLASS)
}

/// Erases a drive that is bound to vfio-pci and that nobody holds, and binds it to vfio-pci again.
/// Blocks for up to [`ERASE_LIMIT`].
pub fn erase(root: &Path, device: Bdf) -> Result<Erased, AssignError> {
    let begin = Instant::now();
    let erased = bind(root, &[device], NVME)
        .map_err(|source| EraseError::Bind { source: Box::new(source) })
        .and_then(|()| {
            let path = wait_for_controller(root, device)?;
            // It may be another than the one that was here before.
            let serial =
                lent::keep_serial(root, device).map_err(|source| EraseError::Serial { source })?;
            let open = |source| EraseError::Open { path: path.display().to_string(), source };
            let controller = File::options().read(true).write(true).open(&path).map_err(open)?;
            Ok((wipe(&mut Kernel(controller), begin)?, serial))
        });
    // Whatever came of it, the kernel's driver has no more business with what a renter left.
    let bound = bind_group(root, &[device]);
    let (method, serial) = erased.map_err(|source| AssignError::NotErased { device, source })?;
    bound?;
    lent::forget(root, device, serial.as_deref())?;
    Ok(Erased { method, took: begin.elapsed() })
}

/// Returns the character device of a drive's controller, when that is at work.
fn wait_for_controller(root: &Path, device: Bdf) -> Result<PathBuf, EraseError> {
    let begin = Instant::now();
    loop {
        if let Some(path) = controller(root, device) {
            return Ok(path);
        }
        // A drive that the driver gave up is let go of, and nothing comes any more.
        let given_up = driver_of(&device_path(root, device)).as_deref() != Some(NVME);
        if given_up || begin.elapsed() >= CONTROLLER_LIMIT {
            return Err(EraseError::NoController);
        }
        std::thread::sleep(POLL);
    }
}

fn controller(root: &Path, device: Bdf) -> Option<PathBuf> {
    let entries = fs::read_dir(device_path(root, device).join("nvme")).ok()?.flatten();
    let live = |entry: &fs::DirEntry| {
        let state = fs::read_to_string(entry.path().join("state"));
        state.is_ok_and(|state| state.trim() == "live")
    };
    let path = root.join("dev").join(entries.into_iter().find(live)?.file_name());
    path.exists().then_some(path)
}

/// What sends commands to a drive.
trait AdminQueue {
    /// Sends one, waits for it, and reads what it returns into `data`.
    fn submit(&mut self, command: Command, data: &mut [u8]) -> Result<(), EraseError>;
}

/// The character device of a controller.
struct Kernel(File);

impl AdminQueue for Kernel {
    fn submit(&mut self, command: Command, data: &mut [u8]) -> Result<(), EraseError> {
        let Command { name, opcode, nsid, cdw10, limit } = command;
        let timeout_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let asked = Admin { opcode, nsid, cdw10, timeout_ms };
        let status = admin(self.0.as_fd(), asked, data)
            .map_err(|source| EraseError::Unanswered { command: name, source })?;
        match status & STATUS {
            SUCCESS => Ok(()),
            status => Err(EraseError::Refused { command: name, status }),
        }
    }
}

/// Has a drive erase itself in the best way that it does not refuse: some say that they can what they, or the
/// firmware that locked them, then refuse. No command is begun [`BEGIN_LIMIT`] after `begin`. Returns the first
/// refusal where nothing else is left.
fn wipe(queue: &mut impl AdminQueue, begin: Instant) -> Result<Method, EraseError> {
    let bytes = identify(queue, About::Controller)?;
    let controller = Controller::parse(&bytes).ok_or(MEANINGLESS)?;
    let mut refusal = None;
    for method in controller.methods() {
        let erased = match method {
            Method::Sanitize(action) => sanitize(queue, action, begin),
            Method::Format(erase) => format(queue, (controller, erase), begin),
        };
        match erased {
            Ok(()) => return Ok(method),
            Err(refused @ EraseError::Refused { .. }) => refusal = refusal.or(Some(refused)),
            Err(failed) => return Err(failed),
        }
    }
    Err(refusal.unwrap_or(EraseError::NoMethod))
}

const MEANINGLESS: EraseError = EraseError::Meaningless { command: "Identify" };

fn identify(queue: &mut impl AdminQueue, about: About) -> Result<Vec<u8>, EraseError> {
    let mut bytes = vec![0; IDENTIFY];
    queue.submit(Command::identify(about), &mut bytes)?;
    Ok(bytes)
}

fn sanitize(queue: &mut impl AdminQueue, action: Action, begin: Instant) -> Result<(), EraseError> {
    // One that the renter began goes on through every reset, and no other begins before its end.
    settle(queue, begin)?;
    queue.submit(Command::sanitize(action), &mut [])?;
    match settle(queue, begin)? {
        Sanitized::Done(done) if done == action => Ok(()),
        Sanitized::Failed => Err(EraseError::Failed),
        Sanitized::Done(_) | Sanitized::Never | Sanitized::Otherwise | Sanitized::Running => {
            Err(EraseError::Meaningless { command: Command::sanitize_status().name })
        }
    }
}

/// Waits until no sanitize operation goes on. Returns how the last one went.
fn settle(queue: &mut impl AdminQueue, begin: Instant) -> Result<Sanitized, EraseError> {
    let command = Command::sanitize_status();
    loop {
        let mut log = vec![0; SANITIZE_LOG];
        queue.submit(command, &mut log)?;
        let meaningless = EraseError::Meaningless { command: command.name };
        let status = Sanitized::parse(&log).ok_or(meaningless)?;
        if status != Sanitized::Running {
            return Ok(status);
        }
        left(begin)?;
        std::thread::sleep(POLL);
    }
}

fn format(
    queue: &mut impl AdminQueue,
    (controller, erase): (Controller, Erase),
    begin: Instant,
) -> Result<(), EraseError> {
    let list = |bytes: Vec<u8>| nvme::namespaces(&bytes).ok_or(MEANINGLESS);
    let active = list(identify(queue, About::Active)?)?;
    let unattached = if controller.manages_namespaces() {
        let all = list(identify(queue, About::Allocated)?)?;
        all.iter().filter(|id| !active.contains(id)).count()
    } else {
        0
    };
    // Format NVM does not reach what is not attached, and another renter could attach it.
    if active.is_empty() || unattached > 0 {
        return Err(EraseError::Namespaces { active: active.len(), unattached });
    }
    let mut layouts = Vec::new();
    for id in active {
        let bytes = identify(queue, About::Namespace(id))?;
        layouts.push((id, Layout::parse(&bytes).ok_or(MEANINGLESS)?));
    }
    for (id, layout) in controller.formats(&layouts) {
        let limit = FORMAT_LIMIT.min(left(begin)?);
        queue.submit(Command::format(id, layout, erase, limit), &mut [])?;
    }
    Ok(())
}

/// Returns how long commands may still begin.
fn left(begin: Instant) -> Result<Duration, EraseError> {
    let left = BEGIN_LIMIT.checked_sub(begin.elapsed()).filter(|left| !left.is_zero());
    left.ok_or(EraseError::Late)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{nvme::ALL_NAMESPACES, *};
    use crate::testing::root;

    const DEVICE: Bdf = Bdf { segment: 0, bus: 1, device: 0, function: 0 };

    /// A drive: what it can do, and what it was told.
    #[derive(Default)]
    struct Drive {
        oacs: u8,
        sanicap: u8,
        fna: u8,
        /// Numbers of namespaces, of which the first `attached` are so.
        namespaces: Vec<u32>,
        attached: usize,
        /// Words of the log of sanitize operations, as one look after the other finds them.
        log: Vec<(u8, u8)>,
        /// Opcodes that are refused.
        refuses: Vec<u8>,
        /// Opcode, namespace and dword 10 of everything that erases.
        told: Vec<(u8, u32, u32)>,
    }

    impl AdminQueue for Drive {
        fn submit(&mut self, command: Command, data: &mut [u8]) -> Result<(), EraseError> {
            if self.refuses.contains(&command.opcode) {
                return Err(EraseError::Refused { command: command.name, status: 0x10a });
            }
            let mut list = |ids: &[u32]| {
                for (at, id) in ids.iter().enumerate() {
                    data[4 * at..4 * at + 4].copy_from_slice(&id.to_le_bytes());
                }
            };
            match (command.opcode, command.cdw10) {
                (0x06, 0x00) => data[26] = u8::try_from(command.nsid).expect("a small number"),
                (0x06, 0x01) => {
                    (data[256], data[328], data[524]) = (self.oacs, self.sanicap, self.fna);
                }
                (0x06, 0x02) => list(&self.namespaces[..self.attached]),
                (0x06, 0x10) => list(&self.namespaces),
                (0x02, _) => (data[2], data[4]) = self.log.remove(0),
                told => self.told.push((told.0, command.nsid, told.1)),
            }
            Ok(())
        }
    }

    impl Drive {
        fn wipe(&mut self) -> Result<Method, EraseError> {
            wipe(self, Instant::now())
        }
    }

    #[test]
    fn a_drive_that_can_is_sanitized_after_what_the_renter_began() {
        let log = vec![(2, 3), (1, 3), (2, 0xc), (1, 0xc)];
        let mut drive = Drive { sanicap: 3, log, ..Drive::default() };
        let method = drive.wipe().expect("erased");
        assert_eq!(method.name(), "sanitize-crypto-erase");
        assert_eq!(drive.told, [(0x84, 0, 0xc)]);
        assert!(drive.log.is_empty());
    }

    #[test]
    fn a_sanitize_operation_that_failed_or_is_another_one_erased_nothing() {
        let wipe = |last| {
            let log = vec![(0, 0), last];
            Drive { sanicap: 1, log, ..Drive::default() }.wipe().expect_err("not erased")
        };
        assert!(matches!(wipe((3, 0xc)), EraseError::Failed));
        assert!(matches!(wipe((1, 0xa)), EraseError::Meaningless { .. }));
        assert!(matches!(wipe((0, 0)), EraseError::Meaningless { .. }));
    }

    #[test]
    fn other_drives_are_formatted_namespace_by_namespace() {
        let attached = Drive { namespaces: vec![1, 5], attached: 2, ..Drive::default() };
        let mut drive = Drive { oacs: 2, ..attached };
        assert_eq!(drive.wipe().expect("erased").name(), "format-user-data-erase");
        assert_eq!(drive.told, [(0x80, 1, 0x201), (0x80, 5, 0x205)]);

        let mut one =
            Drive { oacs: 10, fna: 6, namespaces: vec![3], attached: 1, ..Drive::default() };
        assert_eq!(one.wipe().expect("erased").name(), "format-crypto-erase");
        assert_eq!(one.told, [(0x80, ALL_NAMESPACES, 0x403)]);
    }

    #[test]
    fn what_cannot_be_erased_whole_is_not_begun() {
        let mut hidden =
            Drive { oacs: 10, namespaces: vec![1, 2], attached: 1, ..Drive::default() };
        let refused = hidden.wipe().expect_err("not erased");
        assert!(matches!(refused, EraseError::Namespaces { active: 1, unattached: 1 }));
        assert!(hidden.told.is_empty());
        let mut empty = Drive { oacs: 2, ..Drive::default() };
        assert!(matches!(empty.wipe(), Err(EraseError::Namespaces { active: 0, unattached: 0 })));
        assert!(matches!(Drive::default().wipe(), Err(EraseError::NoMethod)));
    }

    #[test]
    fn what_a_drive_refuses_is_tried_in_the_next_way_that_it_has() {
        let one =
            || Drive { oacs: 2, fna: 4, namespaces: vec![1], attached: 1, ..Drive::default() };
        let idle = || vec![(0, 0), (0, 0)];
        let mut drive = Drive { sanicap: 3, log: idle(), refuses: vec![0x84], ..one() };
        assert_eq!(drive.wipe().expect("erased").name(), "format-crypto-erase");
        assert_eq!(drive.told, [(0x80, 1, 0x401)]);
        let mut drive = Drive { sanicap: 3, log: idle(), refuses: vec![0x84, 0x80], ..one() };
        let refused = drive.wipe().expect_err("not erased");
        assert!(matches!(refused, EraseError::Refused { command: "Sanitize", .. }), "{refused}");
        // One that was accepted and failed is no refusal: the drive is not to be trusted with another.
        let log = vec![(0, 0), (3, 0xc)];
        let mut drive = Drive { sanicap: 3, log, ..one() };
        assert!(matches!(drive.wipe(), Err(EraseError::Failed)));
    }

    #[test]
    fn a_command_that_is_refused_is_named() {
        let one = || Drive { oacs: 2, namespaces: vec![1], attached: 1, ..Drive::default() };
        let mut drive = Drive { refuses: vec![0x80], ..one() };
        let refused = drive.wipe().expect_err("not erased");
        assert!(matches!(refused, EraseError::Refused { command: "Format NVM", status: 0x10a }));
        let begin = Instant::now().checked_sub(BEGIN_LIMIT).expect("a time long ago");
        let mut late = one();
        let late = wipe(&mut late, begin);
        assert!(matches!(late, Err(EraseError::Late)));
    }

    #[test]
    fn a_drive_that_the_driver_does_not_take_is_not_erased_and_stays_noted() {
        let device = format!("sys/bus/pci/devices/{DEVICE}");
        let root = root(&[
            (&format!("{device}/class"), b"0x010802\n"),
            (&format!("{device}/driver_override"), b""),
            ("sys/bus/pci/drivers_probe", b""),
        ]);
        lent::remember(root.path(), DEVICE).expect("noted");
        let failed = erase(root.path(), DEVICE).expect_err("not erased");
        let reason = crate::init::boot::chain(&failed);
        assert!(reason.contains("release-device"), "{reason}");
        assert!(reason.contains("the driver nvme did not take it"), "{reason}");
        assert!(lent::is_lent(root.path(), DEVICE));
        let driver = fs::read_to_string(root.path().join(&device).join("driver_override"));
        assert_eq!(driver.expect("read"), crate::assign::DRIVER, "it is no disk of the node's");
    }

    #[test]
    fn the_drive_that_is_erased_tells_which_it_is() {
        let device = format!("sys/bus/pci/devices/{DEVICE}");
        let root = root(&[
            (&format!("{device}/class"), b"0x010802\n"),
            (&format!("{device}/nvme/nvme0/serial"), b"OLD\n"),
            ("sys/bus/pci/drivers_probe", b""),
            ("dev/nvme0", b""),
        ]);
        let path = root.path().join(&device);
        lent::keep_serial(root.path(), DEVICE).expect("kept");
        // Another is in its place, which the driver has.
        fs::write(path.join("nvme/nvme0/serial"), "NEW\n").expect("written");
        fs::write(path.join("nvme/nvme0/state"), "live\n").expect("written");
        fs::create_dir_all(root.path().join("sys/bus/pci/drivers/nvme")).expect("made");
        symlink("../../drivers/nvme", path.join("driver")).expect("linked");
        erase(root.path(), DEVICE).expect_err("a file erases nothing");
        fs::remove_dir_all(path.join("nvme")).expect("vfio-pci has it");
        let kept = fs::read_to_string(root.path().join("run/holdfast/drives/0000:01:00.0"));
        assert_eq!(kept.expect("kept"), "NEW");
    }

    #[test]
    fn a_controller_is_used_when_it_is_at_work() {
        let device = format!("sys/bus/pci/devices/{DEVICE}");
        let root =
            root(&[(&format!("{device}/nvme/nvme3/state"), b"connecting\n"), ("dev/nvme3", b"")]);
        assert_eq!(controller(root.path(), DEVICE), None);
        assert!(matches!(wait_for_controller(root.path(), DEVICE), Err(EraseError::NoController)));
        fs::write(root.path().join(device).join("nvme/nvme3/state"), "live\n").expect("written");
        assert_eq!(controller(root.path(), DEVICE), Some(root.path().join("dev/nvme3")));
    }
}
