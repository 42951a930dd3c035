#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::sync::Mutex;

use super::*;
use crate::{
    pci::port::{AtomicOps, Link, LinkState},
    vfio::{
        bars::Part,
        fake::{FakeDevice, Told, lock},
        irq::tests::Recorders,
    },
};

/// Records what lies where in the guest, for as long as it does.
#[derive(Default, Clone)]
struct Memory(Arc<Mutex<Vec<(u64, usize)>>>);

struct Slot(Memory, (u64, usize));

impl Slots for Memory {
    fn map(&self, guest: u64, part: &Part) -> io::Result<Box<dyn Send>> {
        let place = (guest, part.mapping.size());
        lock(&self.0).push(place);
        Ok(Box::new(Slot(self.clone(), place)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.0.0).retain(|place| *place != self.1);
    }
}

struct Bench {
    device: Arc<FakeDevice>,
    memory: Memory,
    function: Function,
}

fn open(device: FakeDevice) -> Result<(Arc<FakeDevice>, Memory, Assigned), AssignError> {
    let (device, memory) = (Arc::new(device), Memory::default());
    let address: Bdf = "0000:01:00.0".parse().unwrap();
    let resetter = Resetter::start(
        address,
        Arc::<FakeDevice>::clone(&device),
        &Neighbours::default(),
        Confinement::Open,
    )
    .unwrap();
    let host = Host {
        interrupts: Arc::new(Recorders::default()),
        slots: Arc::new(memory.clone()),
        places: Arc::default(),
        route: PinRoute { slot: 2, turn: 0 },
        clique: None,
    };
    let assigned =
        Function::open(address, Arc::<FakeDevice>::clone(&device), host, Arc::new(resetter))?;
    Ok((device, memory, assigned))
}

fn bench(device: FakeDevice) -> Bench {
    let (device, memory, assigned) = open(device).unwrap();
    device.told();
    Bench { device, memory, function: assigned.function }
}

impl Bench {
    /// Writes configuration space as the bus does: changed BARs are told.
    fn write(&mut self, offset: u16, data: &[u8]) {
        let before = self.function.bars();
        self.function.write_config(offset, data);
        if self.function.bars() != before {
            self.function.bars_changed();
        }
    }

