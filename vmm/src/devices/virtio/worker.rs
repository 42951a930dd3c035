//! The thread behind a queue or a device: it gets orders through a mailbox. Giving one never waits; only at
//! a driver's reset, and when it takes bus mastering away, `pci` waits a second at most for what was ordered.

use std::{
    collections::VecDeque,
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    sandbox::{ThreadKind, apply_thread_filter},
    sys::io::borrow_eventfd,
};

/// What a worker is told.
pub(in crate::devices) enum Order<J> {
    /// Serve this until told to stop.
    Run(J),
    /// Finish what is under way, then call [`Inbox::hold`].
    Hold,
    /// Let go of the rings and of guest memory, then say so with [`Inbox::stopped`].
    Stop,
    /// End the thread.
    Quit,
}

struct Mailbox<J> {
    orders: Mutex<VecDeque<Order<J>>>,
    wake: EventFd,
    busy: AtomicBool,
    /// A stop was ordered that the thread has not carried out. Changed with `orders` locked, and
    /// cleared before `busy`: a stop of this job must not be left for the next.
    stopping: AtomicBool,
    /// The device's end wants the thread to wait.
    hold: AtomicBool,
    /// The thread waits.
    held: AtomicBool,
}

impl<J> Mailbox<J> {
    fn new() -> io::Result<Self> {
        Ok(Self {
            orders: Mutex::default(),
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            busy: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            hold: AtomicBool::new(false),
            held: AtomicBool::new(false),
        })
    }

    fn orders(&self) -> MutexGuard<'_, VecDeque<Order<J>>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, order: Order<J>) {
        self.orders().push_back(order);
        self.wake();
    }

    fn wake(&self) {
        // A full counter is a wake-up that is pending already.
        let _ = self.wake.write(1);
    }
}

/// The device's end: gives orders.
pub(in crate::devices) struct Worker<J> {
    mailbox: Arc<Mailbox<J>>,
}

/// The thread's end: takes orders.
pub(in crate::devices) struct Inbox<J> {
    mailbox: Arc<Mailbox<J>>,
}

