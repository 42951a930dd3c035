#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use proptest::prelude::*;

use super::*;
use crate::vfio::{
    device::{Area, Device, Region, RegionInfo},
    fake::{FakeDevice, lock},
};

/// Returns the device's own bytes and the filter over them.
fn filter(device: &FakeDevice) -> (Vec<u8>, ConfigFilter) {
    filter_with(device, &[]).unwrap()
}

fn filter_with(
    device: &FakeDevice,
    quirks: &[&'static Quirk],
) -> Result<(Vec<u8>, ConfigFilter), ConfigError> {
    let snapshot = lock(&device.config).clone();
    let bar_sizes = [0, 1, 2, 3, 4, 5].map(|bar: usize| device.bars[bar].size);
    let (rom_size, vectors) = (device.region(Region::Rom).unwrap().size, device.vectors);
    let facts = Facts { snapshot: &snapshot, bar_sizes, rom_size, vectors, quirks, clique: None };
    let filter = ConfigFilter::new(&facts)?;
    Ok((snapshot, filter))
}

fn read<const N: usize>((device, filter): &(Vec<u8>, ConfigFilter), offset: u16) -> [u8; N] {
    let mut data = [0xff; N];
    let at = usize::from(offset);
    data.copy_from_slice(&device[at..at + N]);
    filter.read(offset, &mut data);
    data
}

fn write(
    (_, filter): &mut (Vec<u8>, ConfigFilter),
    offset: u16,
    data: &[u8],
) -> Vec<(u16, Vec<u8>)> {
    let mut passed = Vec::new();
    filter.write(offset, data, |offset, run| passed.push((offset, run.to_vec())));
    passed
}

/// The list as a guest walks it.
fn chain(state: &(Vec<u8>, ConfigFilter)) -> Vec<u8> {
    let mut seen = vec![0; state.0.len()];
    seen.copy_from_slice(&state.0);
    state.1.read(0, &mut seen);
    capabilities::walk(&seen).iter().map(|capability| capability.id).collect()
}

#[test]
fn a_bar_tells_its_size() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(write(&mut state, 0x10, &[0xff; 4]), []);
    assert_eq!(write(&mut state, 0x14, &[0xff; 4]), []);
    assert_eq!(u32::from_le_bytes(read(&state, 0x10)), 0xffff_c004);
    assert_eq!(u32::from_le_bytes(read(&state, 0x14)), 0xffff_ffff);
    assert_eq!(u32::from_le_bytes(read(&state, 0x18)), 0);
}

#[test]
fn a_rom_is_sized_placed_and_switched_on_like_a_bar() {
    let mut state = filter(&FakeDevice::nvme().with_rom(&[0; 0x2_0000]));
    assert_eq!(read(&state, 0x30), [0; 4], "what the host has there is none of the guest's");
    assert_eq!(write(&mut state, 0x30, &0xffff_f800_u32.to_le_bytes()), []);
    assert_eq!(u32::from_le_bytes(read(&state, 0x30)), 0xfffe_0000);
    let rom = |state: &(Vec<u8>, ConfigFilter)| *state.1.bars().last().unwrap();
    state.1.place_bar(rom::INDEX, 0xc010_0000);
    let expected = Bar {
        index: rom::INDEX,
        kind: BarKind::Memory32,
        size: 0x2_0000,
        address: 0xc010_0000,
        decoding: false,
    };
    write(&mut state, 0x04, &[0x02, 0x00]);
    assert_eq!(rom(&state), expected, "memory alone does not switch it on");
    write(&mut state, 0x30, &0xc010_0001_u32.to_le_bytes());
    assert_eq!(rom(&state), Bar { decoding: true, ..expected });
    assert_eq!(u32::from_le_bytes(read(&state, 0x30)), 0xc010_0001);
    write(&mut state, 0x04, &[0x00, 0x00]);
    assert!(!rom(&state).decoding);
    state.1.reset();
    assert_eq!(rom(&state), Bar { address: 0, ..expected });
    let small = filter(&FakeDevice::nvme().with_rom(&[0; 0x800]));
    assert_eq!(rom(&small).size, 0x1000);
}

