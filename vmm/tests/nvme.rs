//! The NVMe controller behind its PCI function, with its real thread behind its real filter, driven
//! as a driver does, and as no driver should.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "nvme/admin.rs"]
mod admin;
#[path = "common/nvme.rs"]
mod nvme;
#[path = "nvme/queues.rs"]
mod queues;
#[path = "common/syncs.rs"]
mod syncs;
#[path = "common/virtio.rs"]
mod virtio;

use std::{
    fs,
    os::fd::AsFd,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nvme::{ACQ, ASQ, BLOCKS, DATA, Driver, ENTRIES, Pair, QUEUES, Request, spec, transfer};
use proptest::prelude::*;
use syncs::where_syncs_fail;
use types::vm::{Disk, Rate, RateLimit};
use virtio::{Machine, wait_for};
use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::{
        nvme::{
            Nvme,
            controller::{Controller, DEPTH, Progress},
            identify::MAX_TRANSFER,
            shared::Shared,
        },
        throttle::{Admission, Limits},
        virtio::blk::{
            engine::{Engine, EngineChoice},
            request::Access,
        },
    },
    irq::InterruptSource,
    pci::function::PciFunction,
};

const READ: u8 = 2;
const WRITE: u8 = 1;
const FLUSH: u8 = 0;

fn reads_and_writes(engine: EngineChoice) {
    let mut driver = Driver::on(engine, None);
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(READ, 7, 2)).status, 0);
    assert_eq!(driver.memory(DATA, 1024), [[7; 512], [8; 512]].concat());
    driver.machine.ram.write_slice(&[0x5a; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(driver.command(&mut pair, transfer(WRITE, 127, 1)).status, 0);
    assert_eq!(driver.block(127), [0x5a; 512]);
    let flush = Request { opcode: FLUSH, namespace: u32::MAX, ..Request::default() };
    assert_eq!(driver.command(&mut pair, flush).status, 0);
    assert!(driver.machine.fired(1) > 0, "the queue's vector fires");
    let done = driver.machine.platform.activity.read().remove(0);
    assert_eq!((done.name.as_str(), done.requests, done.errors), ("nvme0", 3, 0));
    assert_eq!((done.read_bytes, done.written_bytes), (1024, 512));
    assert!(done.interrupts > 0);
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
fn transfers_follow_page_lists() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    let list = DATA + 0x8000;
    for (index, page) in [3u64, 1, 2].into_iter().enumerate() {
        let at = GuestAddress(list + 8 * index as u64);
        driver.machine.ram.write_obj(DATA + 0x1000 * page, at).unwrap();
    }
    let request = Request { prps: (DATA + 0xe00, list), ..transfer(READ, 0, 25) };
    assert_eq!(driver.command(&mut pair, request).status, 0);
    assert_eq!(driver.memory(DATA + 0xe00, 512), [0; 512]);
    assert_eq!(driver.memory(DATA + 0x3000, 512), [1; 512]);
    assert_eq!(driver.memory(DATA + 0x1000, 512), [9; 512]);
    assert_eq!(driver.memory(DATA + 0x2e00, 512), [24; 512]);
}

#[test]
fn zeroed_and_deallocated_blocks_read_as_zeroes() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(8, 8, 8)).status, 0);
    assert_eq!([7, 8, 15, 16].map(|b| driver.block(b)[0]), [7, 0, 0, 16]);
    let range = |blocks: u32, first: u64| {
        [&[0; 4][..], &blocks.to_le_bytes(), &first.to_le_bytes()].concat()
    };
    let list = [range(8, 24), range(8, 40)].concat();
    driver.machine.ram.write_slice(&list, GuestAddress(DATA)).unwrap();
    let mut discard = transfer(9, 1, 1);
    discard.dwords = [1, 1 << 2, 0, 0, 0, 0];
    assert_eq!(driver.command(&mut pair, discard).status, 0);
    assert_eq!([23, 24, 31, 32, 40, 47, 48].map(|b| driver.block(b)[0]), [23, 0, 0, 32, 0, 0, 48]);
}

