//! The thread of a vhost device: it gives rings to the kernel and takes them back, and answers the
//! control queue, if there is one.

use std::{io, os::fd::AsFd, sync::Arc, time::Instant};

use ::vhost::{VhostBackend, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::{
    super::{
        Activation, Distress, MAX_RING_SIZE, ReadyQueue,
        control::{Card, ControlQueue, Pace, Progress, Refused},
        transport::QueueLayout,
        worker::{Inbox, Next, Order, Patience},
    },
    Backend, Steering, VhostFd,
};
use crate::sys::io::borrow_eventfd;

/// One queue that the kernel serves, and our ear for it.
struct Line {
    /// Rings when the kernel used buffers and no vector interrupts the driver by itself.
    call: EventFd,
    /// Rings when the kernel finds the ring senseless.
    error: EventFd,
}

/// What the driver has running now.
struct Live {
    /// Those that the kernel serves, or will when the driver says so.
    queues: Vec<ReadyQueue>,
    /// The vector of each that the kernel rings; it rings us where there is none.
    wired: Vec<Option<u16>>,
    control: Option<ControlQueue>,
    distress: Distress,
    serving: Serving,
}

/// What the kernel does for the driver.
struct Serving {
    /// Features that both sides agreed on.
    features: u64,
    /// The same without the offloads that the driver has switched off.
    in_force: u64,
    /// Descriptors whose rings it has been told, from the first on.
    ready: u16,
    /// Those of them whose rings it serves.
    units: u16,
}

pub(super) struct Thread<B> {
    units: Vec<Arc<VhostFd>>,
    backend: Arc<B>,
    known: u64,
    lines: Vec<Line>,
}

impl<B: Backend> Thread<B> {
    pub(super) fn new(units: Vec<Arc<VhostFd>>, backend: Arc<B>, known: u64) -> io::Result<Self> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let lines = (0..units.len() * usize::from(B::QUEUES))
            .map(|_| Ok(Line { call: event()?, error: event()? }))
            .collect::<io::Result<_>>()?;
        Ok(Self { units, backend, known, lines })
    }

    pub(super) fn serve(self, inbox: &Inbox<Activation>) {
        let mut live: Option<Live> = None;
        let mut pace = Pace::new(Instant::now());
        loop {
            while let Some(order) = inbox.next() {
                match order {
                    Order::Run(activation) => live = Some(self.begin(activation)),
                    Order::Hold => self.hold(live.as_ref(), inbox),
                    Order::Stop => {
                        self.end();
                        live = None;
                        inbox.stopped();
                    }
                    Order::Quit => return self.end(),
                }
            }
            let mut patience = Patience::Forever;
            if let Some(live) = &mut live {
                self.wire(live);
                self.relay(live);
                patience = self.answer(live, &mut pace);
            }
            let mut descriptors = Vec::new();
            if let Some(live) = &live {
                let lines = self.lines.iter().flat_map(|line| [&line.call, &line.error]);
                descriptors.extend(lines.map(borrow_eventfd));
                let control = live.control.iter();
                descriptors.extend(control.map(|control| borrow_eventfd(&control.queue().kick)));
            }
            inbox.wait(&descriptors, patience);
        }
    }

    fn begin(&self, activation: Activation) -> Live {
        let Activation { features, mut queues, distress } = activation;
        let Steering { more, control } = self.backend.steering(features);
        let control = queues
            .iter()
            .position(|queue| Some(queue.index) == control)
            .map(|position| ControlQueue::new(queues.remove(position)));
        let mut serving = Serving { features, in_force: features, ready: 0, units: 0 };
        let began = self
            .tell_rings(&queues, more, &mut serving)
            .and_then(|()| self.connect(0, &queues, features).map_err(BeginError::Connect));
        match began {
            Ok(()) => serving.units = 1,
            Err(error) => {
                self.end();
                serving.ready = 0;
                distress.raise(&error);
            }
        }
        let wired = vec![None; queues.len()];
        Live { queues, wired, control, distress, serving }
    }

    /// Tells the kernel of the rings of the first descriptor, which have to be there, and of those of up to
    /// `more` others, as far as the driver enabled them all.
    fn tell_rings(
        &self,
        queues: &[ReadyQueue],
        more: u16,
        serving: &mut Serving,
    ) -> Result<(), BeginError> {
        let kernels = serving.features & self.known;
        let failed = |what| move |source| BeginError::Vhost { what, source };
        for (unit, fd) in (0..=more).zip(&self.units) {
            let first = unit.saturating_mul(B::QUEUES);
            let mut rings = Vec::new();
            for local in 0..B::QUEUES {
                let index = first.saturating_add(local);
                let queue = queues.iter().find(|queue| queue.index == index);
                match (queue, self.lines.get(usize::from(index))) {
                    (Some(queue), Some(line)) => rings.push((usize::from(local), queue, line)),
                    _ if unit == 0 => return Err(BeginError::Missing { index }),
                    _ => return Ok(()),
                }
            }
            fd.set_features(kernels).map_err(failed("set features"))?;
            for ring in rings {
                set_ring(fd, ring)?;
            }
            serving.ready = unit + 1;
        }
        Ok(())
    }

    /// Takes the rings away from the kernel, which remembers how far it was, until told to go on.
    fn hold(&self, live: Option<&Live>, inbox: &Inbox<Activation>) {
        let Some(live) = live.filter(|live| live.serving.units > 0) else {
            inbox.hold();
            return;
        };
        self.end_units();
        if inbox.hold() == Next::Order {
            // A stop, or another hold: the kernel must not have the rings in between.
            return;
        }
        for unit in 0..live.serving.units {
            if let Err(error) = self.connect(unit, &live.queues, live.serving.in_force) {
                live.distress.raise(&format_args!("vhost refused to go on: {error}"));
                return;
            }
        }
    }

    /// Lets the kernel use the rings of a descriptor, and rings the doorbells of its `queues`: one that
    /// rang while nothing was connected is used up, and vhost-vsock does not look at what the driver
    /// offered before (drivers/vhost/vsock.c, `vhost_vsock_start` and `vhost_vsock_handle_tx_kick`).
    fn connect(&self, unit: u16, queues: &[ReadyQueue], features: u64) -> io::Result<()> {
        let fd = self.units.get(usize::from(unit)).ok_or(io::ErrorKind::NotFound)?;
        self.backend.connect(unit, fd.as_fd(), features)?;
        for queue in queues.iter().filter(|queue| queue.index / B::QUEUES == unit) {
            // A full counter is a kick that is pending already.
            let _ = queue.kick.write(1);
        }
        Ok(())
    }

    fn disconnect(&self, unit: u16) {
        if let Some(fd) = self.units.get(usize::from(unit)) {
            // A device that was not connected refuses, which is as good.
            let _ = self.backend.disconnect(unit, fd.as_fd());
        }
    }

    fn end_units(&self) {
        for unit in (0u16..).take(self.units.len()) {
            self.disconnect(unit);
        }
    }

    /// Takes the rings away from the kernel and forgets what was signalled.
    fn end(&self) {
        self.end_units();
        for line in &self.lines {
            let _ = line.call.read();
            let _ = line.error.read();
        }
    }

    /// Has the kernel ring the vectors that the driver has chosen for its queues now.
    fn wire(&self, live: &mut Live) {
        for (queue, wired) in live.queues.iter().zip(&mut live.wired) {
            let (direct, unit) = (queue.signal.direct(), queue.index / B::QUEUES);
            let vector = direct.map(|(vector, _)| vector);
            let served = self.units.get(usize::from(unit)).filter(|_| unit < live.serving.ready);
            let (Some(fd), Some(line)) = (served, self.lines.get(usize::from(queue.index))) else {
                continue;
            };
            if vector == *wired {
                continue;
            }
            let call = direct.map_or(&line.call, |(_, call)| call);
            if let Err(error) = self.backend.ring(fd, usize::from(queue.index % B::QUEUES), call) {
                live.distress.raise(&format_args!("vhost refused an interrupt: {error}"));
                return;
            }
            // What was told by the vector of before, its driver may have missed.
            if std::mem::replace(wired, vector).is_some() {
                queue.signal.trigger();
            }
        }
    }

    /// Passes on what the kernel signalled.
    fn relay(&self, live: &Live) {
        for (index, line) in (0u16..).zip(&self.lines) {
            if line.call.read().is_ok()
                && let Some(queue) = live.queues.iter().find(|queue| queue.index == index)
            {
                queue.signal.trigger();
            }
            if line.error.read().is_ok() {
                live.distress.raise(&format_args!("the kernel gave up on queue {index}"));
            }
        }
    }

    /// Answers the control queue; returns how long it can wait. A ring that makes no sense is left alone
    /// until the device is reset.
    fn answer(&self, live: &mut Live, pace: &mut Pace) -> Patience {
        let Live { queues, control: Some(control), serving, .. } = live else {
            return Patience::Forever;
        };
        let mut units = Units { thread: self, queues, serving };
        let now = Instant::now();
        match control.turn(&mut units, pace, now) {
            Ok(Progress::Idle) => Patience::Forever,
            Ok(Progress::More) => Patience::None,
            Ok(Progress::At(time)) => Patience::For(time.saturating_duration_since(now)),
            Err(error) => {
                live.distress.raise(&error);
                live.control = None;
                Patience::Forever
            }
        }
    }
}

