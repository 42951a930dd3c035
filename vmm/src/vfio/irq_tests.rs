#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::File,
    os::fd::AsFd,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use super::*;
use crate::{
    irq::Level,
    vfio::fake::{FakeDevice, Told, lock},
};

/// A vector or line that records how it is routed.
pub(crate) struct Recorder {
    routed: Mutex<Option<MsiMessage>>,
    rung: AtomicU32,
    file: File,
}

impl Recorder {
    fn new() -> Arc<Self> {
        let file = File::open("/dev/null").unwrap();
        Arc::new(Self { routed: Mutex::default(), rung: AtomicU32::default(), file })
    }
}

impl MsiVector for Recorder {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *lock(&self.routed) = message;
        Ok(())
    }
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    fn trigger(&self) -> io::Result<()> {
        self.rung.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl InterruptLine for Recorder {
    fn set_level(&self, _asserted: Level) -> io::Result<()> {
        Ok(())
    }
    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[derive(Default)]
pub(crate) struct Recorders(Mutex<Vec<Arc<Recorder>>>);

impl Recorders {
    pub(crate) fn routed(&self, index: usize) -> Option<MsiMessage> {
        *lock(&lock(&self.0)[index].routed)
    }

    fn rung(&self, index: usize) -> u32 {
        lock(&self.0)[index].rung.load(Ordering::Relaxed)
    }
}

impl InterruptSource for Recorders {
    fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
        let vector = Recorder::new();
        lock(&self.0).push(Arc::clone(&vector));
        Ok(vector)
    }
    fn line(&self, _slot: u8, _pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
        Ok(Recorder::new())
    }
}

struct Bench {
    device: Arc<FakeDevice>,
    source: Arc<Recorders>,
    interrupts: Interrupts,
}

fn bench(device: FakeDevice) -> Bench {
    let (device, source) = (Arc::new(device), Arc::new(Recorders::default()));
    let msix_vectors = u16::try_from(device.vectors[2]).unwrap();
    let ways = Ways { line: Some(Recorder::new()), msix_vectors };
    let interrupts =
        Interrupts::new(Arc::<FakeDevice>::clone(&device), Arc::<Recorders>::clone(&source), ways)
            .unwrap();
    Bench { device, source, interrupts }
}

const NO_MSI: MsiState = MsiState { vectors: 0, address: 0, data: 0, masked: 0 };

fn pin_on() -> [Told; 2] {
    [Told::Triggers(IrqKind::Intx, 0, vec![true]), Told::Unmask]
}

#[test]
fn without_messages_the_pin_is_used_and_unmasked_by_the_guests_acknowledgement() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), pin_on());
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), []);
}

#[test]
fn msix_is_on_at_the_device_before_the_first_vector_is_unmasked() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 0, vec![false])]);
}

#[test]
fn vectors_are_armed_one_by_one_when_unmasked() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    bench.device.told();
    bench.interrupts.write_table(3 * 16, &0xfee0_0000_u32.to_le_bytes()).unwrap();
    bench.interrupts.write_table(3 * 16 + 8, &[0x31]).unwrap();
    assert_eq!(bench.device.told(), []);
    bench.interrupts.write_table(3 * 16 + 12, &[0x00]).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 3, vec![true])]);
    let message = MsiMessage { address: 0xfee0_0000, data: 0x31 };
    assert_eq!(bench.source.routed(0), Some(message));
    bench.interrupts.write_table(3 * 16 + 12, &[0x01]).unwrap();
    assert_eq!((bench.device.told(), bench.source.routed(0)), (vec![], None));
}

#[test]
fn vectors_unmasked_before_are_armed_at_once() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.write_table(12, &[0, 0, 0, 0]).unwrap();
    bench.interrupts.write_table(2 * 16 + 12, &[0, 0, 0, 0]).unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    let expected = [Told::Triggers(IrqKind::Msix, 0, vec![true, false, true])];
    assert_eq!(bench.device.told(), expected);
}

#[test]
fn vectors_unmasked_behind_the_functions_mask_are_armed_when_it_goes() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.write_table(5 * 16 + 12, &[0]).unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 0, vec![false])]);
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 5, vec![true])]);
}

/// What a driver does after a reset of the device's own, which took the device's table.
#[test]
fn vectors_masked_all_at_once_and_unmasked_are_armed_anew() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.write_table(12, &[0]).unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    bench.device.told();
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told(), []);
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    let armed = Told::Triggers(IrqKind::Msix, 0, vec![true]);
    assert_eq!(bench.device.told(), [Told::Disable(IrqKind::Msix), armed]);
    assert!(bench.source.routed(0).is_some());
    // What a device that was not reset has signalled in between is not waited for.
    assert_eq!(bench.source.rung(0), 1);
    // As at every start: nothing was there to restore.
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told().last(), Some(&Told::Triggers(IrqKind::Msix, 0, vec![true])));
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    assert_eq!(bench.device.told(), []);
    assert_eq!(bench.source.rung(0), 1);
}

