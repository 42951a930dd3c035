//! An NVMe controller with one namespace over a raw file or block device: for guests that have no
//! virtio drivers.
//! Source: NVM Express Base Specification 1.4 ("NVMe"), cited as "§"; PCI Local Bus 3.0.
//!
//! | BAR 0 offset | Bytes       | Structure                                               |
//! |--------------|-------------|---------------------------------------------------------|
//! | 0x0000       | 0x1000      | controller registers, see `registers`                   |
//! | 0x1000       | 8 a queue   | doorbells: submission tail, completion head (§3.1.24)   |
//! | 0x2000       | 16 a vector | MSI-X table                                             |
//! | 0x3000       | 0x1000      | MSI-X pending bits                                      |
//!
//! `registers`, `command`, `prp`, `queue` and `identify` are pure; `controller` owns the queues and
//! the file and runs on one thread of its own, `flight` is its part that moves data; this file is the PCI function, which virtual CPUs
//! call: it keeps the registers, and passes doorbells on as the last value written and, where the thread has to see it
//! at once, a wake-up.
//!
//! Not offered: SGLs, metadata, more than one namespace, namespace management, firmware update,
//! queues in controller memory.

pub mod admin;
pub mod command;
pub mod controller;
mod features;
mod flight;
pub mod identify;
pub mod logs;
pub mod pin;
pub mod prp;
pub mod queue;
pub mod registers;
pub mod shared;
pub mod transfer;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use controller::{Controller, DEPTH, Start};
use identify::{Profile, SERIAL_SIZE};
use registers::{Control, Effect, FATAL, READY, Registers};
use shared::{Shared, Shutdown};
use types::{disk_key::DiskKey, vm::Disk};

use super::{
    backing::{BackingError, Geometry},
    master::{self, Mastery, Running, Until},
    throttle::Limits,
    virtio::{
        Platform,
        blk::{
            engine::{Engine, EngineChoice},
            losses::Losses,
            request::Access,
        },
        worker::Worker,
    },
};
use crate::{
    pci::{
        config::{COMMAND_INTX_DISABLE, ConfigError, ConfigSpace, Identity},
        express::{Express, FunctionReset},
        function::{Bar, BarKind, PciFunction},
        msix::{self, MsixTable},
    },
    sandbox::ThreadKind,
    sys::memory::GuestRam,
};

/// Most I/O queue pairs: Linux and Windows make one for each virtual CPU, and all are served by
/// one thread.
pub const MAX_QUEUE_PAIRS: u16 = 16;
/// Fewest: UEFI's driver makes two without asking how many there are, and gives up when it cannot
/// (edk2 MdeModulePkg/Bus/Pci/NvmExpressDxe, `NVME_MAX_QUEUES`).
pub const MIN_QUEUE_PAIRS: u16 = 2;

/// Vendor and device id under which operating systems know an emulated NVMe controller (QEMU
/// docs/specs/pci-ids.rst: "1b36:0010, PCIe NVMe device"). Drivers bind to the class. Under this
/// name Linux takes no UUID from the namespace and names it by its serial number.
const VENDOR: u16 = 0x1b36;
const DEVICE: u16 = 0x0010;
/// Mass storage, non-volatile memory, NVMe I/O controller (§2.1.5).
const CLASS: u32 = 0x01_08_02;

const BAR: u8 = 0;
/// INTA.
const PIN: u8 = 1;
const BAR_SIZE: u64 = 0x4000;
const DOORBELLS: u64 = 0x1000;
const TABLE: u64 = 0x2000;
const PENDING: u64 = 0x3000;

/// Name of the thread, and of the device among those that count.
const NAME: &str = "nvme";

/// How long a reset of the function waits for the thread to let go of guest memory.
const RESET_DEADLINE: Duration = Duration::from_secs(10);
/// How often it looks.
const RESET_STEP: Duration = Duration::from_millis(1);

/// Why there can be no controller.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum NvmeError {
    #[error("nvme: {what}")]
    Host { what: &'static str, source: io::Error },
    #[error("nvme: {problem}")]
    Refused { problem: String },
    #[error("nvme: its PCI function cannot be described")]
    Pci { source: ConfigError },
}

