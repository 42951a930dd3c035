//! MSI-X: the vector table, the pending bits, and the function's mask.
//! Source: PCI Local Bus 3.0 §6.8.2.
//!
//! | Offset in an entry | Field          |
//! |--------------------|----------------|
//! | 0                  | address, low   |
//! | 4                  | address, high  |
//! | 8                  | data           |
//! | 12                 | control, bit 0 masks |

use std::{io, os::fd::BorrowedFd, sync::Arc};

use crate::irq::{InterruptSource, MsiMessage, MsiVector};

/// Capability identifier of MSI-X.
pub const CAPABILITY: u8 = 0x11;
/// Bytes of one table entry.
pub const ENTRY_SIZE: u64 = 16;
/// Message control: MSI-X is on.
const ENABLE: u16 = 1 << 15;
/// Message control: every vector is masked.
const FUNCTION_MASK: u16 = 1 << 14;
/// Vector control: this vector is masked.
const MASKED: u32 = 1;
/// Largest table (11-bit field, minus one).
const MAX_VECTORS: u16 = 2048;

/// One entry as the guest wrote it.
#[derive(Debug, Clone, Copy)]
struct Entry {
    address: u64,
    data: u32,
    control: u32,
}

impl Default for Entry {
    /// Masked, as after reset.
    fn default() -> Self {
        Self { address: 0, data: 0, control: MASKED }
    }
}

/// The table of one function and the interrupts behind it.
pub struct MsixTable {
    entries: Vec<Entry>,
    vectors: Vec<Option<Arc<dyn MsiVector>>>,
    control: u16,
    /// Where vectors come from when they are first unmasked; `None` if all are there already.
    source: Option<Arc<dyn InterruptSource>>,
}

impl MsixTable {
    /// Makes a table of `count` vectors, 1..=2048, all masked, MSI-X off.
    pub fn new(count: u16, interrupts: &dyn InterruptSource) -> io::Result<Self> {
        let mut table = Self::empty(count)?;
        for vector in &mut table.vectors {
            *vector = Some(interrupts.allocate_msi()?);
        }
        Ok(table)
    }

    /// Makes such a table whose vectors are allocated when the guest first unmasks them. Devices
    /// have tables of up to 2,048 entries, guests use a few of them, and KVM has 4,096 routes for
    /// all devices together.
    pub fn lazy(count: u16, source: Arc<dyn InterruptSource>) -> io::Result<Self> {
        Ok(Self { source: Some(source), ..Self::empty(count)? })
    }

    fn empty(count: u16) -> io::Result<Self> {
        if !(1..=MAX_VECTORS).contains(&count) {
            return Err(io::Error::other(format!(
                "{count} MSI-X vectors; a table has 1 to {MAX_VECTORS}"
            )));
        }
        let entries = vec![Entry::default(); usize::from(count)];
        Ok(Self { vectors: vec![None; entries.len()], entries, control: 0, source: None })
    }

    /// Allocates the vectors that are not there yet.
    pub fn allocate_all(&mut self) -> io::Result<()> {
        (0..self.vectors.len()).try_for_each(|index| self.allocate(index).map(drop))
    }

    /// Returns the number of vectors.
    pub fn len(&self) -> u16 {
        u16::try_from(self.entries.len()).unwrap_or(MAX_VECTORS)
    }

    /// Returns whether there are no vectors, which never happens.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the message control register as the guest reads it.
    pub fn control(&self) -> u16 {
        self.control | (self.len() - 1)
    }

    /// Returns the body of the capability, without identifier and next pointer, for a table at
    /// `table` and pending bits at `pending`, each a BAR index and an offset.
    pub fn capability(&self, table: (u8, u32), pending: (u8, u32)) -> [u8; 10] {
        let mut body = [0; 10];
        body[..2].copy_from_slice(&self.control().to_le_bytes());
        body[2..6].copy_from_slice(&(table.1 & !7 | u32::from(table.0)).to_le_bytes());
        body[6..].copy_from_slice(&(pending.1 & !7 | u32::from(pending.0)).to_le_bytes());
        body
    }

