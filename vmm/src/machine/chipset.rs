//! The parts of the board that firmware talks to: the clock, fw_cfg (as systems do, too) and the flash
//! chips.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    os::unix::fs::FileExt,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use types::vm::{Boot, Rate, RateLimit};

use super::{board::locked, smm::SmmWatch};
use crate::{
    devices::{
        cmos::{self, Cmos},
        flash::{Flash, Store},
        fw_cfg::{self, FwCfg, NotePlace},
        power,
        throttle::{Admission, Throttle},
    },
    events::Events,
    irq::InterruptLine,
    pci::{
        bus::Answered,
        chipset::{Ecam, HostBridge, SmramWatch},
    },
    sys::{
        kvm::{KvmError, MemorySlot, Place, Vm},
        memory::{Access, Alignment, GuestRam, Mapping},
    },
};

/// How long the clock is left alone at most.
const MAX_SLEEP: Duration = Duration::from_secs(60);

/// What firmware and, later, its guests find besides PCI.
pub struct Chipset {
    /// Where enhanced configuration space is.
    pub ecam: Ecam,
    /// The clock.
    pub clock: Mutex<Cmos>,
    /// When it interrupts next may have changed.
    rearmed: Condvar,
    /// What the machine tells of itself.
    pub fw_cfg: Option<FwCfgPorts>,
    /// Present in machines that start from firmware.
    pub firmware: Option<Firmware>,
    /// Looks whether that firmware is one for this machine.
    pub smm: Option<Arc<SmmWatch>>,
}

impl Chipset {
    /// Makes the chipset of a machine with RAM at these places, (address, length), whose clock is so many
    /// seconds ahead of the host's.
    pub fn new(ram: &[(u64, u64)], ahead_s: i64) -> Self {
        let clock = Mutex::new(Cmos::new(ram, ahead_s));
        Self {
            ecam: Ecam::default(),
            clock,
            rearmed: Condvar::new(),
            fw_cfg: None,
            firmware: None,
            smm: None,
        }
    }

    /// Returns the chipset with a wire for the clock's interrupt.
    #[must_use]
    pub fn wired(self, line: Arc<dyn InterruptLine>) -> Self {
        let clock = self.clock.into_inner().unwrap_or_else(PoisonError::into_inner);
        Self { clock: Mutex::new(clock.wired(line)), ..self }
    }