/// NVMe 1.4 §6.17 (FUA of Write Zeroes), §5.21.1.6 (no write cache): where no sync succeeds, neither does
/// a change that has to be durable.
#[test]
fn zeroes_and_deallocations_are_durable_when_asked_or_when_there_is_no_cache() {
    let statuses = |cache: u32| {
        where_syncs_fail(libc::EIO, move || {
            let mut driver = Driver::on(EngineChoice::Plain, None);
            let mut pair = driver.pair(1);
            // With the cache off what was written before has to be durable, too.
            let expected = if cache == 0 { 0x280 } else { 0 };
            assert_eq!(driver.admin(9, 0, &[6, cache]), (expected, 0));
            let mut forced = transfer(8, 8, 8);
            forced.dwords[2] |= 1 << 30;
            let range = [[0u8, 0, 0, 0, 8, 0, 0, 0], [24, 0, 0, 0, 0, 0, 0, 0]].concat();
            driver.machine.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
            let mut discard = transfer(9, 0, 1);
            discard.dwords = [0, 1 << 2, 0, 0, 0, 0];
            [forced, transfer(8, 8, 8), discard].map(|it| driver.command(&mut pair, it).status)
        })
    };
    assert_eq!([statuses(1), statuses(0)], [[0x280, 0, 0], [0x280; 3]]);
}

#[test]
fn durable_zeroes_are_completed_once() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    let mut forced = transfer(8, 8, 8);
    forced.dwords[2] |= 1 << 30;
    assert_eq!(driver.command(&mut pair, forced).status, 0);
    assert_eq!(driver.command(&mut pair, transfer(READ, 7, 2)).status, 0);
    assert_eq!(driver.memory(DATA, 1024), [[7; 512], [0; 512]].concat());
    assert_eq!(pair.poll(&driver.machine.ram), None);
}

#[test]
fn bad_commands_fail_alone() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    let outside = Request { prps: (0x4000_0000, 0), ..transfer(READ, 0, 1) };
    let odd = Request { prps: (DATA + 2, 0), ..transfer(READ, 0, 1) };
    let list = Request { flags: 0x40, ..transfer(READ, 0, 1) };
    let last = u32::try_from(BLOCKS).unwrap();
    let table = [
        (transfer(READ, last, 1), 0x4080),
        (transfer(WRITE, last - 1, 2), 0x4080),
        (transfer(0x7f, 0, 1), 0x4001),
        (Request { namespace: 2, ..transfer(READ, 0, 1) }, 0x400b),
        (outside, 0x4004),
        (odd, 0x4013),
        (list, 0x4002),
        (transfer(READ, 0, 1), 0),
    ];
    let found = table.map(|(request, _)| driver.command(&mut pair, request).status);
    assert_eq!(found, table.map(|(_, status)| status));
    // They are the guest's own doing.
    assert_eq!(driver.machine.platform.activity.read()[0].media_errors, 0);
    // The log tells of them, the newest first.
    assert_eq!(driver.admin(2, 0, &[0xff << 16 | 1]), (0, 0));
    let log = driver.memory(DATA, 64);
    assert_eq!((log[0], log[8], u16::from_le_bytes([log[12], log[13]])), (7, 1, 0x8004));
}

#[test]
fn a_file_that_shrank_fails_the_read() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    rustix::fs::ftruncate(&driver.file, 512).unwrap();
    assert_eq!(driver.command(&mut pair, transfer(READ, 1, 1)).status, 0x281);
    assert_eq!(driver.command(&mut pair, transfer(READ, 0, 2)).status, 0x281);
    let counted = driver.machine.platform.activity.read();
    assert_eq!((counted[0].errors, counted[0].media_errors), (2, 2));
}

#[test]
fn a_read_only_disk_takes_no_change() {
    let disk = Disk { read_only: true, ..spec(None) };
    let mut driver = Driver::off(EngineChoice::Best, &disk, 1);
    driver.enable();
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(WRITE, 0, 1)).status, 0x4020);
    assert_eq!(driver.command(&mut pair, transfer(READ, 3, 1)).status, 0);
}

#[test]
fn many_commands_at_once_all_come_back_on_their_queues() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pairs = [driver.pair(1), driver.pair(2)];
    for round in 0..100u32 {
        for pair in &mut pairs {
            let mut tail = 0;
            for slot in 0..10 {
                let data = DATA + 0x200 * u64::from(slot);
                let request =
                    Request { prps: (data, 0), ..transfer(READ, (round + slot) % 128, 1) };
                tail = pair.put(&driver.machine.ram, request).1;
            }
            let pair: &_ = pair;
            driver.ring(pair, tail);
        }
        for pair in &mut pairs {
            let status: Vec<u16> = (0..10).map(|_| driver.wait(pair).status).collect();
            assert_eq!(status, [0; 10]);
        }
        let expected = u8::try_from((round + 9) % 128).unwrap();
        assert_eq!(driver.memory(DATA + 0x1200, 512), vec![expected; 512]);
    }
}

