//! Firmware that was built for system management mode, which the machine does not have. It finds that out
//! before it has a console, and then waits for ever without a word; so it is told of here.
//!
//! Only what reads these registers before it asks for the ACPI tables is such firmware: whatever comes later
//! may look at any register.
//! Source: edk2 OvmfPkg/SmmAccess/SmmAccessPei.c (ESMRAMC), OvmfPkg/SmmControl2Dxe/SmmControl2Dxe.c (SMI_EN).

use std::sync::atomic::{AtomicU8, Ordering};

use types::operations::VmEventKind;

use crate::{events::Events, pci::chipset::SmramWatch};

/// What such firmware means for its machine.
pub(crate) const PROBLEM: &str = "this firmware needs system management mode, which this machine does not \
    have, and waits for ever; use the build without it (of Debian's, OVMF_CODE_4M.fd)";

/// Firmware has not asked for the ACPI tables.
const EARLY: u8 = 0;
/// It has, so it starts a system.
const LATE: u8 = 1;
/// It needed what there is not.
const MISSED: u8 = 2;

/// Looks what firmware asks for.
pub struct SmmWatch {
    state: AtomicU8,
    events: Events,
}

impl SmmWatch {
    /// Looks from power-on, and tells `events`.
    pub(super) fn new(events: Events) -> Self {
        Self { state: AtomicU8::new(EARLY), events }
    }

    /// Firmware asks for the ACPI tables.
    pub(super) fn tables_asked_for(&self) {
        self.change(LATE);
    }

    /// Returns what keeps the machine from starting, if that is it.
    pub fn problem(&self) -> Option<&'static str> {
        (self.state.load(Ordering::Relaxed) == MISSED).then_some(PROBLEM)
    }

    /// What comes first stays. Returns whether this did.
    fn change(&self, to: u8) -> bool {
        self.state.compare_exchange(EARLY, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl SmramWatch for SmmWatch {
    fn asked(&self) {
        if self.change(MISSED) {
            eprintln!("holdfast-vmm: {PROBLEM}");
            self.events.push(VmEventKind::FirmwareUnsupported, PROBLEM);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::{machine::Chipset, pci::function::PciFunction};

    /// A machine that starts from firmware, and what it has told by then.
    fn machine() -> (Chipset, Arc<SmmWatch>, Events) {
        let events = Events::default();
        let watch = Arc::new(SmmWatch::new(events.clone()));
        let mut chipset = Chipset::new(&[], 0);
        chipset.smm = Some(Arc::clone(&watch));
        (chipset, watch, events)
    }

    fn told(events: &Events) -> Vec<(VmEventKind, String)> {
        let all = events.read(0, Duration::ZERO).events;
        all.into_iter().map(|event| (event.kind, event.detail)).collect()
    }

    #[test]
    fn firmware_that_asks_for_its_memory_is_told_of_once() {
        let (chipset, watch, events) = machine();
        let mut bridge = chipset.host_bridge();
        let mut data = [0xff; 4];
        // Its neighbours are read by all firmware.
        bridge.read_config(0x9a, &mut data);
        bridge.read_config(0x9f, &mut data[..1]);
        assert_eq!((watch.problem(), told(&events)), (None, vec![]));
        bridge.read_config(0x9e, &mut data[..1]);
        bridge.read_config(0x9e, &mut data[..1]);
        assert_eq!(data[0], 0, "there is such memory");
        let once = vec![(VmEventKind::FirmwareUnsupported, PROBLEM.to_owned())];
        assert_eq!((watch.problem(), told(&events)), (Some(PROBLEM), once));
        watch.tables_asked_for();
        assert_eq!(watch.problem(), Some(PROBLEM));
    }

    #[test]
    fn firmware_that_asks_for_its_interrupt_is_told_of() {
        let (chipset, watch, _) = machine();
        chipset.read_port(0x62f, &mut [0]);
        chipset.read_port(0x634, &mut [0; 4]);
        assert_eq!(watch.problem(), None);
        chipset.read_port(0x630, &mut [0; 4]);
        assert_eq!(watch.problem(), Some(PROBLEM));
    }

    #[test]
    fn what_starts_afterwards_may_look_at_any_register() {
        let (chipset, watch, events) = machine();
        watch.tables_asked_for();
        chipset.read_port(0x630, &mut [0; 4]);
        chipset.host_bridge().read_config(0x9c, &mut [0; 4]);
        assert_eq!((watch.problem(), told(&events)), (None, vec![]));
    }
}