/// The PCI function.
pub struct Nvme {
    registers: Registers,
    shared: Arc<Shared>,
    parts: Option<Parts>,
    worker: Option<Worker<Start>>,
    config: ConfigSpace,
    /// Configuration space at power-on.
    pristine: ConfigSpace,
    msix: MsixTable,
    msix_capability: u16,
    express: Express,
    /// A reset was asked for, and the thread has not let go yet.
    resetting: bool,
    mastery: Mastery,
}

/// What the thread is made of.
struct Parts {
    file: OwnedFd,
    ram: GuestRam,
    engine: EngineChoice,
    profile: Profile,
    limits: Limits,
    key: Option<DiskKey>,
    losses: Losses,
}

impl Nvme {
    /// Makes a controller over `file`, not started, for `slot` of a root bus, with an I/O queue pair for each of
    /// `vcpus`, at least [`MIN_QUEUE_PAIRS`] and at most [`MAX_QUEUE_PAIRS`].
    pub fn open(
        disk: &Disk,
        file: OwnedFd,
        (slot, vcpus): (u8, u32),
        engine: EngineChoice,
        platform: &Platform,
    ) -> Result<Self, NvmeError> {
        let access = if disk.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let geometry = Geometry::of(&file, access).map_err(|error| match error {
            BackingError::Host { what, source } => NvmeError::Host { what, source },
            BackingError::Refused { problem } => NvmeError::Refused { problem },
        })?;
        let pairs = u16::try_from(vcpus).unwrap_or(MAX_QUEUE_PAIRS);
        let pairs = pairs.clamp(MIN_QUEUE_PAIRS, MAX_QUEUE_PAIRS);
        let profile = Profile::new(&geometry, serial(&disk.serial)?, pairs);
        let msix = MsixTable::new(pairs + 1, &*platform.interrupts)
            .map_err(|source| NvmeError::Host { what: "cannot have interrupt vectors", source })?;
        let vectors = (0..msix.len()).filter_map(|index| msix.vector(index).cloned());
        let vectors: Vec<_> = vectors.collect();
        let line = platform
            .interrupts
            .line(slot, PIN)
            .map_err(|source| NvmeError::Host { what: "cannot have a line", source })?;
        let mut shared = Shared::new(pairs, &vectors, line)
            .map_err(|source| NvmeError::Host { what: "cannot have doorbells", source })?;
        shared.activity = platform.activity.device(NAME);
        let Described { config, msix: msix_capability, express } =
            describe(&msix).map_err(|source| NvmeError::Pci { source })?;
        let limits = Limits::new(disk.limit, Instant::now()).and(&platform.limits);
        Ok(Self {
            registers: Registers::default(),
            shared: Arc::new(shared),
            parts: Some(Parts {
                file,
                ram: platform.ram.clone(),
                engine,
                profile,
                limits,
                key: disk.key.clone(),
                losses: Losses::of(&disk.serial, platform.events.clone()),
            }),
            worker: None,
            pristine: config.clone(),
            config,
            msix,
            msix_capability,
            express,
            resetting: false,
            mastery: Mastery::new(Until::Back),
        })
    }

    /// Makes it say that it sits below a port, at the end of a link. Call it before anybody looks.
    pub fn set_below_port(&mut self) {
        for config in [&mut self.config, &mut self.pristine] {
            self.express.set_below_port(config);
        }
    }

    /// Starts the thread. Call it once, after `sandbox::enter` and before the guest runs.
    pub fn start(&mut self) -> Result<(), NvmeError> {
        let Some(parts) = self.parts.take() else { return Ok(()) };
        let shared = Arc::clone(&self.shared);
        let prepare = move || {
            let Parts { file, ram, engine, profile, limits, key, losses } = parts;
            let engine = Engine::new(engine, file.as_fd(), ram.clone(), DEPTH)?;
            let engine = engine.sealed(key.as_ref(), ram.clone(), DEPTH).sharing(losses);
            Ok(Controller::new(engine, ram, profile, limits, shared))
        };
        let worker = Worker::spawn(
            NAME.to_owned(),
            ThreadKind::Block,
            prepare,
            |controller: Controller, inbox| controller.serve(&inbox),
        );
        let failed = |source| NvmeError::Host { what: "cannot start a thread", source };
        self.worker = Some(worker.map_err(failed)?);
        Ok(())
    }

