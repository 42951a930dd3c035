//! Takes devices from their descriptors to functions on the guest's bus, and back to a clean state.
//!
//! Taking goes: bind (the kernel resets and claims the device), look whether it came back and reset it if
//! not, attach to one address space for all. Only then is known where guest memory may lie. Giving goes: map
//! guest memory there, read what the device is.

use std::{io, sync::Arc};

use types::{node::Bdf, vm::Passthrough as Spec};

use super::{
    alarms::{Alarms, Since, Watch},
    bars::{MappedBar, Slots},
    bind::{bind_all, interface},
    capabilities,
    config::{ConfigError, ConfigFilter, Facts, MsixLayout, Source, Written},
    device::{Device, IrqKind, Region},
    dma::{self, AddressSpace, DmaError, PeerSlots},
    irq::{Interrupts, Ways},
    link,
    neighbours::{InUse, Neighbours},
    places::Places,
    plug::Plug,
    quirks,
    reset::{self, Confinement, DEADLINE, ResetError, Resetter},
    rom,
};
use crate::{
    holes::{Holes, Peers},
    irq::{InterruptSource, PinRoute},
    pci::{
        function::{Bar, BarKind, PciFunction},
        port::Behind,
    },
    sys::{iommu::Interface, kvm::Vm, memory::Ram, vfio::VfioDevice},
};

/// Offset of the command register.
const COMMAND: u64 = 0x04;
/// Offset of the interrupt pin.
const INTERRUPT_PIN: u16 = 0x3d;
/// Most complaints about one device in the log; a guest can provoke any number.
const COMPLAINTS: u32 = 16;

/// Why a device cannot be given to the guest.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum AssignError {
    #[error("descriptor {fd}, given as {what}, cannot be used")]
    Descriptor { what: String, fd: i32, source: io::Error },
    #[error("cannot take {device} from the kernel{}", bind_hint(source))]
    Bind { device: Bdf, source: io::Error },
    #[error("{device} did not finish being bound within {} s", DEADLINE.as_secs())]
    BindDeadline { device: Bdf },
    #[error("cannot attach {device} to the IOMMU")]
    Attach { device: Bdf, source: io::Error },
    #[error(
        "other devices cannot be given the BARs of {device} with this kernel, as peer_to_peer asks; \
         by iommufd that takes Linux 6.19 with CONFIG_PCI_P2PDMA, by groups any"
    )]
    Peers { device: Bdf, source: io::Error },
    #[error(transparent)]
    Reset(#[from] ResetError),
    #[error(transparent)]
    Dma(#[from] DmaError),
    #[error("{device} cannot be given to a guest")]
    Config { device: Bdf, source: ConfigError },
    #[error("cannot hear of the removal of devices")]
    Listen { source: io::Error },
    #[error("cannot {what} of {device}")]
    Device { what: &'static str, device: Bdf, source: io::Error },
}

fn bind_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => " (somebody else holds it or a device of its group)",
        Some(libc::EPERM) => {
            " (the host has no interrupt remapping, or still uses a device of its group)"
        }
        Some(libc::EINVAL) => " (it is bound already, or iommu_fd is no iommufd)",
        Some(libc::ENOTTY) => " (cdev_fd is not a VFIO device)",
        Some(_) | None => "",
    }
}

/// All devices passed through to one machine.
pub struct Passthrough {
    /// The devices, in the order of the specification.
    pub devices: Vec<Assigned>,
    /// Takes them back.
    pub closer: Closer,
    /// Takes devices that come later.
    pub plug: Plug,
}

/// One device passed through.
pub struct Assigned {
    /// Its address on the host.
    pub address: Bdf,
    /// What it is on the host's bus, for the port above it to show.
    pub behind: Behind,
    /// What goes onto the bus.
    pub function: Function,
}

/// Devices that are the machine's, reset and attached, before the machine has memory: where memory
/// may lie depends on them.
pub struct Claim {
    space: Arc<dyn Interface>,
    bound: Vec<(Bdf, Arc<VfioDevice>)>,
    resetters: Vec<Arc<Resetter>>,
    neighbours: Neighbours,
    alarms: Alarms,
    watches: Vec<Watch>,
    peers: Peers,
    cliques: Vec<Option<u8>>,
}

