//! The controller's thread: takes commands from the queues, carries them out, posts completions.
//!
//! System calls behind the filter (`ThreadKind::Block`): as for a queue of virtio-blk.

use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    admin::{Answer, EventSource},
    command::{COMPLETION_SIZE, Command, Completion, SUBMISSION_SIZE, Status},
    flight::{Flight, Transfer},
    identify::Profile,
    logs::Logs,
    queue::{CompletionQueue, Place, SubmissionQueue},
    shared::{Shared, Shutdown, Side},
    transfer,
};
use crate::{
    devices::{
        throttle::{Admission, Limits},
        virtio::{
            blk::engine::Engine,
            worker::{Bell, Inbox, Order, Patience},
        },
    },
    sys::{io::borrow_eventfd, memory::GuestRam},
};

/// Commands that the file works on at once, for all queues together.
pub const DEPTH: u16 = 256;
/// Commands taken from one queue before the next has its turn.
const BURST: u32 = 32;
/// Turns of all queues before the thread looks at its orders again.
const ROUNDS: u32 = 8;
/// Largest admin queue (AQA has 12 bits).
const MAX_ADMIN_ENTRIES: u32 = 4096;
/// Errors that wait for a driver to ask for them.
const MAX_EVENTS: usize = 4;

/// What the thread is given when the driver switches the controller on.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// The admin submission queue.
    pub submissions: Place,
    /// The admin completion queue.
    pub completions: Place,
}

impl Start {
    /// Returns whether the sizes are possible. Whether the queues are memory, the thread sees.
    pub fn is_sound(&self) -> bool {
        let sizes = [self.submissions.entries, self.completions.entries];
        sizes.iter().all(|entries| (2..=MAX_ADMIN_ENTRIES).contains(entries))
    }
}

/// What came of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to do until the driver or the file says something.
    Idle,
    /// There may be more to do at once.
    More,
    /// The next command may go at this time.
    At(Instant),
}

/// Queues, features and events of a controller that is switched on.
pub(super) struct Live {
    pub(super) submissions: Vec<Option<SubmissionQueue>>,
    pub(super) completions: Vec<Option<CompletionQueue>>,
    /// Deletions of submission queues that wait for their commands: the queue and the command.
    pub(super) deletions: Vec<(u16, Command)>,
    /// Asynchronous Event Requests that wait.
    pub(super) event_requests: VecDeque<u16>,
    /// Events that wait for a request.
    pub(super) events: VecDeque<EventSource>,
    /// Log pages of events that were reported, and that were not read since.
    masked: Vec<u8>,
    pub(super) features: [u32; super::features::FEATURES],
    /// Vectors whose coalescing is off, as the driver set it. Nothing is ever coalesced.
    pub(super) vector_flags: Vec<bool>,
    /// A command that waits for its turn, its queue, and when that is.
    held: Option<(u16, Command, Instant)>,
    /// The I/O queue, less one, that went first last time.
    next: u16,
    flushing: bool,
    /// Something waits for room in a completion queue.
    short_of_room: bool,
}

impl Live {
    /// Keeps an event until it can be told; there is no room for endless ones.
    pub(super) fn note(&mut self, event: EventSource) {
        if self.events.len() < MAX_EVENTS {
            self.events.push_back(event);
        }
    }

    /// Posts the completion of the request for events at `at`; returns whether there was room for it.
    pub(super) fn answer_request(
        &mut self,
        at: usize,
        ram: &GuestRam,
        status: Status,
        result: u32,
    ) -> bool {
        let head = self.submissions.first().and_then(Option::as_ref).map_or(0, |q| q.head());
        let admin = self.completions.first_mut().and_then(Option::as_mut);
        let Some(admin) = admin.filter(|admin| admin.has_room()) else { return false };
        let Some(command) = self.event_requests.remove(at) else { return false };
        admin.post(ram, &Completion { result, head, queue: 0, command, status });
        true
    }

    /// The driver has read a log page: its kind of event is told again (§5.2).
    pub(super) fn unmask(&mut self, page: u8) {
        self.masked.retain(|masked| *masked != page);
    }
}

/// The thread's state.
pub struct Controller {
    pub(super) engine: Engine,
    pub(super) ram: GuestRam,
    pub(super) profile: Profile,
    limits: Limits,
    pub(super) shared: Arc<Shared>,
    pub(super) flights: Vec<Option<Flight>>,
    pub(super) free: Vec<u16>,
    pub(super) live: Option<Live>,
    pub(super) logs: Logs,
    /// Something was started again that the kernel had no means to do.
    pub(super) again: bool,
}