#[test]
fn identify_and_features_tell_what_there_is() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    assert_eq!(driver.admin(6, 0, &[1]), (0, 0));
    assert_eq!(&driver.memory(DATA + 4, 20), b"holdfast            ");
    assert_eq!(driver.admin(6, 1, &[0]), (0, 0));
    assert_eq!(driver.memory(DATA, 8), BLOCKS.to_le_bytes());
    assert_eq!(driver.admin(6, 0, &[2]), (0, 0));
    assert_eq!(driver.memory(DATA, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.admin(6, 1, &[3]), (0, 0));
    assert_eq!(driver.memory(DATA, 2), [3, 16]);
    assert_eq!(driver.admin(6, 2, &[0]).0, 0x400b);
    assert_eq!(driver.admin(6, u32::MAX, &[2]).0, 0x400b);
    assert_eq!(driver.admin(6, 1, &[0x1c]).0, 0x4002);
    assert_eq!(driver.admin(9, 0, &[7, 0x000f_000f]), (0, 0x0001_0001));
    assert_eq!(driver.admin(9, 0, &[7, 0xffff]).0, 0x4002);
    assert_eq!(driver.admin(9, 0, &[6, 0]), (0, 0));
    assert_eq!(driver.admin(10, 0, &[6]), (0, 0));
    assert_eq!(driver.admin(9, 0, &[9, 1 << 16 | 2]), (0, 0));
    assert_eq!(driver.admin(10, 0, &[9, 2]), (0, 1 << 16 | 2));
    assert_eq!(driver.admin(10, 0, &[9, 3]).0, 0x4002);
    assert_eq!(driver.admin(9, 0, &[1 << 31 | 6]).0, 0x410d);
    assert_eq!(driver.admin(10, 0, &[0x7f]).0, 0x4002);
    assert_eq!(driver.admin(2, 0, &[127 << 16 | 2]), (0, 0));
    assert_eq!(driver.admin(2, 0, &[127 << 16 | 3]), (0, 0));
    assert_eq!(driver.admin(2, 0, &[127 << 16 | 0x70]).0, 0x4109);
    assert_eq!(driver.admin(2, 0, &[2, 0, 516]).0, 0x4002);
    assert_eq!(driver.admin(0x7f, 0, &[]).0, 0x4001);
}

/// NVMe 1.4 §5.13 (Select, figure 161), §5.21 (namespaces), figure 276 (thresholds).
#[test]
fn features_have_defaults_and_abilities_and_belong_to_controller_or_namespace() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    assert_eq!(driver.admin(9, 0, &[6, 0]), (0, 0));
    let cache = [0, 1, 2, 3].map(|select: u32| driver.admin(10, 0, &[select << 8 | 6]));
    assert_eq!(cache, [(0, 0), (0, 1), (0, 1), (0, 1 << 2)]);
    assert_eq!(driver.admin(10, 0, &[4 << 8 | 6]).0, 0x4002);
    assert_eq!(driver.admin(9, 1, &[6, 1]).0, 0x410f, "the cache is no namespace's");
    assert_eq!(driver.admin(9, 0, &[5, 7]).0, 0x400b, "error recovery is a namespace's");
    assert_eq!(driver.admin(9, 1, &[5, 7]), (0, 0));
    assert_eq!(driver.admin(10, 1, &[5]), (0, 7));
    assert_eq!(driver.admin(10, 1, &[3 << 8 | 5]), (0, 0b110));
    let under = 1 << 20;
    assert_eq!(driver.admin(9, 0, &[4, under | 280]), (0, 0));
    let thresholds = [0, under, 3 << 16].map(|which| driver.admin(10, 0, &[4, which]));
    assert_eq!(thresholds, [(0, 343), (0, 280), (0, 0)]);
    assert_eq!(driver.admin(9, 0, &[4, 2 << 20]).0, 0x4002);
}