impl Claim {
    /// Takes all devices of `spec`, and resets them.
    pub fn new(spec: &Spec) -> Result<Self, AssignError> {
        let space = interface(spec).map_err(|source| AssignError::Descriptor {
            what: "iommu_fd".into(),
            fd: spec.iommu_fd,
            source,
        })?;
        let bound = bind_all(&spec.devices, &space)?;
        let neighbours = Neighbours::default();
        let (alarms, watches) = listen(&bound)?;
        let resetters = start_resetters(&bound, &neighbours)?;
        reset::clean(&resetters)?;
        for (address, device) in &bound {
            space
                .admit(device)
                .map_err(|source| AssignError::Attach { device: *address, source })?;
        }
        let peers = if spec.peer_to_peer && bound.len() > 1 { Peers::Reach } else { Peers::Apart };
        if peers == Peers::Reach {
            for (address, device) in &bound {
                space
                    .reaches_peers(&**device)
                    .map_err(|source| AssignError::Peers { device: *address, source })?;
            }
        }
        let cliques = spec.devices.iter().map(|device| device.p2p_clique).collect();
        Ok(Self { space, bound, resetters, neighbours, alarms, watches, peers, cliques })
    }

    /// Returns the addresses that memory and BARs must stay out of.
    pub fn holes(&self) -> Result<Holes, AssignError> {
        let space: &dyn AddressSpace = &*self.space;
        Ok(dma::holes(space)?)
    }

    /// Returns whether the devices are to reach each other.
    pub fn peers(&self) -> Peers {
        self.peers
    }

    /// Maps guest memory for the devices and makes functions of them. `routes` say where the pin of
    /// each goes.
    pub fn give(
        self,
        ram: &Ram,
        vm: &Arc<Vm>,
        routes: &[PinRoute],
    ) -> Result<Passthrough, AssignError> {
        let space: Arc<dyn AddressSpace> = Arc::<dyn Interface>::clone(&self.space);
        // Without a device there may be no address space yet to map it in.
        if !self.bound.is_empty() {
            dma::map_ram(&*space, ram)?;
        }
        let (mut devices, places) = (Vec::new(), Arc::<Places>::default());
        let all = self.bound.iter().zip(&self.resetters).zip(&self.cliques).zip(routes);
        for (((claimed, resetter), clique), route) in all {
            let (address, device) = claimed;
            let device: Arc<dyn Device> = Arc::<VfioDevice>::clone(device);
            let slots: Arc<dyn Slots> = match self.peers {
                Peers::Apart => Arc::new(Arc::clone(vm)),
                Peers::Reach => {
                    let (space, device) = (Arc::clone(&space), Arc::clone(&device));
                    Arc::new(PeerSlots { guest: Box::new(Arc::clone(vm)), space, device })
                }
            };
            let interrupts: Arc<dyn InterruptSource> = Arc::<Vm>::clone(vm);
            let places = Arc::clone(&places);
            let host = Host { interrupts, slots, places, route: *route, clique: *clique };
            devices.push(Function::open(*address, device, host, Arc::clone(resetter))?);
        }
        let in_use =
            self.bound.iter().map(|(address, _)| self.neighbours.admit(*address)).collect();
        let keep = self.bound.into_iter().map(|(_, device)| device as Arc<dyn Device>).collect();
        let Self { resetters, watches, neighbours, alarms, .. } = self;
        let closer =
            Closer { devices: keep, resetters, _watches: watches, _in_use: in_use, _space: space };
        let (ram, vm) = (ram.clone(), Arc::clone(vm));
        let plug = Plug { space: self.space, neighbours, alarms, places, ram, vm };
        Ok(Passthrough { devices, closer, plug })
    }
}

/// Takes devices back at the end.
pub struct Closer {
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) resetters: Vec<Arc<Resetter>>,
    pub(super) _watches: Vec<Watch>,
    /// The guest has them until they are reset.
    pub(super) _in_use: Vec<InUse>,
    /// Guest memory stays mapped until no device reaches for it any more.
    pub(super) _space: Arc<dyn AddressSpace>,
}

impl Closer {
    /// Silences and resets all devices, each rung with [`DEADLINE`], and returns what failed.
    /// The virtual CPUs must have stopped.
    pub fn close(self) -> Vec<ResetError> {
        Self::close_all(vec![self])
    }