    /// Returns whether MSI-X is on.
    pub fn is_enabled(&self) -> bool {
        self.control & ENABLE != 0
    }

    /// Returns vector `index`, if there is one and it is allocated.
    pub fn vector(&self, index: u16) -> Option<&Arc<dyn MsiVector>> {
        self.vectors.get(usize::from(index))?.as_ref()
    }

    /// Returns whether the guest has unmasked vector `index`, whatever the function's mask says.
    pub fn is_unmasked(&self, index: u16) -> bool {
        self.entries.get(usize::from(index)).is_some_and(|entry| entry.control & MASKED == 0)
    }

    /// Fires vector `index`; one that does not exist is ignored, as is any while MSI-X is off.
    pub fn trigger(&self, index: u16) -> io::Result<()> {
        match self.vector(index) {
            Some(vector) if self.is_enabled() => vector.trigger(),
            Some(_) | None => Ok(()),
        }
    }

    /// Takes a write of 1, 2 or 4 bytes into the capability, `offset` from its first byte; only
    /// the two writable bits of message control count.
    pub fn write_capability(&mut self, offset: u16, data: &[u8]) -> io::Result<()> {
        let mut bytes = self.control.to_le_bytes();
        for (index, byte) in data.iter().enumerate() {
            match usize::from(offset) + index {
                2 => bytes[0] = *byte,
                3 => bytes[1] = *byte,
                _ => {}
            }
        }
        let control = u16::from_le_bytes(bytes) & (ENABLE | FUNCTION_MASK);
        if control == self.control {
            return Ok(());
        }
        self.control = control;
        (0..self.entries.len()).try_for_each(|index| self.route(index))
    }

    /// Reads the table at `offset`. Outside of it everything reads as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = self.table_byte(offset.saturating_add(index as u64));
        }
    }

    /// Writes the table at `offset`. Writes outside of it are ignored.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut touched = None;
        for (index, byte) in data.iter().enumerate() {
            let at = offset.saturating_add(index as u64);
            let Ok(entry) = usize::try_from(at / ENTRY_SIZE) else { continue };
            if touched.is_some_and(|old| old != entry) {
                self.route_if_there(touched)?;
            }
            self.set_table_byte(entry, at % ENTRY_SIZE, *byte);
            touched = Some(entry);
        }
        self.route_if_there(touched)
    }

    /// Reads the pending bits (PCI 3.0 §6.8.2.8): one for each vector, set while a signal waits for its
    /// vector to be unmasked. Outside of them everything reads as zero.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(index as u64);
            let first = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(8);
            *byte = (0..8).fold(0, |bits, bit| {
                bits | u8::from(self.is_pending(first.saturating_add(bit))) << bit
            });
        }
    }

    fn is_pending(&self, index: usize) -> bool {
        let closed = self.is_enabled() && !self.is_open(index);
        let vector = self.vectors.get(index).and_then(Option::as_ref);
        closed && vector.is_some_and(|vector| holds_signal(vector.eventfd()))
    }

    /// Returns whether vector `index` fires as soon as it is triggered.
    fn is_open(&self, index: usize) -> bool {
        self.is_enabled()
            && self.control & FUNCTION_MASK == 0
            && self.entries.get(index).is_some_and(|entry| entry.control & MASKED == 0)
    }

    /// Masks everything and switches MSI-X off, as at reset.
    pub fn reset(&mut self) -> io::Result<()> {
        self.control = 0;
        self.entries.fill(Entry::default());
        (0..self.entries.len()).try_for_each(|index| self.route(index))?;
        if self.source.is_some() {
            self.vectors.fill(None);
        }
        Ok(())
    }

    fn route_if_there(&mut self, entry: Option<usize>) -> io::Result<()> {
        match entry {
            Some(index) if index < self.entries.len() => self.route(index),
            Some(_) | None => Ok(()),
        }
    }

    fn route(&mut self, index: usize) -> io::Result<()> {
        let Some(entry) = self.entries.get(index).copied() else { return Ok(()) };
        let open = self.is_open(index);
        let vector = if open { self.allocate(index)? } else { self.vectors[index].clone() };
        let message = MsiMessage { address: entry.address, data: entry.data };
        vector.map_or(Ok(()), |vector| vector.route(open.then_some(message)))
    }

    fn allocate(&mut self, index: usize) -> io::Result<Option<Arc<dyn MsiVector>>> {
        let Some(vector) = self.vectors.get_mut(index) else { return Ok(None) };
        if let (None, Some(source)) = (&vector, &self.source) {
            *vector = Some(source.allocate_msi()?);
        }
        Ok(vector.clone())
    }

    fn table_byte(&self, at: u64) -> u8 {
        let entry = usize::try_from(at / ENTRY_SIZE).ok().and_then(|index| self.entries.get(index));
        let Some(entry) = entry else { return 0 };
        let bytes = entry_bytes(entry);
        usize::try_from(at % ENTRY_SIZE).ok().and_then(|at| bytes.get(at).copied()).unwrap_or(0)
    }

    fn set_table_byte(&mut self, entry: usize, at: u64, value: u8) {
        let Some(entry) = self.entries.get_mut(entry) else { return };
        let mut bytes = entry_bytes(entry);
        if let Some(place) = usize::try_from(at).ok().and_then(|at| bytes.get_mut(at)) {
            *place = value;
        }
        let word = |from: usize| {
            u32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]])
        };
        entry.address = u64::from(word(0)) & !3 | u64::from(word(4)) << 32;
        entry.data = word(8);
        entry.control = word(12) & MASKED;
    }
}

