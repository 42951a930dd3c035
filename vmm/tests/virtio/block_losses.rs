//! What the host has lost of a disk, which its kernel tells once for each opening of the file (fsync(2), EIO).

use std::{os::fd::AsFd, time::Duration};

use types::operations::VmEventKind;
use vm_memory::{Bytes, GuestAddress};
use vmm::{
    devices::virtio::{
        F_VERSION_1, VirtioPci,
        blk::{
            Block,
            engine::{Engine, EngineChoice},
            losses::Losses,
        },
    },
    pci::function::PciFunction,
    sys::io::DiskCommand,
};

use super::{DATA, F_FLUSH, F_MQ, HEADER, STATUS, disk, file, spec};
use crate::{
    driver::{Machine, Queue, Registers, enable_msix, wait_for},
    syncs::where_syncs_fail,
};

#[test]
fn no_queue_of_a_disk_flushes_after_lost_writes() {
    let (machine, file) = (Machine::new(), file());
    let engine = || Engine::new(EngineChoice::Plain, file.as_fd(), machine.ram.clone(), 4).unwrap();
    let losses = Losses::default();
    let (mut first, mut second) = (engine().sharing(losses.clone()), engine().sharing(losses));
    let flush = |engine: &mut Engine| {
        engine.queue(0, DiskCommand::Sync).unwrap();
        engine.complete().unwrap().1.is_ok()
    };
    assert!(flush(&mut second));
    assert!(!where_syncs_fail(libc::EIO, || flush(&mut first)));
    assert_eq!([flush(&mut first), flush(&mut second)], [false; 2]);
    assert!(flush(&mut engine()), "the other disk has lost nothing");
}

/// Each queue has its own opening of the file, here the second a pipe, which cannot be synced: what one hears all know.
#[test]
fn queues_share_what_their_disk_has_lost() {
    for engine in [EngineChoice::Plain, EngineChoice::Best] {
        let machine = Machine::new();
        let (pipe, _far_end) = rustix::pipe::pipe().unwrap();
        let losses = Losses::of("data", machine.platform.events.clone());
        let block = Block::new(&spec(false), file(), 2, engine, machine.ram.clone()).unwrap();
        let block = block.opened_again(vec![pipe]).recording(losses);
        let mut function = VirtioPci::new(Box::new(block), 16, &machine.platform).unwrap();
        function.start().unwrap();
        enable_msix(&mut function, 3);
        assert!(function.negotiate(F_VERSION_1 | F_MQ | F_FLUSH));
        let mut queues = [0x10000, 0x20000].map(|at| Queue::new(&machine.ram, 16, at));
        for (index, queue) in (0u16..).zip(&queues) {
            assert!(function.set_queue(index, queue, u64::from(index) + 1));
        }
        function.set_status(15);
        let mut flush = |index: u16| {
            machine.ram.write_slice(&[4, 0, 0, 0], GuestAddress(HEADER)).unwrap();
            machine.ram.write_obj(0xaau8, GuestAddress(STATUS)).unwrap();
            let queue = &mut queues[usize::from(index)];
            queue.add(&[(HEADER, 16, false), (STATUS, 1, true)]);
            function.kick(index);
            queue.wait_used();
            machine.ram.read_obj::<u8>(GuestAddress(STATUS)).unwrap()
        };
        assert_eq!([0, 1, 0, 1].map(&mut flush), [0, 1, 1, 1], "{engine:?}");
        let told = machine.platform.events.read(0, Duration::ZERO).events;
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!(told[0].kind, VmEventKind::DeviceFailed);
        assert!(told[0].detail.starts_with("disk data: "), "{told:?}");
    }
}

/// A write has no flag of its own for it: a failed one (RWF_DSYNC) would leave open what is lost.
#[test]
fn without_flush_writes_are_synced() {
    let write = |features| {
        where_syncs_fail(libc::EIO, move || {
            disk(EngineChoice::Plain, features).request(1, 5, &[(DATA, 512, false)]).0
        })
    };
    assert_eq!([write(0), write(F_FLUSH)], [1, 0]);
}

/// Has four syncs carried out; returns which ended together, and how.
fn sync_four(choice: EngineChoice, losses: Losses) -> Vec<Vec<(u16, Option<i32>)>> {
    let (machine, file) = (Machine::new(), file());
    let engine = Engine::new(choice, file.as_fd(), machine.ram.clone(), 8).unwrap();
    let mut engine = engine.sharing(losses);
    for token in 0..4 {
        engine.queue(token, DiskCommand::Sync).unwrap();
    }
    let code = |result: std::io::Result<u32>| result.err().and_then(|error| error.raw_os_error());
    let mut ended: Vec<Vec<_>> = Vec::new();
    while ended.iter().flatten().count() < 4 {
        engine.wait().unwrap();
        let next = || engine.complete().map(|(token, result)| (token, code(result)));
        ended.push(std::iter::from_fn(next).collect());
    }
    ended.retain(|together| !together.is_empty());
    ended
}

/// One is under way at a time; those asked for meanwhile share the next.
#[test]
fn syncs_of_a_queue_are_all_answered() {
    let all = [0, 1, 2, 3].map(|token| (token, None));
    assert_eq!(sync_four(EngineChoice::Plain, Losses::default()).concat(), all);
    let by_ring = sync_four(EngineChoice::Best, Losses::default());
    assert_eq!(by_ring.concat(), all);
    // Where there is no io_uring, none waits.
    assert!(by_ring == [&all[..1], &all[1..]] || by_ring == [&all[..]], "{by_ring:?}");
}

#[test]
fn syncs_that_wait_for_one_that_failed_fail_with_one_word() {
    let machine = Machine::new();
    let losses = Losses::of("data", machine.platform.events.clone());
    let ended = where_syncs_fail(libc::EIO, || sync_four(EngineChoice::Plain, losses));
    assert_eq!(ended.concat(), [0, 1, 2, 3].map(|token| (token, Some(libc::EIO))));
    assert_eq!(machine.platform.events.read(0, Duration::ZERO).events.len(), 1);
}

/// Each has begun, waits for another, or is over when the driver resets the device or the machine pauses.
#[test]
fn a_device_stops_with_flushes_under_way() {
    for _ in 0..20 {
        let mut disk = disk(EngineChoice::Best, F_FLUSH);
        disk.machine.ram.write_slice(&[4, 0, 0, 0], GuestAddress(HEADER)).unwrap();
        for status in 0..5 {
            disk.queue.add(&[(HEADER, 16, false), (STATUS + status, 1, true)]);
        }
        disk.function.kick(0);
        disk.function.hold();
        wait_for(|| disk.function.is_held());
        disk.function.go_on();
        for _ in 0..5 {
            disk.queue.wait_used();
        }
        for status in 0..5 {
            disk.queue.add(&[(HEADER, 16, false), (STATUS + status, 1, true)]);
        }
        disk.function.kick(0);
        disk.function.set_status(0);
        wait_for(|| disk.function.status() == 0);
    }
}
