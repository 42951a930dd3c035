//! Runs fuzz cases of what firmware talks to: fw_cfg with its DMA and the note that a guest names there, the
//! flash chip, the clock.

use std::{io, time::Duration};

use types::vm::MemoryBacking;
use vm_memory::{Bytes, GuestAddress};
use vmm::{
    acpi::{self, Platform},
    devices::{
        cmos::Cmos,
        flash::{BLOCK, Flash, Store},
        fw_cfg::{
            FwCfg, Items, VMCOREINFO_FILE, acpi_files, bootorder, e820, note_place, vmcoreinfo_item,
        },
    },
    dump::{elf, vmcoreinfo as note},
    layout,
    sys::memory::Ram,
};

/// Guest memory of the fw_cfg cases, in bytes.
const MEMORY: u64 = 1 << 20;
/// How far behind memory a descriptor may lie.
const BEYOND: u64 = 0x1000;

/// Accesses to fw_cfg, and DMA descriptors.
///
/// | Byte of 24 | Meaning                                                              |
/// |------------|----------------------------------------------------------------------|
/// | 0          | bits 1:0 what: read, write, write a descriptor and start it, select  |
/// | 1          | port, from the first                                                 |
/// | 2          | length, modulo 9                                                     |
/// | 4..20      | data; the descriptor                                                 |
/// | 20..24     | address of the descriptor, at most a page beyond memory              |
pub(crate) fn fw_cfg(bytes: &[u8]) {
    let ram = Ram::new(&[(0, MEMORY)], MemoryBacking::Memfd).expect("memory").memory;
    let mut device = FwCfg::new(items());
    for step in bytes.chunks_exact(24) {
        let length = usize::from(step[2] % 9);
        let mut data = [0; 16];
        data.copy_from_slice(&step[4..20]);
        match step[0] & 3 {
            0 => device.read(step[1], &mut data[..length]),
            1 => device.write(step[1], &data[..length], &ram),
            2 => {
                let word = u32::from_le_bytes([step[20], step[21], step[22], step[23]]);
                let address = u64::from(word) % (MEMORY + BEYOND);
                // One that lies beyond memory is ignored.
                let _ = ram.write_slice(&data, GuestAddress(address));
                let low = u32::try_from(address).expect("small");
                // An earlier step may have written the high half.
                device.write(4, &[0; 4], &ram);
                device.write(8, &low.to_be_bytes(), &ram);
                if address + 16 <= MEMORY && !overlaps(&data, address) {
                    let mut left = [0; 4];
                    ram.read_slice(&mut left, GuestAddress(address)).expect("inside");
                    let control = u32::from_be_bytes(left);
                    assert!(control <= 1, "a request is left as {control:#x}");
                }
            }
            _ => device.write(0, &data[..2], &ram),
        }
    }
    // Whatever was asked, what the guest may write is as long as before, and the signature is there.
    assert_eq!(device.written(VMCOREINFO_FILE).map(<[u8]>::len), Some(16));
    let mut byte = [0];
    device.write(0, &[0, 0], &ram);
    device.read(1, &mut byte);
    assert_eq!(byte, *b"Q");
}

/// Whether a descriptor at `address` has its own place filled.
fn overlaps(descriptor: &[u8; 16], address: u64) -> bool {
    let [_, _, _, _, a, b, c, d, to @ ..] = *descriptor;
    let (length, to) = (u64::from(u32::from_be_bytes([a, b, c, d])), u64::from_be_bytes(to));
    to < address + 16 && to.saturating_add(length) > address
}

fn items() -> Items {
    let mut items = Items::new(2, [1; 16]);
    let platform = Platform {
        cpus: vmm::vcpu::Cpus::in_one_package(2),
        roots: Vec::new(),
        nodes: Vec::new(),
        ecam: layout::ECAM,
    };
    let files = acpi_files(&acpi::tables(&platform)).expect("sound");
    items.add("etc/e820", e820(&[(0, MEMORY)], &[]));
    items.add("bootorder", bootorder(&[]));
    items.add("etc/table-loader", files.script);
    items.add_made("etc/acpi/tables", files.tables.len(), move || files.tables.clone());
    items.add_written(VMCOREINFO_FILE, vmcoreinfo_item());
    items
}

