//! A block device over a file in memory, with its real threads behind their real filters.

use std::os::fd::{AsFd, OwnedFd};

use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::virtio::{
        F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, F_VERSION_1, MAX_CHAIN, VirtioPci,
        blk::{Block, engine::EngineChoice},
    },
    pci::function::PciFunction,
};

use crate::{
    driver::{
        DEVICE, INDIRECT, Machine, NEXT, Queue, RAM_SIZE, Registers, WRITE, enable_msix, wait_for,
        write_descriptor,
    },
    syncs::where_syncs_fail,
};

#[path = "limits.rs"]
mod limits;
#[path = "block_losses.rs"]
mod losses;
#[path = "block_zeroes.rs"]
mod zeroes;

const F_FLUSH: u64 = 1 << 9;
const F_MQ: u64 = 1 << 12;
const F_DISCARD: u64 = 1 << 13;
const SECTORS: u64 = 128;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const DATA: u64 = 0xa000;

struct Disk {
    function: VirtioPci,
    machine: Machine,
    file: OwnedFd,
    queue: Queue,
}

fn file() -> OwnedFd {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SECTORS * 512).unwrap();
    for sector in 0..SECTORS {
        let fill = [u8::try_from(sector).unwrap(); 512];
        rustix::io::pwrite(&file, &fill, sector * 512).unwrap();
    }
    file
}

fn spec(read_only: bool) -> types::vm::Disk {
    types::vm::Disk {
        fd: -1,
        more_fds: Vec::new(),
        read_only,
        serial: "holdfast-disk".to_owned(),
        model: types::vm::DiskModel::VirtioBlk,
        limit: None,
        key: None,
    }
}

/// A started device, without a driver.
fn device(engine: EngineChoice, queues: u16, read_only: bool) -> (VirtioPci, Machine, OwnedFd) {
    let machine = Machine::new();
    let file = file();
    let shared = file.as_fd().try_clone_to_owned().unwrap();
    let block = Block::new(&spec(read_only), shared, queues, engine, machine.ram.clone()).unwrap();
    let block = block.counted(machine.platform.activity.device("blk"));
    let mut function = VirtioPci::new(Box::new(block), 16, &machine.platform).unwrap();
    function.start().unwrap();
    enable_msix(&mut function, u64::from(queues) + 1);
    (function, machine, file)
}

/// A disk with a driver on queue 0.
fn disk(engine: EngineChoice, features: u64) -> Disk {
    let (mut function, machine, file) = device(engine, 1, false);
    let queue = start_driver(&mut function, &machine, features);
    Disk { function, machine, file, queue }
}

fn start_driver(function: &mut VirtioPci, machine: &Machine, features: u64) -> Queue {
    let queue = Queue::new(&machine.ram, 16, 0x1000);
    for ring in [queue.table, queue.avail, queue.used] {
        machine.ram.write_slice(&[0; 0x1000], GuestAddress(ring)).unwrap();
    }
    assert!(function.negotiate(F_VERSION_1 | features));
    assert!(function.set_queue(0, &queue, 1));
    function.write(0x10, 2, 0);
    function.set_status(15);
    queue
}

impl Disk {
    fn header(&self, at: u64, kind: u32, sector: u64) {
        self.machine.ram.write_obj(kind, GuestAddress(at)).unwrap();
        self.machine.ram.write_obj(sector, GuestAddress(at + 8)).unwrap();
        self.machine.ram.write_obj(0xaau8, GuestAddress(STATUS)).unwrap();
    }

