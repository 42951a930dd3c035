//! Commands on their way through the file: what a command that moves data is made of, how it is
//! handed to the engine piece by piece, and how it ends.

use std::{io, mem, thread};

use vm_memory::GuestAddress;

use super::{
    command::{Command, Status},
    controller::Controller,
    prp,
    transfer::{self, RANGE_SIZE, Work},
};
use crate::{
    devices::virtio::blk::{
        Durability,
        flight::{PAUSE, Tries, advance},
    },
    sys::io::DiskCommand,
};

/// A command in flight.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) queue: u16,
    pub(super) command: Command,
    transfer: Transfer,
    tries: Tries,
}

impl Flight {
    /// Makes a command of `queue` that nothing was done of.
    pub(super) fn new(queue: u16, command: Command, transfer: Transfer) -> Self {
        Self { queue, command, transfer, tries: Tries::default() }
    }
}

/// What is left of it to do.
#[derive(Debug)]
pub(super) enum Transfer {
    Read { offset: u64, into: Vec<(GuestAddress, u32)> },
    Write { offset: u64, from: Vec<(GuestAddress, u32)>, durability: Durability },
    Flush,
    Zero { offset: u64, length: u64, durability: Durability },
    Punch { ranges: Vec<(u64, u64)>, durability: Durability, purpose: Purpose },
}

/// What ranges are given back for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// They are to read as zeroes.
    Zeroes,
    /// The driver has no more use for them.
    Space,
}

impl Transfer {
    /// Returns whether a flush has to follow, because of what was asked for or of the `cache` that there is now: what
    /// was begun while writes were cached may end when they are not.
    fn needs_flush(&self, cache: Durability) -> bool {
        match self {
            Self::Read { .. } | Self::Flush => false,
            Self::Write { durability, .. }
            | Self::Zero { durability, .. }
            | Self::Punch { durability, .. } => [*durability, cache].contains(&Durability::Durable),
        }
    }
}

impl Controller {
    /// Finds the memory of a command; returns what there is to do, if anything.
    pub(super) fn begin(
        &mut self,
        command: &Command,
        work: Work,
    ) -> Result<Option<Transfer>, Status> {
        let prps = (command.prp1, command.prp2);
        // With the cache off, all that is completed is durable (§5.21.1.6).
        let at_least = |asked| match self.write_cache() {
            Durability::Cached => asked,
            Durability::Durable => Durability::Durable,
        };
        Ok(Some(match work {
            Work::Nothing => return Ok(None),
            Work::Flush => Transfer::Flush,
            Work::Read { offset, length } => {
                self.logs.read(length);
                Transfer::Read { offset, into: prp::segments(&self.ram, prps, length)? }
            }
            Work::Write { offset, length, durability } => {
                let durability = at_least(durability);
                self.logs.write(length);
                let from = prp::segments(&self.ram, prps, length)?;
                Transfer::Write { offset, from, durability }
            }
            Work::Zero { offset, length, deallocate: false, durability } => {
                Transfer::Zero { offset, length, durability: at_least(durability) }
            }
            Work::Zero { offset, length, deallocate: true, durability } => {
                let durability = at_least(durability);
                Transfer::Punch {
                    ranges: vec![(offset, length)],
                    durability,
                    purpose: Purpose::Zeroes,
                }
            }
            Work::Deallocate { ranges } => {
                let mut list = vec![0; ranges * RANGE_SIZE];
                prp::read(&self.ram, prps, &mut list)?;
                let ranges = transfer::ranges(&list, &self.profile)?;
                if ranges.is_empty() {
                    return Ok(None);
                }
                let durability = at_least(Durability::Cached);
                Transfer::Punch { ranges, durability, purpose: Purpose::Space }
            }
        }))
    }

    /// Starts what is left of a command.
    pub(super) fn launch(&mut self, flight: Flight) {
        let Some(token) = self.free.pop() else {
            return self.fail(flight.queue, &flight.command, Status::INTERNAL);
        };
        let command = match &flight.transfer {
            Transfer::Read { offset, into } => DiskCommand::Read { offset: *offset, into },
            Transfer::Write { offset, from, .. } => DiskCommand::Write { offset: *offset, from },
            Transfer::Flush => DiskCommand::Sync,
            Transfer::Zero { offset, length, .. } => {
                DiskCommand::Zero { offset: *offset, length: *length }
            }
            Transfer::Punch { ranges, .. } => match ranges.last() {
                Some((offset, length)) => DiskCommand::Punch { offset: *offset, length: *length },
                None => DiskCommand::Sync,
            },
        };
        match (self.engine.queue(token, command), self.flights.get_mut(usize::from(token))) {
            (Ok(()), Some(slot)) => *slot = Some(flight),
            // Buffers outside guest memory end here.
            _ => {
                self.free.push(token);
                self.fail(flight.queue, &flight.command, Status::DATA_TRANSFER);
            }
        }
    }

