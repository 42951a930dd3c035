//! What races with a device are made of: a thread that changes what the device looks at, and memory
//! and a disk that show whether they were touched beyond their ends.

#![allow(dead_code, reason = "each user needs a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(missing_docs, unreachable_pub, reason = "not part of any crate's interface")]

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MmapRegion, VolatileMemory};
use vmm::sys::memory::GuestRam;

use super::virtio::{HIGH_RAM, RAM_SIZE};

/// How often a device is served while everything changes.
pub const RACE_ROUNDS: u32 = 64;

/// Where a change goes, and its two bytes.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    pub place: u16,
    pub value: [u8; 2],
}

/// Returns what is there before the race, and the changes.
pub fn halves(data: &[u8]) -> (&[u8], &[u8]) {
    data.split_at(data.len() / 2)
}

/// Serves a device while another thread makes all of `changes`: once before, and then again and
/// again.
pub fn race<T>(changes: &[u8], apply: impl Fn(Change) + Sync, serve: impl FnOnce() -> T) -> T {
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let mover = scope.spawn(|| {
            loop {
                for [low, high, first, second] in changes.as_chunks::<4>().0 {
                    let place = u16::from_le_bytes([*low, *high]);
                    apply(Change { place, value: [*first, *second] });
                }
                begun.store(true, Ordering::Relaxed);
                if over.load(Ordering::Relaxed) || changes.len() < 4 {
                    break;
                }
            }
        });
        let ends = EndsWith(&over);
        until(|| begun.load(Ordering::Relaxed));
        let served = serve();
        drop(ends);
        // The scope waits for the work only; what the thread itself had is given back by now.
        mover.join().unwrap();
        served
    })
}

/// Ends the other thread, also when the device fails the test.
struct EndsWith<'a>(&'a AtomicBool);

impl Drop for EndsWith<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits for what the kernel finishes when it likes.
pub fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(8);
    while !done() {
        assert!(Instant::now() < deadline, "the device does not come to an end");
        thread::yield_now();
    }
}

/// What lies behind the end of the disk, over and over.
const BEHIND_DISK: [u8; 16] = *b"\xf1not the guest's";
/// What lies around the parts of memory.
const AROUND_MEMORY: [u8; 16] = *b"\xf2around a memory";
/// Bytes of either.
const MARGIN: usize = 64 * 1024;

/// Guest memory with something around its parts that no device may see or change.
pub struct Walled {
    pub ram: GuestRam,
    walls: [MmapRegion; 3],
}

impl Walled {
    pub fn new() -> Self {
        let part = |bytes| MmapRegion::new(bytes).unwrap();
        let size = usize::try_from(RAM_SIZE).unwrap();
        // Linux puts each mapping next to the one before, where there is room.
        let (above, high, between, low, below) =
            (part(MARGIN), part(size), part(MARGIN), part(size), part(MARGIN));
        let walls = [above, between, below];
        for wall in &walls {
            wall.as_volatile_slice().copy_from(&AROUND_MEMORY.repeat(MARGIN / 16));
        }
        let region = |part, at| GuestRegionMmap::new(part, GuestAddress(at)).unwrap();
        let ram = GuestRam::from_regions(vec![region(low, 0), region(high, HIGH_RAM)]).unwrap();
        Self { ram, walls }
    }
}

/// A disk with something behind its end that no guest may see or change.
pub struct Guarded {
    pub file: OwnedFd,
    bytes: u64,
}

impl Guarded {
    pub fn new(contents: &[u8]) -> Self {
        let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes = contents.len() as u64;
        let all = [contents, &BEHIND_DISK.repeat(MARGIN / 16)].concat();
        assert_eq!(rustix::io::pwrite(&file, &all, 0), Ok(all.len()));
        Self { file, bytes }
    }

    pub fn contents(&self) -> Vec<u8> {
        let mut contents = vec![0; usize::try_from(self.bytes).unwrap()];
        rustix::io::pread(&self.file, &mut contents, 0).unwrap();
        contents
    }

    /// Nothing moved between the disk and what is beyond memory, or between memory and what is
    /// beyond the disk.
    pub fn assert_guarded(&self, memory: &Walled) {
        let size = u64::try_from(rustix::fs::fstat(&self.file).unwrap().st_size).unwrap();
        assert_eq!(size, self.bytes + MARGIN as u64, "the disk keeps its size");
        let mut margin = vec![0; MARGIN];
        rustix::io::pread(&self.file, &mut margin, self.bytes).unwrap();
        assert!(margin == BEHIND_DISK.repeat(MARGIN / 16), "something behind the disk was written");
        assert!(!holds(&self.contents(), AROUND_MEMORY), "something around memory was read");
        for wall in &memory.walls {
            wall.as_volatile_slice().copy_to(&mut margin);
            let kept = margin == AROUND_MEMORY.repeat(MARGIN / 16);
            assert!(kept, "something around memory was written");
        }
        let mut image = vec![0; usize::try_from(RAM_SIZE).unwrap()];
        for region in [0, HIGH_RAM] {
            memory.ram.read_slice(&mut image, GuestAddress(region)).unwrap();
            assert!(!holds(&image, BEHIND_DISK), "something behind the disk was read");
            assert!(!holds(&image, AROUND_MEMORY), "something around memory was read");
        }
    }
}

/// Returns whether an aligned word of `image` is of a copy of `pattern`, from whatever byte on.
fn holds(image: &[u8], pattern: [u8; 16]) -> bool {
    let pattern = u128::from_le_bytes(pattern);
    let turned: [u128; 16] =
        std::array::from_fn(|byte| pattern.rotate_left(8 * u32::try_from(byte).unwrap()));
    let words = image.as_chunks::<16>().0.iter().map(|word| u128::from_le_bytes(*word));
    words.filter(|word| *word != 0).any(|word| turned.contains(&word))
}
