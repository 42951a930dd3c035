//! Guest memory fetched from the host before the guest starts: bound to NUMA nodes, by threads that
//! are pinned and all started before any of them touches a page. A thread that starts while others
//! populate would wait for the lock of the address space, which they hold nearly all the time.
//! Source: mbind(2); madvise(2), `MADV_POPULATE_WRITE`; sched_setaffinity(2).

use std::{
    io,
    num::NonZero,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// What one turn of a thread takes; a huge page when that is more. Small enough that threads end
/// together, large enough that the call is nothing beside the clearing of memory.
const TURN: u64 = 64 << 20;
/// Least memory for which a thread of its own pays: starting one costs as much as clearing a few
/// hundred KiB.
const LEAST_SHARE: u64 = 64 << 20;
/// Most threads of one machine's start, as many as large hosts have CPUs.
const MAX_THREADS: usize = 512;
/// Most threads when nobody says which CPUs.
const MAX_UNPINNED: usize = 16;
/// Nodes of the host are below this (MAX_NUMNODES of x86 Linux).
pub const MAX_NODES: u32 = 1024;
/// CPUs of the host are below this (the largest NR_CPUS of x86 Linux).
pub const MAX_CPUS: u32 = 8192;

/// Some mapped guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    /// Host address.
    pub(super) address: u64,
    /// Length in bytes.
    pub(super) size: u64,
}

/// Guest memory that comes from one node.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// The node; none for any.
    pub(super) node: Option<u32>,
    /// Which memory, in whole pages.
    pub(super) spans: Vec<Span>,
    /// Where its threads run; empty for anywhere.
    pub(super) cpus: Vec<u32>,
}

/// Pages that a node has not got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Missing {
    /// The node.
    pub(super) node: Option<u32>,
    /// Missing pages.
    pub(super) pages: u64,
    /// Of how many.
    pub(super) of: u64,
}

/// Why memory is not there.
#[derive(Debug)]
pub(super) enum PopulateError {
    /// Too few pages.
    Missing(Missing),
    /// A system call failed.
    Call(&'static str, io::Error),
}

/// Binds each share to its node. Nothing may have touched the memory before.
pub(super) fn bind(shares: &[Share]) -> Result<(), PopulateError> {
    for share in shares {
        let Some(node) = share.node else { continue };
        for span in &share.spans {
            bind_span(*span, node)
                .map_err(|error| PopulateError::Call("bind guest memory to a node", error))?;
        }
    }
    Ok(())
}

fn bind_span(span: Span, node: u32) -> io::Result<()> {
    let mut mask = [0u64; (MAX_NODES / 64) as usize];
    let word = mask.get_mut((node / 64) as usize).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % 64);
    // SAFETY: the mask has the announced number of bits (and the one more that the call wants); the
    // memory is only named, not touched.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            span.address,
            span.size,
            libc::MPOL_BIND,
            mask.as_ptr(),
            u64::from(MAX_NODES) + 1,
            0u64,
        )
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Fetches all memory of `shares`, in pages of `page` bytes.
pub(super) fn populate(shares: &[Share], page: u64) -> Result<(), PopulateError> {
    let turn = TURN.max(page);
    let work: Vec<Work> = shares.iter().map(|share| Work::new(share, turn)).collect();
    let crews: Vec<Vec<Option<u32>>> = shares.iter().map(crew).collect();
    let threads: usize = crews.iter().map(Vec::len).sum();
    let start = Barrier::new(threads);
    let start = &start;
    thread::scope(|scope| {
        for (work, crew) in work.iter().zip(&crews) {
            for cpu in crew {
                let labour = move || {
                    if let Some(cpu) = cpu {
                        // Elsewhere it is slower, not wrong: the node is bound already.
                        let _ = run_on(*cpu);
                    }
                    start.wait();
                    work.carry_out(page);
                };
                if thread::Builder::new()
                    .name("populate".into())
                    .spawn_scoped(scope, labour)
                    .is_err()
                {
                    // The others wait for it at the barrier, so its part is done here.
                    start.wait();
                    work.carry_out(page);
                }
            }
        }
    });
    for (work, share) in work.iter().zip(shares) {
        let pages = work.missing.load(Ordering::Relaxed);
        if pages > 0 {
            let of = share.spans.iter().map(|span| span.size / page).sum();
            return Err(PopulateError::Missing(Missing { node: share.node, pages, of }));
        }
    }
    Ok(())
}