/// The descriptors as what the driver's commands are about.
struct Units<'a, B> {
    thread: &'a Thread<B>,
    queues: &'a [ReadyQueue],
    serving: &'a mut Serving,
}

impl<B: Backend> Units<'_, B> {
    fn shrink(&mut self, count: u16) {
        while self.serving.units > count {
            self.serving.units -= 1;
            self.thread.disconnect(self.serving.units);
        }
    }
}

impl<B: Backend> Card for Units<'_, B> {
    fn possible_pairs(&self) -> u16 {
        self.serving.ready
    }

    fn set_pairs(&mut self, count: u16) -> Result<(), Refused> {
        let before = self.serving.units;
        self.shrink(count);
        while self.serving.units < count {
            let unit = self.serving.units;
            if self.thread.connect(unit, self.queues, self.serving.in_force).is_err() {
                self.thread.disconnect(unit);
                self.shrink(before);
                return Err(Refused);
            }
            self.serving.units += 1;
        }
        Ok(())
    }

    fn set_offloads(&mut self, offloads: u64) -> Result<(), Refused> {
        if self.serving.units == 0 {
            return Err(Refused);
        }
        let switched = self.thread.backend.switch_offloads(self.serving.features, offloads);
        self.serving.in_force = switched.map_err(|_| Refused)?;
        Ok(())
    }
}

