//! fw_cfg: where firmware and systems read what the machine is made of. What the guest writes changes no
//! item but those that are for it to write, and those only as a whole.
//! Source: QEMU docs/specs/fw_cfg.rst, "Hardware Interface", "Item Keys" and "Guest-side DMA
//! Interface".
//!
//! | Port          | Access | Register                                              |
//! |---------------|--------|-------------------------------------------------------|
//! | 0x510         | w      | selector, 16 bits, little-endian                      |
//! | 0x511         | r      | data, the next byte of the selected item, then zeros  |
//! | 0x514..0x518  | r/w    | DMA address, bits 63:32, big-endian; reads "QEMU"     |
//! | 0x518..0x51c  | r/w    | DMA address, bits 31:0; writing starts; reads " CFG"  |
//!
//! | Key    | Item                                            |
//! |--------|-------------------------------------------------|
//! | 0x0000 | signature "QEMU"                                |
//! | 0x0001 | interface version: bit 0 ports, bit 1 DMA       |
//! | 0x0002 | UUID of the machine                             |
//! | 0x0005 | virtual CPUs, 16 bits, little-endian            |
//! | 0x000f | most virtual CPUs, likewise                     |
//! | 0x0019 | directory of the files below                    |
//! | 0x0020 | the first file; the others follow               |

mod dma;
mod files;
mod hardware_info;
mod loader;
mod vmcoreinfo;

use std::collections::BTreeMap;

pub use files::{Disk, DiskKind, bootorder, e820, window_mib};
pub use hardware_info::hardware_info;
pub use loader::{AcpiFiles, AcpiLoaderError, ROOT_FILE, SCRIPT_FILE, TABLES_FILE, acpi_files};
pub use vmcoreinfo::{NotePlace, VMCOREINFO_FILE, note_place, vmcoreinfo_item};

use crate::sys::memory::GuestRam;

/// First port.
pub const BASE: u16 = 0x510;
/// Ports.
pub const LENGTH: u16 = 12;
/// ACPI hardware id of the device.
pub const HARDWARE_ID: &str = "QEMU0002";

/// What the DMA address register reads as.
const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";
/// The port interface and DMA are there.
const VERSION: u32 = 1 | 2;
const KEY_SIGNATURE: u16 = 0x00;
const KEY_VERSION: u16 = 0x01;
const KEY_UUID: u16 = 0x02;
const KEY_CPUS: u16 = 0x05;
const KEY_MAX_CPUS: u16 = 0x0f;
const KEY_DIRECTORY: u16 = 0x19;
const KEY_FIRST_FILE: u16 = 0x20;
/// Bytes of a file's name with its terminating zero.
const NAME: usize = 56;

/// What an item holds.
enum Content {
    /// These bytes.
    Fixed(Vec<u8>),
    /// What this makes whenever the item is selected; always as many bytes.
    Made { size: usize, make: Box<dyn Fn() -> Vec<u8> + Send> },
    /// What the guest wrote last; always as many bytes.
    Written(Vec<u8>),
}

impl Content {
    fn size(&self) -> usize {
        match self {
            Self::Fixed(bytes) | Self::Written(bytes) => bytes.len(),
            Self::Made { size, .. } => *size,
        }
    }
}

/// What firmware is told; becomes a [`FwCfg`].
pub struct Items {
    keys: BTreeMap<u16, Content>,
    names: Vec<(&'static str, u16)>,
    next: u16,
}

impl Items {
    /// Begins with what every machine has: its CPUs, and its UUID, big-endian.
    pub fn new(cpus: u16, uuid: [u8; 16]) -> Self {
        let mut keys = BTreeMap::new();
        let mut put = |key, bytes: &[u8]| keys.insert(key, Content::Fixed(bytes.to_vec()));
        put(KEY_SIGNATURE, b"QEMU");
        put(KEY_VERSION, &VERSION.to_le_bytes());
        put(KEY_UUID, &uuid);
        put(KEY_CPUS, &cpus.to_le_bytes());
        put(KEY_MAX_CPUS, &cpus.to_le_bytes());
        Self { keys, names: Vec::new(), next: KEY_FIRST_FILE }
    }

