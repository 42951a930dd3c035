//! One queue of a block device and the thread that serves it.
//!
//! System calls behind the filter (`ThreadKind::Block`): io_uring_enter; preadv, pwritev,
//! fdatasync and fallocate where there is no io_uring; ppoll, read and write of eventfds, the
//! KVM_IRQ_LINE ioctl, clock_nanosleep, and those of the allocator and of locks.

use std::{
    io, mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{
    Durability,
    engine::Engine,
    flight::{PAUSE, Tries, advance},
    request::{self, ID_SIZE, Request, RequestError, Rules, Status, Support, Work},
    transfer::Transfer,
};
use crate::{
    counters::Activity,
    devices::{
        throttle::{Admission, Limits},
        virtio::{
            Distress, QueueSignal, ReadyQueue, Ring,
            ring::{RingError, Segment},
            worker::{Bell, Inbox, Order, Patience},
        },
    },
    sys::io::{DiskCommand, borrow_eventfd},
};

/// Shortest sleep: a clock that has not moved on must not keep the thread busy.
const MIN_WAIT: Duration = Duration::from_nanos(1);
/// Chains taken from the ring before the thread looks at its orders and completions again.
const BATCH: u16 = 256;

/// What a queue's thread is given when the driver is ready.
pub struct Job {
    /// The queue.
    pub queue: ReadyQueue,
    /// What requests may ask for.
    pub rules: Rules,
    /// When a change of the disk counts as done.
    pub durability: Durability,
    /// How to ask for a reset.
    pub distress: Distress,
    /// Where to count.
    pub activity: Arc<Activity>,
    /// The disk's limits, shared by its queues.
    pub limits: Limits,
}

/// What is wrong with a ring, or with a chain in it.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Ring(#[from] RingError),
}

/// A command in flight.
struct Flight {
    head: u16,
    status: GuestAddress,
    transfer: Transfer,
    tries: Tries,
}

/// What came of looking at the ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing more to do until the driver kicks.
    Idle,
    /// Every slot is in flight: a completion comes first.
    Full,
    /// The batch is used up; there may be more.
    More,
    /// The next request may go at this time.
    At(Instant),
}

/// The driver's side of a queue: gone after a reset.
pub struct Live {
    ring: Ring,
    kick: Arc<EventFd>,
    signal: QueueSignal,
    rules: Rules,
    durability: Durability,
    distress: Distress,
    activity: Arc<Activity>,
    limits: Limits,
    /// A request that waits for its turn, and when that is.
    held: Option<(Request, Instant)>,
    /// The ring made no sense; it is not touched again.
    broken: bool,
    progress: Progress,
    /// Whether `kick` has to be read in the next turn: always, unless the thread has just looked.
    bell: Bell,
}

/// The thread's state.
pub struct BlockQueue {
    engine: Engine,
    flights: Vec<Option<Flight>>,
    free: Vec<u16>,
    id: [u8; ID_SIZE],
    /// Whether zeroing may try to give space back.
    punching: Support,
    /// Something was started again that the kernel had no means to do.
    again: bool,
}

impl BlockQueue {
    /// Returns the state of a thread with `depth` slots.
    pub fn new(engine: Engine, depth: u16, id: [u8; ID_SIZE]) -> Self {
        Self {
            engine,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            id,
            punching: Support::Yes,
            again: false,
        }
    }

    /// Returns the state for a disk that can give space back, or cannot; of others, that is seen in trying.
    pub fn punching(self, punching: Support) -> Self {
        Self { punching, ..self }
    }

    /// Serves until told to quit.
    pub(super) fn serve(mut self, inbox: &Inbox<Job>) {
        let mut live: Option<Live> = None;
        loop {
            while let Some(order) = inbox.next() {
                match order {
                    Order::Run(job) => live = Some(Live::from(job)),
                    Order::Hold => {
                        self.settle(live.as_mut());
                        inbox.hold();
                    }
                    Order::Stop => {
                        self.drain();
                        live = None;
                        inbox.stopped();
                    }
                    // A ring that is dropped waits for what the kernel has got, or leaves it what that needs.
                    Order::Quit => return,
                }
            }
            let progress = live.as_mut().map(|live| self.turn(live));
            let patience = match progress {
                Some(Progress::More) => Patience::None,
                Some(Progress::Idle | Progress::Full) | None => Patience::Forever,
                Some(Progress::At(at)) => {
                    Patience::For(at.saturating_duration_since(Instant::now()).max(MIN_WAIT))
                }
            };
            self.wait(live.as_mut(), inbox, patience);
        }
    }

