//! AtomicOps: additions, swaps, and compare-and-swaps of memory that devices ask of the root complex.
//! A driver asks for them only if the root port above says that they are completed, and each port of
//! a switch on the way that it passes them on.
//! Source: PCI Express Base Specification 6.0 §6.15 (AtomicOps), §7.5.3.15 (device capabilities 2).

use types::topology::PortRegisters;

use super::{Kind, LinkState};

/// Device capabilities 2: AtomicOps are routed.
const ROUTED: u32 = 1 << 6;
/// Device capabilities 2: AtomicOps with 32-bit, with 64-bit operands, and compare-and-swaps with 128-bit ones
/// are completed.
pub(super) const COMPLETED: u32 = 7 << 7;

/// Which AtomicOps the host's root complex completes for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtomicOps(u32);

impl AtomicOps {
    /// None at all.
    pub const NONE: Self = Self(0);

    /// Those of `sizes`: bit 0 for operands of 32 bits, bit 1 for 64, bit 2 for compare-and-swaps of
    /// 128. Other bits mean nothing.
    pub const fn of_sizes(sizes: u32) -> Self {
        Self(sizes << 7 & COMPLETED)
    }

    /// Returns those that all of `devices` have that have any: a port tells all behind it the same, and who
    /// has none is told so by the port right above it, if there is a switch between.
    pub fn common(devices: impl IntoIterator<Item = Self>) -> Self {
        let able = devices.into_iter().filter(|ops| *ops != Self::NONE);
        able.reduce(|one, other| Self(one.0 & other.0)).unwrap_or(Self::NONE)
    }

    /// Returns the bits of device capabilities 2 of a root port.
    pub(super) fn completed(self) -> u32 {
        self.0
    }

    /// Returns `registers` as a port of `kind` that is not the host's says them for these.
    pub fn told(self, kind: Kind, registers: PortRegisters) -> PortRegisters {
        let mine = match kind {
            Kind::Root => self.0,
            Kind::Upstream | Kind::Downstream if self != Self::NONE => ROUTED,
            Kind::Upstream | Kind::Downstream => 0,
        };
        let others = registers.device_capabilities2 & !(ROUTED | COMPLETED);
        PortRegisters { device_capabilities2: others | mine, ..registers }
    }
}

/// What a port shows of the device behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behind {
    /// Its link.
    pub link: LinkState,
    /// What it can ask of the root complex.
    pub atomics: AtomicOps,
}

impl From<LinkState> for Behind {
    /// A device with this link and no AtomicOps.
    fn from(link: LinkState) -> Self {
        Self { link, atomics: AtomicOps::NONE }
    }
}