    /// As [`Self::close`], with all devices of all of them at once: it takes no longer than one of them may.
    pub fn close_all(closers: Vec<Self>) -> Vec<ResetError> {
        for device in closers.iter().flat_map(|closer| &closer.devices) {
            for kind in [IrqKind::Intx, IrqKind::Msi, IrqKind::Msix] {
                // Only one kind is on, the others say so.
                let _ = device.disable_irqs(kind);
            }
        }
        let resetters = closers.iter().flat_map(|closer| &closer.resetters).map(Arc::clone);
        let resetters: Vec<Arc<Resetter>> = resetters.collect();
        let failures = reset::reset_all(&resetters).into_iter().filter_map(Result::err).collect();
        // The guest has had them, and its memory was mapped for them, until now.
        drop(closers);
        failures
    }
}

/// Listens to what the kernel says of the devices.
fn listen(bound: &[(Bdf, Arc<VfioDevice>)]) -> Result<(Alarms, Vec<Watch>), AssignError> {
    let alarms = Alarms::new().map_err(|source| AssignError::Listen { source })?;
    let watch = |(address, device): &(Bdf, Arc<VfioDevice>)| {
        listen_to(&alarms, *address, Since::Start, &**device)
    };
    let watches = bound.iter().map(watch).collect::<Result<_, _>>()?;
    Ok((alarms, watches))
}

/// Listens to what the kernel says of one device.
pub(super) fn listen_to(
    alarms: &Alarms,
    device: Bdf,
    since: Since,
    file: &dyn Device,
) -> Result<Watch, AssignError> {
    let what = "hear of the removal";
    alarms.watch(device, since, file).map_err(|source| AssignError::Device { what, device, source })
}

pub(super) fn start_resetters(
    bound: &[(Bdf, Arc<VfioDevice>)],
    neighbours: &Neighbours,
) -> Result<Vec<Arc<Resetter>>, ResetError> {
    bound
        .iter()
        .map(|(address, device)| {
            let device: Arc<dyn Device> = Arc::<VfioDevice>::clone(device);
            Resetter::start(*address, device, neighbours, Confinement::Filtered).map(Arc::new)
        })
        .collect()
}

/// What a function needs of the machine around it.
pub struct Host {
    /// Where its vectors and its line come from.
    pub interrupts: Arc<dyn InterruptSource>,
    /// Gives the guest its BARs.
    pub slots: Arc<dyn Slots>,
    /// Where it has all devices' BARs.
    pub places: Arc<Places>,
    /// Where the pin goes.
    pub route: PinRoute,
    /// Which clique of peers the device is told to be in.
    pub clique: Option<u8>,
}

/// A passed-through device as a function on the guest's bus.
pub struct Function {
    address: Bdf,
    device: Arc<dyn Device>,
    resetter: Arc<Resetter>,
    places: Arc<Places>,
    config: ConfigFilter,
    /// Sizes of the device's own BARs.
    bar_sizes: [u64; 6],
    /// What is in its ROM, if the guest has that.
    rom: Vec<u8>,
    mapped: Vec<MappedBar>,
    interrupts: Interrupts,
    complaints: u32,
}