    /// Adds a file. Its name has at most 55 bytes.
    pub fn add(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.insert(name, Content::Fixed(bytes));
    }

    /// Adds a file that `make` makes anew whenever it is selected: `size` bytes, more are cut off.
    pub fn add_made(
        &mut self,
        name: &'static str,
        size: usize,
        make: impl Fn() -> Vec<u8> + Send + 'static,
    ) {
        self.insert(name, Content::Made { size, make: Box::new(make) });
    }

    /// Adds a file that the guest writes, and that holds `bytes` before it does.
    pub fn add_written(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.insert(name, Content::Written(bytes));
    }

    fn insert(&mut self, name: &'static str, content: Content) {
        self.keys.insert(self.next, content);
        self.names.push((name, self.next));
        self.next += 1;
    }

    /// The directory: big-endian count, then for each file big-endian size and key, two zero bytes,
    /// and the name; sorted by name.
    fn directory(&self) -> Vec<u8> {
        let mut names = self.names.clone();
        names.sort_unstable();
        let mut bytes = u32::try_from(names.len()).unwrap_or(u32::MAX).to_be_bytes().to_vec();
        for (name, key) in names {
            let size = self.keys.get(&key).map_or(0, Content::size);
            bytes.extend(u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend(key.to_be_bytes());
            bytes.extend([0, 0]);
            let length = name.len().min(NAME - 1);
            bytes.extend(&name.as_bytes()[..length]);
            bytes.resize(bytes.len() + NAME - length, 0);
        }
        bytes
    }
}

/// The item that is selected and how far it has been read.
#[derive(Default)]
struct Selected {
    key: Option<u16>,
    bytes: Vec<u8>,
    next: usize,
}

impl Selected {
    /// Takes up to `length` bytes; there are fewer at the end.
    fn take(&mut self, length: usize) -> &[u8] {
        let start = self.next.min(self.bytes.len());
        let end = start.saturating_add(length).min(self.bytes.len());
        self.next = self.next.saturating_add(length);
        &self.bytes[start..end]
    }
}

/// The device.
pub struct FwCfg {
    items: BTreeMap<u16, Content>,
    names: Vec<(&'static str, u16)>,
    selected: Selected,
    dma_address: u64,
}

impl FwCfg {
    /// Makes the device.
    pub fn new(items: Items) -> Self {
        let directory = items.directory();
        let mut keys = items.keys;
        keys.insert(KEY_DIRECTORY, Content::Fixed(directory));
        Self { items: keys, names: items.names, selected: Selected::default(), dma_address: 0 }
    }

    /// Returns what a file that the guest writes holds now.
    pub fn written(&self, name: &str) -> Option<&[u8]> {
        let (_, key) = self.names.iter().find(|(file, _)| *file == name)?;
        match self.items.get(key)? {
            Content::Written(bytes) => Some(bytes),
            Content::Fixed(_) | Content::Made { .. } => None,
        }
    }

    /// Reads at `offset` from the first port.
    pub fn read(&mut self, offset: u8, data: &mut [u8]) {
        match (offset, data.len()) {
            (1, 1) => data[0] = self.selected.take(1).first().copied().unwrap_or(0),
            (4..12, _) => {
                for (byte, at) in data.iter_mut().zip(usize::from(offset) - 4..) {
                    *byte = DMA_SIGNATURE.get(at).copied().unwrap_or(0xff);
                }
            }
            _ => data.fill(0xff),
        }
    }

    /// Writes at `offset` from the first port. DMA goes to `ram`.
    pub fn write(&mut self, offset: u8, data: &[u8], ram: &GuestRam) {
        match (offset, data) {
            (0, [low, high]) => self.select(u16::from_le_bytes([*low, *high])),
            (4, [a, b, c, d]) => {
                self.dma_address = u64::from(u32::from_be_bytes([*a, *b, *c, *d])) << 32;
            }
            (8, [a, b, c, d]) => {
                let low = u64::from(u32::from_be_bytes([*a, *b, *c, *d]));
                let address = self.dma_address & !0xffff_ffff | low;
                self.dma_address = 0;
                self.transfer(address, ram);
            }
            // Anything else is no register.
            _ => {}
        }
    }