/// Why the kernel did not take the rings.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error("the driver did not enable queue {index}")]
    Missing { index: u16 },
    #[error("vhost refused to {what}: {source}")]
    Vhost { what: &'static str, source: ::vhost::Error },
    #[error("vhost refused to start: {0}")]
    Connect(io::Error),
}

/// Tells the kernel of one ring, by its number among the descriptor's own.
fn set_ring(
    fd: &VhostFd,
    (index, queue, line): (usize, &ReadyQueue, &Line),
) -> Result<(), BeginError> {
    let failed = |what| move |source| BeginError::Vhost { what, source };
    let layout = queue.ring.layout();
    fd.set_vring_num(index, layout.size).map_err(failed("set a ring's size"))?;
    fd.set_vring_base(index, 0).map_err(failed("set a ring's start"))?;
    fd.set_vring_addr(index, &ring_addresses(layout)).map_err(failed("place a ring"))?;
    fd.set_vring_call(index, &line.call).map_err(failed("set an interrupt"))?;
    fd.set_vring_err(index, &line.error).map_err(failed("set an error signal"))?;
    fd.set_vring_kick(index, &queue.kick).map_err(failed("set a doorbell"))
}

fn ring_addresses(layout: &QueueLayout) -> VringConfigData {
    VringConfigData {
        queue_max_size: MAX_RING_SIZE,
        queue_size: layout.size,
        flags: 0,
        desc_table_addr: layout.descriptors,
        used_ring_addr: layout.used,
        avail_ring_addr: layout.available,
        log_addr: None,
    }
}

#[cfg(test)]
#[path = "thread_tests.rs"]
mod tests;