/// Returns where the threads of a share run.
fn crew(share: &Share) -> Vec<Option<u32>> {
    let bytes: u64 = share.spans.iter().map(|span| span.size).sum();
    let pay = usize::try_from(bytes / LEAST_SHARE).unwrap_or(MAX_THREADS).max(1);
    if share.cpus.is_empty() {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        return vec![None; cpus.min(pay).min(MAX_UNPINNED)];
    }
    share.cpus.iter().take(pay.min(MAX_THREADS)).copied().map(Some).collect()
}

/// What the threads of one share have to do.
struct Work {
    turns: Vec<Span>,
    next: AtomicU64,
    missing: AtomicU64,
}

impl Work {
    fn new(share: &Share, turn: u64) -> Self {
        let mut turns = Vec::new();
        for span in &share.spans {
            let mut done = 0;
            while done < span.size {
                let size = turn.min(span.size - done);
                turns.push(Span { address: span.address + done, size });
                done += size;
            }
        }
        Self { turns, next: AtomicU64::new(0), missing: AtomicU64::new(0) }
    }

    /// Takes turns until none is left.
    fn carry_out(&self, page: u64) {
        loop {
            let turn = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(span) = usize::try_from(turn).ok().and_then(|turn| self.turns.get(turn))
            else {
                return;
            };
            if fetch(*span).is_err() {
                // Some of it may be there; which pages are not is what the message tells.
                let pages = (0..span.size / page)
                    .map(|at| Span { address: span.address + at * page, size: page });
                let missing = pages.filter(|page| fetch(*page).is_err()).count();
                self.missing.fetch_add(missing as u64, Ordering::Relaxed);
            }
        }
    }
}

fn fetch(span: Span) -> io::Result<()> {
    let size = usize::try_from(span.size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the span is part of one live mapping of guest memory; populating writes nothing.
    let ret = unsafe {
        libc::madvise(span.address as *mut libc::c_void, size, libc::MADV_POPULATE_WRITE)
    };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the calling thread run on one CPU only.
fn run_on(cpu: u32) -> io::Result<()> {
    let mut mask = [0u64; (MAX_CPUS / 64) as usize];
    let word = mask.get_mut((cpu / 64) as usize).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (cpu % 64);
    // SAFETY: the mask has the announced size; 0 is the calling thread.
    let ret =
        unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(&mask), mask.as_ptr()) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(spans: &[(u64, u64)], cpus: &[u32]) -> Share {
        let spans = spans.iter().map(|(address, size)| Span { address: *address, size: *size });
        Share { node: None, spans: spans.collect(), cpus: cpus.to_vec() }
    }

    #[test]
    fn turns_cover_a_share_without_overlap() {
        let work = Work::new(&share(&[(0, TURN + 4096), (1 << 40, 4096)], &[]), TURN);
        let expected = [(0, TURN), (TURN, 4096), (1 << 40, 4096)]
            .map(|(address, size)| Span { address, size });
        assert_eq!(work.turns, expected);
    }

    #[test]
    fn a_thread_comes_for_each_cpu_that_pays() {
        assert_eq!(crew(&share(&[(0, 1 << 30)], &[4, 5])), [Some(4), Some(5)]);
        assert_eq!(crew(&share(&[(0, 4096)], &[4, 5])), [Some(4)]);
        assert_eq!(crew(&share(&[(0, 4096)], &[])), [None]);
    }

    #[test]
    fn a_cpu_that_cannot_be_is_refused() {
        assert!(run_on(MAX_CPUS).is_err());
    }
}