#[test]
fn a_bar_is_where_the_guest_puts_it_and_decodes_when_it_says_so() {
    let mut state = filter(&FakeDevice::nvme());
    write(&mut state, 0x10, &0x8000_0000_u32.to_le_bytes());
    write(&mut state, 0x14, &0x38_u32.to_le_bytes());
    let expected = Bar {
        index: 0,
        kind: BarKind::Memory64,
        size: 0x4000,
        address: 0x38_8000_0000,
        decoding: false,
    };
    assert_eq!(state.1.bars(), [expected]);
    write(&mut state, 0x04, &[0x02, 0x00]);
    assert_eq!(state.1.bars(), [Bar { decoding: true, ..expected }]);
    state.1.place_bar(0, 0x40_0000_0000);
    assert_eq!(state.1.bars()[0].address, 0x40_0000_0000);
}

#[test]
fn ports_are_sized_like_ports() {
    let mut state = filter(&FakeDevice::conventional());
    write(&mut state, 0x14, &[0xff; 4]);
    assert_eq!(u32::from_le_bytes(read(&state, 0x14)), 0xffff_ffe1);
    write(&mut state, 0x14, &0xc040_u32.to_le_bytes());
    write(&mut state, 0x04, &[0x01]);
    let bars = state.1.bars();
    assert_eq!((bars[1].kind, bars[1].address, bars[1].decoding), (BarKind::Io, 0xc040, true));
    assert!(!bars[0].decoding);
}

#[test]
fn the_device_goes_on_decoding_when_the_guest_stops_it() {
    let mut state = filter(&FakeDevice::nvme());
    // Bus mastering off, memory off: the device gets the first, and memory on.
    assert_eq!(write(&mut state, 0x04, &[0x00, 0x04]), [(0x04, vec![0x02, 0x04])]);
    assert_eq!(read(&state, 0x04), [0x00]);
    assert_eq!(state.1.initial_command(0x0400), 0x0402);
}

#[test]
fn a_device_has_one_function_no_self_test_and_no_rom() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(write(&mut state, 0x30, &[0xff; 4]), []);
    assert_eq!(write(&mut state, 0x0f, &[0x40]), []);
    assert_eq!(read(&state, 0x0e), [0, 0]);
    assert_eq!(read(&state, 0x30), [0; 4]);
}

#[test]
fn the_interrupt_line_is_the_guests_note() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(write(&mut state, 0x3c, &[0x07]), []);
    assert_eq!(read(&state, 0x3c), [0x07, 0x01]);
}

#[test]
fn a_pin_that_the_host_cannot_deliver_is_hidden() {
    let mut device = FakeDevice::nvme();
    device.vectors[0] = 0;
    assert_eq!(read(&filter(&device), 0x3d), [0]);
}

#[test]
fn capabilities_keep_their_order() {
    assert_eq!(chain(&filter(&FakeDevice::nvme())), [0x11, 0x10, 0x01]);
}

#[test]
fn what_the_host_cannot_deliver_leaves_the_list() {
    let mut device = FakeDevice::nvme();
    device.vectors[2] = 0;
    let state = filter(&device);
    assert_eq!(chain(&state), [0x10, 0x01]);
    assert_eq!(read(&state, 0x40), [0; 12]);
    assert_eq!(state.1.msix_layout(), None);
}

#[test]
fn what_lies_behind_a_hidden_capability_stays_the_devices() {
    let mut device = FakeDevice::nvme();
    device.vectors[2] = 0;
    lock(&device.config)[0x4c..0x50].copy_from_slice(&[1, 2, 3, 4]);
    let mut state = filter(&device);
    assert_eq!(read(&state, 0x48), [0, 0, 0, 0, 1, 2, 3, 4]);
    assert_eq!(write(&mut state, 0x48, &[5, 6, 7, 8, 9]), [(0x4c, vec![9])]);
}