    /// Takes what the driver offers, starts it, and gives back what is done. Waits for nothing, but a
    /// moment where the kernel had no means to do something.
    pub fn turn(&mut self, live: &mut Live) -> Progress {
        let last = live.progress;
        let bell = mem::replace(&mut live.bell, Bell::Rung);
        let kicked = bell == Bell::Rung && live.kick.read().is_ok();
        let finished = self.reap(live);
        let due = match last {
            Progress::More => true,
            Progress::Full => kicked || finished > 0,
            Progress::Idle => kicked,
            Progress::At(at) => at <= Instant::now(),
        };
        let mut progress = if due { self.take(live) } else { last };
        let mut submitted = self.submit(live);
        // The plain engine is done already, and so may be a ring whose pages were cached.
        if self.reap(live) > 0 {
            // What was short goes on at once.
            submitted = self.submit(live);
            if progress == Progress::Full {
                progress = Progress::More;
            }
        }
        live.signal_used();
        live.progress = if submitted { progress } else { Progress::More };
        live.progress
    }

    /// Hands started commands to the kernel; returns whether it took all of them.
    fn submit(&mut self, live: &mut Live) -> bool {
        self.engine.submit().unwrap_or_else(|error| {
            live.fail(&error);
            true
        })
    }

    fn wait(&self, live: Option<&mut Live>, inbox: &Inbox<Job>, patience: Patience) {
        let kick = live.as_deref().map(|live| borrow_eventfd(&live.kick));
        let bell = inbox.wait_for_bell(kick, self.engine.as_fd(), patience);
        if let Some(live) = live {
            live.bell = bell;
        }
    }

    /// Takes up to [`BATCH`] chains.
    fn take(&mut self, live: &mut Live) -> Progress {
        if live.broken {
            return Progress::Idle;
        }
        match self.try_take(live) {
            Ok(progress) => progress,
            Err(error) => {
                live.fail(&error);
                Progress::Idle
            }
        }
    }

    fn try_take(&mut self, live: &mut Live) -> Result<Progress, TakeError> {
        live.ring.disable_kicks()?;
        for _ in 0..BATCH {
            if self.free.is_empty() || !self.engine.has_room() {
                return Ok(Progress::Full);
            }
            let Some((request, at)) = live.next_request()? else {
                let more = live.ring.enable_kicks()?;
                return Ok(if more { Progress::More } else { Progress::Idle });
            };
            if let Some(at) = at.filter(|at| *at > Instant::now()) {
                live.held = Some((request, at));
                return Ok(Progress::At(at));
            }
            self.begin(live, request)?;
        }
        Ok(Progress::More)
    }

    /// Starts one request, or answers it at once.
    fn begin(&mut self, live: &mut Live, request: Request) -> Result<(), RingError> {
        let Request { head, status, work } = request;
        let transfer = match work {
            Work::Answer(answer) => return live.answer(head, status, answer, 0),
            Work::Identify { into } => {
                return match write_id(live, &into, self.id) {
                    Some(written) => live.answer(head, status, Status::Done, written),
                    None => live.answer(head, status, Status::Failed, 0),
                };
            }
            Work::Read { offset, into } => Transfer::Read { offset, into: pairs(&into), moved: 0 },
            Work::Write { offset, from } => Transfer::Write { offset, from: pairs(&from) },
            Work::Flush => Transfer::Sync,
            Work::Discard { offset, length } => {
                Transfer::discard((offset, length), live.durability)
            }
            Work::Zero { offset, length, unmap } => {
                let punching = if unmap { self.punching } else { Support::No };
                Transfer::zero((offset, length), punching, live.durability)
            }
        };
        let flight = Flight { head, status, transfer, tries: Tries::default() };
        self.launch(live, flight)
    }

