//! Zeroes for which a driver lets space be given back, on a host that gives none back.

use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::virtio::{
    VirtioPci,
    blk::{Block, engine::EngineChoice},
};

use super::{DATA, Disk, F_FLUSH, spec, start_driver};
use crate::driver::{DEVICE, Machine, Registers, enable_msix};

const F_WRITE_ZEROES: u64 = 1 << 14;
/// `write_zeroes_may_unmap` of the device's configuration.
const MAY_UNMAP: u64 = DEVICE + 56;
/// The mode of fallocate(2) by which space is given back.
const PUNCH: u64 = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).cast_unsigned() as u64;

/// Runs `work` on a thread where no punch succeeds, nor on those that it starts. Those by io_uring do.
fn where_no_space_is_given_back<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let punches = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, PUNCH);
    let rule = SeccompRule::new(vec![punches.unwrap()]).unwrap();
    let filter = SeccompFilter::new(
        [(libc::SYS_fallocate, vec![rule])].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EOPNOTSUPP.cast_unsigned()),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    let filtered = || {
        seccompiler::apply_filter(&program).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

/// A device that has looked at what its file can do, not started.
fn opened() -> (VirtioPci, Machine, OwnedFd) {
    let machine = Machine::new();
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    rustix::io::pwrite(&file, &[0x5a; 32 * 512], 0).unwrap();
    let shared = file.as_fd().try_clone_to_owned().unwrap();
    let ram = machine.ram.clone();
    let block = Block::new(&spec(false), shared, 1, EngineChoice::Plain, ram).unwrap();
    let function = VirtioPci::new(Box::new(block), 16, &machine.platform).unwrap();
    (function, machine, file)
}

/// Has sectors 8 to 23 zeroed, with unmap. Returns whether the device says that it may, its status, and what those
/// sectors and their neighbours begin with.
fn zero(opened: (VirtioPci, Machine, OwnedFd)) -> (u64, u8, [u8; 4]) {
    let (mut function, machine, file) = opened;
    function.start().unwrap();
    enable_msix(&mut function, 2);
    let may_unmap = function.read(MAY_UNMAP, 1);
    let queue = start_driver(&mut function, &machine, F_FLUSH | F_WRITE_ZEROES);
    let mut disk = Disk { function, machine, file, queue };
    let range = [[8u8, 0, 0, 0, 0, 0, 0, 0], [16, 0, 0, 0, 1, 0, 0, 0]].concat();
    disk.machine.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
    let status = disk.request(13, 0, &[(DATA, 16, false)]).0;
    (may_unmap, status, [7, 8, 23, 24].map(|sector| disk.sector(sector)[0]))
}

/// A block device without discard says so only when it is tried, a file system mostly when the device is made.
#[test]
fn zeroes_with_unmap_are_written_where_no_space_is_given_back() {
    let mut seen_to_punch = opened();
    if seen_to_punch.0.read(0x04, 4) & F_WRITE_ZEROES == 0 {
        println!("skipped: zeroes with unmap: no ranges of temporary files can be zeroed here");
        return;
    }
    let zeroed = [0x5a, 0, 0, 0x5a];
    assert_eq!(where_no_space_is_given_back(move || zero(seen_to_punch)), (1, 0, zeroed));
    assert_eq!(where_no_space_is_given_back(|| zero(opened())), (0, 0, zeroed));
}