    /// Does one request; returns status and written length.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> (u8, u32) {
        self.header(HEADER, kind, sector);
        let chain = [&[(HEADER, 16, false)], data, &[(STATUS, 1, true)]].concat();
        let head = self.queue.add(&chain);
        self.function.kick(0);
        let (used, length) = self.queue.wait_used();
        assert_eq!(used, head);
        (self.status(), length)
    }

    fn status(&self) -> u8 {
        self.machine.ram.read_obj(GuestAddress(STATUS)).unwrap()
    }

    fn memory(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.machine.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn sector(&self, sector: u64) -> [u8; 512] {
        let mut bytes = [0; 512];
        rustix::io::pread(&self.file, &mut bytes, sector * 512).unwrap();
        bytes
    }

    /// The device has given up and said so, and starts again after a reset.
    fn assert_broken_until_reset(mut self) {
        wait_for(|| self.function.status() & 64 != 0);
        assert_eq!(self.queue.used_index(), self.queue.seen_used, "nothing is given back");
        assert!(self.machine.fired(0) > 0, "the configuration vector fires");
        self.function.set_status(0);
        wait_for(|| self.function.status() == 0);
        self.queue = start_driver(&mut self.function, &self.machine, F_FLUSH);
        assert_eq!(self.request(0, 5, &[(DATA, 512, true)]), (0, 513));
    }
}

fn reads_and_writes(engine: EngineChoice) {
    let mut disk = disk(engine, F_FLUSH | F_RING_INDIRECT_DESC | F_RING_EVENT_IDX);
    assert_eq!(disk.request(0, 7, &[(DATA, 512, true), (DATA + 0x2000, 1024, true)]), (0, 1537));
    assert_eq!(disk.memory(DATA, 512), [7; 512]);
    assert_eq!(disk.memory(DATA + 0x2000, 1024), [[8; 512], [9; 512]].concat());
    disk.machine.ram.write_slice(&[0x5a; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(disk.request(1, 127, &[(DATA, 512, false)]), (0, 1));
    assert_eq!(disk.sector(127), [0x5a; 512]);
    assert_eq!(disk.request(4, 0, &[]), (0, 1));
    assert!(disk.machine.fired(1) > 0);
}

#[test]
fn reads_writes_and_flushes_by_io_uring() {
    reads_and_writes(EngineChoice::Best);
}

#[test]
fn reads_writes_and_flushes_by_plain_calls() {
    reads_and_writes(EngineChoice::Plain);
}

#[test]
fn a_driver_without_flush_gets_durable_writes() {
    for engine in [EngineChoice::Best, EngineChoice::Plain] {
        let mut disk = disk(engine, 0);
        disk.machine.ram.write_slice(&[1; 512], GuestAddress(DATA)).unwrap();
        assert_eq!(disk.request(1, 0, &[(DATA, 512, false)]), (0, 1));
        assert_eq!(disk.sector(0), [1; 512]);
    }
}

/// Where no sync succeeds, neither does a change that has to be durable.
#[test]
fn a_driver_without_flush_gets_durable_discards() {
    let discard = |features| {
        where_syncs_fail(libc::EIO, move || {
            let mut disk = disk(EngineChoice::Plain, features);
            let range = [[8u8, 0, 0, 0, 0, 0, 0, 0], [16, 0, 0, 0, 0, 0, 0, 0]].concat();
            disk.machine.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
            disk.request(11, 0, &[(DATA, 16, false)]).0
        })
    };
    assert_eq!([discard(F_DISCARD), discard(F_DISCARD | F_FLUSH)], [1, 0]);
}

/// A flush that the kernel had no means to do is started again, but not for ever.
#[test]
fn a_flush_that_is_never_done_fails_in_the_end() {
    for error in [libc::ECANCELED, libc::EINTR] {
        let flush = || disk(EngineChoice::Plain, F_FLUSH).request(4, 0, &[]).0;
        assert_eq!(where_syncs_fail(error, flush), 1);
    }
}

#[test]
fn a_discard_is_answered_once_behind_its_sync() {
    let mut disk = disk(EngineChoice::Best, F_DISCARD);
    let range = [[8u8, 0, 0, 0, 0, 0, 0, 0], [16, 0, 0, 0, 0, 0, 0, 0]].concat();
    disk.machine.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
    assert_eq!(disk.request(11, 0, &[(DATA, 16, false)]), (0, 1));
    assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
    assert_eq!(disk.queue.used_index(), disk.queue.seen_used);
}

#[test]
fn the_serial_number_is_the_id() {
    let mut disk = disk(EngineChoice::Best, 0);
    assert_eq!(disk.request(8, 0, &[(DATA, 20, true)]), (0, 21));
    assert_eq!(disk.memory(DATA, 20), b"holdfast-disk\0\0\0\0\0\0\0");
}

#[test]
fn discarded_sectors_read_as_zeroes() {
    for engine in [EngineChoice::Best, EngineChoice::Plain] {
        let mut disk = disk(engine, F_DISCARD);
        let range = [[8u8, 0, 0, 0, 0, 0, 0, 0], [16, 0, 0, 0, 0, 0, 0, 0]].concat();
        disk.machine.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
        assert_eq!(disk.request(11, 0, &[(DATA, 16, false)]), (0, 1));
        assert_eq!((disk.sector(7), disk.sector(8)), ([7; 512], [0; 512]));
        assert_eq!((disk.sector(23), disk.sector(24)), ([0; 512], [24; 512]));
    }
}

#[test]
fn indirect_tables_are_followed() {
    let mut disk = disk(EngineChoice::Best, F_RING_INDIRECT_DESC);
    disk.header(HEADER, 0, 3);
    let table = 0xc000;
    write_descriptor(&disk.machine.ram, table, (HEADER, 16, NEXT, 1));
    write_descriptor(&disk.machine.ram, table + 16, (DATA, 512, NEXT | WRITE, 2));
    write_descriptor(&disk.machine.ram, table + 32, (STATUS, 1, WRITE, 0));
    disk.queue.write_descriptor(0, (table, 48, INDIRECT, 0));
    disk.queue.offer(0);
    disk.function.kick(0);
    assert_eq!(disk.queue.wait_used(), (0, 513));
    assert_eq!((disk.status(), disk.memory(DATA, 512)), (0, vec![3; 512]));
}

#[test]
fn many_requests_at_once_all_come_back() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH | F_RING_EVENT_IDX);
    for round in 0..200u64 {
        for slot in 0..5 {
            disk.header(HEADER + 16 * slot, 0, (round + slot) % SECTORS);
            let place = DATA + 0x400 * slot;
            let chain = [(HEADER + 16 * slot, 16, false), (place, 512, true), (STATUS, 1, true)];
            disk.queue.add(&chain);
        }
        disk.function.kick(0);
        let written: Vec<u32> = (0..5).map(|_| disk.queue.wait_used().1).collect();
        assert_eq!(written, [513; 5]);
        let first = u8::try_from((round + 4) % SECTORS).unwrap();
        assert_eq!(disk.memory(DATA + 0x1000, 512), vec![first; 512]);
    }
}

