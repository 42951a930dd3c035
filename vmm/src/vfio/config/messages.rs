//! MSI and MSI-X as the guest programs them. Neither reaches the device: the kernel programs it with
//! what VFIO is told.
//!
//! The MSI-X table is the guest's own. Where its pages hold other registers as well, accesses to
//! those would leave the guest each time, so the table is told to be elsewhere:
//!
//! | the device's table                  | the guest finds it                                   |
//! |-------------------------------------|------------------------------------------------------|
//! | at the start of a page              | where it is; its pages are trapped                   |
//! | elsewhere, a base address register  | in a 32-bit BAR of its own; the device's BAR is      |
//! | is left                             | mapped whole                                         |
//! | elsewhere, none is left             | behind the end of its BAR, which is told to be twice |
//! |                                     | as large                                             |
//!
//! That the guest then reaches the device's real table does no harm: a host without interrupt
//! remapping hands no devices out, and with it a device can deliver only what the kernel has set up.
//! Source: PCI Express Base Specification 6.0 §7.7.1, §7.7.2, §7.7.2.2 (which page what may share).

use super::{
    BarRegister, CONVENTIONAL, ConfigError, ConfigFilter, Facts,
    capabilities::{dword, word},
};
use crate::{pci::function::BarKind, vfio::quirks::Effect};

/// Granularity of mappings.
const PAGE: u64 = 4096;
/// Bytes of one entry of the MSI-X table.
const ENTRY: u64 = 16;

/// Where MSI lies and how far it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MsiLayout {
    offset: usize,
    data: usize,
    mask: Option<usize>,
}

/// What the guest has programmed into MSI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiState {
    /// Vectors in use, 0 when disabled, else a power of two up to 32.
    pub vectors: u32,
    /// Address of all messages.
    pub address: u64,
    /// Data of all messages but for its low bits, which are the number of each.
    pub data: u32,
    /// Bit per vector that is masked.
    pub masked: u32,
}

/// Where the MSI-X table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixLayout {
    /// Offset of the capability.
    offset: usize,
    /// BAR that holds the table.
    pub bar: u8,
    /// Offset of the table in it.
    pub table: u64,
    /// Number of vectors, 1..=2048.
    pub vectors: u16,
    /// From where on nothing of the device lies in that BAR.
    pub device_end: u64,
}

/// What the guest has programmed into the MSI-X control word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MsixState {
    /// MSI-X is off.
    Disabled,
    /// On, with every vector masked at once.
    Masked,
    /// On.
    Enabled,
}

impl ConfigFilter {
    /// Returns the state of MSI; all zeroes without the capability.
    pub fn msi(&self) -> MsiState {
        let Some(layout) = self.msi else { return MsiState::default() };
        let control = self.shadow_word(layout.offset + 2);
        let vectors = if control & 1 == 0 { 0 } else { 1 << ((control >> 4) & 7).min(5) };
        let low = u64::from(self.shadow_dword(layout.offset + 4));
        let high = match layout.data - layout.offset {
            12 => u64::from(self.shadow_dword(layout.offset + 8)),
            _ => 0,
        };
        MsiState {
            vectors,
            address: high << 32 | low,
            data: u32::from(self.shadow_word(layout.data)),
            masked: layout.mask.map_or(0, |at| self.shadow_dword(at)),
        }
    }

    /// Returns where the MSI-X table is, if there is one.
    pub fn msix_layout(&self) -> Option<MsixLayout> {
        self.msix
    }

    /// Returns the state of MSI-X.
    pub fn msix(&self) -> MsixState {
        let Some(layout) = self.msix else { return MsixState::Disabled };
        match self.bytes[layout.offset + 3].shadow & 0xc0 {
            0x80 => MsixState::Enabled,
            0xc0 => MsixState::Masked,
            _ => MsixState::Disabled,
        }
    }

