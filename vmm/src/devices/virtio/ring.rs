//! One split ring: takes chains the driver offers, checked, and gives them back.
//! Source: virtio §2.7 "Split Virtqueues".
//!
//! Every number in a ring is the guest's. A chain that loops, leaves its table, is longer than
//! [`MAX_CHAIN`] or has a readable part behind a writable one is an error of the ring itself:
//! the device asks for a reset. Where the buffers lie is checked by who reads or writes them.

use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::{F_RING_EVENT_IDX, MAX_CHAIN, MAX_RING_SIZE, transport::QueueLayout};
use crate::sys::memory::GuestRam;

/// VIRTQ_AVAIL_F_NO_INTERRUPT.
const NO_INTERRUPT: u16 = 1;

/// A part of guest memory that a chain names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: GuestAddress,
    /// Bytes, never zero.
    pub length: u32,
}

/// A chain of buffers that the driver offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// What to give back.
    pub head: u16,
    /// Buffers that the device reads.
    pub readable: Vec<Segment>,
    /// Buffers that the device writes.
    pub writable: Vec<Segment>,
}

/// What is wrong with a ring. The device needs a reset.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RingError {
    #[error("the ring cannot be used: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("chain {head} does not end: a descriptor is missing, loops or is too deep")]
    Unfinished { head: u16 },
    #[error("chain {head} has more than {limit} descriptors")]
    TooLong { head: u16, limit: u16 },
    #[error("chain {head} has a readable descriptor behind a writable one")]
    Order { head: u16 },
    #[error("the queue offers descriptor {head} of a table of {size}")]
    Head { head: u16, size: u16 },
}

/// A ring in guest memory.
#[derive(Debug)]
pub struct Ring {
    queue: Queue,
    ram: GuestRam,
    layout: QueueLayout,
    /// Whether chains were given back since the driver was last interrupted, or spared.
    unsignalled: bool,
}

impl Ring {
    /// Returns the ring of a queue that the transport has checked.
    pub fn new(layout: QueueLayout, features: u64, ram: GuestRam) -> Result<Self, RingError> {
        let mut queue = Queue::new(MAX_RING_SIZE)?;
        queue.try_set_size(layout.size)?;
        queue.try_set_desc_table_address(GuestAddress(layout.descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(layout.available))?;
        queue.try_set_used_ring_address(GuestAddress(layout.used))?;
        queue.set_event_idx(features & F_RING_EVENT_IDX != 0);
        queue.set_ready(true);
        Ok(Self { queue, ram, layout, unsignalled: false })
    }

    /// Returns the latched layout, for vhost.
    pub fn layout(&self) -> &QueueLayout {
        &self.layout
    }

    /// Returns the memory that the chains point into.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Takes the next chain, or `None` when the driver offers no more.
    pub fn pop(&mut self) -> Result<Option<Chain>, RingError> {
        let Some(descriptors) = self.queue.iter(&self.ram)?.next() else {
            return Ok(None);
        };
        let head = descriptors.head_index();
        if head >= self.layout.size {
            let size = self.layout.size;
            return Err(RingError::Head { head, size });
        }
        let mut chain = Chain { head, readable: Vec::new(), writable: Vec::new() };
        let mut finished = false;
        for (index, descriptor) in (0u16..).zip(descriptors) {
            if index >= MAX_CHAIN {
                let limit = MAX_CHAIN;
                return Err(RingError::TooLong { head, limit });
            }
            finished = !descriptor.has_next();
            let segment = Segment { address: descriptor.addr(), length: descriptor.len() };
            if segment.length == 0 {
                continue;
            }
            if descriptor.is_write_only() {
                chain.writable.push(segment);
            } else if chain.writable.is_empty() {
                chain.readable.push(segment);
            } else {
                return Err(RingError::Order { head });
            }
        }
        // The iterator says nothing about why it ended; only a last descriptor without "next" is
        // a whole chain.
        if finished { Ok(Some(chain)) } else { Err(RingError::Unfinished { head }) }
    }

    /// Gives a chain back with `written` bytes in its writable part.
    pub fn push_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        self.unsignalled = true;
        Ok(self.queue.add_used(&self.ram, head, written)?)
    }

    /// Returns whether the driver wants an interrupt for what was given back since the last call.
    pub fn needs_signal(&mut self) -> Result<bool, RingError> {
        if !std::mem::take(&mut self.unsignalled) {
            return Ok(false);
        }
        // The crate knows `used_event` but not the flag that drivers without it set.
        let wanted = self.queue.needs_notification(&self.ram)?;
        Ok(wanted && (self.queue.event_idx_enabled() || !self.driver_wants_silence()))
    }

    /// Returns whether the driver set VIRTQ_AVAIL_F_NO_INTERRUPT (virtio §2.7.7).
    fn driver_wants_silence(&self) -> bool {
        self.ram
            .load::<u16>(GuestAddress(self.layout.available), Ordering::Relaxed)
            .is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT != 0)
    }

    /// Asks the driver not to notify while the device is looking anyway.
    pub fn disable_kicks(&mut self) -> Result<(), RingError> {
        Ok(self.queue.disable_notification(&self.ram)?)
    }

    /// Asks the driver to notify again; returns whether chains came in the meantime.
    pub fn enable_kicks(&mut self) -> Result<bool, RingError> {
        Ok(self.queue.enable_notification(&self.ram)?)
    }
}