impl<J: Send + 'static> Worker<J> {
    /// Starts a thread: `prepare` runs before the system call filter, `serve` behind it. Returns
    /// when the thread is behind its filter, with the error of what failed before.
    pub(in crate::devices) fn spawn<S: 'static>(
        name: String,
        kind: ThreadKind,
        prepare: impl FnOnce() -> io::Result<S> + Send + 'static,
        serve: impl FnOnce(S, Inbox<J>) + Send + 'static,
    ) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let inbox = Inbox { mailbox: Arc::clone(&mailbox) };
        let (ready, started) = mpsc::sync_channel(1);
        thread::Builder::new().name(name).spawn(move || {
            let prepared = prepare().and_then(|state| match apply_thread_filter(kind) {
                Ok(()) => Ok(state),
                Err(error) => Err(io::Error::other(error)),
            });
            match prepared {
                Ok(state) => {
                    let _ = ready.send(Ok(()));
                    serve(state, inbox);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
        started
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the thread ended before it was ready")))?;
        Ok(Self { mailbox })
    }

    /// Gives the worker something to serve. It must be idle.
    pub(in crate::devices) fn run(&self, job: J) {
        self.mailbox.busy.store(true, Ordering::Release);
        self.mailbox.post(Order::Run(job));
    }

    /// Tells the worker to stop; [`Self::is_idle`] says when it has. One that was told already is not
    /// told again.
    pub(in crate::devices) fn stop(&self) {
        let mut orders = self.mailbox.orders();
        if self.is_idle() || self.mailbox.stopping.swap(true, Ordering::AcqRel) {
            return;
        }
        orders.push_back(Order::Stop);
        drop(orders);
        self.mailbox.wake();
    }

    /// Tells the worker to finish what is under way and wait; [`Self::is_held`] says when it does.
    /// However often that is, there is never more than one order to hold behind the last one of another
    /// kind.
    pub(in crate::devices) fn hold(&self) {
        self.mailbox.hold.store(true, Ordering::Release);
        let mut orders = self.mailbox.orders();
        if !matches!(orders.back(), Some(Order::Hold)) {
            orders.push_back(Order::Hold);
        }
        drop(orders);
        self.mailbox.wake();
    }

    /// Returns whether the worker waits and touches no guest memory.
    pub(in crate::devices) fn is_held(&self) -> bool {
        self.mailbox.held.load(Ordering::Acquire)
    }

    /// Lets the worker go on.
    pub(in crate::devices) fn go_on(&self) {
        self.mailbox.hold.store(false, Ordering::Release);
        self.mailbox.wake();
    }

    /// Has the worker look at everything that it waits for.
    pub(in crate::devices) fn wake(&self) {
        self.mailbox.wake();
    }

    /// Returns whether the worker serves nothing and touches no guest memory.
    pub(in crate::devices) fn is_idle(&self) -> bool {
        !self.mailbox.busy.load(Ordering::Acquire)
    }
}

impl<J> Drop for Worker<J> {
    fn drop(&mut self) {
        // Not joined: a thread that waits for a disk must not keep the process from ending.
        self.mailbox.post(Order::Quit);
    }
}

impl<J> Inbox<J> {
    /// Returns the next order, if any.
    pub(in crate::devices) fn next(&self) -> Option<Order<J>> {
        self.mailbox.orders().pop_front()
    }

    /// Nothing of the guest's is in use any more.
    pub(in crate::devices) fn stopped(&self) {
        let _orders = self.mailbox.orders();
        self.mailbox.stopping.store(false, Ordering::Release);
        self.mailbox.busy.store(false, Ordering::Release);
    }

    /// Nothing is under way: waits until the device's end says to go on, or to do something else.
    /// Returns which of the two.
    pub(in crate::devices) fn hold(&self) -> Next {
        self.mailbox.held.store(true, Ordering::Release);
        while self.mailbox.hold.load(Ordering::Acquire) && self.mailbox.orders().is_empty() {
            self.wait(&[], Patience::Forever);
        }
        self.mailbox.held.store(false, Ordering::Release);
        if self.mailbox.orders().is_empty() { Next::GoOn } else { Next::Order }
    }

    /// Waits until an order or one of `others` is ready; with [`Patience::None`] only looks.
    pub(in crate::devices) fn wait(&self, others: &[BorrowedFd<'_>], patience: Patience) {
        let mailbox = borrow_eventfd(&self.mailbox.wake);
        let all = std::iter::once(mailbox).chain(others.iter().copied());
        let mut descriptors: Vec<PollFd<'_>> = all.map(readable).collect();
        let polled = poll(&mut descriptors, patience);
        self.empty(descriptors.first().map_or(Bell::Rung, |mailbox| bell(polled, mailbox)));
    }

    /// Waits as [`Self::wait`] does, for a doorbell and for something else, where they are there, and makes no
    /// list of them. Returns whether the doorbell has to be read.
    pub(in crate::devices) fn wait_for_bell(
        &self,
        doorbell: Option<BorrowedFd<'_>>,
        other: Option<BorrowedFd<'_>>,
        patience: Patience,
    ) -> Bell {
        let mailbox = borrow_eventfd(&self.mailbox.wake);
        // The mailbox once more stands for what is not there.
        let all = [mailbox, doorbell.unwrap_or(mailbox), other.unwrap_or(mailbox)];
        let mut descriptors = all.map(readable);
        let polled = poll(&mut descriptors, patience);
        let [mailbox, doorbell, _] = descriptors.each_ref().map(|each| bell(polled, each));
        self.empty(mailbox);
        doorbell
    }

    fn empty(&self, mailbox: Bell) {
        if mailbox == Bell::Rung {
            let _ = self.mailbox.wake.read();
        }
    }
}

fn readable(descriptor: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(descriptor, PollFlags::IN)
}

fn poll(descriptors: &mut [PollFd<'_>], patience: Patience) -> rustix::io::Result<usize> {
    let timeout = match patience {
        Patience::None => Some(Timespec::default()),
        Patience::For(duration) => Timespec::try_from(duration).ok(),
        Patience::Forever => None,
    };
    rustix::event::poll(descriptors, timeout.as_ref())
}

/// Returns whether an eventfd has to be read. Poll fails when interrupted, which is as good as being woken, and tells
/// of no descriptor then.
fn bell(polled: rustix::io::Result<usize>, eventfd: &PollFd<'_>) -> Bell {
    if polled.is_err() || eventfd.revents().contains(PollFlags::IN) {
        Bell::Rung
    } else {
        Bell::Silent
    }
}

#[cfg(test)]
impl<J> Worker<J> {
    /// Returns both ends, without a thread between them.
    pub(in crate::devices) fn detached() -> io::Result<(Self, Inbox<J>)> {
        let mailbox = Arc::new(Mailbox::new()?);
        Ok((Self { mailbox: Arc::clone(&mailbox) }, Inbox { mailbox }))
    }
}

/// What comes after a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::devices) enum Next {
    /// The work goes on.
    GoOn,
    /// An order, which says whether it does.
    Order,
}

/// Whether an eventfd has to be read. One that rings behind a look stays readable, and ends the next wait at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::devices) enum Bell {
    /// It rang, or nobody has looked.
    Rung,
    /// It had not rung.
    Silent,
}

/// How long to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::devices) enum Patience {
    /// Not at all.
    None,
    /// Until something happens, and no longer than this.
    For(Duration),
    /// Until something happens.
    Forever,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Worker<u32>, Inbox<u32>) {
        Worker::detached().expect("an eventfd")
    }

    #[test]
    fn whoever_is_told_to_stop_is_told_once() {
        let (worker, inbox) = ends();
        worker.stop();
        assert!(inbox.next().is_none(), "it does nothing that it could stop");
        worker.run(1);
        worker.stop();
        worker.stop();
        assert!(matches!(inbox.next(), Some(Order::Run(1))));
        assert!(matches!(inbox.next(), Some(Order::Stop)));
        worker.stop();
        assert!(inbox.next().is_none());
        inbox.stopped();
        assert!(worker.is_idle());
    }

    #[test]
    fn stops_of_one_job_do_not_end_the_next() {
        let (worker, inbox) = ends();
        worker.run(1);
        worker.stop();
        worker.stop();
        assert!(matches!(inbox.next(), Some(Order::Run(1))));
        assert!(matches!(inbox.next(), Some(Order::Stop)));
        inbox.stopped();
        worker.run(2);
        assert!(matches!(inbox.next(), Some(Order::Run(2))));
        assert!(inbox.next().is_none());
        assert!(!worker.is_idle());
        worker.stop();
        assert!(matches!(inbox.next(), Some(Order::Stop)));
    }

    #[test]
    fn what_rang_is_told_and_only_the_mailbox_is_emptied() {
        let (worker, inbox) = ends();
        let doorbell = EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
        let look = || inbox.wait_for_bell(Some(borrow_eventfd(&doorbell)), None, Patience::None);
        assert_eq!(look(), Bell::Silent);
        doorbell.write(1).expect("room");
        assert_eq!([look(), look()], [Bell::Rung; 2]);
        doorbell.read().expect("it rang");
        worker.wake();
        assert_eq!(look(), Bell::Silent);
        assert!(inbox.mailbox.wake.read().is_err(), "the mailbox was emptied");
        worker.wake();
        inbox.wait(&[], Patience::None);
        assert!(inbox.mailbox.wake.read().is_err(), "the mailbox was emptied");
        let interrupted = Err(rustix::io::Errno::INTR);
        assert_eq!(bell(interrupted, &readable(borrow_eventfd(&doorbell))), Bell::Rung);
    }

    #[test]
    fn orders_to_hold_do_not_pile_up() {
        let (worker, inbox) = ends();
        worker.run(1);
        for _ in 0..3 {
            worker.hold();
            worker.go_on();
        }
        assert!(matches!(inbox.next(), Some(Order::Run(1))));
        assert!(matches!(inbox.next(), Some(Order::Hold)));
        assert!(inbox.next().is_none());
        assert_eq!(inbox.hold(), Next::GoOn);
    }

    #[test]
    fn an_order_ends_a_hold_and_a_hold_behind_it_counts() {
        let (worker, inbox) = ends();
        worker.run(1);
        assert!(matches!(inbox.next(), Some(Order::Run(1))));
        worker.hold();
        worker.stop();
        worker.hold();
        assert!(matches!(inbox.next(), Some(Order::Hold)));
        assert_eq!(inbox.hold(), Next::Order);
        assert!(matches!(inbox.next(), Some(Order::Stop)));
        assert!(matches!(inbox.next(), Some(Order::Hold)));
    }
}