/// NVMe 1.4 §5.14.1.2 (critical warning), §5.2 (events), figure 150.
#[test]
fn a_temperature_beyond_its_threshold_is_a_warning_and_an_event() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let health = 127 << 16 | 2;
    assert_eq!(driver.admin(9, 0, &[0xb, 1 << 1]), (0, 0));
    let mut admin = driver.admin.clone();
    let event = Request { opcode: 0x0c, ..Request::default() };
    let (waiting, tail) = admin.put(&driver.machine.ram, event);
    driver.ring(&admin, tail);
    driver.admin = admin;
    assert_eq!(driver.admin(2, u32::MAX, &[health]), (0, 0));
    assert_eq!(driver.memory(DATA, 1), [0]);
    assert_eq!(driver.admin(9, 0, &[4, 300]), (0, 0));
    let mut admin = driver.admin.clone();
    let told = driver.wait(&mut admin);
    assert_eq!((told.id, told.result), (waiting, 0x0002_0101));
    driver.admin = admin;
    assert_eq!(driver.admin(2, u32::MAX, &[health]), (0, 0));
    assert_eq!(driver.memory(DATA, 1), [2]);
    assert_eq!(driver.admin(2, 1, &[health]).0, 0x4002, "the log is the controller's");
}

/// PCIe 6.0 §6.6.2; NVMe 1.4 §2.5.3, §7.3.2.
#[test]
fn a_function_level_reset_forgets_everything() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    driver.pair(1);
    let express = 0x4c;
    let mut word = [0; 4];
    driver.function.read_config(express, &mut word);
    assert_eq!(word[0], 0x10, "PCI Express follows MSI-X");
    driver.function.read_config(express + 4, &mut word);
    assert_eq!(u32::from_le_bytes(word) >> 28 & 1, 1);
    driver.function.write_config(4, &[6, 0]);
    driver.function.write_config(0x10, &[0, 0, 0, 0xc0]);
    driver.function.write_config(express + 8, &[0, 0x80]);
    wait_for(|| driver.read(0x1c, 4) == 0);
    assert_eq!((driver.read(0x14, 4), driver.read(0x24, 4), driver.read(0x28, 8)), (0, 0, 0));
    driver.function.read_config(4, &mut word);
    assert_eq!(word[..2], [0, 0]);
    driver.function.read_config(express + 8, &mut word);
    assert_eq!(word[..2], [0, 0], "the bit reads as zero");
    assert_eq!(driver.function.bars()[0].address, 0);
    driver.enable();
    assert_eq!(driver.admin(6, 0, &[1]).0, 0);
}

/// PCIe 6.0 §7.5.3.2 (device/port type), §7.5.3.8 (link status).
/// PCI 3.0 §6.2.2, bit 2.
#[test]
fn without_bus_mastering_memory_is_left_alone_until_it_is_back_or_reset() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    driver.function.write_config(4, &[6, 0]);
    assert_eq!(driver.command(&mut pair, transfer(READ, 7, 1)).status, 0);
    driver.function.write_config(4, &[2, 0]);
    wait_for(|| driver.function.is_held());
    let (_, tail) = pair.put(&driver.machine.ram, transfer(READ, 8, 1));
    driver.ring(&pair, tail);
    driver.function.hold();
    driver.function.go_on();
    assert!(driver.function.is_held());
    assert_eq!(pair.poll(&driver.machine.ram), None);
    driver.function.write_config(4, &[6, 0]);
    assert_eq!(driver.wait(&mut pair).status, 0);
    driver.function.write_config(4, &[2, 0]);
    wait_for(|| driver.function.is_held());
    driver.write(0x14, 4, 0x0046_0000);
    wait_for(|| driver.read(0x1c, 4) & 1 == 0);
    driver.enable();
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(READ, 7, 1)).status, 0);
}

#[test]
fn below_a_port_it_is_an_endpoint_with_a_link() {
    let mut driver = Driver::off(EngineChoice::Best, &spec(None), 1);
    let express = 0x4c;
    let kind = |driver: &mut Driver| {
        let mut word = [0; 4];
        driver.function.read_config(express, &mut word);
        let mut link = [0; 4];
        driver.function.read_config(express + 0x10, &mut link);
        (word[2] >> 4, link[2])
    };
    assert_eq!(kind(&mut driver), (9, 0));
    driver.function.set_below_port();
    assert_eq!(kind(&mut driver), (0, 0x11));
    driver.function.reset();
    assert_eq!(kind(&mut driver), (0, 0x11));
}