    /// Has the clock interrupt when it is due, once; returns when that was, or may have changed.
    pub(super) fn follow_clock(&self) {
        let mut clock = locked(&self.clock);
        let now = since_1970();
        clock.look(now);
        // The host's calendar, by which alarms are counted, may be set meanwhile.
        let wait = clock.due_in(now).map(|due| due.min(MAX_SLEEP));
        let mut clock = match wait {
            Some(wait) => {
                let woken = self.rearmed.wait_timeout(clock, wait);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.rearmed.wait(clock).unwrap_or_else(PoisonError::into_inner),
        };
        clock.look(since_1970());
    }

    /// Has whoever waits for the clock look again, if the guest wants interrupts of it.
    fn rearm(&self, clock: &Cmos) {
        if clock.is_armed() {
            self.rearmed.notify_one();
        }
    }

    /// Has a machine's firmware looked at, if it starts from one.
    #[must_use]
    pub(super) fn watching(self, boot: &Boot, events: &Events) -> Self {
        let is_firmware = matches!(boot, Boot::Uefi { .. });
        let smm = is_firmware.then(|| Arc::new(SmmWatch::new(events.clone())));
        Self { smm, ..self }
    }

    /// Makes the host bridge.
    pub(super) fn host_bridge(&self) -> HostBridge {
        let watch = self.smm.clone().map(|watch| watch as Arc<dyn SmramWatch>);
        HostBridge::new(self.ecam.clone()).watched(watch)
    }

    /// Returns where the guest says that its VMCOREINFO is.
    pub(crate) fn guest_note(&self) -> Option<NotePlace> {
        let device = locked(&self.fw_cfg.as_ref()?.device);
        fw_cfg::note_place(device.written(fw_cfg::VMCOREINFO_FILE)?)
    }

    /// Answers a read of I/O ports.
    pub(super) fn read_port(&self, port: u16, data: &mut [u8]) -> Answered {
        if let Some(offset) = within(port, cmos::BASE, cmos::LENGTH) {
            let mut clock = locked(&self.clock);
            data.iter_mut().for_each(|byte| *byte = clock.read(offset, since_1970()));
            self.rearm(&clock);
            return Answered::Yes;
        }
        if let Some(smm) = self.smm.as_ref().filter(|_| power::SMI_ENABLE.contains(&port)) {
            smm.asked();
        }
        match (&self.fw_cfg, within(port, fw_cfg::BASE, fw_cfg::LENGTH)) {
            (Some(ports), Some(offset)) => {
                locked(&ports.device).read(offset, data);
                Answered::Yes
            }
            (Some(_) | None, _) => Answered::No,
        }
    }

    /// Answers a write to I/O ports.
    pub(super) fn write_port(&self, port: u16, data: &[u8]) -> Answered {
        if let Some(offset) = within(port, cmos::BASE, cmos::LENGTH) {
            let mut clock = locked(&self.clock);
            for (at, byte) in (offset..cmos::LENGTH.to_le_bytes()[0]).zip(data) {
                clock.write(at, *byte, since_1970());
            }
            self.rearm(&clock);
            return Answered::Yes;
        }
        match (&self.fw_cfg, within(port, fw_cfg::BASE, fw_cfg::LENGTH)) {
            (Some(ports), Some(offset)) => {
                locked(&ports.device).write(offset, data, &ports.ram);
                Answered::Yes
            }
            (Some(_) | None, _) => Answered::No,
        }
    }

    /// Answers a read of memory.
    pub(super) fn read_memory(&self, address: u64, data: &mut [u8]) -> Answered {
        let Some(firmware) = &self.firmware else { return Answered::No };
        let variables = locked(&firmware.variables);
        let Some(offset) = variables.offset(address) else { return Answered::No };
        variables.flash.read(offset, data);
        Answered::Yes
    }

    /// Answers a write to memory.
    pub(super) fn write_memory(&self, address: u64, data: &[u8]) -> Answered {
        let Some(firmware) = &self.firmware else { return Answered::No };
        let mut variables = locked(&firmware.variables);
        let Some(offset) = variables.offset(address) else { return Answered::No };
        variables.flash.write(offset, data);
        // Where the guest has put a device's memory over it, KVM does not show it, and reads come here.
        let _ = variables.show();
        Answered::Yes
    }
}

/// fw_cfg, and the memory in which it answers.
pub struct FwCfgPorts {
    /// The device.
    pub device: Mutex<FwCfg>,
    /// The guest's memory.
    pub ram: GuestRam,
}

/// Firmware: its flash chips.
pub struct Firmware {
    /// Where it keeps its variables.
    pub variables: Mutex<Variables>,
    /// Its code, as KVM maps it.
    pub code: MemorySlot,
}

/// The flash chip with the variables. While reads return its contents it is memory that can be
/// read, else every access comes to us.
pub struct Variables {
    flash: Flash<VariableFile>,
    mapping: Arc<Mapping>,
    place: Place,
    slot: Option<MemorySlot>,
    vm: Arc<Vm>,
}

impl Variables {
    /// Maps `file`, whole blocks, at `place`. `None` when it is no size for a chip.
    pub fn new(file: File, place: Place, vm: &Arc<Vm>) -> Result<Option<Self>, KvmError> {
        let mapping = Arc::new(map(&file, place.size)?);
        let file = VariableFile { file, pace: pace(Instant::now()) };
        let Some(flash) = Flash::new(file, place.size) else { return Ok(None) };
        let mut variables = Self { flash, mapping, place, slot: None, vm: Arc::clone(vm) };
        variables.show()?;
        Ok(Some(variables))
    }

    fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.place.guest).filter(|offset| *offset < self.place.size)
    }

    /// Maps the contents where reads return them, and unmaps them where they do not.
    fn show(&mut self) -> Result<(), KvmError> {
        if !self.flash.is_readable() {
            self.slot = None;
        } else if self.slot.is_none() {
            self.slot = Some(self.vm.map(self.place, &self.mapping, 0, Access::ReadOnly)?);
        }
        Ok(())
    }
}

/// Maps the first `size` bytes of a file for a slot that the guest can only read.
pub(super) fn map(file: &File, size: u64) -> Result<Mapping, KvmError> {
    let failed = |source| KvmError::Call { what: "map the firmware's files", source };
    let length = usize::try_from(size).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
    let anywhere = Alignment { modulus: 4096, residue: 0 };
    Mapping::of_file(file.as_fd(), 0, length, Access::ReadOnly, anywhere).map_err(failed)
}

/// How often the variables are made to last at most. Each time the host's disk writes what it holds,
/// which everybody waits for who uses it; firmware that starts for the first time does it some hundred
/// times.
const SYNCS: Rate = Rate { per_second: 50, burst: 256 };

/// What bounds that.
fn pace(now: Instant) -> Option<Throttle> {
    Throttle::new(Some(RateLimit { bytes: None, operations: Some(SYNCS) }), now)
}

/// Returns how long whoever asks at `now` has to wait.
fn wait(pace: &mut Option<Throttle>, now: Instant) -> Duration {
    match pace.as_mut().map(|pace| pace.admit(now, 0)) {
        Some(Admission::At(at)) => at.saturating_duration_since(now),
        Some(Admission::Now) | None => Duration::ZERO,
    }
}

