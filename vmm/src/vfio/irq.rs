//! Interrupts of a passed-through device: which of pin, MSI and MSI-X the host delivers, and to
//! what. An eventfd that VFIO signals is the one that KVM takes, so that no thread is on the way.

use std::{io, ops::RangeInclusive, os::fd::BorrowedFd, sync::Arc};

use super::{
    config::{MsiState, MsixState},
    device::{Device, IrqInfo, IrqKind},
};
use crate::{
    irq::{InterruptLine, InterruptSource, MsiMessage, MsiVector},
    pci::msix::{ENTRY_SIZE, MsixTable},
};

/// How the device interrupts now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Off,
    Pin,
    Msi { vectors: u32 },
    Msix,
}

/// The interrupts of one device.
pub struct Interrupts {
    device: Arc<dyn Device>,
    source: Arc<dyn InterruptSource>,
    mode: Mode,
    line: Option<Arc<dyn InterruptLine>>,
    msi: Vec<Arc<dyn MsiVector>>,
    msi_info: IrqInfo,
    msix: Option<MsixTable>,
    msix_info: IrqInfo,
    /// Per MSI-X vector, whether VFIO has its eventfd.
    armed: Vec<bool>,
    masked: Masked,
}

/// Whether the guest masks all MSI-X vectors after it had some unmasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Masked {
    /// None was unmasked since MSI-X was enabled.
    Yet,
    /// Not now.
    No,
    /// It does.
    Again,
}

/// What the device can interrupt by.
pub struct Ways {
    /// The line of its pin, if it has one.
    pub line: Option<Arc<dyn InterruptLine>>,
    /// Vectors of its MSI-X table, 0 for none.
    pub msix_vectors: u16,
}

impl Interrupts {
    /// Takes the interrupts of `device` in hand; none is enabled yet.
    pub fn new(
        device: Arc<dyn Device>,
        source: Arc<dyn InterruptSource>,
        ways: Ways,
    ) -> io::Result<Self> {
        let msix = match ways.msix_vectors {
            0 => None,
            vectors => Some(MsixTable::lazy(vectors, Arc::clone(&source))?),
        };
        let (msi_info, msix_info) = (device.irq(IrqKind::Msi)?, device.irq(IrqKind::Msix)?);
        let armed = vec![false; usize::from(ways.msix_vectors)];
        let (line, mode) = (ways.line, Mode::Off);
        let msi = Vec::new();
        let masked = Masked::Yet;
        Ok(Self { device, source, mode, line, msi, msi_info, msix, msix_info, armed, masked })
    }

    /// Follows what the guest has programmed into configuration space.
    pub fn follow(&mut self, msi: MsiState, msix: MsixState) -> io::Result<()> {
        // A guest may ask for more than there are; it gets those.
        let programmed = msi.vectors;
        let msi = MsiState { vectors: programmed.min(self.msi_info.count), ..msi };
        let wanted = match (msix, msi.vectors, &self.line) {
            (MsixState::Enabled | MsixState::Masked, _, _) => Mode::Msix,
            (MsixState::Disabled, 1.., _) => Mode::Msi { vectors: msi.vectors },
            (MsixState::Disabled, 0, Some(_)) => Mode::Pin,
            (MsixState::Disabled, 0, None) => Mode::Off,
        };
        if let Some(table) = &mut self.msix {
            let control = match msix {
                MsixState::Disabled => 0,
                MsixState::Enabled => 0x80,
                MsixState::Masked => 0xc0,
            };
            table.write_capability(3, &[control])?;
        }
        let is_restored = self.is_restored(msix);
        if wanted != self.mode || is_restored {
            self.disable()?;
            self.mode = wanted;
            if let Err(error) = self.enable(wanted) {
                // A failure leaves the device silent, also one half-way; the next write tries again.
                let _ = self.disable();
                return Err(error);
            }
        }
        match wanted {
            Mode::Msi { .. } => self.route_msi(msi, programmed),
            Mode::Msix if is_restored => {
                self.arm_unmasked(0..=u16::MAX)?;
                self.ring_armed()
            }
            Mode::Msix => self.arm_unmasked(0..=u16::MAX),
            Mode::Off | Mode::Pin => Ok(()),
        }
    }

    /// The device has lost what it interrupts with, as by a reset of its own; [`Self::follow`] gives it that anew. A
    /// pin needs nothing.
    pub fn lost(&mut self) -> io::Result<()> {
        match self.mode {
            Mode::Off | Mode::Pin => Ok(()),
            Mode::Msi { .. } | Mode::Msix => self.disable(),
        }
    }

    /// Calls for every vector that VFIO has: of a device that was not reset, what came while its eventfds were
    /// exchanged is gone. Whoever finds nothing to do has lost nothing.
    fn ring_armed(&self) -> io::Result<()> {
        let Some(table) = &self.msix else { return Ok(()) };
        let armed = (0..table.len()).zip(&self.armed);
        let unmasked = armed.filter(|(index, armed)| **armed && table.is_unmasked(*index));
        unmasked.map(|(index, _)| index).try_for_each(|index| table.trigger(index))
    }

