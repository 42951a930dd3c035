//! What the rest of `vfio` needs of a VFIO device. The real one is `sys::vfio::VfioDevice`.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use super::alarms::Alarm;
use crate::{pci::port::AtomicOps, sys::memory::Mapping};

/// A region of a VFIO PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// What BAR `.0` decodes.
    Bar(u8),
    /// Configuration space.
    Config,
    /// The expansion ROM, which can only be read.
    Rom,
}

/// Some bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Offset in the region.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// What a region is like.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegionInfo {
    /// Size in bytes; 0 when the region does not exist.
    pub size: u64,
    /// The parts that can be mapped, ascending; empty when none can.
    pub mappable: Vec<Area>,
}

/// A way for the device to interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqKind {
    /// The pin.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
}

/// What a way to interrupt is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IrqInfo {
    /// Number of vectors; 0 when the device does not interrupt that way.
    pub count: u32,
    /// Whether vectors can be added one by one once some are enabled.
    pub growable: bool,
}

/// How far a reset goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// The function alone: function-level reset, or what the kernel has in its place (a transition
    /// through D3hot, or the bus when the function has it for itself).
    Function,
    /// Everything on the function's bus or slot ("hot reset"), which the machine must hold whole.
    Set,
}

/// A VFIO PCI device that is bound and attached.
pub trait Device: Send + Sync {
    /// Describes a region.
    fn region(&self, region: Region) -> io::Result<RegionInfo>;

    /// Reads `offset` bytes into a region.
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes `offset` bytes into a region.
    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Describes a way to interrupt.
    fn irq(&self, kind: IrqKind) -> io::Result<IrqInfo>;

    /// Makes the vectors from `first` on signal `fds`; `None` leaves a vector silent. The first
    /// call for a kind enables it.
    fn set_triggers(
        &self,
        kind: IrqKind,
        first: u32,
        fds: &[Option<BorrowedFd<'_>>],
    ) -> io::Result<()>;

    /// Makes `fd` unmask the pin, which masks itself whenever it fires.
    fn set_unmask(&self, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Disables a way to interrupt and forgets its descriptors.
    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()>;

    /// Has the kernel ring `fd` with what it says of the device. Fails when it never says such a thing.
    fn set_alarm(&self, alarm: Alarm, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Returns which AtomicOps the host's root complex completes for the device: what the whole way up
    /// lets pass.
    fn atomic_ops(&self) -> AtomicOps;

    /// Returns whether the kernel reset the device when it was opened.
    fn was_reset(&self) -> bool;

    /// Resets the device. May take seconds, or for ever.
    fn reset(&self, rung: Rung) -> io::Result<()>;

    /// Returns whether parts of BARs can be exported.
    fn exports(&self) -> io::Result<()>;

    /// Exports part of a BAR, so that an address space for devices can map it.
    fn export(&self, bar: u8, area: Area) -> io::Result<OwnedFd>;

    /// Maps `area` of BAR `bar`, so that its address is congruent to its offset modulo `modulus`.
    fn map(&self, bar: u8, area: Area, modulus: u64) -> io::Result<Arc<Mapping>>;
}