impl Function {
    /// Reads what a freshly reset device is and prepares everything the guest will reach.
    pub fn open(
        address: Bdf,
        device: Arc<dyn Device>,
        host: Host,
        resetter: Arc<Resetter>,
    ) -> Result<Assigned, AssignError> {
        let failed = |what| move |source| AssignError::Device { what, device: address, source };
        let facts = facts(&*device).map_err(failed("read the configuration space"))?;
        let quirks = quirks::of(
            capabilities::word(&facts.snapshot, 0),
            capabilities::word(&facts.snapshot, 2),
        );
        let config = ConfigFilter::new(&Facts {
            snapshot: &facts.snapshot,
            bar_sizes: facts.bar_sizes,
            rom_size: facts.rom.len() as u64,
            vectors: facts.vectors,
            quirks: &quirks,
            clique: host.clique,
        })
        .map_err(|source| AssignError::Config { device: address, source })?;
        let mapped = map_bars(&*device, &config, (&host.places, &host.slots))
            .map_err(failed("map the BARs"))?;
        let mut pin = [facts.snapshot.get(usize::from(INTERRUPT_PIN)).copied().unwrap_or(0)];
        config.read(INTERRUPT_PIN, &mut pin);
        let line = match pin[0] {
            pin @ 1..=4 => Some(
                host.interrupts
                    .line(host.route.slot, host.route.pin(pin))
                    .map_err(failed("route the interrupt pin"))?,
            ),
            _ => None,
        };
        let ways = Ways { line, msix_vectors: config.msix_layout().map_or(0, |m| m.vectors) };
        let interrupts = Interrupts::new(Arc::clone(&device), host.interrupts, ways)
            .map_err(failed("prepare the interrupts"))?;
        let behind = Behind { link: link::of(&facts.snapshot), atomics: device.atomic_ops() };
        let mut function = Self {
            address,
            device,
            resetter,
            places: host.places,
            config,
            bar_sizes: facts.bar_sizes,
            rom: facts.rom,
            mapped,
            interrupts,
            complaints: 0,
        };
        function.let_decode().map_err(failed("write the command register"))?;
        function.follow_interrupts();
        Ok(Assigned { address, behind, function })
    }

    /// Makes the device answer for its BARs, whatever the guest sees in its command register. The kernel restores the
    /// BARs with that, where a reset that it did not do has taken them.
    fn let_decode(&mut self) -> io::Result<()> {
        let mut command = [0; 2];
        self.device.read(Region::Config, COMMAND, &mut command)?;
        self.command(u16::from_le_bytes(command))
    }

    /// Gives the device's command register `value`, and what its BARs need to answer.
    fn command(&mut self, value: u16) -> io::Result<()> {
        let command = self.config.initial_command(value);
        self.device.write(Region::Config, COMMAND, &command.to_le_bytes())
    }

    fn follow_interrupts(&mut self) {
        let result = self.interrupts.follow(self.config.msi(), self.config.msix());
        self.complain("switch interrupts", result);
    }

    /// Forgets what the guest has programmed, as the device did.
    fn forget(&mut self) {
        self.config.reset();
        self.mapped.iter_mut().for_each(MappedBar::forget);
        let result = self.interrupts.reset();
        self.complain("switch interrupts off", result);
        // The kernel puts back what it held before, which a function that was reset does not: it masters no bus, and
        // its pin is not switched off.
        let result = self.command(0);
        self.complain("write the command register", result);
        self.follow_interrupts();
    }

    /// Whether an access of `length` bytes touches the MSI-X table.
    fn table(&self, bar: u8, offset: u64, length: usize) -> Option<u64> {
        let layout = self.config.msix_layout().filter(|layout| layout.bar == bar)?;
        let end = offset.saturating_add(length as u64);
        let inside = end > layout.table && offset < table_end(&layout);
        // What lies before the table wraps to far behind it, where the table ignores it.
        inside.then(|| offset.wrapping_sub(layout.table))
    }

    /// Whether `offset` lies where a BAR has only the moved MSI-X table, or the rest of a page.
    fn behind_device(&self, bar: u8, offset: u64) -> bool {
        let moved = self.config.msix_layout().filter(|layout| layout.bar == bar);
        let device_end = moved.map_or(u64::MAX, |layout| layout.device_end);
        offset >= device_end.min(self.bar_sizes.get(usize::from(bar)).copied().unwrap_or(0))
    }

    fn complain(&mut self, what: &str, result: io::Result<()>) {
        if let Err(error) = result
            && self.complaints < COMPLAINTS
        {
            self.complaints += 1;
            eprintln!("{}: cannot {what}: {error}", self.address);
        }
    }
}