#[test]
fn a_quirk_hides_all_of_a_capability_whose_length_nobody_knows() {
    static ROW: Quirk =
        Quirk { vendor: 0, device: 0, effect: Effect::HideCapability(0x0f), evidence: "none" };
    let device = FakeDevice::nvme();
    lock(&device.config)[0x60] = 0x0f;
    lock(&device.config)[0x7c..0x80].fill(0xaa);
    let state = filter_with(&device, &[&ROW]).unwrap();
    assert_eq!(chain(&state), [0x11, 0x10]);
    assert_eq!(read(&state, 0x7c), [0; 4]);
}

#[test]
fn a_quirk_hides_a_capability() {
    static ROW: Quirk =
        Quirk { vendor: 0, device: 0, effect: Effect::HideCapability(0x01), evidence: "none" };
    let mut state = filter_with(&FakeDevice::nvme(), &[&ROW]).unwrap();
    assert_eq!(chain(&state), [0x11, 0x10]);
    assert_eq!(write(&mut state, 0x64, &[0x03, 0x00]), []);
}

#[test]
fn hidden_extended_capabilities_leave_a_null_one() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(u32::from_le_bytes(read(&state, 0x100)), 0x1501_0001);
    assert_eq!(u32::from_le_bytes(read(&state, 0x150)), 0x1600_0000);
    assert_eq!(u32::from_le_bytes(read(&state, 0x160)), 0x2000_0000);
    assert_eq!(u32::from_le_bytes(read(&state, 0x200)), 0x0001_0003);
    assert_eq!(read(&state, 0x154), [0; 4]);
    assert_eq!(read(&state, 0x164), [0; 60]);
    assert_eq!(write(&mut state, 0x168, &[0x01, 0, 0, 0]), []);
}

#[test]
fn a_device_stays_awake_when_the_guest_puts_it_to_sleep() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(write(&mut state, 0x64, &[0x03, 0x81]), [(0x64, vec![0x00, 0x81])]);
    // Nor was it reset when it wakes up, whatever it says of that.
    state.0[0x64] = 0;
    assert_eq!(read(&state, 0x64), [0x0b]);
    state.1.reset();
    assert_eq!(read(&state, 0x64), [0x08]);
}

#[test]
fn msix_control_is_taken_in_every_width() {
    let mut state = filter(&FakeDevice::nvme());
    assert_eq!(write(&mut state, 0x43, &[0xc0]), []);
    assert_eq!(state.1.msix(), MsixState::Masked);
    assert_eq!(write(&mut state, 0x42, &[0xff, 0x80]), []);
    assert_eq!(state.1.msix(), MsixState::Enabled);
    assert_eq!(read(&state, 0x42), [0x40, 0x80]);
    assert_eq!(write(&mut state, 0x40, &[0xff, 0xff, 0x00, 0x00]), []);
    assert_eq!(state.1.msix(), MsixState::Disabled);
    assert_eq!(read(&state, 0x40), [0x11, 0x80, 0x40, 0x00]);
}

#[test]
fn a_table_outside_its_bar_is_refused() {
    let device = FakeDevice::nvme();
    lock(&device.config)[0x45] = 0x3f;
    let refusal = filter_with(&device, &[]).unwrap_err();
    assert_eq!(refusal, ConfigError::MsixTable { bar: 0, offset: 0x3f00, vectors: 65 });
}

#[test]
fn msi_is_read_as_programmed() {
    let mut state = filter(&FakeDevice::conventional());
    write(&mut state, 0x44, &0xfee0_1003_u32.to_le_bytes());
    write(&mut state, 0x48, &0x1_u32.to_le_bytes());
    write(&mut state, 0x4c, &[0x40, 0x41]);
    write(&mut state, 0x50, &[0x02]);
    assert_eq!(state.1.msi().vectors, 0);
    assert_eq!(write(&mut state, 0x40, &[0, 0, 0x21, 0x00]), []);
    let expected = MsiState { vectors: 4, address: 0x1_fee0_1000, data: 0x4140, masked: 0x02 };
    assert_eq!(state.1.msi(), expected);
    assert_eq!(read(&state, 0x42), [0xa7, 0x01]);
}

