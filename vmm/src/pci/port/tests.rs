use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use types::topology::AccessControl;

use super::*;
use crate::{
    irq::{InterruptLine, Level, MsiMessage, MsiVector},
    pci::config::COMMAND_INTX_DISABLE,
};

const KEPT: Kept = Kept { memory: 32 << 20, prefetchable: 1 << 38 };
const GEN5: Link = Link { speed: 5, width: 16 };

/// Where everything of a slot's alarm is written down.
pub(crate) struct Recorder {
    fired: Mutex<u32>,
    level: Mutex<Level>,
    switched: Mutex<Vec<u16>>,
    file: OwnedFd,
}

impl MsiVector for Recorder {
    fn route(&self, _message: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    fn trigger(&self) -> io::Result<()> {
        *self.fired.lock().expect("one thread") += 1;
        Ok(())
    }
}

impl InterruptLine for Recorder {
    fn set_level(&self, level: Level) -> io::Result<()> {
        *self.level.lock().expect("one thread") = level;
        Ok(())
    }
    fn trigger_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    fn resample_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl SlotWatch for Recorder {
    fn power_switched(&self, slot: u16) {
        self.switched.lock().expect("one thread").push(slot);
    }
}

/// A port of an empty slot.
pub(crate) fn hot_port() -> (Port, Arc<Recorder>) {
    let recorder = Arc::new(Recorder {
        fired: Mutex::new(0),
        level: Mutex::new(Level::Low),
        switched: Mutex::default(),
        file: OwnedFd::from(std::fs::File::open("/dev/null").expect("there")),
    });
    let alarm = Alarm {
        vector: Arc::<Recorder>::clone(&recorder),
        line: Arc::<Recorder>::clone(&recorder),
        watch: Arc::<Recorder>::clone(&recorder),
    };
    let spec = SlotSpec { number: 9, alarm: Some(alarm), kept: Some(KEPT) };
    let registers = Link { speed: 1, width: 1 }.fixed().registers();
    (Port::new(Kind::Root, &registers, Some(spec)).expect("room"), recorder)
}

fn word(port: &mut Port, offset: u16) -> u32 {
    let mut data = [0; 4];
    port.read_config(offset, &mut data);
    u32::from_le_bytes(data)
}

fn half(port: &mut Port, offset: u16) -> u16 {
    let mut data = [0; 2];
    port.read_config(offset, &mut data);
    u16::from_le_bytes(data)
}

const CONTROL: u16 = EXPRESS_AT + 0x18;
const STATUS: u16 = EXPRESS_AT + 0x1a;
const LINK_STATUS: u16 = EXPRESS_AT + 0x12;
/// All events of pciehp and its interrupt, power off.
const LISTENING: u16 = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 12 | 3 << 6 | 3 << 8 | 1 << 10;

fn fired(recorder: &Recorder) -> u32 {
    *recorder.fired.lock().expect("one thread")
}

/// A hot port whose guest listens by messages and has acknowledged everything.
fn listening() -> (Port, Arc<Recorder>) {
    let (mut port, recorder) = hot_port();
    let msi = port.msi;
    port.write_config(msi + 4, &0xfee0_0000u32.to_le_bytes());
    port.write_config(msi + 2, &[1, 0]);
    port.write_config(CONTROL, &LISTENING.to_le_bytes());
    assert_eq!(fired(&recorder), 1, "the command is completed");
    port.write_config(STATUS, &[0xff, 0xff]);
    assert_eq!(half(&mut port, STATUS), 0);
    (port, recorder)
}

#[test]
fn every_register_of_the_host_is_told() {
    let host = PortRegisters {
        device_capabilities: 0x0000_8022,
        device_control: 0x5937,
        link_capabilities: 0x0b7a_dd05,
        link_control: 0x0040,
        link_status: 0x3105,
        device_capabilities2: 0x7093_5bff,
        device_control2: 0x1029,
        link_capabilities2: 0x0180_003e,
        link_control2: 0x0005,
        link_status2: 0x001e,
        access_control: Some(AccessControl { capabilities: 0x007f, control: 0x001d }),
    };
    let slot = SlotSpec { number: 300, alarm: None, kept: None };
    let mut port = Port::new(Kind::Downstream, &host, Some(slot)).expect("room");
    let express = |at| EXPRESS_AT + at;
    assert_eq!(half(&mut port, express(0x02)), 2 | 6 << 4 | 1 << 8);
    assert_eq!(word(&mut port, express(0x04)), host.device_capabilities);
    assert_eq!(half(&mut port, express(0x08)), host.device_control);
    assert_eq!(word(&mut port, express(0x0c)), host.link_capabilities | LINK_ACTIVE_CAPABLE);
    assert_eq!(half(&mut port, express(0x10)), host.link_control);
    assert_eq!(half(&mut port, express(0x12)), host.link_status | LINK_ACTIVE);
    assert_eq!(word(&mut port, express(0x14)), 300 << 19);
    assert_eq!(half(&mut port, express(0x1a)), 1 << 6);
    assert_eq!(word(&mut port, express(0x24)), host.device_capabilities2);
    assert_eq!(half(&mut port, express(0x28)), host.device_control2);
    assert_eq!(word(&mut port, express(0x2c)), host.link_capabilities2);
    assert_eq!(half(&mut port, express(0x30)), host.link_control2);
    assert_eq!(half(&mut port, express(0x32)), host.link_status2);
    assert_eq!(word(&mut port, 0x100), 0x0001_000d);
    assert_eq!(word(&mut port, 0x104), 0x001d_007f);
    port.write_config(0x106, &[0, 0]);
    assert_eq!(half(&mut port, 0x106), 0x001d, "access control is the host's");
}

/// Everything that the guest can set in the registers of a port that tells `registers`: device, link,
/// root and device 2 control.
fn settable(kind: Kind, registers: &PortRegisters) -> [u16; 4] {
    let mut port = Port::new(kind, registers, None).expect("room");
    [0x08, 0x10, 0x1c, 0x28].map(|at| {
        port.write_config(EXPRESS_AT + at, &[0xff, 0xff]);
        half(&mut port, EXPRESS_AT + at)
    })
}

/// PCIe 6.0 §7.5.3.4, §7.5.3.7, §7.5.3.12, §7.5.3.16: what a port cannot do stays off.
#[test]
fn controls_follow_the_capabilities() {
    let poor = GEN5.fixed().registers();
    let rich = PortRegisters {
        device_capabilities: 0x0000_8022,
        link_capabilities: poor.link_capabilities | 1 << 18 | 1 << 21,
        device_capabilities2: 0x002e_0bff,
        ..poor
    };
    assert_eq!(settable(Kind::Root, &poor), [0x78ff, 0x02d3, 0x000f, 0x0300]);
    assert_eq!(settable(Kind::Root, &rich), [0x79ff, 0x0ed3, 0x000f, 0xf7ff]);
    assert_eq!(settable(Kind::Upstream, &poor), [0x78ff, 0x02c3, 0, 0x0300]);
    assert_eq!(settable(Kind::Upstream, &rich), [0x79ff, 0x03c3, 0, 0xf7ff]);
    assert_eq!(settable(Kind::Downstream, &rich)[1..3], [0x0ed3, 0]);
}

#[test]
fn firmware_is_told_what_to_keep() {
    let (mut port, _) = hot_port();
    let at = capability(&mut port, 9);
    let words: Vec<u32> = (0..8).map(|number| word(&mut port, at + 4 * number)).collect();
    assert_eq!(words[0] >> 16, 1 << 8 | 32);
    assert_eq!(words[1..], [u32::MAX, u32::MAX, u32::MAX, 32 << 20, u32::MAX, 0, 1 << 6]);
}

#[test]
fn kinds_are_told() {
    let express = |kind| {
        let mut port = Port::new(kind, &GEN5.fixed().registers(), None).expect("room");
        (word(&mut port, 0) >> 16, half(&mut port, EXPRESS_AT + 2) >> 4 & 0xf)
    };
    assert_eq!(express(Kind::Root), (0x000c, 4));
    assert_eq!(express(Kind::Upstream), (0x8232, 5));
    assert_eq!(express(Kind::Downstream), (0x8233, 6));
}

#[test]
fn what_is_not_there_cannot_be_switched_on() {
    let slot = SlotSpec { number: 1, alarm: None, kept: None };
    let mut port = Port::new(Kind::Root, &GEN5.fixed().registers(), Some(slot)).expect("room");
    let before = half(&mut port, CONTROL);
    port.write_config(CONTROL, &[0xff, 0xff]);
    assert_eq!((half(&mut port, CONTROL), half(&mut port, STATUS)), (before, 1 << 6));
    assert_eq!(before, 0, "indicators that the slot does not have");
}

#[test]
fn a_slot_is_the_only_one_of_a_chassis_of_its_own() {
    for (number, chassis) in [(1, 1), (2, 2), (254, 254)] {
        let slot = SlotSpec { number, alarm: None, kept: None };
        let mut port = Port::new(Kind::Root, &GEN5.fixed().registers(), Some(slot)).expect("room");
        let at = capability(&mut port, SLOT_NUMBERING.into());
        // One slot, the first of the chassis; the chassis' number.
        assert_eq!(half(&mut port, at + 2), 1 | 1 << 5 | chassis << 8);
    }
}

#[test]
fn a_disabled_link_hides_and_resets_what_is_behind_it() {
    let mut port = Port::new(Kind::Root, &GEN5.fixed().registers(), None).expect("room");
    port.set_buses(0, 3, 4);
    assert_eq!(port.buses(), Some((3, 4)));
    port.write_config(EXPRESS_AT + 0x10, &LINK_DISABLE.to_le_bytes());
    assert_eq!((port.buses(), half(&mut port, LINK_STATUS) & LINK_ACTIVE), (None, 0));
    assert!(!port.took_bus_reset());
    port.write_config(EXPRESS_AT + 0x10, &[0, 0]);
    assert_eq!((port.buses(), port.took_bus_reset()), (Some((3, 4)), true));
}

/// Where the capability with an identifier is.
fn capability(port: &mut Port, identifier: u32) -> u16 {
    let mut at = u16::from(word(port, 0x34).to_le_bytes()[0]);
    while word(port, at) & 0xff != identifier {
        at = u16::from(word(port, at).to_le_bytes()[1]);
    }
    at
}

/// PCIe 6.0 §7.5.2, §5.3.1.4.1.
#[test]
fn nothing_passes_a_port_that_sleeps_and_its_events_wait() {
    let (mut port, recorder) = listening();
    port.set_buses(0, 3, 4);
    port.insert(GEN5.fixed().into()).expect("recorded");
    port.write_config(CONTROL, &(LISTENING & !(1 << 10)).to_le_bytes());
    port.connect().expect("recorded");
    port.write_config(STATUS, &[0xff, 0xff]);
    let power = capability(&mut port, 1);
    assert_eq!(word(&mut port, power) >> 16, 3, "version 3, no D1, no D2, no PME");
    assert_eq!((half(&mut port, power + 4), port.buses()), (1 << 3, Some((3, 4))));
    let before = fired(&recorder);
    port.write_config(power + 4, &[3, 0]);
    assert_eq!((half(&mut port, power + 4), port.buses()), (1 << 3 | 3, None));
    port.press_button().expect("recorded");
    assert_eq!((half(&mut port, STATUS), fired(&recorder)), (1 << 6 | 1, before));
    port.write_config(power + 4, &[0, 0]);
    assert_eq!((port.buses(), fired(&recorder)), (Some((3, 4)), before + 1));
    port.write_config(power + 4, &[3, 0]);
    port.bus_reset();
    assert_eq!(half(&mut port, power + 4), 1 << 3);
}

#[test]
fn an_empty_slot_is_plugged_powered_and_connected() {
    let (mut port, recorder) = listening();
    assert_eq!((port.power(), port.buses()), (Power::Off, None));
    port.insert(GEN5.fixed().into()).expect("recorded");
    assert_eq!((half(&mut port, STATUS), fired(&recorder)), (1 << 6 | 1 << 3 | 1, 2));
    assert_eq!(half(&mut port, 0x06) & 1 << 3, 0, "messages are no interrupt of the pin");
    port.write_config(STATUS, &(1u16 << 3 | 1).to_le_bytes());
    port.write_config(CONTROL, &(LISTENING & !(1 << 10)).to_le_bytes());
    assert_eq!(*recorder.switched.lock().expect("one thread"), [9]);
    assert_eq!((port.power(), fired(&recorder)), (Power::On, 3));
    port.write_config(STATUS, &(1u16 << 4).to_le_bytes());
    port.connect().expect("recorded");
    assert_eq!((half(&mut port, STATUS), fired(&recorder)), (1 << 8 | 1 << 6, 4));
    assert_eq!(half(&mut port, LINK_STATUS), 5 | 16 << 4 | LINK_ACTIVE);
    assert!(port.buses().is_some());
}

#[test]
fn no_link_is_faster_or_wider_than_its_port_says() {
    let (mut port, _) = hot_port();
    let before = word(&mut port, EXPRESS_AT + 0x0c);
    port.insert(GEN5.fixed().into()).expect("recorded");
    port.connect().expect("recorded");
    assert_eq!(word(&mut port, EXPRESS_AT + 0x0c), before & !0x3ff | 5 | 16 << 4);
    assert_eq!(word(&mut port, EXPRESS_AT + 0x2c), 0b11_1110);
    assert_eq!(half(&mut port, EXPRESS_AT + 0x30), 5);
    assert_eq!(port.link(), GEN5);
    port.remove().expect("recorded");
    port.insert(Link { speed: 1, width: 1 }.fixed().into()).expect("recorded");
    assert_eq!(word(&mut port, EXPRESS_AT + 0x0c), before);
}

/// A GPU that idles: its status is no bound for what it can be.
#[test]
fn a_port_tells_the_most_of_a_link_and_what_it_is() {
    let (mut port, _) = hot_port();
    let idle = LinkState { most: GEN5, now: Link { speed: 1, width: 16 } };
    port.insert(idle.into()).expect("recorded");
    assert_eq!(word(&mut port, EXPRESS_AT + 0x0c) & 0x3ff, 5 | 16 << 4);
    assert_eq!(word(&mut port, EXPRESS_AT + 0x2c), 0b11_1110);
    assert_eq!(half(&mut port, EXPRESS_AT + 0x30), 5);
    assert_eq!(half(&mut port, LINK_STATUS), 1 | 16 << 4);
    assert_eq!(port.link(), GEN5);
}

#[test]
fn the_button_and_removal_are_told() {
    let (mut port, recorder) = listening();
    port.insert(GEN5.fixed().into()).expect("recorded");
    port.write_config(CONTROL, &(LISTENING & !(1 << 10)).to_le_bytes());
    port.connect().expect("recorded");
    port.write_config(STATUS, &[0xff, 0xff]);
    let before = fired(&recorder);
    port.press_button().expect("recorded");
    assert_eq!((half(&mut port, STATUS), fired(&recorder)), (1 << 6 | 1, before + 1));
    port.remove().expect("recorded");
    assert_eq!(half(&mut port, STATUS), 1 | 1 << 3 | 1 << 8);
    assert_eq!(fired(&recorder), before + 1, "one message until it is acknowledged");
    assert_eq!((port.buses(), half(&mut port, LINK_STATUS) & LINK_ACTIVE), (None, 0));
}

/// Linux's pciehp waits a second after it took the power, and forgets what was told until then.
#[test]
fn a_link_is_down_as_soon_as_the_guest_takes_the_power() {
    let (mut port, recorder) = listening();
    port.insert(GEN5.fixed().into()).expect("recorded");
    port.connect().expect("recorded");
    assert_eq!(half(&mut port, LINK_STATUS) & LINK_ACTIVE, 0, "there is no power yet");
    port.write_config(CONTROL, &(LISTENING & !(1 << 10)).to_le_bytes());
    port.connect().expect("recorded");
    port.write_config(STATUS, &[0xff, 0xff]);
    let before = fired(&recorder);
    port.write_config(CONTROL, &LISTENING.to_le_bytes());
    assert_eq!((half(&mut port, LINK_STATUS) & LINK_ACTIVE, port.buses()), (0, None));
    assert_eq!(half(&mut port, STATUS), 1 << 4 | 1 << 6 | 1 << 8);
    assert_eq!((fired(&recorder), port.is_connected()), (before + 1, false));
    port.write_config(STATUS, &[0xff, 0xff]);
    port.disconnect().expect("recorded");
    assert_eq!(half(&mut port, STATUS), 1 << 6, "the change was told already");
    assert!(!port.has_given_up(), "the link had been up");
}

#[test]
fn without_messages_the_pin_stays_high_until_acknowledged() {
    let (mut port, recorder) = hot_port();
    let level = |recorder: &Recorder| *recorder.level.lock().expect("one thread");
    port.write_config(CONTROL, &(LISTENING & !(1 << 4)).to_le_bytes());
    port.insert(GEN5.fixed().into()).expect("recorded");
    assert_eq!((level(&recorder), half(&mut port, 0x06) & 1 << 3), (Level::High, 1 << 3));
    port.write_config(0x04, &COMMAND_INTX_DISABLE.to_le_bytes());
    assert_eq!(level(&recorder), Level::Low);
    port.write_config(0x04, &[0, 0]);
    assert_eq!(level(&recorder), Level::High);
    port.write_config(STATUS, &[0xff, 0xff]);
    assert_eq!((level(&recorder), fired(&recorder)), (Level::Low, 0));
}

#[test]
fn windows_are_programmed_and_can_be_moved() {
    let mut port = Port::new(Kind::Root, &GEN5.fixed().registers(), None).expect("room");
    port.set_windows(Windows {
        io: None,
        memory: Some((0xc000_0000, 0xc00f_ffff)),
        prefetchable: Some((0x80_0000_0000, 0xbf_ffff_ffff)),
    });
    assert_eq!(word(&mut port, 0x20), 0xc000_c000);
    assert_eq!(word(&mut port, 0x28), 0x80);
    port.write_config(0x20, &[0x10, 0xd0]);
    assert_eq!(half(&mut port, 0x20), 0xd010);
}

const DEVICE_CAPABILITIES2: u16 = EXPRESS_AT + 0x24;

#[test]
fn a_root_port_completes_what_the_host_completes_for_the_device_in_its_slot() {
    let (mut port, _) = hot_port();
    assert_eq!(word(&mut port, DEVICE_CAPABILITIES2), 0);
    let link = GEN5.fixed();
    port.insert(Behind { link, atomics: AtomicOps::of_sizes(0b011) }).expect("recorded");
    port.connect().expect("recorded");
    assert_eq!(word(&mut port, DEVICE_CAPABILITIES2), 1 << 7 | 1 << 8);
    port.remove().expect("recorded");
    assert_eq!(word(&mut port, DEVICE_CAPABILITIES2), 0);
    port.insert(Behind { link, atomics: AtomicOps::of_sizes(0b101) }).expect("recorded");
    assert_eq!(word(&mut port, DEVICE_CAPABILITIES2), 1 << 7 | 1 << 9);
    // One that has none in its place.
    port.remove().expect("recorded");
    port.insert(link.into()).expect("recorded");
    assert_eq!(word(&mut port, DEVICE_CAPABILITIES2), 0);
}

#[test]
fn atomic_operations_leave_the_other_capabilities_of_a_port_alone() {
    let registers = PortRegisters { device_capabilities2: u32::MAX, ..PortRegisters::default() };
    let told = |atomics: AtomicOps, kind| atomics.told(kind, registers).device_capabilities2;
    let (some, others) = (AtomicOps::of_sizes(0b011), !0b11_1100_0000);
    assert_eq!(told(some, Kind::Root), others | 0b01_1000_0000);
    assert_eq!(told(some, Kind::Upstream), others | 1 << 6);
    assert_eq!(told(some, Kind::Downstream), others | 1 << 6);
    for kind in [Kind::Root, Kind::Upstream, Kind::Downstream] {
        assert_eq!(told(AtomicOps::NONE, kind), others);
    }
    assert_eq!(AtomicOps::of_sizes(0xf8), AtomicOps::NONE);
}