    pub(super) fn msi_capability(&mut self, at: usize, snapshot: &[u8]) {
        let control = word(snapshot, at + 2);
        let wide = control & 1 << 7 != 0;
        let maskable = control & 1 << 8 != 0;
        let data = at + if wide { 12 } else { 8 };
        let mask = maskable.then_some(data + 4);
        let end = data + if maskable { 12 } else { 2 };
        if end > CONVENTIONAL {
            // A list that ends in the middle of its registers: MSI stays unusable.
            return self.blank(at + 2, CONVENTIONAL - at - 2);
        }
        self.blank(at + 2, end - at - 2);
        let [low, high] = (control & 0x018e).to_le_bytes();
        self.bytes[at + 2].shadow = low;
        self.bytes[at + 3].shadow = high;
        self.bytes[at + 2].writable = 0x71;
        for (index, byte) in self.bytes[at + 4..data + 2].iter_mut().enumerate() {
            byte.writable = if index == 0 { 0xfc } else { 0xff };
        }
        if let Some(mask) = mask {
            self.bytes[mask..mask + 4].iter_mut().for_each(|byte| byte.writable = 0xff);
        }
        self.msi = Some(MsiLayout { offset: at, data, mask });
    }

    pub(super) fn msix_capability(
        &mut self,
        at: usize,
        facts: &Facts<'_>,
    ) -> Result<(), ConfigError> {
        let vectors = (word(facts.snapshot, at + 2) & 0x7ff) + 1;
        let table = dword(facts.snapshot, at + 4);
        let [bar, ..] = (table & 7).to_le_bytes();
        let offset = u64::from(table & !7);
        let length = ENTRY * u64::from(vectors);
        let holder = self.bars.iter().find(|register| {
            register.index == bar
                && register.kind != BarKind::Io
                && offset + length <= register.size
        });
        let Some(holder) = holder.copied().filter(|_| at + 12 <= CONVENTIONAL) else {
            return Err(ConfigError::MsixTable { bar, offset, vectors });
        };
        for at in at + 2..at + 12 {
            self.show(at, facts.snapshot[at]);
        }
        self.edit(at + 3, |byte| {
            byte.shadow &= 0x07;
            byte.writable = 0xc0;
        });
        let forced = facts.quirks.iter().any(|quirk| quirk.effect == Effect::MoveTable);
        let own = MsixLayout { offset: at, bar, table: offset, vectors, device_end: holder.size };
        let layout = if forced || !offset.is_multiple_of(PAGE) {
            self.move_table(own, holder).unwrap_or(own)
        } else {
            own
        };
        let place = u32::try_from(layout.table).unwrap_or(u32::MAX) & !7 | u32::from(layout.bar);
        for (at, value) in (at + 4..).zip(place.to_le_bytes()) {
            self.show(at, value);
        }
        self.msix = Some(layout);
        Ok(())
    }

    /// Moves the table where the device has nothing. `None` when there is no such place.
    fn move_table(&mut self, own: MsixLayout, holder: BarRegister) -> Option<MsixLayout> {
        let length = ENTRY * u64::from(own.vectors);
        let taken = |index: u8| {
            self.bars.iter().any(|bar| {
                let wide = matches!(bar.kind, BarKind::Memory64 | BarKind::Memory64Prefetchable);
                bar.index == index || wide && bar.index + 1 == index
            })
        };
        if let Some(index) = (0..6).find(|index| !taken(*index)) {
            let size = length.next_power_of_two().max(PAGE);
            self.bar_register(BarRegister { index, kind: BarKind::Memory32, size }, 0);
            return Some(MsixLayout { bar: index, table: 0, device_end: 0, ..own });
        }
        let table = holder.size.max(PAGE);
        let size = (table + length.max(PAGE)).checked_next_power_of_two()?;
        let most = if holder.kind == BarKind::Memory32 { 1 << 31 } else { 1 << 62 };
        // The offset has 32 bits, the lowest three of which name the BAR.
        if size > most || table + length > 1 << 32 {
            return None;
        }
        let flags = u32::from(self.bytes[super::BARS + 4 * usize::from(holder.index)].shadow);
        self.bars.retain(|bar| bar.index != holder.index);
        self.bar_register(BarRegister { size, ..holder }, flags);
        Some(MsixLayout { table, device_end: holder.size, ..own })
    }
}
