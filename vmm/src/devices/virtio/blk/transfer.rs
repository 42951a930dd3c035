//! What a request of a block device's queue has left to do.

use vm_memory::GuestAddress;

use super::{Durability, request::Support};
use crate::sys::io::DiskCommand;

/// What is left of a command in flight to do.
pub(super) enum Transfer {
    Read {
        offset: u64,
        into: Vec<(GuestAddress, u32)>,
        moved: u32,
    },
    /// A driver without flush takes what is completed for durable (virtio §5.2.6.2): a sync follows then, here and
    /// below. A flag of the write's own (RWF_DSYNC) would do less: where it fails, nobody knows whether the write
    /// did, or what was written before is lost.
    Write {
        offset: u64,
        from: Vec<(GuestAddress, u32)>,
    },
    /// A command that zeroes a range or gives it back.
    Range {
        command: DiskCommand<'static>,
        /// What does it, too, where the host cannot do `command`.
        instead: Option<DiskCommand<'static>>,
        durability: Durability,
    },
    Sync,
}

impl Transfer {
    pub(super) fn discard((offset, length): (u64, u64), durability: Durability) -> Self {
        let command = DiskCommand::Punch { offset, length };
        Self::Range { command, instead: None, durability }
    }

    /// Returns what makes a range read as zeroes; its space is given back if `punching` says so and the host can.
    pub(super) fn zero(
        (offset, length): (u64, u64),
        punching: Support,
        durability: Durability,
    ) -> Self {
        let zero = DiskCommand::Zero { offset, length };
        let (command, instead) = match punching {
            Support::Yes => (DiskCommand::Punch { offset, length }, Some(zero)),
            Support::No => (zero, None),
        };
        Self::Range { command, instead, durability }
    }

    /// The host cannot do the command: takes what does it instead. Returns whether there is something.
    pub(super) fn take_other_way(&mut self) -> bool {
        let Self::Range { command, instead, .. } = self else { return false };
        let Some(other) = instead.take() else { return false };
        *command = other;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command that `transfer` starts next, and whether there is another way when the host cannot do it.
    fn tried(transfer: &mut Transfer) -> (Option<DiskCommand<'static>>, bool) {
        let command = match transfer {
            Transfer::Range { command, .. } => Some(*command),
            Transfer::Read { .. } | Transfer::Write { .. } | Transfer::Sync => None,
        };
        (command, transfer.take_other_way())
    }

    #[test]
    fn what_cannot_be_given_back_is_zeroed_and_a_discard_is_not() {
        let (range, cached) = ((512, 1024), Durability::Cached);
        let punch = Some(DiskCommand::Punch { offset: 512, length: 1024 });
        let zero = Some(DiskCommand::Zero { offset: 512, length: 1024 });
        let mut with_unmap = Transfer::zero(range, Support::Yes, cached);
        let ways = [tried(&mut with_unmap), tried(&mut with_unmap)];
        assert_eq!(ways, [(punch, true), (zero, false)]);
        assert_eq!(tried(&mut Transfer::zero(range, Support::No, cached)), (zero, false));
        assert_eq!(tried(&mut Transfer::discard(range, cached)), (punch, false));
        assert_eq!(tried(&mut Transfer::Sync), (None, false));
    }
}