impl Controller {
    /// Returns a controller that is off.
    pub fn new(
        engine: Engine,
        ram: GuestRam,
        profile: Profile,
        limits: Limits,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            engine,
            ram,
            profile,
            limits,
            shared,
            flights: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            live: None,
            logs: Logs::default(),
            again: false,
        }
    }

    /// Serves until told to quit.
    pub(super) fn serve(mut self, inbox: &Inbox<Start>) {
        loop {
            while let Some(order) = inbox.next() {
                match order {
                    Order::Run(start) => self.start(&start),
                    Order::Hold => {
                        self.settle();
                        inbox.hold();
                    }
                    Order::Stop => {
                        self.stop();
                        inbox.stopped();
                    }
                    // A ring that is dropped waits for what the kernel has got, or leaves it what that needs.
                    Order::Quit => return,
                }
            }
            let patience = match self.turn(Instant::now()) {
                Progress::More => Patience::None,
                Progress::Idle => Patience::Forever,
                Progress::At(at) => {
                    Patience::For(at.saturating_duration_since(Instant::now()).max(MIN_WAIT))
                }
            };
            let kick = Some(borrow_eventfd(&self.shared.kick));
            // Read before the doorbells are: one that is written behind the look at them rings again.
            if inbox.wait_for_bell(kick, self.engine.as_fd(), patience) == Bell::Rung {
                let _ = self.shared.kick.read();
            }
        }
    }

    /// Switches the controller on, or fails if its admin queues are not memory.
    pub fn start(&mut self, start: &Start) {
        let (submissions, completions) = (start.submissions, start.completions);
        let memory = submissions.is_memory(&self.ram, SUBMISSION_SIZE)
            && completions.is_memory(&self.ram, COMPLETION_SIZE);
        if !memory {
            self.shared.set_fatal();
            return;
        }
        let queues = usize::from(self.profile.pairs) + 1;
        let mut live = Live {
            submissions: (0..queues).map(|_| None).collect(),
            completions: (0..queues).map(|_| None).collect(),
            deletions: Vec::new(),
            event_requests: VecDeque::new(),
            events: VecDeque::new(),
            masked: Vec::new(),
            features: super::features::defaults(),
            vector_flags: vec![false; self.shared.vector_count()],
            held: None,
            next: 0,
            flushing: false,
            short_of_room: false,
        };
        live.submissions[0] = Some(SubmissionQueue::new(submissions, 0));
        let mut admin = CompletionQueue::new(completions, Some(0));
        admin.users = 1;
        live.completions[0] = Some(admin);
        self.shared.pin.open();
        self.shared.pin.made(0, completions.entries, Some(0));
        self.live = Some(live);
    }

    /// Waits for everything in flight and posts it, even of a ring that fails: guest memory is not left alone before
    /// that. Commands not begun stay where they are.
    fn settle(&mut self) {
        while self.flights.iter().any(Option::is_some) {
            self.await_completion();
            self.reap();
        }
        self.finish_deletions();
        self.interrupt();
    }

    /// Forgets the queues and waits for everything in flight. A ring that fails for good is waited for without end:
    /// to its driver the controller is one that does not reset, which is better than memory that is written when
    /// it has another use.
    pub fn stop(&mut self) {
        self.live = None;
        while self.flights.iter().any(Option::is_some) {
            self.await_completion();
            while let Some((token, _)) = self.engine.complete() {
                if self.take_flight(token).is_some() {
                    self.free.push(token);
                }
            }
        }
    }

    /// Waits for something in flight. A ring that fails is a controller that does.
    fn await_completion(&mut self) {
        if self.engine.wait().is_err() {
            self.shared.set_fatal();
        }
    }

    /// Takes what the driver offers, starts it, and posts what is done. Waits for nothing, but a moment where
    /// the kernel had no means to do something.
    pub fn turn(&mut self, now: Instant) -> Progress {
        self.reap();
        if self.live.is_none() || self.shared.is_fatal() {
            self.interrupt();
            return Progress::Idle;
        }
        self.answer_doorbells();
        self.shut_down_if_asked();
        let mut progress = Progress::More;
        for _ in 0..ROUNDS {
            progress = self.round(now);
            if progress != Progress::More {
                break;
            }
        }
        let submitted = self.submit();
        // The plain engine is done already, and so may be a ring whose pages were cached.
        let finished = self.reap();
        let submitted = submitted && (finished == 0 || self.submit());
        self.finish_deletions();
        self.report_events();
        self.interrupt();
        let more = !submitted || (finished > 0 && progress == Progress::Idle);
        if more || self.may_have_room() { Progress::More } else { progress }
    }

    /// Has the thread woken when something waits for room in a completion queue. Returns whether there may be some
    /// already.
    fn may_have_room(&mut self) -> bool {
        let short = self.live.as_mut().is_some_and(|live| mem::take(&mut live.short_of_room));
        short && self.shared.await_room()
    }

    /// Hands started commands to the kernel; returns whether it took all of them.
    fn submit(&mut self) -> bool {
        self.engine.submit().unwrap_or_else(|_| {
            self.shared.set_fatal();
            true
        })
    }

    fn answer_doorbells(&mut self) {
        let Some(live) = &mut self.live else { return };
        for ring in self.shared.take_rings() {
            let index = usize::from(ring.queue);
            let sound = match ring.side {
                Side::Submission => live
                    .submissions
                    .get_mut(index)
                    .and_then(Option::as_mut)
                    .map(|queue| queue.ring(ring.value)),
                Side::Completion => live
                    .completions
                    .get_mut(index)
                    .and_then(Option::as_mut)
                    .map(|queue| queue.ring(ring.value)),
            };
            let event = match sound {
                Some(true) => continue,
                Some(false) => EventSource::InvalidDoorbellValue,
                None => EventSource::InvalidDoorbell,
            };
            live.note(event);
        }
    }

    /// Gives every queue one burst: the admin queue first, the others in turn (§4.13.1).
    fn round(&mut self, now: Instant) -> Progress {
        let mut took = false;
        for queue in self.order() {
            for _ in 0..BURST {
                match self.take(queue, now) {
                    Taken::Nothing => break,
                    Taken::One => took = true,
                    Taken::Wait(at) => return Progress::At(at),
                }
            }
        }
        if took { Progress::More } else { Progress::Idle }
    }

    /// Returns the admin queue and then the I/O queues, beginning with another one each time.
    fn order(&mut self) -> impl Iterator<Item = u16> + use<> {
        let pairs = self.profile.pairs;
        let first = self.live.as_mut().map_or(0, |live| {
            live.next = (live.next + 1) % pairs;
            live.next
        });
        std::iter::once(0).chain((0..pairs).map(move |index| 1 + (first + index) % pairs))
    }

    /// Takes one command from a queue and starts it.
    fn take(&mut self, index: u16, now: Instant) -> Taken {
        if self.free.is_empty() || !self.engine.has_room() {
            return Taken::Nothing;
        }
        let Some(live) = &mut self.live else { return Taken::Nothing };
        let held = match live.held.as_ref().filter(|_| index > 0) {
            Some((_, _, at)) if *at > now => return Taken::Wait(*at),
            Some(_) => live.held.take(),
            None => None,
        };
        let had_its_turn = held.is_some();
        let popped = || pop(live, index, &self.ram).map(|command| (index, command));
        let taken = held.map(|(queue, command, _)| (queue, command)).or_else(popped);
        let Some((queue, command)) = taken else { return Taken::Nothing };
        if queue == 0 {
            self.admin(command);
            return Taken::One;
        }
        let work = match transfer::parse(&command, &self.profile) {
            Ok(work) => work,
            Err(status) => {
                self.fail(queue, &command, status);
                return Taken::One;
            }
        };
        // Each has its turn after the one before.
        let admit = |bytes| {
            (0..work.operations()).fold(Admission::Now, |_, _| self.limits.admit(now, bytes))
        };
        if let (Some(bytes), false) = (work.bytes(), had_its_turn)
            && let Admission::At(at) = admit(bytes)
        {
            if let Some(live) = &mut self.live {
                live.held = Some((queue, command, at));
            }
            return Taken::Wait(at);
        }
        match self.begin(&command, work) {
            Ok(Some(transfer)) => self.launch(Flight::new(queue, command, transfer)),
            Ok(None) => self.complete(queue, &command, Status::SUCCESS, 0),
            Err(status) => self.fail(queue, &command, status),
        }
        Taken::One
    }

    fn admin(&mut self, command: Command) {
        match self.carry_out(&command) {
            Ok(Answer::Done(result)) => self.complete(0, &command, Status::SUCCESS, result),
            Ok(Answer::Later) => {}
            Err(status) => self.fail(0, &command, status),
        }
    }

    pub(super) fn end(&mut self, flight: &Flight, status: Status) {
        if flight.queue == SHUTDOWN_QUEUE {
            if let Some(live) = &mut self.live {
                live.flushing = false;
            }
            if status != Status::SUCCESS {
                // Nothing else tells a driver that waits for CSTS.SHST (§7.6.2).
                self.logs.error(flight.queue, &flight.command, status);
                self.shared.activity.media_errors.add(u64::from(status.is_of_media()));
                self.shared.set_fatal();
            }
            self.shared.set_shutdown(Shutdown::Done);
        } else if status == Status::SUCCESS {
            self.complete(flight.queue, &flight.command, status, 0);
        } else {
            self.fail(flight.queue, &flight.command, status);
        }
    }

    /// Notes and posts a failure.
    pub(super) fn fail(&mut self, queue: u16, command: &Command, status: Status) {
        self.logs.error(queue, command, status);
        self.complete(queue, command, status, 0);
    }

    /// Posts the completion of a command that was taken from `queue`.
    pub(super) fn complete(&mut self, queue: u16, command: &Command, status: Status, result: u32) {
        if queue > 0 {
            self.shared.activity.requests.add(1);
            let activity = &self.shared.activity;
            activity.errors.add(u64::from(status != Status::SUCCESS));
            activity.media_errors.add(u64::from(status.is_of_media()));
        }
        let Some(live) = &mut self.live else { return };
        let Some(Some(submissions)) = live.submissions.get_mut(usize::from(queue)) else { return };
        submissions.outstanding = submissions.outstanding.saturating_sub(1);
        let to = usize::from(submissions.completions);
        let Some(Some(completions)) = live.completions.get_mut(to) else { return };
        completions.owed = completions.owed.saturating_sub(1);
        let head = submissions.head();
        let completion = Completion { result, head, queue, command: command.id, status };
        completions.post(&self.ram, &completion);
    }

    /// Ends deletions whose queue has nothing in flight any more.
    fn finish_deletions(&mut self) {
        let Some(live) = &mut self.live else { return };
        let ready = |live: &Live, queue: u16| {
            let slot = live.submissions.get(usize::from(queue)).and_then(Option::as_ref);
            slot.is_none_or(|queue| queue.outstanding == 0)
        };
        let (done, waiting): (Vec<_>, Vec<_>) =
            mem::take(&mut live.deletions).into_iter().partition(|(queue, _)| ready(live, *queue));
        live.deletions = waiting;
        for (queue, command) in done {
            self.remove_submission_queue(queue);
            self.complete(0, &command, Status::SUCCESS, 0);
        }
    }

    /// Interrupts the driver for every completion queue with news.
    fn interrupt(&mut self) {
        let Some(live) = &mut self.live else { return };
        for (index, queue) in (0u16..).zip(&mut live.completions) {
            if let Some(queue) = queue
                && mem::take(&mut queue.news)
            {
                self.shared.posted(index, queue.tail(), queue.vector);
            }
        }
    }

    /// Answers events with the requests that wait for them (§5.2).
    fn report_events(&mut self) {
        let Some(live) = &mut self.live else { return };
        while !live.event_requests.is_empty() {
            let open = |event: &EventSource| !live.masked.contains(&event.log_page());
            let Some(at) = live.events.iter().position(open) else { return };
            let Some(event) = live.events.get(at).copied() else { return };
            if !live.answer_request(0, &self.ram, Status::SUCCESS, event.result()) {
                live.short_of_room = true;
                return;
            }
            live.events.remove(at);
            live.masked.push(event.log_page());
        }
    }

    /// Makes everything durable before a shutdown is reported as complete (§7.6.2).
    fn shut_down_if_asked(&mut self) {
        let Some(live) = &mut self.live else { return };
        if self.shared.shutdown() != Shutdown::Busy || live.flushing || self.free.is_empty() {
            return;
        }
        live.flushing = true;
        let command = Command::from_bytes(&[0; SUBMISSION_SIZE as usize]);
        self.launch(Flight::new(SHUTDOWN_QUEUE, command, Transfer::Flush));
    }
}

/// The queue of the flush that no driver asked for.
const SHUTDOWN_QUEUE: u16 = u16::MAX;
/// Shortest sleep: a clock that has not moved on must not keep the thread busy.
const MIN_WAIT: Duration = Duration::from_nanos(1);

enum Taken {
    Nothing,
    One,
    Wait(Instant),
}

/// Takes a command from queue `index`, if its completion will have room.
fn pop(live: &mut Live, index: u16, ram: &GuestRam) -> Option<Command> {
    if live.deletions.iter().any(|(queue, _)| *queue == index) {
        return None;
    }
    let queue = live.submissions.get_mut(usize::from(index))?.as_mut()?;
    let completions = live.completions.get_mut(usize::from(queue.completions))?.as_mut()?;
    if !completions.has_room() {
        live.short_of_room |= !queue.is_empty();
        return None;
    }
    let command = queue.pop(ram)?;
    completions.owed += 1;
    Some(command)
}