#[test]
fn a_function_level_reset_is_passed_on_and_noticed() {
    let (_, mut filter) = filter(&FakeDevice::nvme());
    let mut passed = Vec::new();
    let written = filter.write(0x88, &[0x10, 0xa8], |at, run| passed.push((at, run.to_vec())));
    assert_eq!(written, Written::FunctionReset);
    assert_eq!(passed, [(0x88, vec![0x10, 0xa8])]);
    let written = filter.write(0x88, &[0x10, 0x28], |_, _| ());
    assert_eq!(written, Written::Registers);
}

#[test]
fn a_reset_forgets_what_the_guest_wrote() {
    let mut state = filter(&FakeDevice::nvme());
    write(&mut state, 0x10, &0x8000_0000_u32.to_le_bytes());
    write(&mut state, 0x04, &[0x06, 0x00]);
    write(&mut state, 0x42, &[0x40, 0x80]);
    state.1.reset();
    assert_eq!(u32::from_le_bytes(read(&state, 0x10)), 0x4);
    assert_eq!(state.1.msix(), MsixState::Disabled);
    assert!(!state.1.bars()[0].decoding);
}

#[test]
fn product_data_is_never_written() {
    let device = FakeDevice::nvme();
    lock(&device.config)[0x60..0x62].copy_from_slice(&[0x03, 0x00]);
    let mut state = filter(&device);
    assert_eq!(write(&mut state, 0x64, &[1, 2, 3, 4]), []);
    assert_eq!(write(&mut state, 0x62, &[0x10, 0x80]), [(0x62, vec![0x10, 0x00])]);
}

#[test]
fn bridges_dead_devices_and_odd_bars_are_refused() {
    let bridge = FakeDevice::nvme();
    lock(&bridge.config)[0x0e] = 0x81;
    assert_eq!(filter_with(&bridge, &[]).unwrap_err(), ConfigError::NoEndpoint { header_type: 1 });
    assert_eq!(filter_with(&FakeDevice::gone(), &[]).unwrap_err(), ConfigError::Gone);
    let mut odd = FakeDevice::nvme();
    odd.bars[0].size = 0x3000;
    let refusal = filter_with(&odd, &[]).unwrap_err();
    assert_eq!(refusal, ConfigError::BarSize { index: 0, size: 0x3000, register: 4 });
}

#[test]
fn conventional_devices_have_no_extended_space() {
    let (_, filter) = filter(&FakeDevice::conventional());
    let mut data = [0; 4];
    filter.read(0x100, &mut data);
    assert_eq!(data, [0xff; 4]);
}

proptest! {
    #[test]
    fn any_device_and_any_guest_are_survived(
        config in proptest::collection::vec(any::<u8>(), 0..4097),
        sizes in proptest::array::uniform6(proptest::option::of(0u32..63)),
        vectors in proptest::array::uniform3(0u32..3000),
        writes in proptest::collection::vec((0u16..4096, any::<[u8; 4]>()), 0..32),
    ) {
        let bar_sizes = sizes.map(|size| size.map_or(0, |shift| 1u64 << shift));
        let facts = Facts { snapshot: &config, bar_sizes, rom_size: 0x800, vectors, quirks: &[], clique: None };
        if let Ok(mut filter) = ConfigFilter::new(&facts) {
            for (offset, data) in writes {
                filter.write(offset, &data, |at, run| assert!(run.len() <= 4 && at >= offset));
                let _ = (filter.bars(), filter.msi(), filter.msix());
            }
            let mut all = config.clone();
            filter.read(0, &mut all);
            let hidden = |c: &capabilities::ExtendedCapability| HIDDEN_EXTENDED.contains(&c.id);
            prop_assert!(!capabilities::walk_extended(&all).iter().any(hidden));
        }
    }
}

/// A device whose table of four vectors begins in the middle of the first page.
fn crowded() -> FakeDevice {
    let device = FakeDevice::nvme();
    lock(&device.config)[0x42..0x48].copy_from_slice(&[0x03, 0x00, 0x40, 0x01, 0x00, 0x00]);
    device
}