    /// Returns CSTS.
    fn status(&mut self) -> u32 {
        self.finish_reset_if_stopped();
        let fatal = if self.shared.is_fatal() { FATAL } else { 0 };
        // Ready until the thread has let go of a controller that was switched off (§3.1.6).
        let ready = if self.is_busy() { READY } else { 0 };
        fatal | ready | self.shared.shutdown_bits()
    }

    fn is_busy(&self) -> bool {
        self.worker.as_ref().is_some_and(|worker| !worker.is_idle())
    }

    /// Tells the thread to let go of guest memory, also where it waits for bus mastering.
    fn stop(&mut self) {
        self.worker.iter().for_each(Worker::stop);
        let effect = self.mastery.reset();
        self.follow(effect);
    }

    /// Takes over what the command register, which was `before`, says of bus mastering now.
    fn take_mastery(&mut self, before: u16) {
        let running = if self.is_busy() && !self.resetting { Running::Yes } else { Running::No };
        let effect = self.mastery.written(before, self.config.command(), running);
        self.follow(effect);
    }

    fn follow(&self, effect: master::Effect) {
        match effect {
            master::Effect::None => {}
            master::Effect::Hold => self.worker.iter().for_each(Worker::hold),
            master::Effect::GoOn => self.worker.iter().for_each(Worker::go_on),
        }
    }

    fn control(&mut self, before: Control, after: Control) {
        match (before.enabled(), after.enabled()) {
            (true, false) => {
                self.resetting = true;
                // The mask goes with the reset: what was posted behind it is nobody's any more.
                self.shared.pin.close();
                self.shared.pin.set_mask(self.registers.mask());
                self.stop();
                self.finish_reset_if_stopped();
            }
            (false, true) => self.enable(after),
            (true, true) | (false, false) => {}
        }
        self.shared.set_control(after);
        if after.shutdown() && !before.shutdown() {
            if self.is_busy() && !self.resetting {
                self.shared.ask_shutdown();
            } else {
                self.shared.set_shutdown(Shutdown::Done);
            }
        }
    }

    /// Starts with the queues that the registers name. A driver that did not wait for the last
    /// reset to end, or that asks for what is impossible, gets a fatal status.
    fn enable(&mut self, control: Control) {
        self.finish_reset_if_stopped();
        let (submissions, completions) = self.registers.admin_queues();
        let start = Start { submissions, completions };
        match &self.worker {
            Some(worker) if !self.resetting && control.possible() && start.is_sound() => {
                self.shared.restart(control);
                worker.run(start);
            }
            Some(_) | None => self.shared.set_fatal(),
        }
    }

    /// Ends a reset as soon as the thread has let go (§7.3.2).
    fn finish_reset_if_stopped(&mut self) {
        if self.resetting && !self.is_busy() {
            self.resetting = false;
            self.shared.reset();
            if self.registers.control().enabled() {
                // The driver did not wait for it.
                self.shared.set_fatal();
            }
        }
    }

    /// Function level reset (PCIe 6.0 §6.6.2, NVMe 1.4 §7.3.2): registers are as at power-on. The
    /// thread lets go when what is under way is done; until then the controller stays ready.
    fn reset_function(&mut self) {
        self.stop();
        self.forget();
        self.resetting = true;
        self.finish_reset_if_stopped();
    }

    /// Returns every register to its value at power-on.
    fn forget(&mut self) {
        self.registers = Registers::default();
        self.shared.set_control(self.registers.control());
        // Without a driver to take what was posted, the line would stay high.
        self.shared.pin.close();
        self.shared.pin.set_mask(self.registers.mask());
        // As in `write_config`.
        let _ = self.msix.reset();
        self.config = self.pristine.clone();
        self.take_mode();
    }

    /// Takes over how the driver wants to be interrupted.
    fn take_mode(&self) {
        let pin_disabled = self.config.command() & COMMAND_INTX_DISABLE != 0;
        self.shared.set_mode(self.msix.is_enabled(), pin_disabled);
    }

    fn doorbell(&self, offset: u64, data: &[u8]) {
        // Doorbells are written whole (§3.1.24); anything else is undefined, and ignored.
        if let (true, Ok(bytes)) = (offset.is_multiple_of(4), <[u8; 4]>::try_from(data)) {
            self.shared.ring(offset / 4, u32::from_le_bytes(bytes));
        }
    }
}