#[test]
fn wrong_doorbells_become_events() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let event = Request { opcode: 0x0c, ..Request::default() };
    let mut admin = driver.admin.clone();
    let (first, _) = admin.put(&driver.machine.ram, event);
    let (second, tail) = admin.put(&driver.machine.ram, event);
    driver.ring(&admin, tail);
    // Queue 2 is not there.
    driver.write(0x1010, 4, 1);
    let done = driver.wait(&mut admin);
    assert_eq!((done.id, done.result), (first, 0x0001_0000));
    // The next waits until the log was read.
    driver.write(0x1004, 4, 16);
    driver.admin = admin.clone();
    assert_eq!(driver.admin(2, 0, &[15 << 16 | 1]), (0, 0));
    admin = driver.admin.clone();
    let done = driver.wait(&mut admin);
    assert_eq!((done.id, done.result), (second, 0x0001_0100));
    driver.admin = admin;
    let events: Vec<u16> = {
        let mut admin = driver.admin.clone();
        let tail = (0..5).map(|_| admin.put(&driver.machine.ram, event).1).last().unwrap();
        driver.ring(&admin, tail);
        vec![driver.wait(&mut admin).status]
    };
    assert_eq!(events, [0x4105], "the fifth is one too many");
}

#[test]
fn a_reset_forgets_the_queues_and_it_starts_again() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(READ, 0, 1)).status, 0);
    driver.write(0x14, 4, 0x0046_0000);
    wait_for(|| driver.read(0x1c, 4) == 0);
    driver.enable();
    let mut pair = driver.pair(1);
    assert_eq!(driver.command(&mut pair, transfer(READ, 9, 1)).status, 0);
    assert_eq!(driver.memory(DATA, 512), [9; 512]);
    driver.function.reset();
    assert_eq!((driver.read(0x14, 4), driver.read(0x1c, 4), driver.read(0x28, 8)), (0, 0, 0));
}

#[test]
fn a_shutdown_ends_when_all_is_durable() {
    let mut driver = Driver::on(EngineChoice::Best, None);
    driver.write(0x14, 4, 0x0046_4001);
    wait_for(|| driver.read(0x1c, 4) == 9);
    driver.write(0x14, 4, 0x0046_0000);
    wait_for(|| driver.read(0x1c, 4) == 0);
    // Off already: there is nothing to wait for.
    driver.write(0x14, 4, 0x0046_4000);
    assert_eq!(driver.read(0x1c, 4), 8);
}

/// NVMe 1.4 §3.1.6: CSTS.CFS is all that a driver looks at then.
#[test]
fn a_shutdown_whose_flush_fails_is_a_fatal_status() {
    let status = where_syncs_fail(libc::EIO, || {
        let mut driver = Driver::on(EngineChoice::Plain, None);
        driver.write(0x14, 4, 0x0046_4001);
        wait_for(|| driver.read(0x1c, 4) & 8 != 0);
        driver.read(0x1c, 4)
    });
    assert_eq!(status, 0xb);
}

#[test]
fn what_cannot_work_is_a_fatal_status_until_reset() {
    let mut driver = Driver::off(EngineChoice::Best, &spec(None), 1);
    let mut fatal = |sizes, submissions, control| {
        driver.write(0x24, 4, sizes);
        driver.write(0x28, 8, submissions);
        driver.write(0x30, 8, nvme::ACQ);
        driver.write(0x14, 4, control);
        wait_for(|| driver.read(0x1c, 4) & 2 != 0);
        driver.write(0x14, 4, 0);
        wait_for(|| driver.read(0x1c, 4) == 0);
    };
    fatal(0, ASQ, 0x0046_0001);
    fatal(0x000f_000f, 0x4000_0000, 0x0046_0001);
    fatal(0x000f_000f, u64::MAX, 0x0046_0001);
    fatal(0x000f_000f, ASQ, 0x0046_0081);
    fatal(0x000f_000f, ASQ, 0x0046_0011);
    driver.enable();
    assert_eq!(driver.admin(6, 0, &[1]).0, 0);
}

#[test]
fn a_limit_spreads_requests_evenly() {
    let limit = RateLimit { bytes: None, operations: Some(Rate { per_second: 100, burst: 1 }) };
    let mut driver = Driver::on(EngineChoice::Best, Some(limit));
    let mut pair = driver.pair(1);
    let start = Instant::now();
    driver.command(&mut pair, transfer(READ, 0, 1));
    let times: Vec<u128> = (0..10)
        .map(|_| {
            driver.command(&mut pair, transfer(READ, 0, 1));
            start.elapsed().as_millis()
        })
        .collect();
    assert!(times[9] >= 99, "ten requests behind the first, at 100 a second, took {times:?} ms");
    // Admin commands wait for no tokens.
    assert_eq!(driver.admin(6, 0, &[1]).0, 0);
}

