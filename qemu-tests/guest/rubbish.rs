//! A guest that means ill: it takes every PCI device from its driver and writes rubbish into it.
//!
//! First into the queues of each virtio device, set up as a driver does but with descriptors that
//! loop, point nowhere, are empty or huge; then into all registers of every BAR and of every
//! configuration space. Built by the tests as one static program, without any crate. It needs no
//! `unsafe`: BARs of virtio devices are reached through the access window in configuration space
//! (virtio §4.1.4.9), those of other devices through busybox's `devmem`, and the rings are ordinary
//! memory whose physical address the kernel tells (`/proc/self/pagemap`).

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const PCI: &str = "/sys/bus/pci/devices";
const PAGE: usize = 4096;
/// Entries of the rings: one page holds the table.
const ENTRIES: u16 = 256;
/// Rounds for each queue of each device.
const ROUNDS: u32 = 12;
/// Random writes into each configuration space, and into each BAR.
const CONFIG_WRITES: u32 = 3000;
const BAR_WRITES: u32 = 3000;
/// Those that take a process each.
const SLOW_WRITES: u32 = 60;

/// xorshift64*: the same rubbish every time.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Pages of this process that a device can be pointed at.
struct Pages {
    memory: Vec<u8>,
    start: usize,
    physical: Vec<u64>,
}

