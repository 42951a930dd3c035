//! virtio-rng: random bytes of the host's kernel.
//! Source: virtio §5.4 "Entropy Device". One queue, no configuration, no features of its own.
//!
//! System calls behind the filter (`ThreadKind::Event`): getrandom; ppoll, read and write of
//! eventfds, the KVM_IRQ_LINE ioctl, and those of the allocator and of locks.

use std::sync::Arc;

use vm_memory::{Address, Bytes, GuestAddress};

use super::{
    Activation, DeviceIdentity, Distress, F_RING_EVENT_IDX, F_RING_INDIRECT_DESC, Platform,
    QueueSignal, ReadyQueue, Ring, VirtioDevice, VirtioError, VirtioPci,
    ring::{Chain, RingError},
    worker::{Inbox, Order, Patience, Worker},
};
use crate::{counters::Activity, sandbox::ThreadKind, sys::io::borrow_eventfd};

/// Bytes given for one request, at most: enough to seed any generator, cheap to make.
pub const MAX_BYTES: usize = 4096;
/// Requests answered before the thread looks at its orders again.
pub const BATCH: u16 = 64;

const IDENTITY: DeviceIdentity =
    DeviceIdentity { name: "rng", virtio_id: 4, class: [0xff, 0x00, 0x00] };

/// An entropy device.
#[derive(Default)]
pub struct Rng {
    worker: Option<Worker<Activation>>,
    activity: Arc<Activity>,
}

/// Makes an entropy device.
pub fn open(slot: u8, platform: &Platform) -> Result<VirtioPci, VirtioError> {
    let activity = platform.activity.device(IDENTITY.name);
    VirtioPci::new(Box::new(Rng { worker: None, activity }), slot, platform)
}

impl VirtioDevice for Rng {
    fn identity(&self) -> DeviceIdentity {
        IDENTITY
    }

    fn features(&self) -> u64 {
        F_RING_INDIRECT_DESC | F_RING_EVENT_IDX
    }

    fn queue_count(&self) -> u16 {
        1
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn start(&mut self) -> Result<(), VirtioError> {
        let activity = Arc::clone(&self.activity);
        let worker = Worker::spawn(
            IDENTITY.name.to_owned(),
            ThreadKind::Event,
            || Ok(()),
            move |(), inbox| serve(&inbox, &activity),
        )
        .map_err(|source| VirtioError::Host {
            device: IDENTITY.name,
            what: "cannot start a thread",
            source,
        })?;
        self.worker = Some(worker);
        Ok(())
    }

    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError> {
        let Some(worker) = &self.worker else {
            let problem = "the device was not started".to_owned();
            return Err(VirtioError::Refused { device: IDENTITY.name, problem });
        };
        worker.run(activation);
        Ok(())
    }

    fn stop(&mut self) {
        self.worker.iter().for_each(Worker::stop);
    }

    fn stopped(&mut self) -> bool {
        self.worker.iter().all(Worker::is_idle)
    }

    fn hold(&mut self) {
        self.worker.iter().for_each(Worker::hold);
    }

    fn is_held(&mut self) -> bool {
        self.worker.iter().all(Worker::is_held)
    }

    fn go_on(&mut self) {
        self.worker.iter().for_each(Worker::go_on);
    }
}

/// What the driver has running now.
struct Live {
    queue: ReadyQueue,
    distress: Distress,
}

/// Whether the ring is done with for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Until the driver kicks.
    Idle,
    /// There may be more.
    More,
}

fn serve(inbox: &Inbox<Activation>, activity: &Activity) {
    let mut live: Option<Live> = None;
    let mut progress = Progress::Idle;
    loop {
        while let Some(order) = inbox.next() {
            match order {
                Order::Run(activation) => {
                    let distress = activation.distress;
                    live =
                        activation.queues.into_iter().next().map(|queue| Live { queue, distress });
                    progress = Progress::More;
                }
                // A batch is answered before the next order is looked at.
                Order::Hold => {
                    inbox.hold();
                }
                Order::Stop => {
                    live = None;
                    inbox.stopped();
                }
                Order::Quit => return,
            }
        }
        let kicked = live.as_ref().is_some_and(|live| live.queue.kick.read().is_ok());
        if kicked || progress == Progress::More {
            progress = turn(&mut live, activity);
        }
        let patience = match progress {
            Progress::More => Patience::None,
            Progress::Idle => Patience::Forever,
        };
        let kick = live.as_ref().map(|live| borrow_eventfd(&live.queue.kick));
        inbox.wait(kick.as_slice(), patience);
    }
}

/// Answers a batch. A ring that makes no sense is left alone until the device is reset.
fn turn(live: &mut Option<Live>, activity: &Activity) -> Progress {
    let Some(Live { queue, distress }) = live else {
        return Progress::Idle;
    };
    match answer_batch(&mut queue.ring, &queue.signal, activity) {
        Ok(progress) => progress,
        Err(error) => {
            distress.raise(&error);
            *live = None;
            Progress::Idle
        }
    }
}

/// Answers up to [`BATCH`] requests.
pub fn answer_batch(
    ring: &mut Ring,
    signal: &QueueSignal,
    activity: &Activity,
) -> Result<Progress, RingError> {
    let mut progress = Progress::More;
    ring.disable_kicks()?;
    for _ in 0..BATCH {
        let Some(chain) = ring.pop()? else {
            if !ring.enable_kicks()? {
                progress = Progress::Idle;
            }
            break;
        };
        let written = fill(ring, &chain);
        ring.push_used(chain.head, written)?;
        activity.requests.add(1);
        activity.read_bytes.add(written.into());
    }
    if ring.needs_signal()? {
        activity.interrupts.add(1);
        signal.trigger();
    }
    Ok(progress)
}

/// Writes random bytes into the chain's buffers, up to [`MAX_BYTES`] and to the first that is not
/// memory; returns how many.
fn fill(ring: &Ring, chain: &Chain) -> u32 {
    let mut bytes = [0; MAX_BYTES];
    let wanted = chain.writable.iter().map(|segment| u64::from(segment.length)).sum::<u64>();
    let length = usize::try_from(wanted).unwrap_or(MAX_BYTES).min(MAX_BYTES);
    let (random, _) = bytes.split_at_mut(length);
    // The kernel's generator is ready before any machine starts; it fills requests of this size
    // at once, or not at all.
    let Ok(ready) = rustix::rand::getrandom(&mut *random, rustix::rand::GetRandomFlags::empty())
    else {
        return 0;
    };
    let mut rest = random.get(..ready).unwrap_or_default();
    let mut written = 0u32;
    for segment in &chain.writable {
        let fits = usize::try_from(segment.length).unwrap_or(MAX_BYTES).min(rest.len());
        let (part, behind) = rest.split_at(fits);
        let place = GuestAddress(segment.address.raw_value());
        if ring.ram().write_slice(part, place).is_err() {
            break;
        }
        rest = behind;
        written = written.saturating_add(u32::try_from(fits).unwrap_or(0));
    }
    written
}