#[test]
fn each_queue_has_a_thread_of_its_own() {
    let (mut function, machine, _file) = device(EngineChoice::Best, 4, false);
    assert!(function.negotiate(F_VERSION_1 | F_MQ));
    let mut queues: Vec<Queue> =
        (0..4).map(|index| Queue::new(&machine.ram, 16, 0x10000 * (1 + index))).collect();
    for (index, queue) in (0u16..).zip(&queues) {
        assert!(function.set_queue(index, queue, u64::from(index) + 1));
    }
    function.set_status(15);
    for (index, queue) in (0u16..).zip(&mut queues) {
        let header = HEADER + 16 * u64::from(index);
        machine.ram.write_obj(u64::from(index), GuestAddress(header + 8)).unwrap();
        let data = 0x60000 + 0x1000 * u64::from(index);
        queue.add(&[(header, 16, false), (data, 512, true), (data + 512, 1, true)]);
        function.kick(index);
        assert_eq!(queue.wait_used(), (0, 513));
        assert_eq!(
            machine.ram.read_obj::<u8>(GuestAddress(data)).unwrap(),
            u8::try_from(index).unwrap()
        );
    }
}

#[test]
fn configuration_says_what_the_disk_is() {
    let (mut function, _machine, _file) = device(EngineChoice::Plain, 2, false);
    let fields = [(0, 8), (12, 4), (20, 4), (24, 1), (26, 2), (34, 2), (40, 4), (60, 4)];
    let values = fields.map(|(offset, length)| function.read(DEVICE + offset, length));
    assert_eq!(values, [SECTORS, 254, 512, 3, 8, 2, 1, 0]);
}

