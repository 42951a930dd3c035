//! An encrypted block device: the guest reads what it wrote, and the file holds ciphertext.

use std::os::fd::{AsFd, OwnedFd};

use types::disk_key::{DiskKey, KEY_BYTES, SectorCipher};
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::virtio::{
    F_VERSION_1, VirtioPci,
    blk::{Block, engine::EngineChoice},
};

use crate::driver::{Machine, Queue, RAM_SIZE, Registers, enable_msix};

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
/// Guest memory where a test's data begins.
const DATA: u64 = 0x2_0000;
/// Bytes of the disk.
const DISK: u64 = 1 << 20;

struct Disk {
    function: VirtioPci,
    machine: Machine,
    file: OwnedFd,
    queue: Queue,
}

fn key() -> DiskKey {
    DiskKey::from_bytes(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ 0x5a))
}

fn disk(engine: EngineChoice) -> Disk {
    let machine = Machine::new();
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, DISK).unwrap();
    let spec = types::vm::Disk {
        fd: -1,
        more_fds: Vec::new(),
        read_only: false,
        serial: "sealed".to_owned(),
        model: types::vm::DiskModel::VirtioBlk,
        limit: None,
        key: Some(key()),
    };
    let shared = file.as_fd().try_clone_to_owned().unwrap();
    let block = Block::new(&spec, shared, 1, engine, machine.ram.clone()).unwrap();
    let mut function = VirtioPci::new(Box::new(block), 16, &machine.platform).unwrap();
    function.start().unwrap();
    enable_msix(&mut function, 2);
    let queue = Queue::new(&machine.ram, 16, 0x1000);
    assert!(function.negotiate(F_VERSION_1));
    assert!(function.set_queue(0, &queue, 1));
    function.write(0x10, 2, 0);
    function.set_status(15);
    Disk { function, machine, file, queue }
}

impl Disk {
    /// Does one request and returns its status.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u8 {
        let ram = &self.machine.ram;
        ram.write_obj(kind, GuestAddress(HEADER)).unwrap();
        ram.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        ram.write_obj(0xaau8, GuestAddress(STATUS)).unwrap();
        let chain = [&[(HEADER, 16, false)], data, &[(STATUS, 1, true)]].concat();
        self.queue.add(&chain);
        self.function.kick(0);
        self.queue.wait_used();
        self.machine.ram.read_obj(GuestAddress(STATUS)).unwrap()
    }

    fn put(&self, bytes: &[u8]) {
        self.machine.ram.write_slice(bytes, GuestAddress(DATA)).unwrap();
    }

    fn get(&self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.machine.ram.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
        bytes
    }

    fn raw(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        rustix::io::pread(&self.file, &mut bytes, at).unwrap();
        bytes
    }
}

fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect()
}

/// Writes and reads back through buffers that are cut in the middle of sectors, longer than what is
/// encrypted at once.
fn round_trip(engine: EngineChoice) {
    let mut disk = disk(engine);
    let plain = pattern(300 << 10);
    disk.put(&plain);
    let cut = |way| {
        [
            (DATA, 700, way),
            (DATA + 700, (300 << 10) - 700 - 68, way),
            (DATA + (300 << 10) - 68, 68, way),
        ]
    };
    assert_eq!(disk.request(1, 9, &cut(false)), 0);
    assert_eq!(disk.get(plain.len()), plain, "the guest's buffer stays what it was");
    let mut raw = disk.raw(9 * 512, plain.len());
    assert_ne!(raw[..512], plain[..512]);
    SectorCipher::new(&key()).decrypt(9, &mut raw);
    assert_eq!(raw, plain);
    disk.put(&vec![0; plain.len()]);
    assert_eq!(disk.request(0, 9, &cut(true)), 0);
    assert_eq!(disk.get(plain.len()), plain);
}

#[test]
fn what_is_written_comes_back_by_io_uring() {
    round_trip(EngineChoice::Best);
}

#[test]
fn what_is_written_comes_back_by_plain_calls() {
    round_trip(EngineChoice::Plain);
}

#[test]
fn what_was_never_written_reads_as_zeros_and_what_was_zeroed_too() {
    let mut disk = disk(EngineChoice::Best);
    disk.put(&pattern(4096));
    assert_eq!(disk.request(0, 100, &[(DATA, 4096, true)]), 0);
    assert_eq!(disk.get(4096), vec![0; 4096]);
    assert_eq!(disk.request(1, 100, &[(DATA, 4096, false)]), 0);
    assert!(disk.raw(100 * 512, 4096).iter().any(|&byte| byte != 0), "zeros are encrypted too");
    assert_eq!(disk.request(0, 100, &[(DATA, 4096, true)]), 0);
    assert_eq!(disk.get(4096), vec![0; 4096]);
}

#[test]
fn another_key_reads_nothing_of_it() {
    let mut disk = disk(EngineChoice::Best);
    let plain = pattern(512);
    disk.put(&plain);
    assert_eq!(disk.request(1, 0, &[(DATA, 512, false)]), 0);
    let mut raw = disk.raw(0, 512);
    SectorCipher::new(&DiskKey::from_bytes([9; KEY_BYTES])).decrypt(0, &mut raw);
    assert_ne!(raw, plain);
}

/// A read that cannot go where it is wanted, then a write from somewhere else, which gets the same place
/// among the commands in flight.
fn write_behind_a_failed_read(engine: EngineChoice) {
    let mut disk = disk(engine);
    let kept = pattern(512);
    disk.put(&kept);
    let other = DATA + 0x1000;
    disk.machine.ram.write_slice(&[0x33; 512], GuestAddress(other)).unwrap();
    assert_eq!(disk.request(0, 0, &[(DATA, 512, true), (RAM_SIZE, 512, true)]), 1);
    assert_eq!(disk.get(512), kept);
    assert_eq!(disk.request(1, 0, &[(other, 512, false)]), 0);
    assert_eq!(disk.get(512), kept, "nothing is decrypted over memory that no read was for");
}

#[test]
fn a_write_behind_a_failed_read_leaves_memory_alone_by_io_uring() {
    write_behind_a_failed_read(EngineChoice::Best);
}

#[test]
fn a_write_behind_a_failed_read_leaves_memory_alone_by_plain_calls() {
    write_behind_a_failed_read(EngineChoice::Plain);
}

/// A file that ends within a sector: the read moved bytes that do not count.
#[test]
fn a_write_behind_a_read_of_less_than_a_sector_leaves_memory_alone() {
    let mut disk = disk(EngineChoice::Best);
    rustix::fs::ftruncate(&disk.file, 100).unwrap();
    assert_eq!(disk.request(0, 0, &[(DATA, 512, true)]), 1);
    let kept = pattern(512);
    disk.put(&kept);
    let other = DATA + 0x1000;
    disk.machine.ram.write_slice(&[0x33; 512], GuestAddress(other)).unwrap();
    assert_eq!(disk.request(1, 0, &[(other, 512, false)]), 0);
    assert_eq!(disk.get(512), kept);
}