    pub(super) fn take_flight(&mut self, token: u16) -> Option<Flight> {
        self.flights.get_mut(usize::from(token)).and_then(Option::take)
    }

    /// Ends what has completed; returns how many commands that was.
    pub(super) fn reap(&mut self) -> usize {
        let mut finished = 0;
        while let Some((token, result)) = self.engine.complete() {
            let Some(flight) = self.take_flight(token) else { continue };
            self.free.push(token);
            finished += 1;
            self.conclude(flight, result);
        }
        if mem::take(&mut self.again) {
            thread::sleep(PAUSE);
        }
        finished
    }

    /// Goes on with a command whose ranges the host cannot give back, as of a block device without discard: they
    /// are zeroed, or the driver's hint that it has no use for them is not taken.
    fn go_without_punching(&mut self, mut flight: Flight) {
        match &flight.transfer {
            Transfer::Punch { ranges, durability, purpose: Purpose::Zeroes } => {
                let (offset, length) = ranges.last().copied().unwrap_or_default();
                flight.transfer = Transfer::Zero { offset, length, durability: *durability };
                self.launch(flight);
            }
            Transfer::Punch { .. } => self.end(&flight, Status::SUCCESS),
            Transfer::Read { .. }
            | Transfer::Write { .. }
            | Transfer::Flush
            | Transfer::Zero { .. } => {
                let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
                let status = failure(&flight.transfer, &error);
                self.end(&flight, status);
            }
        }
    }

    /// Ends one command, or starts what is left of it.
    fn conclude(&mut self, mut flight: Flight, result: io::Result<u32>) {
        let moved = match result {
            Err(error) if flight.tries.take(&error) => {
                self.again = true;
                return self.launch(flight);
            }
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return self.go_without_punching(flight);
            }
            Err(error) => {
                let status = failure(&flight.transfer, &error);
                return self.end(&flight, status);
            }
            Ok(moved) => moved,
        };
        flight.tries = Tries::default();
        let activity = &self.shared.activity;
        match &flight.transfer {
            Transfer::Read { .. } => activity.read_bytes.add(moved.into()),
            Transfer::Write { .. } => activity.written_bytes.add(moved.into()),
            Transfer::Flush | Transfer::Zero { .. } | Transfer::Punch { .. } => {}
        }
        let left = match &mut flight.transfer {
            Transfer::Flush | Transfer::Zero { .. } => false,
            Transfer::Punch { ranges, .. } => {
                ranges.pop();
                !ranges.is_empty()
            }
            Transfer::Read { offset, into } => advance(offset, into, moved),
            Transfer::Write { offset, from, .. } => advance(offset, from, moved),
        };
        let transfers = matches!(flight.transfer, Transfer::Read { .. } | Transfer::Write { .. });
        if !left && flight.transfer.needs_flush(self.write_cache()) {
            flight.transfer = Transfer::Flush;
            self.launch(flight);
        } else if !left {
            self.end(&flight, Status::SUCCESS);
        } else if transfers && moved == 0 {
            // The file ends before the disk does.
            let end = io::Error::from(io::ErrorKind::UnexpectedEof);
            let status = failure(&flight.transfer, &end);
            self.end(&flight, status);
        } else {
            self.launch(flight);
        }
    }
}

/// Returns how a failed command ends.
fn failure(transfer: &Transfer, error: &io::Error) -> Status {
    match (transfer, error.raw_os_error()) {
        (_, Some(libc::EFAULT)) => Status::DATA_TRANSFER,
        (Transfer::Read { .. }, _) => Status::READ_ERROR,
        (Transfer::Write { .. } | Transfer::Flush, _) => Status::WRITE_FAULT,
        (Transfer::Zero { .. } | Transfer::Punch { .. }, _) => Status::INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_begun_with_a_cache_is_flushed_when_it_ends_without_one() {
        let all = |durability| {
            [
                Transfer::Write { offset: 0, from: Vec::new(), durability },
                Transfer::Zero { offset: 0, length: 512, durability },
                Transfer::Punch { ranges: Vec::new(), durability, purpose: Purpose::Space },
            ]
        };
        let flushed = |begun, now| all(begun).map(|transfer| transfer.needs_flush(now));
        let (cached, durable) = (Durability::Cached, Durability::Durable);
        assert_eq!(flushed(cached, cached), [false; 3]);
        assert_eq!(flushed(cached, durable), [true; 3]);
        assert_eq!(flushed(durable, cached), [true; 3]);
        assert_eq!(flushed(durable, durable), [true; 3]);
        let others = [Transfer::Flush, Transfer::Read { offset: 0, into: Vec::new() }];
        assert!(others.iter().all(|transfer| !transfer.needs_flush(durable)));
    }
}