impl PciFunction for Nvme {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        self.config.set_interrupt_status(self.shared.pin.status());
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        let before = self.config.command();
        self.config.write(offset, data);
        self.take_mastery(before);
        if let Some(inside) = offset.checked_sub(self.msix_capability).filter(|at| *at < 12) {
            // A vector that cannot be routed loses interrupts, which the driver survives or not.
            let _ = self.msix.write_capability(inside, data);
            self.config.set(self.msix_capability + 2, &self.msix.control().to_le_bytes());
        }
        self.take_mode();
        if self.express.asks_for_reset(offset, data) {
            self.reset_function();
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.config.bars()
    }

    fn place_bar(&mut self, index: u8, address: u64) {
        self.config.place_bar(index, address);
    }

    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            _ if bar != BAR => {}
            ..DOORBELLS => {
                let status = self.status();
                self.registers.read(offset, data, status);
            }
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            PENDING..BAR_SIZE => self.msix.read_pending(offset - PENDING, data),
            // Doorbells read as zero.
            _ => {}
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        match offset {
            _ if bar != BAR => {}
            ..DOORBELLS => match self.registers.write(offset, data) {
                Effect::None => {}
                Effect::Control(before, after) => self.control(before, after),
                Effect::Mask => self.shared.pin.set_mask(self.registers.mask()),
            },
            DOORBELLS..TABLE => self.doorbell(offset - DOORBELLS, data),
            TABLE..PENDING => {
                // As for the capability.
                let _ = self.msix.write_table(offset - TABLE, data);
            }
            _ => {}
        }
    }

    fn hold(&mut self) {
        if !self.mastery.is_taken() {
            self.worker.iter().for_each(Worker::hold);
        }
    }

    fn is_held(&mut self) -> bool {
        self.worker.iter().all(Worker::is_held)
    }

    fn go_on(&mut self) {
        if !self.mastery.is_taken() {
            self.worker.iter().for_each(Worker::go_on);
        }
    }

    fn bus_reset(&mut self) {
        self.reset_function();
    }

    fn is_quiet(&mut self) -> bool {
        !self.is_busy()
    }

    fn reset(&mut self) {
        self.stop();
        let deadline = Instant::now() + RESET_DEADLINE;
        while self.is_busy() && Instant::now() < deadline {
            thread::sleep(RESET_STEP);
        }
        self.resetting = false;
        self.forget();
        self.shared.reset();
    }
}

/// Returns the serial number as Identify has it: ASCII, padded with spaces (§1.5).
fn serial(text: &str) -> Result<[u8; SERIAL_SIZE], NvmeError> {
    let mut padded = [b' '; SERIAL_SIZE];
    let bytes = text.as_bytes();
    let printable = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
    match padded.get_mut(..bytes.len()) {
        Some(place) if printable => {
            place.copy_from_slice(bytes);
            Ok(padded)
        }
        Some(_) | None => Err(NvmeError::Refused {
            problem: format!(
                "serial number {text:?} is not at most {SERIAL_SIZE} printable ASCII characters"
            ),
        }),
    }
}

/// Configuration space, and where two of its capabilities are.
struct Described {
    config: ConfigSpace,
    msix: u16,
    express: Express,
}

fn describe(msix: &MsixTable) -> Result<Described, ConfigError> {
    let mut config = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device: DEVICE,
        class: CLASS,
        revision: 1,
        subsystem_vendor: VENDOR,
        subsystem: DEVICE,
    });
    config.add_bar(BAR, BarKind::Memory64, BAR_SIZE)?;
    config.set_interrupt_pin(PIN);
    let low = |offset: u64| u32::try_from(offset).unwrap_or(0);
    let table = msix.capability((BAR, low(TABLE)), (BAR, low(PENDING)));
    let msix = config.add_capability(msix::CAPABILITY, &table, &[])?;
    // Every NVMe controller has a function-level reset (NVMe 1.4 §2.5.3).
    let express = Express::add(&mut config, FunctionReset::Offered)?;
    config.add_power_management()?;
    Ok(Described { config, msix, express })
}

const _: () = {
    // Two doorbells of four bytes for each queue, admin included.
    assert!(8 * (MAX_QUEUE_PAIRS as u64 + 1) <= TABLE - DOORBELLS);
    assert!(msix::ENTRY_SIZE * (MAX_QUEUE_PAIRS as u64 + 1) <= PENDING - TABLE);
};