#[test]
fn a_read_only_disk_says_so_and_refuses_writes() {
    let (mut function, machine, file) = device(EngineChoice::Best, 1, true);
    assert_eq!(function.read(0x04, 4) & (1 << 5), 1 << 5);
    let queue = start_driver(&mut function, &machine, 1 << 5);
    let mut disk = Disk { function, machine, file, queue };
    assert_eq!(disk.request(1, 0, &[(DATA, 512, false)]), (1, 1));
    assert_eq!(disk.sector(0), [0; 512]);
    assert_eq!(disk.request(0, 1, &[(DATA, 512, true)]), (0, 513));
}

#[test]
fn bad_requests_fail_alone() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    let outside = 0x4000_0000;
    assert_eq!(disk.request(0, SECTORS, &[(DATA, 512, true)]), (1, 1));
    assert_eq!(disk.request(0, u64::MAX, &[(DATA, 512, true)]), (1, 1));
    assert_eq!(disk.request(0, 0, &[(DATA, 100, true)]), (1, 1));
    assert_eq!(disk.request(0, 0, &[(outside, 512, true)]), (1, 1));
    assert_eq!(disk.request(1, 0, &[(RAM_SIZE - 256, 512, false)]), (1, 1));
    assert_eq!(disk.request(0, 0, &[(u64::MAX - 255, 512, true)]), (1, 1));
    assert_eq!(disk.request(99, 0, &[]), (2, 1));
    assert_eq!(disk.request(11, 0, &[(DATA, 16, false)]), (2, 1));
    assert_eq!(disk.request(0, 1, &[(DATA, 512, true)]), (0, 513));
    assert_eq!(disk.function.status(), 15);
    // They are the guest's own doing.
    let counted = disk.machine.platform.activity.read();
    assert_eq!((counted[0].errors, counted[0].media_errors), (8, 0));
}

#[test]
fn a_file_that_shrank_fails_the_read() {
    for engine in [EngineChoice::Best, EngineChoice::Plain] {
        let mut disk = disk(engine, F_FLUSH);
        rustix::fs::ftruncate(&disk.file, 256).unwrap();
        assert_eq!(disk.request(0, 0, &[(DATA, 512, true)]), (1, 1));
        let counted = disk.machine.platform.activity.read();
        assert_eq!((counted[0].errors, counted[0].media_errors), (1, 1));
    }
}

#[test]
fn a_chain_that_loops_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.queue.write_descriptor(0, (HEADER, 16, NEXT, 1));
    disk.queue.write_descriptor(1, (DATA, 512, NEXT, 0));
    disk.queue.offer(0);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn a_chain_that_leaves_its_table_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Plain, F_FLUSH);
    disk.queue.write_descriptor(0, (HEADER, 16, NEXT, 16));
    disk.queue.offer(0);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn a_head_outside_the_table_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.queue.offer(16);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn an_index_that_runs_ahead_breaks_the_queue() {
    let disk = disk(EngineChoice::Best, F_FLUSH);
    disk.queue.set_avail_index(17);
    let mut disk = disk;
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn a_table_within_a_table_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH | F_RING_INDIRECT_DESC);
    write_descriptor(&disk.machine.ram, 0xc000, (0xc000, 16, INDIRECT, 0));
    disk.queue.write_descriptor(0, (0xc000, 16, INDIRECT, 0));
    disk.queue.offer(0);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