#[test]
fn messages_that_were_lost_are_given_anew_and_a_pin_is_not() {
    let mut device = FakeDevice::nvme();
    device.vectors[1] = 1;
    let mut bench = bench(device);
    let msi = MsiState { vectors: 1, address: 0xfee0_0000, data: 0x21, masked: 0 };
    bench.interrupts.write_table(12, &[0]).unwrap();
    for (msi, msix, kind) in
        [(NO_MSI, MsixState::Enabled, IrqKind::Msix), (msi, MsixState::Disabled, IrqKind::Msi)]
    {
        bench.interrupts.follow(msi, msix).unwrap();
        bench.device.told();
        bench.interrupts.lost().unwrap();
        bench.interrupts.follow(msi, msix).unwrap();
        let armed = Told::Triggers(kind, 0, vec![true]);
        assert_eq!(bench.device.told(), [Told::Disable(kind), armed]);
    }
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    bench.device.told();
    bench.interrupts.lost().unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), []);
}

#[test]
fn a_host_that_cannot_add_vectors_gets_all_of_them() {
    let mut device = FakeDevice::nvme();
    device.growable = false;
    let mut bench = bench(device);
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 0, vec![true; 65])]);
    bench.interrupts.write_table(12, &[0]).unwrap();
    assert_eq!(bench.device.told(), []);
}

#[test]
fn switching_msix_off_brings_the_pin_back() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    bench.device.told();
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap();
    let [trigger, unmask] = pin_on();
    assert_eq!(bench.device.told(), [Told::Disable(IrqKind::Msix), trigger, unmask]);
}

#[test]
fn msi_counts_its_messages_up_and_masks_single_ones() {
    let mut bench = bench(FakeDevice::conventional());
    let msi = MsiState { vectors: 4, address: 0xfee0_0000, data: 0x40, masked: 0b10 };
    bench.interrupts.follow(msi, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msi, 0, vec![true; 4])]);
    assert_eq!(bench.source.routed(1), None);
    assert_eq!(bench.source.routed(3), Some(MsiMessage { address: 0xfee0_0000, data: 0x43 }));
    bench.interrupts.follow(MsiState { masked: 0, ..msi }, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), []);
    assert_eq!(bench.source.routed(1), Some(MsiMessage { address: 0xfee0_0000, data: 0x41 }));
}

#[test]
fn the_number_of_a_message_takes_the_place_of_the_datas_low_bits() {
    let mut bench = bench(FakeDevice::conventional());
    let msi = MsiState { vectors: 2, address: 0xfee0_0000, data: 0x41, masked: 0 };
    bench.interrupts.follow(msi, MsixState::Disabled).unwrap();
    let data = |index| bench.source.routed(index).map(|message| message.data);
    assert_eq!((data(0), data(1)), (Some(0x40), Some(0x41)));
    // Of 16 the host has 8, and the device goes by 16.
    let msi = MsiState { vectors: 16, data: 0x48, ..msi };
    bench.interrupts.follow(msi, MsixState::Disabled).unwrap();
    let data = |index| bench.source.routed(index).map(|message| message.data);
    assert_eq!((data(0), data(7)), (Some(0x40), Some(0x47)));
}

#[test]
fn a_reset_silences_everything() {
    let mut bench = bench(FakeDevice::nvme());
    bench.interrupts.write_table(12, &[0]).unwrap();
    bench.interrupts.follow(NO_MSI, MsixState::Enabled).unwrap();
    bench.device.told();
    bench.interrupts.reset().unwrap();
    assert_eq!(bench.device.told(), [Told::Disable(IrqKind::Msix)]);
    assert_eq!(bench.source.routed(0), None);
}

#[test]
fn a_guest_that_asks_for_more_vectors_of_msi_than_there_are_gets_those() {
    let mut bench = bench(FakeDevice::conventional());
    let msi = MsiState { vectors: 32, address: 0xfee0_0000, data: 0x40, masked: 0 };
    bench.interrupts.follow(msi, MsixState::Disabled).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msi, 0, vec![true; 8])]);
    let last = MsiMessage { address: 0xfee0_0000, data: 0x47 };
    assert_eq!(bench.source.routed(7), Some(last));
}

/// The kernel has one kind on at a time: a pin left on would keep messages off for good.
#[test]
fn a_pin_that_cannot_be_unmasked_is_off_again() {
    let mut device = FakeDevice::nvme();
    device.unmaskable = false;
    let mut bench = bench(device);
    bench.interrupts.follow(NO_MSI, MsixState::Disabled).unwrap_err();
    let on = Told::Triggers(IrqKind::Intx, 0, vec![true]);
    assert_eq!(bench.device.told(), [on, Told::Disable(IrqKind::Intx)]);
    bench.interrupts.follow(NO_MSI, MsixState::Masked).unwrap();
    assert_eq!(bench.device.told(), [Told::Triggers(IrqKind::Msix, 0, vec![false])]);
}