    /// Starts what is left of a command.
    fn launch(&mut self, live: &mut Live, flight: Flight) -> Result<(), RingError> {
        let Some(token) = self.free.pop() else {
            return live.answer(flight.head, flight.status, Status::Failed, 0);
        };
        let command = match &flight.transfer {
            Transfer::Read { offset, into, .. } => DiskCommand::Read { offset: *offset, into },
            Transfer::Write { offset, from } => DiskCommand::Write { offset: *offset, from },
            Transfer::Range { command, .. } => *command,
            Transfer::Sync => DiskCommand::Sync,
        };
        let started = self.engine.queue(token, command);
        match (started, self.flights.get_mut(usize::from(token))) {
            (Ok(()), Some(slot)) => {
                *slot = Some(flight);
                Ok(())
            }
            // Buffers outside guest memory end here.
            _ => {
                self.free.push(token);
                live.answer(flight.head, flight.status, Status::Failed, 0)
            }
        }
    }

    /// Gives back what has completed; returns how many commands that was.
    fn reap(&mut self, live: &mut Live) -> usize {
        let mut finished = 0;
        while let Some((token, result)) = self.engine.complete() {
            let Some(flight) = self.flights.get_mut(usize::from(token)).and_then(Option::take)
            else {
                continue;
            };
            self.free.push(token);
            finished += 1;
            if let Err(error) = self.conclude(live, flight, result) {
                live.fail(&error);
            }
        }
        if mem::take(&mut self.again) {
            thread::sleep(PAUSE);
        }
        finished
    }

    /// Ends one command, or starts what a short transfer left over.
    fn conclude(
        &mut self,
        live: &mut Live,
        mut flight: Flight,
        result: io::Result<u32>,
    ) -> Result<(), RingError> {
        let moved_now = match &result {
            Err(error) if flight.tries.take(error) => {
                self.again = true;
                return self.launch(live, flight);
            }
            Err(error)
                if status_of(error) == Status::Unsupported && flight.transfer.take_other_way() =>
            {
                return self.launch(live, flight);
            }
            Err(error) => {
                let status = status_of(error);
                live.activity.media_errors.add(u64::from(status == Status::Failed));
                return live.answer(flight.head, flight.status, status, 0);
            }
            Ok(moved) => *moved,
        };
        flight.tries = Tries::default();
        let written = match &mut flight.transfer {
            Transfer::Sync | Transfer::Range { durability: Durability::Cached, .. } => 0,
            Transfer::Range { durability: Durability::Durable, .. } => {
                flight.transfer = Transfer::Sync;
                return self.launch(live, flight);
            }
            Transfer::Read { offset, into, moved } => {
                *moved = moved.saturating_add(moved_now);
                let written = *moved;
                if advance(offset, into, moved_now) {
                    return self.continue_or_fail(live, flight, moved_now);
                }
                written
            }
            Transfer::Write { offset, from } => {
                live.activity.written_bytes.add(moved_now.into());
                if advance(offset, from, moved_now) {
                    return self.continue_or_fail(live, flight, moved_now);
                }
                if live.durability == Durability::Durable {
                    flight.transfer = Transfer::Sync;
                    return self.launch(live, flight);
                }
                0
            }
        };
        live.answer(flight.head, flight.status, Status::Done, written)
    }

    fn continue_or_fail(
        &mut self,
        live: &mut Live,
        flight: Flight,
        moved: u32,
    ) -> Result<(), RingError> {
        if moved == 0 {
            // The file ends before the disk does.
            live.activity.media_errors.add(1);
            return live.answer(flight.head, flight.status, Status::Failed, 0);
        }
        self.launch(live, flight)
    }

    /// Waits for everything in flight and gives it back, even of a ring that fails: guest memory is not left alone
    /// before that.
    fn settle(&mut self, live: Option<&mut Live>) {
        let Some(live) = live else { return };
        while self.flights.iter().any(Option::is_some) {
            if let Err(error) = self.engine.wait() {
                live.fail(&error);
            }
            self.reap(live);
        }
        live.signal_used();
        // Slots are free again, and whoever kicked meanwhile is served next.
        live.progress = Progress::More;
    }