    fn mapped(&self) -> Vec<(u64, usize)> {
        lock(&self.memory.0).clone()
    }
}

const AT_3G: [(u64, usize); 2] = [(0xc000_0000, 0x2000), (0xc000_3000, 0x1000)];
const AT_3G_AND_16M: [(u64, usize); 2] = [(0xc100_0000, 0x2000), (0xc100_3000, 0x1000)];

#[test]
fn what_the_host_completes_for_a_device_goes_with_it() {
    let (mut gpu, disk) = (FakeDevice::nvme(), FakeDevice::nvme());
    gpu.atomics = AtomicOps::of_sizes(0b111);
    assert_eq!(open(gpu).unwrap().2.behind.atomics, AtomicOps::of_sizes(0b111));
    assert_eq!(open(disk).unwrap().2.behind.atomics, AtomicOps::NONE);
}

#[test]
fn opening_lets_the_device_decode_and_tells_its_link() {
    let (device, memory, assigned) = open(FakeDevice::nvme()).unwrap();
    let command = Told::Config(0x04, vec![0x02, 0x00]);
    assert_eq!(device.told()[0], command);
    assert_eq!(assigned.behind.link, Link { speed: 4, width: 1 }.fixed());
    assert_eq!(*lock(&memory.0), []);
}

/// An Instinct MI300 has its video BIOS nowhere else.
#[test]
fn an_amd_gpu_has_its_rom_which_is_read_once_and_never_mapped() {
    let mut rom = vec![0; 0x2_0000];
    rom[..4].copy_from_slice(&[0x55, 0xaa, 0x01, 0x02]);
    let device = FakeDevice::nvme().with_rom(&rom);
    lock(&device.config)[..2].copy_from_slice(&[0x02, 0x10]);
    lock(&device.config)[0x0b] = 0x12;
    let mut bench = bench(device);
    bench.function.place_bar(0, 0xc000_0000);
    bench.function.place_bar(6, 0xc010_0000);
    bench.write(0x04, &[0x06, 0x00]);
    bench.write(0x30, &0xc010_0001_u32.to_le_bytes());
    assert!(bench.function.bars().iter().any(|bar| bar.index == 6 && bar.decoding));
    assert_eq!(bench.mapped(), AT_3G, "BAR 0 only");
    bench.device.told();
    let mut data = [0; 4];
    bench.function.write_bar(6, 0, &[0; 4]);
    bench.function.read_bar(6, 0, &mut data);
    assert_eq!(data, [0x55, 0xaa, 0x01, 0x02]);
    bench.function.read_bar(6, 0x1_fffc, &mut data);
    assert_eq!(data, [0; 4]);
    assert_eq!(bench.device.told(), []);
}

#[test]
fn the_most_of_a_link_is_told_while_it_idles() {
    let device = FakeDevice::nvme();
    // Link capabilities: 32 GT/s, 16 lanes. Link status: 2.5 GT/s, 16 lanes.
    lock(&device.config)[0x8c..0x8e].copy_from_slice(&[0x05, 0x01]);
    lock(&device.config)[0x92..0x94].copy_from_slice(&[0x01, 0x11]);
    let (_, _, assigned) = open(device).unwrap();
    let (most, now) = (Link { speed: 5, width: 16 }, Link { speed: 1, width: 16 });
    assert_eq!(assigned.behind.link, LinkState { most, now });
}

/// A virtual function, whose link status is reserved.
#[test]
fn a_link_whose_status_is_not_told_is_the_most_it_can_be() {
    let device = FakeDevice::nvme();
    lock(&device.config)[0x8c..0x8e].copy_from_slice(&[0x05, 0x01]);
    lock(&device.config)[0x92..0x94].fill(0);
    let (_, _, assigned) = open(device).unwrap();
    assert_eq!(assigned.behind.link, Link { speed: 5, width: 16 }.fixed());
}

/// The first of a set that is taken back alone leaves the set to the last; together, none can.
#[test]
fn what_is_taken_back_together_is_reset_together_and_each_failure_told() {
    let neighbours = Neighbours::default();
    let closers = ["0000:01:00.0", "0000:01:00.1"].map(|address| {
        let address: Bdf = address.parse().unwrap();
        let device: Arc<dyn Device> = Arc::new(FakeDevice::nvme().unresettable());
        let reached = Arc::clone(&device);
        let resetter = Resetter::start(address, reached, &neighbours, Confinement::Open).unwrap();
        Closer {
            devices: vec![device],
            resetters: vec![Arc::new(resetter)],
            _watches: Vec::new(),
            _in_use: vec![neighbours.admit(address)],
            _space: Arc::new(dma::tests::Space::default()),
        }
    });
    let failures = Closer::close_all(Vec::from(closers));
    let refused = |failure: &ResetError| matches!(failure, ResetError::Refused { .. });
    assert!(failures.len() == 2 && failures.iter().all(refused), "{failures:?}");
}

#[test]
fn bars_are_mapped_around_the_table_once_they_decode() {
    let mut bench = bench(FakeDevice::nvme());
    bench.function.place_bar(0, 0xc000_0000);
    bench.function.bars_changed();
    assert_eq!(bench.mapped(), []);
    bench.write(0x04, &[0x06, 0x00]);
    assert_eq!(bench.mapped(), AT_3G);
}

#[test]
fn a_bar_stays_mapped_while_it_is_sized_and_moves_when_it_decodes_elsewhere() {
    let mut bench = bench(FakeDevice::nvme());
    bench.function.place_bar(0, 0xc000_0000);
    bench.write(0x04, &[0x06, 0x00]);
    bench.write(0x04, &[0x00, 0x00]);
    bench.write(0x10, &[0xff; 4]);
    assert_eq!(bench.mapped(), AT_3G);
    bench.write(0x10, &0xc100_0000_u32.to_le_bytes());
    bench.write(0x04, &[0x06, 0x00]);
    assert_eq!(bench.mapped(), AT_3G_AND_16M);
}

#[test]
fn the_table_is_ours_and_the_rest_is_the_devices() {
    let mut bench = bench(FakeDevice::nvme());
    bench.function.write_bar(0, 0x2008, &[0x21, 0, 0, 0]);
    bench.function.write_bar(0, 0x2800, &[7, 0, 0, 0]);
    assert_eq!(bench.device.told(), [Told::Bar(0, 0x2800, vec![7, 0, 0, 0])]);
    let mut data = [0; 8];
    bench.function.read_bar(0, 0x2008, &mut data);
    assert_eq!(data, [0x21, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn ports_are_carried_out_one_by_one() {
    let mut bench = bench(FakeDevice::conventional());
    bench.function.write_bar(1, 4, &[9, 8]);
    assert_eq!(bench.device.told(), [Told::Bar(1, 4, vec![9, 8])]);
}

#[test]
fn a_guest_that_resets_the_function_finds_it_as_at_power_on() {
    let mut bench = bench(FakeDevice::nvme());
    bench.write(0x04, &[0x06, 0x00]);
    bench.write(0x42, &[0x00, 0x80]);
    // The kernel restores what it saved.
    lock(&bench.device.config)[4..6].copy_from_slice(&[0x06, 0x04]);
    bench.device.told();
    bench.write(0x88, &[0x00, 0x80]);
    let told = bench.device.told();
    assert_eq!(told[0], Told::Config(0x88, vec![0x00, 0x80]));
    assert!(told.contains(&Told::Disable(IrqKind::Msix)));
    assert!(told.contains(&Told::Config(0x04, vec![0x02, 0x00])));
    assert!(!bench.function.bars()[0].decoding);
}

/// As AMD's GPUs are reset by their drivers. What the guest reads of its BARs is as it was, and nothing has it write
/// there.
#[test]
fn a_device_that_was_reset_by_its_own_registers_decodes_again_when_it_is_looked_at() {
    let mut bench = bench(FakeDevice::nvme());
    bench.write(0x04, &[0x06, 0x00]);
    bench.device.told();
    let mut data = [0; 4];
    lock(&bench.device.config)[4..6].copy_from_slice(&[0x02, 0x00]);
    bench.function.read_config(0x04, &mut data);
    assert_eq!(bench.device.told(), []);
    lock(&bench.device.config)[4..6].copy_from_slice(&[0x00, 0x01]);
    bench.function.read_config(0x04, &mut data);
    assert_eq!(bench.device.told(), [Told::Config(0x04, vec![0x02, 0x01])]);
    assert_eq!(data[0] & 0x02, 0x02);
    // A driver that restores what it has read of its messages writes nothing new.
    bench.function.write_bar(0, 0x200c, &[0; 4]);
    bench.write(0x42, &[0x00, 0x80]);
    bench.device.told();
    lock(&bench.device.config)[4..6].copy_from_slice(&[0x00, 0x01]);
    bench.function.read_config(0x04, &mut data);
    let armed = Told::Triggers(IrqKind::Msix, 0, vec![true]);
    let decodes = Told::Config(0x04, vec![0x02, 0x01]);
    assert_eq!(bench.device.told(), [decodes, Told::Disable(IrqKind::Msix), armed]);
    lock(&bench.device.config)[4..6].copy_from_slice(&[0xff, 0xff]);
    bench.function.read_config(0x04, &mut data[..2]);
    assert_eq!(bench.device.told(), [], "it is silent");
}

/// As it is: a function whose bus is reset is reset by its own means, if it has any.
#[test]
fn a_reset_of_the_bus_reaches_the_function() {
    let mut bench = bench(FakeDevice::nvme());
    bench.write(0x04, &[0x06, 0x00]);
    bench.device.told();
    bench.function.bus_reset();
    assert_eq!(bench.device.told()[0], Told::Config(0x89, vec![0x80]));
    assert!(!bench.function.bars()[0].decoding);
    let mut bench = self::bench(FakeDevice::conventional());
    bench.write(0x04, &[0x03, 0x00]);
    bench.device.told();
    bench.function.bus_reset();
    assert_eq!(bench.device.told()[0], Told::Reset);
    assert!(!bench.function.bars().iter().any(|bar| bar.decoding));
}

#[test]
fn a_device_that_is_gone_is_refused() {
    let refusal = open(FakeDevice::gone()).map(drop).unwrap_err();
    assert!(matches!(refusal, AssignError::Config { source: ConfigError::Gone, .. }));
}

#[test]
fn power_on_resets_the_device_itself() {
    let mut bench = bench(FakeDevice::nvme());
    bench.write(0x04, &[0x06, 0x00]);
    bench.device.told();
    bench.function.reset();
    assert_eq!(bench.device.told()[0], Told::Reset);
    assert!(!bench.function.bars()[0].decoding);
}

#[test]
fn registers_beside_a_moved_table_are_mapped_and_the_table_is_not() {
    let device = FakeDevice::nvme();
    // A table of four vectors in the middle of the first page.
    lock(&device.config)[0x42..0x48].copy_from_slice(&[0x03, 0x00, 0x40, 0x01, 0x00, 0x00]);
    let mut bench = bench(device);
    bench.function.place_bar(0, 0x8000_0000);
    bench.function.place_bar(2, 0x9000_0000);
    bench.write(0x04, &[0x06, 0x00]);
    bench.function.bars_changed();
    assert_eq!(*lock(&bench.memory.0), [(0x8000_0000, 0x4000)]);
    bench.device.told();
    bench.function.write_bar(2, 0, &[1, 2, 3, 4]);
    bench.function.write_bar(2, 0x800, &[1, 2, 3, 4]);
    assert_eq!(bench.device.told(), []);
    let mut data = [0xff; 8];
    bench.function.read_bar(2, 0, &mut data);
    assert_eq!(data, [0, 2, 3, 4, 0, 0, 0, 0]);
    bench.function.read_bar(2, 0x800, &mut data);
    assert_eq!(data, [0; 8]);
}