impl PciFunction for Function {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if self.config.reads_device(offset, data.len()) == Source::Device {
            let result = self.device.read(Region::Config, u64::from(offset), data);
            self.complain("read configuration space", result);
            // Some GPUs' drivers reset them by registers of their own; what the guest sees of its BARs and of its
            // messages stays as it was, so that it restores nothing.
            if self.config.stopped_decoding(offset, data) {
                let result = self.let_decode();
                self.complain("write the command register", result);
                let result = self.interrupts.lost();
                self.complain("switch interrupts off", result);
                self.follow_interrupts();
            }
        }
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        let before = (self.config.msi(), self.config.msix());
        let mut result = Ok(());
        let device = Arc::clone(&self.device);
        let written = self.config.write(offset, data, |offset, run| {
            if let Err(error) = device.write(Region::Config, u64::from(offset), run) {
                result = Err(error);
            }
        });
        self.complain("write configuration space", result);
        if written == Written::FunctionReset {
            self.forget();
        } else if (self.config.msi(), self.config.msix()) != before {
            self.follow_interrupts();
        }
    }

    /// The host's bus is not the guest's to reset: the function is, by itself or as its resetter can.
    fn bus_reset(&mut self) {
        match self.config.function_reset() {
            Some((at, bit)) => {
                // What else is in the byte stays: VFIO passes some of it on.
                let mut byte = [0];
                self.read_config(at, &mut byte);
                self.write_config(at, &[byte[0] | bit]);
            }
            None => self.reset(),
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.config.bars()
    }

    fn place_bar(&mut self, index: u8, address: u64) {
        self.config.place_bar(index, address);
    }

    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if bar == rom::INDEX {
            return rom::copy(&self.rom, offset, data);
        }
        if let Some(at) = self.table(bar, offset, data.len()) {
            return self.interrupts.read_table(at, data);
        }
        if self.behind_device(bar, offset) {
            return data.fill(0);
        }
        let result = self.device.read(Region::Bar(bar), offset, data);
        if result.is_err() {
            data.fill(0xff);
        }
        self.complain("read a BAR", result);
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar == rom::INDEX {
            return;
        }
        let (what, result) = match self.table(bar, offset, data.len()) {
            Some(at) => ("route an interrupt", self.interrupts.write_table(at, data)),
            None if self.behind_device(bar, offset) => return,
            None => ("write a BAR", self.device.write(Region::Bar(bar), offset, data)),
        };
        self.complain(what, result);
    }

    fn bars_changed(&mut self) {
        let bars = self.config.bars();
        let now: Vec<_> = self.mapped.iter().map(|mapped| mapped.decodes(&bars)).collect();
        let placed = self.places.follow(&now);
        self.complain("map a BAR for the guest; it will be slow", placed);
    }

    fn reset(&mut self) {
        let results = reset::reset_all(std::slice::from_ref(&self.resetter));
        let result: Result<(), ResetError> = results.into_iter().collect();
        self.complain("reset", result.map_err(io::Error::other));
        self.forget();
    }
}

/// What a device says of itself, read once.
struct Read {
    snapshot: Vec<u8>,
    bar_sizes: [u64; 6],
    vectors: [u32; 3],
    rom: Vec<u8>,
}

fn facts(device: &dyn Device) -> io::Result<Read> {
    let size = device.region(Region::Config)?.size.min(4096);
    let mut snapshot = vec![0xff; usize::try_from(size).unwrap_or(4096)];
    device.read(Region::Config, 0, &mut snapshot)?;
    let mut bar_sizes = [0; 6];
    for (index, size) in (0..).zip(&mut bar_sizes) {
        *size = device.region(Region::Bar(index))?.size;
    }
    let mut vectors = [0; 3];
    for (kind, count) in [IrqKind::Intx, IrqKind::Msi, IrqKind::Msix].into_iter().zip(&mut vectors)
    {
        *count = device.irq(kind)?.count;
    }
    let rom = rom::read(device, &snapshot);
    Ok(Read { snapshot, bar_sizes, vectors, rom })
}

fn map_bars(
    device: &dyn Device,
    config: &ConfigFilter,
    around: (&Arc<Places>, &Arc<dyn Slots>),
) -> io::Result<Vec<MappedBar>> {
    config
        .bars()
        .iter()
        .filter(|bar| bar.kind != BarKind::Io && bar.index != rom::INDEX)
        .map(|bar| {
            let table = config.msix_layout().filter(|layout| layout.bar == bar.index);
            MappedBar::new(
                device,
                bar,
                table.map(|layout| layout.table..table_end(&layout)),
                around,
            )
        })
        .collect()
}

fn table_end(layout: &MsixLayout) -> u64 {
    layout.table + 16 * u64::from(layout.vectors)
}

#[cfg(test)]
#[path = "assign_tests.rs"]
mod tests;