/// Where the note of the vmcoreinfo cases begins.
const NOTE: u64 = 0x1000;

/// What a guest says of its VMCOREINFO: 16 bytes of the item, then what is at [`NOTE`].
pub(crate) fn vmcoreinfo(bytes: &[u8]) {
    let Some((item, memory)) = bytes.split_at_checked(16) else { return };
    let Some(place) = note_place(item) else { return };
    let ram = Ram::new(&[(0, MEMORY)], MemoryBacking::Memfd).expect("memory").memory;
    let count = memory.len().min(0x1000);
    ram.write_slice(&memory[..count], GuestAddress(NOTE)).expect("inside");
    let contents = match note::read(place, &ram) {
        Ok(contents) => contents,
        // What is wrong is told in words.
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let size = usize::try_from(place.size).expect("small");
    assert!(contents.len() + 24 <= size, "{} bytes in a note of {size}", contents.len());
    // It is the last note, whole, before the padding to a page.
    let head = elf::head(&[], &[], Some(&contents));
    let begin = 64 + 56 + 24;
    assert_eq!(head[begin - 12..begin], *b"VMCOREINFO\0\0");
    assert_eq!(head[begin..begin + contents.len()], contents[..]);
}

/// Blocks of the chip.
const BLOCKS: u64 = 3;

struct Memory(Vec<u8>);

impl Store for Memory {
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(offset).expect("inside");
        data.copy_from_slice(&self.0[at..at + data.len()]);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = usize::try_from(offset).expect("inside");
        self.0[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Accesses to the flash chip: bytes of four are an address (16 bits), a command or datum, and what
/// to do: bit 7 read, 6:0 how many bytes. Programming never sets a bit that was clear.
pub(crate) fn flash(bytes: &[u8]) {
    let size = BLOCKS * BLOCK;
    let content = vec![0x5a; usize::try_from(size).expect("small")];
    let mut chip = Flash::new(Memory(content), size).expect("whole blocks");
    for step in bytes.chunks_exact(4) {
        let at = u64::from(u16::from_le_bytes([step[0], step[1]]));
        let mut data = vec![step[2]; usize::from(step[3] & 0x7f).min(16)];
        if step[3] & 0x80 != 0 {
            chip.read(at, &mut data);
        } else {
            chip.write(at, &data);
        }
    }
    // From any state, enough commands to end a buffer lead back to the contents.
    for _ in 0..300 {
        chip.write(0, &[0xff]);
    }
    assert!(chip.is_readable(), "the chip is stuck");
}

/// Accesses to the clock: of three bytes one says when (in quarters of a second since the last) and
/// whether to write (bit 7), the others are index and value. Digits stay digits.
pub(crate) fn clock(bytes: &[u8]) {
    let mut clock = Cmos::new(&[(0, 2 << 30), (4 << 30, 60 << 40)], 0);
    let mut now = Duration::from_secs(1_795_273_445);
    for step in bytes.chunks_exact(3) {
        now += Duration::from_millis(250) * u32::from(step[0] & 0x7f);
        clock.write(0, step[1], now);
        if step[0] & 0x80 != 0 {
            clock.write(1, step[2], now);
        } else {
            let _ = clock.read(step[2] & 1, now);
        }
    }
    // What is due comes at its time, and not again before it is seen.
    clock.look(now);
    if let Some(wait) = clock.due_in(now) {
        assert!(!wait.is_zero() && wait <= Duration::from_secs(86_400), "{wait:?}");
        now += wait;
        clock.look(now);
        assert_eq!(clock.due_in(now), None);
    }
    // In decimal, 24-hour form every part is two digits.
    clock.write(0, 0x0b, now);
    clock.write(1, 2, now);
    for index in [0, 2, 4, 7, 8, 9] {
        clock.write(0, index, now);
        let value = clock.read(1, now);
        assert!(value & 0xf <= 9 && value >> 4 <= 9, "byte {index} is {value:#x}");
    }
}
