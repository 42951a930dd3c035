//! Interrupts of a passed-through device: which of pin, MSI and MSI-X the host delivers, and to
//! what. An eventfd that VFIO signals is the one that KVM takes, so that no thread is on the way.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use super::{
    config::{MsiState, MsixState},
    device::{Device, IrqInfo, IrqKind},
};
use crate::{
    irq::{InterruptLine, InterruptSource, MsiMessage, MsiVector},
    pci::msix::MsixTable,
};

/// Size of an entry of the MSI-X table, and where in it the mask bit is.
const ENTRY: u64 = 16;
const ENTRY_CONTROL: u64 = 12;

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
    msix: Option<MsixTable>,
    msix_info: IrqInfo,
    /// Per MSI-X vector, whether VFIO has its eventfd.
    armed: Vec<bool>,
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
            vectors => Some(MsixTable::new(vectors, &*source)?),
        };
        let msix_info = device.irq(IrqKind::Msix)?;
        let armed = vec![false; usize::from(ways.msix_vectors)];
        let (line, mode) = (ways.line, Mode::Off);
        Ok(Self { device, source, mode, line, msi: Vec::new(), msix, msix_info, armed })
    }

    /// Follows what the guest has programmed into configuration space.
    pub fn follow(&mut self, msi: MsiState, msix: MsixState) -> io::Result<()> {
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
        if wanted != self.mode {
            self.disable()?;
            // A failure leaves the device silent; the next write tries again.
            self.enable(wanted)?;
            self.mode = wanted;
        }
        match wanted {
            Mode::Msi { .. } => self.route_msi(msi),
            Mode::Msix => self.arm_unmasked(),
            Mode::Off | Mode::Pin => Ok(()),
        }
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
        if self.mode == Mode::Msix { self.arm_unmasked() } else { Ok(()) }
    }

    /// Switches everything off, as after power-on.
    pub fn reset(&mut self) -> io::Result<()> {
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
        let Some(table) = &self.msix else { return Ok(()) };
        let count = table.len().min(u16::try_from(self.msix_info.count).unwrap_or(u16::MAX));
        let wanted: Vec<bool> =
            (0..count).map(|i| !self.msix_info.growable || is_unmasked(table, i)).collect();
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

    fn arm_unmasked(&mut self) -> io::Result<()> {
        let Some(table) = &self.msix else { return Ok(()) };
        for (index, armed) in (0..table.len()).zip(&mut self.armed) {
            if *armed || u32::from(index) >= self.msix_info.count || !is_unmasked(table, index) {
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

    fn route_msi(&self, msi: MsiState) -> io::Result<()> {
        for (index, vector) in (0..msi.vectors).zip(&self.msi) {
            let message = MsiMessage { address: msi.address, data: msi.data | index };
            let masked = msi.masked & 1 << index != 0;
            vector.route((!masked).then_some(message))?;
        }
        Ok(())
    }
}

fn is_unmasked(table: &MsixTable, index: u16) -> bool {
    let mut control = [0xff; 4];
    table.read_table(u64::from(index) * ENTRY + ENTRY_CONTROL, &mut control);
    control[0] & 1 == 0
}

#[cfg(test)]
#[path = "irq_tests.rs"]
pub(super) mod tests;