    /// Waits for everything in flight and forgets it. A ring that fails for good is waited for without end: to its
    /// driver the device is one that does not reset, which is better than memory that is written when it has
    /// another use.
    pub fn drain(&mut self) {
        while self.flights.iter().any(Option::is_some) {
            // Nobody is left to be told of an error.
            let _ = self.engine.wait();
            while let Some((token, _)) = self.engine.complete() {
                let slot = self.flights.get_mut(usize::from(token));
                if slot.and_then(Option::take).is_some() {
                    self.free.push(token);
                }
            }
        }
    }
}

impl From<Job> for Live {
    fn from(job: Job) -> Self {
        let ReadyQueue { ring, kick, signal, .. } = job.queue;
        Self {
            ring,
            kick,
            signal,
            rules: job.rules,
            durability: job.durability,
            distress: job.distress,
            activity: job.activity,
            limits: job.limits,
            held: None,
            broken: false,
            progress: Progress::More,
            bell: Bell::Rung,
        }
    }
}

impl Live {
    /// Returns the request that waited for its turn, or the next one in the ring, and when it may go
    /// unless that is at once.
    fn next_request(&mut self) -> Result<Option<(Request, Option<Instant>)>, TakeError> {
        if let Some((request, at)) = self.held.take() {
            return Ok(Some((request, Some(at))));
        }
        let Some(chain) = self.ring.pop()? else { return Ok(None) };
        let request = request::parse(chain, self.ring.ram(), &self.rules)?;
        let at = self.admit(&request);
        Ok(Some((request, at)))
    }

    /// Takes the tokens of a request; returns when it may go, unless that is at once.
    fn admit(&self, request: &Request) -> Option<Instant> {
        match self.limits.admit(Instant::now(), request.work.bytes()?) {
            Admission::Now => None,
            Admission::At(at) => Some(at),
        }
    }

    /// Writes the status and gives the chain back.
    fn answer(
        &mut self,
        head: u16,
        address: GuestAddress,
        status: Status,
        written: u32,
    ) -> Result<(), RingError> {
        if self.broken {
            return Ok(());
        }
        // The parser saw that the address is memory, and memory does not go away.
        let _ = self.ring.ram().write_obj(status.byte(), address);
        self.activity.requests.add(1);
        self.activity.read_bytes.add(written.into());
        if status != Status::Done {
            self.activity.errors.add(1);
        }
        self.ring.push_used(head, written.saturating_add(1))
    }

    /// Interrupts the driver if it wants to know of what was given back.
    fn signal_used(&mut self) {
        if self.broken {
            return;
        }
        match self.ring.needs_signal() {
            Ok(true) => {
                self.activity.interrupts.add(1);
                self.signal.trigger();
            }
            Ok(false) => {}
            Err(error) => self.fail(&error),
        }
    }

    /// Leaves the ring alone from now on and asks for a reset.
    fn fail(&mut self, reason: &dyn std::fmt::Display) {
        if !self.broken {
            self.broken = true;
            self.distress.raise(reason);
        }
    }
}

fn pairs(segments: &[Segment]) -> Vec<(GuestAddress, u32)> {
    segments.iter().map(|segment| (segment.address, segment.length)).collect()
}

/// Writes as much of the id as fits; returns the bytes.
fn write_id(live: &Live, into: &[Segment], id: [u8; ID_SIZE]) -> Option<u32> {
    let mut rest: &[u8] = &id;
    let mut written = 0;
    for segment in into {
        let length = rest.len().min(usize::try_from(segment.length).ok()?);
        let (part, behind) = rest.split_at(length);
        live.ring.ram().write_slice(part, segment.address).ok()?;
        rest = behind;
        written += u32::try_from(length).ok()?;
    }
    Some(written)
}

fn status_of(error: &io::Error) -> Status {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => Status::Unsupported,
        _ => Status::Failed,
    }
}