/// The file behind the flash chip.
struct VariableFile {
    file: File,
    pace: Option<Throttle>,
}

impl Store for VariableFile {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        std::thread::sleep(wait(&mut self.pace, Instant::now()));
        self.file.sync_data()
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn within(port: u16, base: u16, length: u16) -> Option<u8> {
    let offset = port.checked_sub(base).filter(|offset| *offset < length)?;
    u8::try_from(offset).ok()
}

#[cfg(test)]
mod tests {
    use types::vm::MemoryBacking;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{devices::fw_cfg::Items, irq::Level, sys::memory::Ram};

    /// A wire that tells when it is raised.
    struct Bell(std::sync::mpsc::SyncSender<Level>);

    impl InterruptLine for Bell {
        fn set_level(&self, level: Level) -> io::Result<()> {
            self.0.send(level).map_err(io::Error::other)
        }

        fn trigger_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            unreachable!("no kernel raises it")
        }

        fn resample_fd(&self) -> std::os::fd::BorrowedFd<'_> {
            unreachable!("no kernel lowers it")
        }
    }

    /// As an operating system does: 16 periods a second, each of which it sees.
    #[test]
    fn the_clock_interrupts_by_itself_once_the_guest_wants_it() {
        let (bell, rung) = std::sync::mpsc::sync_channel(64);
        let chipset = Arc::new(Chipset::new(&[], 0).wired(Arc::new(Bell(bell))));
        let followed = Arc::clone(&chipset);
        std::thread::spawn(move || {
            loop {
                followed.follow_clock();
            }
        });
        let write = |index: u8, value: u8| {
            chipset.write_port(cmos::BASE, &[index, value]);
        };
        let seen = || {
            let mut flags = [0];
            chipset.write_port(cmos::BASE, &[0x0c]);
            chipset.read_port(cmos::BASE + 1, &mut flags);
            flags[0]
        };
        write(0x0a, 0x2c);
        let _ = seen();
        let soon = Duration::from_millis(200);
        assert!(rung.recv_timeout(soon).is_err(), "nothing is enabled");
        write(0x0b, 0x42);
        for _ in 0..3 {
            assert_eq!(rung.recv_timeout(Duration::from_secs(30)), Ok(Level::High));
            assert_eq!(seen() & 0xc0, 0xc0);
            assert_eq!(rung.recv_timeout(Duration::from_secs(30)), Ok(Level::Low));
        }
        write(0x0b, 0x02);
        let late = rung.try_iter().last();
        assert!(late.is_none_or(|level| level == Level::Low), "{late:?}");
        assert!(rung.recv_timeout(soon).is_err(), "nothing is enabled");
    }

    #[test]
    fn a_guest_says_where_its_note_is() {
        let mut chipset = Chipset::new(&[], 0);
        assert_eq!(chipset.guest_note(), None);
        let mut items = Items::new(1, [0; 16]);
        items.add_written(fw_cfg::VMCOREINFO_FILE, fw_cfg::vmcoreinfo_item());
        let ram = Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory").memory;
        let device = Mutex::new(FwCfg::new(items));
        chipset.fw_cfg = Some(FwCfgPorts { device, ram: ram.clone() });
        assert_eq!(chipset.guest_note(), None);
        // As Linux does: what it says at 0x2000, and a request to write it to the first file.
        let said = [0, 0, 1, 0, 0x18, 0x10, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0];
        ram.write_slice(&said, GuestAddress(0x2000)).expect("inside");
        let request = [0, 0x20, 0, 8 | 16, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0x20, 0];
        ram.write_slice(&request, GuestAddress(0x1000)).expect("inside");
        assert_eq!(chipset.write_port(fw_cfg::BASE + 4, &[0; 4]), Answered::Yes);
        assert_eq!(chipset.write_port(fw_cfg::BASE + 8, &[0, 0, 0x10, 0]), Answered::Yes);
        assert_eq!(chipset.guest_note(), Some(NotePlace { address: 0x3000, size: 0x1018 }));
    }

    #[test]
    fn variables_are_made_to_last_at_once_for_a_while_and_then_at_a_pace() {
        let start = Instant::now();
        let mut pace = pace(start);
        let mut now = start;
        let waits: Vec<u128> = (0..260)
            .map(|_| {
                let wait = wait(&mut pace, now);
                now += wait;
                wait.as_millis()
            })
            .collect();
        assert_eq!((waits[..256].iter().sum::<u128>(), &waits[256..]), (0, &[20; 4][..]));
        // What was not asked for is saved up.
        now += Duration::from_secs(1);
        let after: Duration = (0..51).map(|_| wait(&mut pace, now)).sum();
        assert_eq!(after.as_millis(), 20);
    }
}