    fn select(&mut self, key: u16) {
        let bytes = match self.items.get(&key) {
            None => Vec::new(),
            Some(Content::Fixed(bytes) | Content::Written(bytes)) => bytes.clone(),
            Some(Content::Made { size, make }) => {
                let mut bytes = make();
                bytes.resize(*size, 0);
                bytes
            }
        };
        self.selected = Selected { key: Some(key), bytes, next: 0 };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use types::vm::MemoryBacking;
    use vm_memory::{Bytes, GuestAddress};

    pub(crate) use super::loader::tests::follow;
    use super::*;
    use crate::sys::memory::Ram;

    fn device() -> FwCfg {
        let mut items = Items::new(3, [7; 16]);
        items.add("etc/b", vec![1, 2, 3]);
        items.add_made("etc/a", 2, || vec![9, 8, 7]);
        items.add_written("etc/c", vec![0; 4]);
        FwCfg::new(items)
    }

    fn ram() -> GuestRam {
        Ram::new(&[(0, 1 << 20)], MemoryBacking::Memfd).expect("memory").memory
    }

    fn item(device: &mut FwCfg, key: u16, length: usize) -> Vec<u8> {
        device.write(0, &key.to_le_bytes(), &ram());
        let mut byte = [0];
        (0..length)
            .map(|_| {
                device.read(1, &mut byte);
                byte[0]
            })
            .collect()
    }

    /// Reads a file as firmware does, by the directory.
    pub(crate) fn file(device: &mut FwCfg, name: &str) -> Vec<u8> {
        let directory = item(device, KEY_DIRECTORY, 4096);
        let mut entries = directory[4..].chunks(64);
        let entry = entries.find(|entry| entry[8..].starts_with(name.as_bytes())).expect("there");
        let size = u32::from_be_bytes([entry[0], entry[1], entry[2], entry[3]]);
        let key = u16::from_be_bytes([entry[4], entry[5]]);
        item(device, key, usize::try_from(size).expect("small"))
    }

    #[test]
    fn fixed_keys_are_answered() {
        let mut device = device();
        assert_eq!(item(&mut device, 0, 6), *b"QEMU\0\0");
        assert_eq!(item(&mut device, 1, 4), [3, 0, 0, 0]);
        assert_eq!(item(&mut device, 2, 16), [7; 16]);
        assert_eq!(item(&mut device, 5, 2), [3, 0]);
        assert_eq!(item(&mut device, 0xf, 2), [3, 0]);
        assert_eq!(item(&mut device, 0x4000, 2), [0, 0]);
    }

    #[test]
    fn the_directory_names_files_in_order() {
        let mut device = device();
        let bytes = item(&mut device, 0x19, 4 + 3 * 64);
        assert_eq!(bytes[..4], [0, 0, 0, 3]);
        assert_eq!(bytes[4..18], *b"\0\0\0\x02\0\x21\0\0etc/a\0");
        assert_eq!(bytes[68..82], *b"\0\0\0\x03\0\x20\0\0etc/b\0");
        assert_eq!(item(&mut device, 0x20, 4), [1, 2, 3, 0]);
        assert_eq!(item(&mut device, 0x21, 3), [9, 8, 0]);
    }

    #[test]
    fn the_dma_register_reads_its_signature() {
        let mut data = [0; 4];
        device().read(4, &mut data);
        assert_eq!(data, *b"QEMU");
        device().read(8, &mut data);
        assert_eq!(data, *b" CFG");
        device().read(10, &mut data);
        assert_eq!(data, *b"FG\xff\xff");
    }

    /// Runs one DMA of `length` bytes to 0x2000 and returns its control field and what is there.
    fn dma(device: &mut FwCfg, control: u32, length: u32) -> (u32, [u8; 6]) {
        let ram = ram();
        let mut descriptor = control.to_be_bytes().to_vec();
        descriptor.extend(length.to_be_bytes());
        descriptor.extend(0x2000u64.to_be_bytes());
        ram.write_slice(&descriptor, GuestAddress(0x1000)).expect("inside");
        ram.write_slice(&[0xee; 6], GuestAddress(0x2000)).expect("inside");
        device.write(8, &0x1000u32.to_be_bytes(), &ram);
        let (mut told, mut data) = ([0; 4], [0; 6]);
        ram.read_slice(&mut told, GuestAddress(0x1000)).expect("inside");
        ram.read_slice(&mut data, GuestAddress(0x2000)).expect("inside");
        (u32::from_be_bytes(told), data)
    }

    #[test]
    fn dma_selects_skips_and_reads() {
        let mut device = device();
        assert_eq!(dma(&mut device, 0x20 << 16 | 8 | 4, 1), (0, [0xee; 6]));
        assert_eq!(dma(&mut device, 2, 4), (0, [2, 3, 0, 0, 0xee, 0xee]));
        assert_eq!(dma(&mut device, 0x20 << 16 | 8 | 2, 2), (0, [1, 2, 0xee, 0xee, 0xee, 0xee]));
    }

    #[test]
    fn what_the_guest_writes_is_kept_as_a_whole() {
        let mut device = device();
        let write = 0x22 << 16 | 8 | 16;
        assert_eq!(device.written("etc/c"), Some(&[0; 4][..]));
        assert_eq!(dma(&mut device, write, 4).0, 0);
        assert_eq!(device.written("etc/c"), Some(&[0xee; 4][..]));
        assert_eq!(item(&mut device, 0x22, 5), [0xee, 0xee, 0xee, 0xee, 0]);
        // Neither a part, nor more, nor from its second byte on.
        let mut device = self::device();
        assert_eq!((dma(&mut device, write, 3).0, dma(&mut device, write, 5).0), (1, 1));
        assert_eq!((dma(&mut device, 0x22 << 16 | 8 | 4, 1).0, dma(&mut device, 16, 3).0), (0, 1));
        assert_eq!(dma(&mut device, 16, 4).0, 1);
        assert_eq!(device.written("etc/c"), Some(&[0; 4][..]));
        // It can be selected before, and written twice.
        device.write(0, &[0x22, 0], &ram());
        assert_eq!((dma(&mut device, 16, 4).0, dma(&mut device, 16, 4).0), (0, 1));
        assert_eq!(device.written("etc/c"), Some(&[0xee; 4][..]));
        assert_eq!((device.written("etc/b"), device.written("etc/x")), (None, None));
    }

    #[test]
    fn a_write_from_outside_memory_changes_nothing() {
        let (mut device, ram) = (device(), ram());
        let mut descriptor = (0x22u32 << 16 | 8 | 16).to_be_bytes().to_vec();
        descriptor.extend(4u32.to_be_bytes());
        descriptor.extend(((1u64 << 20) - 2).to_be_bytes());
        ram.write_slice(&descriptor, GuestAddress(0x1000)).expect("inside");
        device.write(8, &0x1000u32.to_be_bytes(), &ram);
        let mut told = [0; 4];
        ram.read_slice(&mut told, GuestAddress(0x1000)).expect("inside");
        assert_eq!((u32::from_be_bytes(told), device.written("etc/c")), (1, Some(&[0; 4][..])));
    }

    #[test]
    fn dma_that_cannot_be_tells_an_error() {
        let mut device = device();
        assert_eq!(dma(&mut device, 0x20 << 16 | 8 | 16, 1), (1, [0xee; 6]));
        assert_eq!(dma(&mut device, 0x20 << 16 | 8 | 2, 0x10_0000).0, 1);
        // A descriptor outside memory is ignored.
        device.write(8, &0xffff_fff0u32.to_be_bytes(), &ram());
    }
}
