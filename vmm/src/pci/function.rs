//! What the bus needs of one PCI function, and what a function says of its BARs.
//!
//! A function knows no bus number, lock or memory slot of its neighbours. The bus decodes its BARs
//! and hands it offsets. Source: PCI Express Base Specification 6.0 §7.5.1 (type 0 header).

/// What a BAR decodes (PCI Local Bus 3.0 §6.2.5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit memory.
    Memory32,
    /// 64-bit memory, in two consecutive registers.
    Memory64,
    /// 64-bit prefetchable memory, in two consecutive registers.
    Memory64Prefetchable,
    /// I/O ports.
    Io,
}

/// One BAR of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Register index, 0..=5, or 6 for that of the expansion ROM.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Guest-physical (or port) address the guest or the VMM programmed last.
    pub address: u64,
    /// Whether the command register lets it decode now.
    pub decoding: bool,
}

/// One PCI function behind the bus. Accesses are 1, 2 or 4 bytes in configuration space and 1, 2,
/// 4 or 8 bytes in BARs; they never cross the end of either.
pub trait PciFunction: Send {
    /// Reads configuration space at `offset`, 0..4096.
    fn read_config(&mut self, offset: u16, data: &mut [u8]);

    /// Writes configuration space. The bus asks for [`Self::bars`] afterwards.
    fn write_config(&mut self, offset: u16, data: &[u8]);

    /// Returns all implemented BARs, ascending by index.
    fn bars(&self) -> Vec<Bar>;

    /// Places BAR `index` at `address`, before the guest starts.
    fn place_bar(&mut self, index: u8, address: u64);

    /// Reads `offset` bytes into BAR `bar`.
    fn read_bar(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes `offset` bytes into BAR `bar`.
    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// The bus has taken note of new BAR addresses or decoding. A function with direct mappings
    /// moves them here; mappings stay while only decoding is switched off.
    fn bars_changed(&mut self) {}

    /// Another function's memory is where `bar` was before its decoding was switched off: what was left there
    /// goes.
    fn make_room(&mut self, _bar: u8) {}

    /// Returns the buses behind the function as the guest programmed them, secondary and
    /// subordinate, if it is a bridge whose other side can be reached.
    fn buses(&self) -> Option<(u8, u8)> {
        None
    }

    /// Returns whether the guest has begun to reset the bus behind the function since it was asked last, if
    /// it is a bridge.
    fn took_bus_reset(&mut self) -> bool {
        false
    }

    /// Returns whether the link below the function went down since it was asked last, if it is a bridge: nothing that is
    /// sent below arrives any more.
    fn took_link_down(&mut self) -> bool {
        false
    }

    /// The bus that the function is on was reset (PCI Express 6.0 §6.6.1, a hot reset): registers take their
    /// initial values, and what is under way ends without being waited for.
    fn bus_reset(&mut self) {}

    /// Stops using guest memory, as soon as what is under way is done; [`Self::is_held`] says when.
    /// Called with all vCPUs waiting.
    fn hold(&mut self) {}

    /// Returns whether guest memory is not used any more after [`Self::hold`].
    fn is_held(&mut self) -> bool {
        true
    }

    /// Goes on after [`Self::hold`].
    fn go_on(&mut self) {}

    /// Returns the function to its state at power-on. Called with all vCPUs stopped, or while it is on no bus.
    /// Waits for what is under way, but not without end; [`Self::is_quiet`] says whether that was enough.
    fn reset(&mut self) {}

    /// Returns whether a function that was reset has nothing under way any more: it leaves guest memory and its
    /// disk alone.
    fn is_quiet(&mut self) -> bool {
        true
    }
}
