use std::{
    fs::File,
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::*;
use crate::{
    devices::virtio::{
        DistressFlag, F_VERSION_1, Interrupts, QueueSignal, Ring, transport::NO_VECTOR,
        worker::Worker,
    },
    events::Events,
    irq::{InterruptLine, Level},
    sys::memory::GuestRam,
};

struct Line;

impl InterruptLine for Line {
    fn set_level(&self, _level: Level) -> io::Result<()> {
        Ok(())
    }
    fn trigger_fd(&self) -> BorrowedFd<'_> {
        rustix::stdio::stdin()
    }
    fn resample_fd(&self) -> BorrowedFd<'_> {
        rustix::stdio::stdin()
    }
}

/// A kernel that swallows what rings while nothing is connected, as vhost-vsock does, and that may
/// refuse to connect.
struct Kernel {
    kicks: Vec<Arc<EventFd>>,
    refuses: AtomicBool,
}

impl Backend for Kernel {
    const QUEUES: u16 = 2;
    const DEVICE: &'static str = "test";

    fn connect(&self, _unit: u16, _vhost: BorrowedFd<'_>, _features: u64) -> io::Result<()> {
        self.kicks.iter().for_each(|kick| drop(kick.read()));
        if self.refuses.load(Ordering::SeqCst) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }

    fn disconnect(&self, _unit: u16, _vhost: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// Two descriptors with two queues each; the kernel serves the first.
fn served() -> (Thread<Kernel>, Live) {
    let ram: GuestRam =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).expect("memory");
    let line: Arc<dyn InterruptLine> = Arc::new(Line);
    let interrupts = Arc::new(Interrupts::new(Vec::new(), line).expect("a function"));
    let queue = |index: u16| {
        let layout = QueueLayout {
            size: 16,
            descriptors: 0x1000,
            available: 0x2000,
            used: 0x3000,
            vector: NO_VECTOR,
        };
        let ring = Ring::new(layout, F_VERSION_1, ram.clone()).expect("a ring");
        let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd"));
        ReadyQueue { index, ring, kick, signal: QueueSignal::new(Arc::clone(&interrupts), 0) }
    };
    let queues: Vec<ReadyQueue> = (0..4).map(queue).collect();
    let kicks = queues.iter().map(|queue| Arc::clone(&queue.kick)).collect();
    let null = || OwnedFd::from(File::open("/dev/null").expect("there"));
    let unit = || Arc::new(VhostFd { fd: null(), ram: Arc::new(ram.clone()) });
    let backend = Arc::new(Kernel { kicks, refuses: AtomicBool::new(false) });
    let thread = Thread::new(vec![unit(), unit()], backend, F_VERSION_1).expect("eventfds");
    let flag = Arc::new(DistressFlag::new("test", Events::default()));
    let distress = Distress::new(flag, Arc::clone(&interrupts));
    let serving = Serving { features: F_VERSION_1, ready: 2, units: 1 };
    (thread, Live { queues, control: None, distress, serving })
}

/// Returns how often each doorbell has rung since it was looked at last.
fn rung(live: &Live) -> Vec<u64> {
    live.queues.iter().map(|queue| queue.kick.read().unwrap_or(0)).collect()
}

#[test]
fn whoever_goes_on_after_a_hold_looks_at_what_was_offered_meanwhile() {
    let (thread, live) = served();
    live.queues[1].kick.write(1).expect("room");
    let (_worker, inbox) = Worker::detached().expect("an eventfd");
    thread.hold(Some(&live), &inbox);
    assert_eq!(rung(&live), [1, 1, 0, 0]);
}

#[test]
fn whoever_is_stopped_in_a_hold_does_not_get_its_rings_back() {
    let (thread, live) = served();
    let (worker, inbox) = Worker::detached().expect("an eventfd");
    worker.hold();
    thread.hold(Some(&live), &inbox);
    assert_eq!(rung(&live), [0; 4]);
}

#[test]
fn a_pair_that_is_turned_on_looks_at_what_was_offered_before() {
    let (thread, mut live) = served();
    let mut units = Units { thread: &thread, queues: &live.queues, serving: &mut live.serving };
    assert_eq!(units.set(2), Ok(()));
    assert_eq!(rung(&live), [0, 0, 1, 1]);
}

#[test]
fn a_refusal_rings_nothing() {
    let (thread, mut live) = served();
    thread.backend.refuses.store(true, Ordering::SeqCst);
    let mut units = Units { thread: &thread, queues: &live.queues, serving: &mut live.serving };
    assert_eq!(units.set(2), Err(Refused));
    assert_eq!((rung(&live), live.serving.units), (vec![0; 4], 1));
}