    /// Whether the guest unmasks all MSI-X vectors that it had masked in between. So it restores what a reset of the
    /// device's own took (Linux drivers/pci/msi/msi.c, `__pci_restore_msix_state`), and VFIO writes the device's table
    /// only when it gets eventfds.
    fn is_restored(&mut self, msix: MsixState) -> bool {
        let before = self.masked;
        self.masked = match (msix, before) {
            (MsixState::Disabled, _) | (MsixState::Masked, Masked::Yet) => Masked::Yet,
            (MsixState::Masked, Masked::No | Masked::Again) => Masked::Again,
            (MsixState::Enabled, _) => Masked::No,
        };
        (before, self.masked) == (Masked::Again, Masked::No)
    }

    /// Reads the MSI-X table at `offset`.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        match &self.msix {
            Some(table) => table.read_table(offset, data),
            None => data.fill(0),
        }
    }

    /// Writes the MSI-X table at `offset`.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(table) = &mut self.msix {
            table.write_table(offset, data)?;
        }
        if self.mode != Mode::Msix {
            return Ok(());
        }
        // A guest masks all of a large table one by one: only what it touches is looked at.
        let last = offset.saturating_add(data.len().saturating_sub(1) as u64) / ENTRY_SIZE;
        let entry = |at: u64| u16::try_from(at).unwrap_or(u16::MAX);
        self.arm_unmasked(entry(offset / ENTRY_SIZE)..=entry(last))
    }

    /// Switches everything off, as after power-on.
    pub fn reset(&mut self) -> io::Result<()> {
        self.masked = Masked::Yet;
        self.disable()?;
        self.msix.as_mut().map_or(Ok(()), MsixTable::reset)
    }

    fn disable(&mut self) -> io::Result<()> {
        let kind = match std::mem::replace(&mut self.mode, Mode::Off) {
            Mode::Off => return Ok(()),
            Mode::Pin => IrqKind::Intx,
            Mode::Msi { .. } => IrqKind::Msi,
            Mode::Msix => IrqKind::Msix,
        };
        self.armed.fill(false);
        self.device.disable_irqs(kind)?;
        if kind == IrqKind::Intx {
            self.line.iter().for_each(|line| line.release());
        }
        self.msi.iter().try_for_each(|vector| vector.route(None))
    }

    fn enable(&mut self, mode: Mode) -> io::Result<()> {
        match (mode, &self.line) {
            (Mode::Off, _) | (Mode::Pin, None) => Ok(()),
            (Mode::Pin, Some(line)) => {
                self.device.set_triggers(IrqKind::Intx, 0, &[Some(line.trigger_fd())])?;
                self.device.set_unmask(line.resample_fd())
            }
            (Mode::Msi { vectors }, _) => {
                while self.msi.len() < vectors as usize {
                    self.msi.push(self.source.allocate_msi()?);
                }
                let fds: Vec<_> =
                    self.msi.iter().take(vectors as usize).map(|v| Some(v.eventfd())).collect();
                self.device.set_triggers(IrqKind::Msi, 0, &fds)
            }
            (Mode::Msix, _) => self.enable_msix(),
        }
    }

    /// Enables MSI-X with the vectors that are unmasked. If vectors cannot be added later, it is
    /// all of them at once. One silent vector at least, because the function has to be in this
    /// mode also before the guest unmasks the first.
    fn enable_msix(&mut self) -> io::Result<()> {
        let Some(table) = &mut self.msix else { return Ok(()) };
        let count = table.len().min(u16::try_from(self.msix_info.count).unwrap_or(u16::MAX));
        if !self.msix_info.growable {
            table.allocate_all()?;
        }
        let ready = |i| table.vector(i).is_some() && table.is_unmasked(i);
        let wanted: Vec<bool> = (0..count).map(|i| !self.msix_info.growable || ready(i)).collect();
        let end = wanted.iter().rposition(|wanted| *wanted).map_or(1, |last| last + 1);
        let fds: Vec<Option<BorrowedFd<'_>>> = (0..count)
            .zip(&wanted)
            .take(end)
            .map(|(i, wanted)| table.vector(i).filter(|_| *wanted).map(|v| v.eventfd()))
            .collect();
        self.device.set_triggers(IrqKind::Msix, 0, &fds)?;
        for (armed, wanted) in self.armed.iter_mut().zip(wanted) {
            *armed = wanted;
        }
        Ok(())
    }

    /// Gives VFIO the eventfds of unmasked vectors among `touched` that it has not got yet.
    fn arm_unmasked(&mut self, touched: RangeInclusive<u16>) -> io::Result<()> {
        let Some(table) = &self.msix else { return Ok(()) };
        let count = table.len().min(u16::try_from(self.msix_info.count).unwrap_or(u16::MAX));
        for index in *touched.start()..count.min(touched.end().saturating_add(1)) {
            let armed = &mut self.armed[usize::from(index)];
            if *armed || !table.is_unmasked(index) {
                continue;
            }
            if let Some(vector) = table.vector(index) {
                let fds = [Some(vector.eventfd())];
                self.device.set_triggers(IrqKind::Msix, u32::from(index), &fds)?;
                *armed = true;
            }
        }
        Ok(())
    }

    /// Routes the messages that there are of those that the guest has `programmed`, a power of two: as many low bits
    /// of the data are the number of the message, whatever the guest has put there.
    fn route_msi(&self, msi: MsiState, programmed: u32) -> io::Result<()> {
        for (index, vector) in (0..msi.vectors).zip(&self.msi) {
            let data = msi.data & !(programmed - 1) | index;
            let message = MsiMessage { address: msi.address, data };
            let masked = msi.masked & 1 << index != 0;
            vector.route((!masked).then_some(message))?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "irq_tests.rs"]
pub(super) mod tests;