/// Where a table is that is longer than the ring.
const TABLE: u64 = 0x2_0000;

#[test]
fn a_table_with_too_many_entries_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH | F_RING_INDIRECT_DESC);
    let entries = MAX_CHAIN + 1;
    for index in 0..entries {
        let at = TABLE + 16 * u64::from(index);
        let next = if index + 1 < entries { NEXT } else { WRITE };
        write_descriptor(&disk.machine.ram, at, (DATA, 16, next, index + 1));
    }
    disk.queue.write_descriptor(0, (TABLE, u32::from(entries) * 16, INDIRECT, 0));
    disk.queue.offer(0);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

/// What viostor offers for a transfer whose pages lie apart: a header, 513 pieces, and the status.
#[test]
fn a_table_longer_than_the_ring_is_served() {
    let longest = MAX_CHAIN - 2;
    for (engine, pieces) in
        [(EngineChoice::Best, 513), (EngineChoice::Plain, 513), (EngineChoice::Best, longest)]
    {
        let mut disk = disk(engine, F_FLUSH | F_RING_INDIRECT_DESC);
        for kind in [0, 1] {
            disk.header(HEADER, kind, 0);
            let descriptor = |disk: &Disk, index: u16, of: (u64, u32, u16)| {
                let at = TABLE + 16 * u64::from(index);
                write_descriptor(&disk.machine.ram, at, (of.0, of.1, of.2, index + 1));
            };
            descriptor(&disk, 0, (HEADER, 16, NEXT));
            let writable = if kind == 0 { WRITE } else { 0 };
            // 32 bytes each, which is whole sectors in all but for the last ones.
            let data = pieces - pieces % 16;
            for piece in 0..data {
                let place = DATA + 64 * u64::from(data - 1 - piece);
                if kind == 1 {
                    let fill = [u8::try_from(piece / 16).unwrap() ^ 0x80; 32];
                    disk.machine.ram.write_slice(&fill, GuestAddress(place)).unwrap();
                }
                descriptor(&disk, 1 + piece, (place, 32, NEXT | writable));
            }
            let mut last = 1 + data;
            while last <= pieces {
                descriptor(&disk, last, (DATA, 0, NEXT | writable));
                last += 1;
            }
            descriptor(&disk, last, (STATUS, 1, WRITE));
            disk.queue.write_descriptor(0, (TABLE, u32::from(last + 1) * 16, INDIRECT, 0));
            disk.queue.offer(0);
            disk.function.kick(0);
            disk.queue.wait_used();
            assert_eq!(disk.status(), 0, "{engine:?} {kind} {pieces}");
            for piece in (0..data).filter(|_| kind == 0) {
                let place = DATA + 64 * u64::from(data - 1 - piece);
                assert_eq!(disk.memory(place, 32), [u8::try_from(piece / 16).unwrap(); 32]);
            }
        }
        for sector in 0..u64::from(pieces / 16) {
            assert_eq!(disk.sector(sector), [u8::try_from(sector).unwrap() ^ 0x80; 512]);
        }
    }
}

/// NetBSD's driver and edk2's read no status after a reset.
#[test]
fn a_driver_that_goes_on_at_once_after_its_reset_finds_the_device() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    for round in 0..200u64 {
        // One request is on its way while the device is reset.
        disk.header(HEADER, 0, 1);
        disk.queue.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        disk.function.kick(0);
        disk.function.set_status(0);
        disk.queue = start_driver(&mut disk.function, &disk.machine, F_FLUSH);
        let sector = round % SECTORS;
        assert_eq!(disk.request(0, sector, &[(DATA, 512, true)]), (0, 513), "round {round}");
        assert_eq!(disk.memory(DATA, 512), [u8::try_from(sector).unwrap(); 512]);
    }
}

