use std::{
    fs::File,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::*;
use crate::{
    devices::virtio::{
        DistressFlag, F_VERSION_1, Interrupts, QueueSignal, Ring, transport::NO_VECTOR,
        worker::Worker,
    },
    events::Events,
    irq::{InterruptLine, Level, MsiMessage, MsiVector},
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

/// A kernel that swallows what rings while nothing is connected, as vhost-vsock does, that may refuse all that it
/// is asked, and that remembers what it is to ring.
struct Kernel {
    calls: Mutex<Vec<(usize, EventFd)>>,
    /// With which features it was connected.
    connected: Mutex<Vec<u64>>,
    kicks: Vec<Arc<EventFd>>,
    refuses: AtomicBool,
}

impl Backend for Kernel {
    const QUEUES: u16 = 2;
    const DEVICE: &'static str = "test";

    fn connect(&self, _unit: u16, _vhost: BorrowedFd<'_>, features: u64) -> io::Result<()> {
        self.kicks.iter().for_each(|kick| drop(kick.read()));
        self.connected.lock().expect("one thread").push(features);
        if self.refuses.load(Ordering::SeqCst) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }

    fn ring(&self, _vhost: &VhostFd, local: usize, call: &EventFd) -> io::Result<()> {
        self.calls.lock().expect("one thread").push((local, call.try_clone()?));
        Ok(())
    }

    fn switch_offloads(&self, features: u64, offloads: u64) -> io::Result<u64> {
        let refuses = self.refuses.load(Ordering::SeqCst);
        if refuses { Err(io::ErrorKind::Other.into()) } else { Ok(features | offloads) }
    }

    fn disconnect(&self, _unit: u16, _vhost: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// A vector that counts in its eventfd.
struct Vector(EventFd);

impl MsiVector for Vector {
    fn route(&self, _message: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }
    fn eventfd(&self) -> BorrowedFd<'_> {
        borrow_eventfd(&self.0)
    }
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Two descriptors with two queues each; the kernel serves the first.
fn served() -> (Thread<Kernel>, Live) {
    let (thread, live, _) = served_with(Vec::new());
    (thread, live)
}

/// The same of a function with these vectors, and its interrupts.
fn served_with(vectors: Vec<Arc<dyn MsiVector>>) -> (Thread<Kernel>, Live, Arc<Interrupts>) {
    let ram: GuestRam =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).expect("memory");
    let line: Arc<dyn InterruptLine> = Arc::new(Line);
    let interrupts = Arc::new(Interrupts::new(&vectors, line).expect("a function"));
    let queue = |index: u16| {
        let layout = QueueLayout { size: 16, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
        let ring = Ring::new(layout, F_VERSION_1, ram.clone()).expect("a ring");
        let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd"));
        ReadyQueue {
            index,
            ring,
            kick,
            signal: QueueSignal::new(Arc::clone(&interrupts), NO_VECTOR),
        }
    };
    let queues: Vec<ReadyQueue> = (0..4).map(queue).collect();
    let kicks = queues.iter().map(|queue| Arc::clone(&queue.kick)).collect();
    let null = || OwnedFd::from(File::open("/dev/null").expect("there"));
    let unit = || Arc::new(VhostFd { fd: null(), ram: Arc::new(ram.clone()) });
    let (calls, connected) = (Mutex::default(), Mutex::default());
    let backend = Arc::new(Kernel { calls, connected, kicks, refuses: AtomicBool::new(false) });
    let thread = Thread::new(vec![unit(), unit()], backend, F_VERSION_1).expect("eventfds");
    let flag = Arc::new(DistressFlag::new("test", Events::default()));
    let distress = Distress::new(flag, Arc::clone(&interrupts));
    let features = F_VERSION_1;
    let serving = Serving { features, in_force: features, ready: 2, units: 1 };
    let wired = vec![None; queues.len()];
    (thread, Live { queues, wired, control: None, distress, serving }, interrupts)
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
    assert_eq!(units.set_pairs(2), Ok(()));
    assert_eq!(rung(&live), [0, 0, 1, 1]);
}

#[test]
fn a_refusal_rings_nothing() {
    let (thread, mut live) = served();
    thread.backend.refuses.store(true, Ordering::SeqCst);
    let mut units = Units { thread: &thread, queues: &live.queues, serving: &mut live.serving };
    assert_eq!(units.set_pairs(2), Err(Refused));
    assert_eq!((rung(&live), live.serving.units), (vec![0; 4], 1));
}

/// Virtio §5.1.6.5, "Offloads State Configuration": until the driver says something else, or resets the device.
#[test]
fn offloads_that_were_switched_stay_so_after_a_hold() {
    let (thread, mut live) = served();
    let mut units = Units { thread: &thread, queues: &live.queues, serving: &mut live.serving };
    assert_eq!((units.set_offloads(1), units.set_offloads(2)), (Ok(()), Ok(())));
    assert_eq!(units.set_pairs(2), Ok(()));
    thread.backend.refuses.store(true, Ordering::SeqCst);
    assert_eq!(units.set_offloads(4), Err(Refused));
    thread.backend.refuses.store(false, Ordering::SeqCst);
    let (_worker, inbox) = Worker::detached().expect("an eventfd");
    thread.hold(Some(&live), &inbox);
    let connected = thread.backend.connected.lock().expect("one thread");
    assert_eq!(*connected, [F_VERSION_1 | 2; 3]);
}

#[test]
fn a_device_that_did_not_begin_switches_nothing() {
    let (thread, mut live) = served();
    live.serving.units = 0;
    let mut units = Units { thread: &thread, queues: &live.queues, serving: &mut live.serving };
    assert_eq!(units.set_offloads(1), Err(Refused));
    assert_eq!(live.serving.in_force, F_VERSION_1);
}

/// Virtio §4.1.5.1.2.1: vectors are chosen at any time; illumos' driver does when the device is running.
#[test]
fn the_kernel_rings_the_vector_that_the_driver_chose_last() {
    let vector = || Arc::new(Vector(EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd")));
    let vectors = [vector(), vector()];
    let all = vectors.iter().map(|vector| Arc::<Vector>::clone(vector) as Arc<dyn MsiVector>);
    let (thread, mut live, interrupts) = served_with(all.collect());
    let rang = |thread: &Thread<Kernel>| {
        for (local, call) in thread.backend.calls.lock().expect("one thread").drain(..) {
            assert_eq!(local, 1);
            call.write(1).expect("room");
        }
        vectors.each_ref().map(|vector| vector.0.read().unwrap_or(0))
    };
    // Queue 1 of the first descriptor; nothing changes before MSI-X is on.
    assert!(live.queues[1].signal.set_vector(0));
    thread.wire(&mut live);
    assert_eq!(rang(&thread), [0, 0]);
    assert!(interrupts.set_mode(true, false));
    thread.wire(&mut live);
    assert_eq!(rang(&thread), [1, 0]);
    thread.wire(&mut live);
    assert_eq!(rang(&thread), [0, 0], "told once");
    // By the new vector twice: what may have been missed meanwhile is told, too.
    assert!(live.queues[1].signal.set_vector(1));
    thread.wire(&mut live);
    assert_eq!(rang(&thread), [0, 2]);
    // Without one, the kernel rings the thread.
    assert!(live.queues[1].signal.set_vector(NO_VECTOR));
    thread.wire(&mut live);
    assert_eq!(rang(&thread), [0, 0]);
    assert!(thread.lines[1].call.read().is_ok());
}
