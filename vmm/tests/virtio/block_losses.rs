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
    sys::io::DiskCommand,
};

use super::{DATA, F_FLUSH, F_MQ, HEADER, STATUS, disk, file, spec};
use crate::{
    driver::{Machine, Queue, Registers, enable_msix},
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

/// One is under way at a time; those asked for meanwhile share the next.
#[test]
fn syncs_of_a_queue_are_all_answered() {
    for choice in [EngineChoice::Plain, EngineChoice::Best] {
        let (machine, file) = (Machine::new(), file());
        let mut engine = Engine::new(choice, file.as_fd(), machine.ram.clone(), 8).unwrap();
        for token in 0..8 {
            engine.queue(token, DiskCommand::Sync).unwrap();
        }
        let mut ended = Vec::new();
        while ended.len() < 8 {
            engine.wait().unwrap();
            ended.extend(std::iter::from_fn(|| engine.complete()).map(|(token, result)| {
                assert_eq!(result.unwrap(), 0);
                token
            }));
        }
        assert_eq!(ended, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
