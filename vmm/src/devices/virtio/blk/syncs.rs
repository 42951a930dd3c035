//! Syncs of one engine: one is under way at a time, and the next serves all that were asked for meanwhile. So none
//! succeeds beside one that has taken the kernel's word of lost writes with it, and many cost no more than two.

use std::{collections::VecDeque, io, mem};

/// Which commands wait for which sync, by their tokens.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// Served by the one under way, which has the first one's token. Empty when there is none.
    under_way: Vec<u16>,
    /// Asked for since that began.
    next: Vec<u16>,
    /// Over, and not told yet.
    over: VecDeque<(u16, io::Result<u32>)>,
}

impl Syncs {
    /// Takes a command that asks for a sync; returns whether that is to be started now.
    pub(super) fn ask(&mut self, token: u16) -> bool {
        let is_first = self.under_way.is_empty();
        if is_first {
            self.under_way.push(token);
        } else {
            self.next.push(token);
        }
        is_first
    }

    /// The sync that was asked for last could not be started, and is nobody's.
    pub(super) fn forget(&mut self) {
        self.under_way.clear();
    }

    /// Returns whether the command of this token is the sync under way.
    pub(super) fn is_under_way(&self, token: u16) -> bool {
        self.under_way.first() == Some(&token)
    }

    /// The sync under way has ended. Returns the token of the one to start, if more were asked for.
    pub(super) fn end(&mut self, result: io::Result<u32>) -> Option<u16> {
        let served = mem::replace(&mut self.under_way, mem::take(&mut self.next));
        let again = || match &result {
            Ok(moved) => Ok(*moved),
            Err(error) => Err(error
                .raw_os_error()
                .map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)),
        };
        self.over.extend(served.into_iter().map(|token| (token, again())));
        self.under_way.first().copied()
    }

    /// Returns the next command whose sync is over.
    pub(super) fn served(&mut self) -> Option<(u16, io::Result<u32>)> {
        self.over.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(syncs: &mut Syncs) -> Vec<(u16, Option<i32>)> {
        let code = |result: io::Result<u32>| result.err().and_then(|error| error.raw_os_error());
        let next = || syncs.served().map(|(token, result)| (token, code(result)));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn those_asked_for_meanwhile_share_the_next_one() {
        let mut syncs = Syncs::default();
        assert!(syncs.ask(7) && syncs.is_under_way(7) && !syncs.is_under_way(3));
        assert_eq!([3, 5].map(|token| syncs.ask(token)), [false; 2]);
        assert_eq!(syncs.end(Ok(0)), Some(3));
        assert_eq!(told(&mut syncs), [(7, None)]);
        assert!(syncs.is_under_way(3) && !syncs.is_under_way(5) && !syncs.ask(7));
        assert_eq!(syncs.end(Err(io::Error::from_raw_os_error(libc::EIO))), Some(7));
        assert_eq!(told(&mut syncs), [(3, Some(libc::EIO)), (5, Some(libc::EIO))]);
        assert_eq!(syncs.end(Ok(0)), None);
        assert_eq!(told(&mut syncs), [(7, None)]);
        assert!(syncs.ask(5));
    }
}