/// Returns whether an eventfd that nobody waits for holds a signal: it is taken out and put back, so that
/// threads that may not poll can look.
fn holds_signal(event: BorrowedFd<'_>) -> bool {
    let mut count = [0; 8];
    let taken = rustix::io::read(event, &mut count);
    taken == Ok(count.len()) && rustix::io::write(event, &count) == Ok(count.len())
}

fn entry_bytes(entry: &Entry) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&entry.address.to_le_bytes());
    bytes[8..12].copy_from_slice(&entry.data.to_le_bytes());
    bytes[12..].copy_from_slice(&entry.control.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use std::{
        os::fd::{AsFd, BorrowedFd, OwnedFd},
        sync::Mutex,
    };

    use super::*;
    use crate::irq::InterruptLine;

    struct Recorder {
        routed: Mutex<Option<MsiMessage>>,
        file: OwnedFd,
    }

    impl MsiVector for Recorder {
        fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
            *self.routed.lock().expect("one thread") = message;
            Ok(())
        }
        fn eventfd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
        fn trigger(&self) -> io::Result<()> {
            rustix::io::write(&self.file, &1u64.to_ne_bytes())?;
            Ok(())
        }
    }

    #[derive(Default)]
    struct Source(Mutex<Vec<Arc<Recorder>>>);

    impl InterruptSource for Source {
        fn allocate_msi(&self) -> io::Result<Arc<dyn MsiVector>> {
            let flags = rustix::event::EventfdFlags::NONBLOCK;
            let file = rustix::event::eventfd(0, flags)?;
            let vector = Arc::new(Recorder { routed: Mutex::new(None), file });
            self.0.lock().expect("one thread").push(Arc::clone(&vector));
            Ok(vector)
        }
        fn line(&self, _slot: u8, _pin: u8) -> io::Result<Arc<dyn InterruptLine>> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    fn routed(source: &Source, index: usize) -> Option<MsiMessage> {
        *source.0.lock().expect("one thread")[index].routed.lock().expect("one thread")
    }

    fn table(source: &Source) -> MsixTable {
        let mut table = MsixTable::new(3, source).expect("three vectors");
        table.write_table(16, &0xfee0_0000u32.to_le_bytes()).expect("recorded");
        table.write_table(24, &0x41u32.to_le_bytes()).expect("recorded");
        table.write_table(28, &0u32.to_le_bytes()).expect("recorded");
        table
    }

    #[test]
    fn vectors_fire_only_when_enabled_and_unmasked() {
        let source = Source::default();
        let mut table = table(&source);
        assert_eq!(routed(&source, 1), None);
        table.write_capability(2, &ENABLE.to_le_bytes()).expect("recorded");
        assert_eq!(routed(&source, 1), Some(MsiMessage { address: 0xfee0_0000, data: 0x41 }));
        assert_eq!(routed(&source, 0), None);
        table.write_capability(3, &[0xc0]).expect("recorded");
        assert_eq!(routed(&source, 1), None);
        assert_eq!(table.control(), ENABLE | FUNCTION_MASK | 2);
    }

    #[test]
    fn signals_that_wait_are_seen_as_pending() {
        let source = Source::default();
        let mut table = MsixTable::new(11, &source).expect("vectors");
        let pending = |table: &MsixTable| {
            let mut bits = [0xff; 8];
            table.read_pending(0, &mut bits);
            u64::from_le_bytes(bits)
        };
        table.write_capability(2, &ENABLE.to_le_bytes()).expect("recorded");
        table.write_table(16 + 12, &[0]).expect("unmasked");
        for vector in [0, 1, 9] {
            table.trigger(vector).expect("recorded");
        }
        // Vector 1 is open: what is in its eventfd is the kernel's. Looking takes nothing away.
        assert_eq!([pending(&table), pending(&table)], [1 | 1 << 9; 2]);
        let mut byte = [0];
        table.read_pending(1, &mut byte);
        assert_eq!(byte, [2]);
        table.write_table(16 * 9 + 12, &[0]).expect("unmasked");
        assert_eq!(pending(&table), 1);
        table.write_capability(2, &(ENABLE | FUNCTION_MASK).to_le_bytes()).expect("recorded");
        assert_eq!(pending(&table), 1 | 1 << 1 | 1 << 9);
        table.read_pending(u64::MAX, &mut byte);
        assert_eq!(byte, [0]);
    }

    #[test]
    fn control_is_taken_from_a_double_word_too() {
        let source = Source::default();
        let mut table = table(&source);
        table.write_capability(0, &[0x11, 0x50, 0xff, 0x87]).expect("recorded");
        assert!(table.is_enabled());
        assert_eq!(table.control(), ENABLE | 2);
    }

    #[test]
    fn accesses_outside_are_harmless() {
        let source = Source::default();
        let mut table = table(&source);
        table.write_table(u64::MAX - 1, &[1, 2, 3, 4]).expect("ignored");
        table.write_table(46, &[0xff; 8]).expect("half inside");
        let mut data = [7; 8];
        table.read_table(48, &mut data);
        assert_eq!(data, [0; 8]);
    }

    #[test]
    fn lazy_vectors_come_with_the_first_unmasking_and_go_with_reset() {
        let source = Arc::new(Source::default());
        let held = |of: &Source| of.0.lock().expect("one thread").len();
        let mut table = MsixTable::lazy(512, Arc::<Source>::clone(&source)).expect("a large table");
        table.write_table(511 * 16 + 12, &[0]).expect("unmasked");
        assert_eq!((held(&source), table.vector(511).is_some()), (0, false));
        table.write_capability(2, &ENABLE.to_le_bytes()).expect("enabled");
        assert_eq!((held(&source), table.vector(511).is_some()), (1, true));
        assert_eq!(routed(&source, 0), Some(MsiMessage::default()));
        table.write_table(511 * 16 + 12, &[1]).expect("masked");
        assert_eq!((routed(&source, 0), table.vector(511).is_some()), (None, true));
        table.reset().expect("quiet");
        assert!(table.vector(511).is_none());
        table.allocate_all().expect("all");
        assert_eq!(held(&source), 1 + 512);
    }

    #[test]
    fn tables_have_a_largest_size() {
        assert!(MsixTable::new(0, &Source::default()).is_err());
        assert!(MsixTable::new(2049, &Source::default()).is_err());
    }
}