#[test]
fn a_chain_without_a_status_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.queue.add(&[(HEADER, 16, false)]);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn a_readable_part_behind_a_writable_one_breaks_the_queue() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.queue.add(&[(STATUS, 1, true), (HEADER, 16, false)]);
    disk.function.kick(0);
    disk.assert_broken_until_reset();
}

#[test]
fn a_size_written_to_a_running_queue_changes_nothing() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.function.write(0x16, 2, 0);
    disk.function.write(0x18, 2, 256);
    disk.function.write(0x20, 4, 0xf000);
    for sector in 0..40u8 {
        assert_eq!(disk.request(0, sector.into(), &[(DATA, 512, true)]), (0, 513));
        assert_eq!(disk.memory(DATA, 512), [sector; 512]);
    }
}

/// Bus Master Enable, PCI 3.0 §6.2.2.
const MASTER: [u8; 2] = [6, 0];
const NO_MASTER: [u8; 2] = [2, 0];

/// A disk from which bus mastering was taken, and a request that nobody looks at.
fn without_master() -> Disk {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.function.write_config(4, &MASTER);
    assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
    disk.function.write_config(4, &NO_MASTER);
    assert!(disk.function.is_held(), "as soon as it is taken");
    disk.queue.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    disk.function.kick(0);
    disk
}

/// Linux' virtio_pci gives it back before it resets what another kernel left running.
#[test]
fn without_bus_mastering_memory_is_left_alone_until_a_reset() {
    let mut disk = without_master();
    // The machine waits meanwhile, and goes on.
    disk.function.hold();
    assert!(disk.function.is_held());
    disk.function.go_on();
    assert!(disk.function.is_held());
    disk.function.write_config(4, &MASTER);
    disk.function.kick(0);
    disk.function.hold();
    disk.function.go_on();
    assert!(disk.function.is_held());
    assert_eq!(disk.queue.used_index(), disk.queue.seen_used);
}

#[test]
fn a_reset_ends_the_wait_for_bus_mastering() {
    let mut disk = without_master();
    disk.function.set_status(0);
    wait_for(|| disk.function.status() == 0);
    assert_eq!(disk.queue.used_index(), disk.queue.seen_used);
    disk.queue = start_driver(&mut disk.function, &disk.machine, F_FLUSH);
    assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
    // The machine can wait for it as for any other.
    disk.function.hold();
    wait_for(|| disk.function.is_held());
    disk.function.go_on();
    assert_eq!(disk.request(0, 5, &[(DATA, 512, true)]), (0, 513));
}

#[test]
fn taking_bus_mastering_while_the_machine_waits_is_not_undone_when_it_goes_on() {
    let mut disk = disk(EngineChoice::Best, F_FLUSH);
    disk.function.write_config(4, &MASTER);
    disk.function.hold();
    disk.function.write_config(4, &NO_MASTER);
    disk.function.go_on();
    assert!(disk.function.is_held());
    disk.header(HEADER, 0, 5);
    disk.queue.add(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    disk.function.kick(0);
    disk.function.set_status(0);
    wait_for(|| disk.function.status() == 0);
    assert_eq!(disk.queue.used_index(), disk.queue.seen_used);
}

#[test]
fn disks_that_cannot_be_are_refused() {
    let machine = Machine::new();
    let refusal = |spec: &types::vm::Disk, file: OwnedFd| {
        let block = Block::new(spec, file, 1, EngineChoice::Plain, machine.ram.clone());
        block.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let empty = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let read_only = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    let long = types::vm::Disk { serial: "x".repeat(21), ..spec(false) };
    assert!(refusal(&spec(true), null).contains("0 bytes"));
    assert!(refusal(&spec(false), empty).contains("0 bytes"));
    assert!(refusal(&spec(false), read_only).contains("read-only"));
    assert!(refusal(&long, file()).contains("21 bytes"));
}