impl Pages {
    fn new(count: usize) -> io::Result<Self> {
        let memory = vec![1u8; (count + 1) * PAGE];
        let start = memory.as_ptr().addr().wrapping_neg() % PAGE;
        let map = File::open("/proc/self/pagemap")?;
        let first = (memory.as_ptr().addr() + start) / PAGE;
        let mut physical = Vec::new();
        for page in 0..count {
            let mut entry = [0; 8];
            map.read_exact_at(&mut entry, ((first + page) * 8) as u64)?;
            physical.push((u64::from_le_bytes(entry) & ((1 << 55) - 1)) * PAGE as u64);
        }
        Ok(Self { memory, start, physical })
    }
    fn put(&mut self, page: usize, offset: usize, bytes: &[u8]) {
        let at = self.start + page * PAGE + offset;
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

struct Device {
    name: String,
    config: File,
    /// Where the access window is, if it is a virtio device.
    window: Option<u64>,
}

impl Device {
    fn open(folder: &Path) -> io::Result<Self> {
        let config = OpenOptions::new().read(true).write(true).open(folder.join("config"))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut device = Self { name, config, window: None };
        let mut at = u64::from(device.read8(0x34));
        for _ in 0..48 {
            if at < 0x40 {
                break;
            }
            let (id, kind) = (device.read8(at), device.read8(at + 3));
            if device.read16(0) == 0x1af4 && id == 9 && kind == 5 {
                device.window = Some(at);
            }
            at = u64::from(device.read8(at + 1));
        }
        Ok(device)
    }
    fn read8(&self, at: u64) -> u8 {
        let mut byte = [0];
        let _ = self.config.read_exact_at(&mut byte, at);
        byte[0]
    }
    fn read16(&self, at: u64) -> u16 {
        u16::from_le_bytes([self.read8(at), self.read8(at + 1)])
    }
    fn write(&self, at: u64, bytes: &[u8]) {
        // What the kernel refuses does not reach the device.
        let _ = self.config.write_at(bytes, at);
    }
    /// Accesses `length` bytes at `offset` of BAR 0 by the window: reads the data, or writes it.
    fn bar(&self, offset: u32, length: u32, value: Option<u32>) -> u32 {
        let Some(window) = self.window else { return 0 };
        self.write(window + 4, &[0]);
        self.write(window + 8, &offset.to_le_bytes());
        self.write(window + 12, &length.to_le_bytes());
        let mut data = value.unwrap_or(0).to_le_bytes();
        let part = &mut data[..length.min(4) as usize];
        if value.is_some() {
            self.write(window + 16, part);
        } else {
            let _ = self.config.read_exact_at(part, window + 16);
        }
        u32::from_le_bytes(data)
    }
    fn put(&self, offset: u32, length: u32, value: u64) {
        self.bar(offset, length, Some(value as u32));
        if length == 8 {
            self.bar(offset, 4, Some(value as u32));
            self.bar(offset + 4, 4, Some((value >> 32) as u32));
        }
    }
    fn get(&self, offset: u32, length: u32) -> u32 {
        self.bar(offset, length, None)
    }
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// An address that is wrong in one of the ways that count, or one of ours.
fn address(pages: &Pages, noise: &mut Noise) -> u64 {
    let own = pages.physical[3 + noise.below(5) as usize];
    match noise.below(8) {
        0 => u64::MAX - noise.below(64),
        1 => 1 << 40,
        2 => 0xfee0_0000,
        3 => 0xe000_0000,
        4 => own + noise.below(PAGE as u64),
        _ => own,
    }
}

/// Fills table and available ring for round `round`; returns the index that is made available.
fn fill(pages: &mut Pages, noise: &mut Noise, round: u32) -> u16 {
    const LENGTHS: [u32; 8] = [0, 1, 16, 512, 4096, 1 << 20, u32::MAX, u32::MAX - 15];
    for index in 0..ENTRIES {
        let length = LENGTHS[noise.below(8) as usize];
        let bytes = match round % 6 {
            // Chains that loop, over one entry and over all.
            0 => descriptor(address(pages, noise), 512, 1, index),
            1 => descriptor(address(pages, noise), 512, 1, (index + 1) % ENTRIES),
            // Indirect tables: this one itself, ours, nowhere, of odd size, inside each other.
            2 => descriptor(pages.physical[0], 4096, 4, index),
            3 => descriptor(address(pages, noise), length, 4 | noise.below(8) as u16, index + 1),
            4 => descriptor(
                address(pages, noise),
                length,
                noise.below(8) as u16,
                noise.next() as u16,
            ),
            _ => noise.next().to_le_bytes().repeat(2).try_into().unwrap_or([0; 16]),
        };
        pages.put(0, usize::from(index) * 16, &bytes);
        pages.put(
            1,
            4 + 2 * usize::from(index),
            &(noise.next() as u16 >> (round % 12)).to_le_bytes(),
        );
    }
    for page in 3..8 {
        for at in (0..PAGE).step_by(8) {
            pages.put(page, at, &noise.next().to_le_bytes());
        }
    }
    let available = [1, ENTRIES, ENTRIES + 1, u16::MAX, noise.next() as u16][round as usize % 5];
    pages.put(1, 0, &[0, 0]);
    pages.put(1, 2, &available.to_le_bytes());
    available
}

/// Negotiates as a driver does, and lets the device loose on rubbish.
fn queues(device: &Device, pages: &mut Pages, noise: &mut Noise) -> u32 {
    let count = u64::from(device.get(0x12, 2) as u16);
    for round in 0..ROUNDS {
        device.put(0x14, 1, 0);
        (0..100).take_while(|_| device.get(0x14, 1) & 0xff != 0).for_each(drop);
        device.put(0x14, 1, 3);
        for half in 0..2u32 {
            device.put(0, 4, half.into());
            let offered = device.get(4, 4);
            device.put(8, 4, half.into());
            // Without indirect descriptors and event indices in some rounds.
            device.put(12, 4, u64::from(if half == 0 && round % 4 == 3 { 0 } else { offered }));
        }
        device.put(0x14, 1, 0xb);
        for queue in 0..count {
            device.put(0x16, 2, queue);
            device.put(0x18, 2, if round == 7 { noise.next() } else { ENTRIES.into() });
            device.put(0x1a, 2, noise.below(4));
            let ring = if round == 8 {
                [noise.next(), 1 << 41, u64::MAX & !15]
            } else {
                [pages.physical[0], pages.physical[1], pages.physical[2]]
            };
            for (at, value) in [0x20, 0x28, 0x30].into_iter().zip(ring) {
                device.put(at, 8, value);
            }
            device.put(0x1c, 2, 1);
        }
        fill(pages, noise, round);
        device.put(0x14, 1, 0xf);
        for kick in 0..16 * count {
            device.put(0x3000 + 4 * (kick % count.max(1)) as u32, 2, noise.next());
            fill(pages, noise, round + (kick / 8) as u32);
        }
        // Reset in the middle of it.
        device.put(0x14, 1, 0);
    }
    ROUNDS * count as u32
}

/// Writes rubbish all over the first BAR of a virtio device.
fn window(device: &Device, noise: &mut Noise) {
    for _ in 0..BAR_WRITES {
        let length = [1, 2, 4, 3, 8][noise.below(5) as usize];
        let offset = match noise.below(4) {
            0 => noise.below(0x40),
            1 => 0x4000 + noise.below(0x100),
            2 => noise.below(0x9000),
            _ => noise.next(),
        };
        device.bar(offset as u32, length, (noise.below(4) > 0).then_some(noise.next() as u32));
    }
}

/// Writes rubbish into the memory BARs of any other device.
fn memory(folder: &Path, noise: &mut Noise) {
    let text = fs::read_to_string(folder.join("resource")).unwrap_or_default();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or(0);
    for line in text.lines().take(6) {
        let words: Vec<u64> = line.split_whitespace().map(number).collect();
        let [start, end, flags] = words[..] else { continue };
        // Memory, not ports (IORESOURCE_MEM).
        if flags & 0x200 == 0 || end <= start {
            continue;
        }
        for _ in 0..SLOW_WRITES {
            let (width, shift) = [(8, 0), (16, 1), (32, 2), (64, 3)][noise.below(4) as usize];
            let span = if noise.below(2) == 0 { 0x100 } else { end - start + 1 };
            let at = start + (noise.below(span.min(end - start + 1)) >> shift << shift);
            let mut tool = Command::new("devmem");
            tool.args([
                format!("{at:#x}"),
                width.to_string(),
                format!("{:#x}", noise.next() >> (64 - width)),
            ]);
            let _ = tool.stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

fn configuration(device: &Device, noise: &mut Noise) {
    for _ in 0..CONFIG_WRITES {
        let length = [1, 2, 4][noise.below(3) as usize];
        let at = if noise.below(3) == 0 { noise.below(4096) } else { noise.below(256) };
        device.write(at / length * length, &noise.next().to_le_bytes()[..length as usize]);
        let _ = device.read8(noise.below(4096));
    }
}

fn main() -> io::Result<()> {
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let mut folders: Vec<PathBuf> =
        fs::read_dir(PCI)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.sort();
    let mut pages = Pages::new(8)?;
    for folder in &folders {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let _ = fs::write(folder.join("driver/unbind"), &name);
        // Memory decoding and bus mastering on.
        let _ = fs::write(folder.join("enable"), "1");
        Device::open(folder)?.write(4, &[6, 0]);
    }
    for folder in &folders {
        let device = Device::open(folder)?;
        if device.window.is_some() {
            let done = queues(&device, &mut pages, &mut noise);
            println!("rubbish: {} queues {done} rounds", device.name);
        }
    }
    // Devices that only the VMM stands behind: nothing they are told can reach memory that the
    // queues did not name, so this guest outlives it.
    let (own, rest): (Vec<Device>, Vec<Device>) = folders
        .iter()
        .map(|folder| Device::open(folder))
        .collect::<io::Result<Vec<_>>>()?
        .into_iter()
        .partition(|device| device.window.is_some());
    for device in &own {
        window(device, &mut noise);
        println!("rubbish: {} registers", device.name);
    }
    for device in &own {
        configuration(device, &mut noise);
        println!("rubbish: {} configuration", device.name);
    }
    println!("rubbish: what is left is real");
    // A device that is passed through does what it is told: it may write all over this guest.
    for device in &rest {
        memory(&Path::new(PCI).join(&device.name), &mut noise);
        println!("rubbish: {} registers", device.name);
    }
    for device in &rest {
        configuration(device, &mut noise);
        println!("rubbish: {} configuration", device.name);
    }
    println!("rubbish: done");
    Ok(())
}