#[test]
fn a_table_among_registers_gets_a_bar_of_its_own() {
    let mut state = filter(&crowded());
    let layout = state.1.msix_layout().unwrap();
    assert_eq!((layout.bar, layout.table, layout.vectors, layout.device_end), (2, 0, 4, 0));
    assert_eq!(u32::from_le_bytes(read(&state, 0x44)), 2);
    write(&mut state, 0x18, &[0xff; 4]);
    assert_eq!(u32::from_le_bytes(read(&state, 0x18)), 0xffff_f000);
    let own: Vec<(u8, u64)> = state.1.bars().iter().map(|bar| (bar.index, bar.size)).collect();
    assert_eq!(own, [(0, 0x4000), (2, 0x1000)]);
}

#[test]
fn a_table_goes_behind_its_bar_when_no_register_is_left() {
    let mut device = crowded();
    for bar in 2..6 {
        device.bars[bar] = RegionInfo { size: 0x1000, mappable: Vec::new() };
    }
    let state = filter(&device);
    let layout = state.1.msix_layout().unwrap();
    assert_eq!((layout.bar, layout.table, layout.device_end), (0, 0x4000, 0x4000));
    assert_eq!(u32::from_le_bytes(read(&state, 0x44)), 0x4000);
    let whole = state.1.bars().into_iter().find(|bar| bar.index == 0).unwrap();
    assert_eq!((whole.size, whole.kind), (0x8000, BarKind::Memory64));
}

#[test]
fn of_two_msix_capabilities_the_second_is_hidden() {
    let device = crowded();
    // The power management capability, the last of the list, claims a table in the BAR that ours gets.
    let mut config = lock(&device.config);
    config[0x60] = MSIX;
    config[0x62..0x68].copy_from_slice(&[0x03, 0x00, 0x02, 0x00, 0x00, 0x00]);
    drop(config);
    let state = filter(&device);
    assert_eq!(chain(&state), [0x11, 0x10]);
    assert_eq!(read(&state, 0x62), [0; 6]);
    let layout = state.1.msix_layout().unwrap();
    assert_eq!((layout.bar, layout.table, layout.device_end), (2, 0, 0));
}

#[test]
fn a_row_moves_a_table_that_has_its_page() {
    static ROW: Quirk = Quirk { vendor: 0, device: 0, effect: Effect::MoveTable, evidence: "none" };
    let state = filter_with(&FakeDevice::nvme(), &[&ROW]).unwrap();
    assert_eq!(state.1.msix_layout().unwrap().bar, 2);
}

#[test]
fn a_small_bar_has_a_page_for_itself() {
    let mut device = FakeDevice::conventional();
    device.bars[0] = RegionInfo { size: 0x100, mappable: vec![Area { offset: 0, size: 0x100 }] };
    let state = filter(&device);
    let sizes: Vec<u64> = state.1.bars().iter().map(|bar| bar.size).collect();
    assert_eq!(sizes, [0x1000, 0x20]);
}

#[test]
fn a_clique_is_the_last_capability_of_a_gpu() {
    let device = FakeDevice::nvme();
    lock(&device.config)[..4].copy_from_slice(&[0xde, 0x10, 0x30, 0x23]);
    lock(&device.config)[9..12].copy_from_slice(&[0x00, 0x02, 0x03]);
    let snapshot = lock(&device.config).clone();
    let bar_sizes = [0x4000, 0, 0, 0, 0, 0];
    let facts = Facts {
        snapshot: &snapshot,
        bar_sizes,
        rom_size: 0,
        vectors: [1, 0, 65],
        quirks: &[],
        clique: Some(5),
    };
    let state = (snapshot.clone(), ConfigFilter::new(&facts).unwrap());
    assert_eq!(chain(&state), [0x11, 0x10, 0x01, 0x09]);
    assert_eq!(read(&state, 0xc8), [0x09, 0, 8, b'P', b'2', b'P', 5 << 3, 0]);
    let other = Facts { snapshot: &lock(&FakeDevice::nvme().config).clone(), ..facts };
    assert!(matches!(ConfigFilter::new(&other), Err(ConfigError::Clique { clique: 5, .. })));
}