/// What a machine's other disks took leaves less for this one, which has no limit of its own.
#[test]
fn disks_keep_to_the_limit_of_their_machine() {
    let limit = RateLimit { bytes: None, operations: Some(Rate { per_second: 20, burst: 1 }) };
    let (mut machine, start) = (Machine::new(), Instant::now());
    machine.platform.limits = Limits::new(Some(limit), start);
    let others = [0; 4].map(|bytes| machine.platform.limits.admit(start, bytes));
    assert_eq!(others[3], Admission::At(start + Duration::from_millis(150)));
    let mut driver = Driver::within(machine, EngineChoice::Best, &spec(None), 2);
    driver.enable();
    let mut pair = driver.pair(1);
    driver.command(&mut pair, transfer(READ, 0, 1));
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    let next = driver.machine.platform.limits.admit(start, 0);
    assert_eq!(next, Admission::At(start + Duration::from_millis(250)));
}

#[test]
fn a_command_that_waited_for_its_turn_takes_it_once() {
    let Machine { ram, interrupts, .. } = Machine::new();
    let file = nvme::numbered_file();
    let vectors = vec![interrupts.allocate_msi().unwrap()];
    let shared = Arc::new(Shared::new(2, &vectors, interrupts.line(3, 1).unwrap()).unwrap());
    let engine = Engine::new(EngineChoice::Plain, file.as_fd(), ram.clone(), 256).unwrap();
    let limit = RateLimit { bytes: None, operations: Some(Rate { per_second: 10, burst: 1 }) };
    let now = Instant::now();
    let limits = Limits::new(Some(limit), now);
    let profile = nvme::profile(Access::ReadWrite);
    let mut device = Controller::new(engine, ram.clone(), profile, limits, Arc::clone(&shared));
    nvme::start(&mut device, &shared, ENTRIES);
    let mut admin = Pair::new(0, ASQ, ACQ, ENTRIES);
    let name = (ENTRIES - 1) << 16 | 1;
    for (opcode, base, dword11) in [(5, QUEUES + 0x1000, 1), (1, QUEUES, 1 << 16 | 1)] {
        let dwords = [name, dword11, 0, 0, 0, 0];
        let request = Request { opcode, prps: (base, 0), dwords, ..Request::default() };
        shared.ring(0, admin.put(&ram, request).1);
        assert_eq!(device.turn(now), Progress::Idle);
        assert_eq!(admin.poll(&ram).unwrap().status, 0);
    }
    let mut pair = Pair::new(1, QUEUES, QUEUES + 0x1000, ENTRIES);
    for _ in 0..4 {
        shared.ring(2, pair.put(&ram, transfer(READ, 7, 1)).1);
    }
    let after = |tenths: u32| now + tenths * Duration::from_millis(100);
    let turns = [0, 1, 2, 3].map(|tenths| {
        // Looking again before the time changes nothing.
        device.turn(after(tenths));
        let last = device.turn(after(tenths));
        (last, pair.poll(&ram).is_some(), pair.poll(&ram).is_some())
    });
    let one = |progress| (progress, true, false);
    let waits = |tenths| one(Progress::At(after(tenths)));
    assert_eq!(turns, [waits(1), waits(2), waits(3), one(Progress::Idle)]);
}

#[test]
fn disks_that_cannot_be_are_refused() {
    let machine = Machine::new();
    let refusal = |disk: &Disk| {
        let file = nvme::numbered_file().as_fd().try_clone_to_owned().unwrap();
        let opened = Nvme::open(disk, file, (3, 1), EngineChoice::Plain, &machine.platform);
        opened.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refusal(&Disk { serial: "x".repeat(21), ..spec(None) }).contains("20 printable"));
    assert!(refusal(&Disk { serial: "ü".to_owned(), ..spec(None) }).contains("20 printable"));
    assert_eq!(refusal(&spec(None)), "");
}

/// Runs every file of a target's corpus; returns how many there were.
fn replay(target: &str, run: fn(&[u8])) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| run(&fs::read(path).unwrap())).count()
}

#[test]
fn the_corpora_are_survived() {
    assert!(replay("nvme", nvme::controller) >= 8);
    assert!(replay("nvme_function", nvme::function) >= 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn noise_on_the_controller(data in prop::collection::vec(any::<u8>(), 0..800)) {
        nvme::controller(&data);
    }

    #[test]
    fn noise_on_the_function(data in prop::collection::vec(any::<u8>(), 0..400)) {
        nvme::function(&data);
    }
}
