//! Guest memory fetched from the host before the guest starts: bound to NUMA nodes, by threads that
//! are pinned and all started before any of them touches a page. A thread that starts while others
//! populate would wait for the lock of the address space, which they hold nearly all the time. How
//! many start is the host's decision (its limits of tasks); those that do carry out everything.
//! Source: mbind(2); madvise(2), `MADV_POPULATE_WRITE`; sched_setaffinity(2).

use std::{
    io,
    num::NonZero,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, Scope},
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
    labour(&work, &crews, page, &mut Threads);
    for (work, share) in work.iter().zip(shares) {
        let pages = work.missing.load(Ordering::Relaxed);
        if pages > 0 {
            let of = share.spans.iter().map(|span| span.size / page).sum();
            return Err(PopulateError::Missing(Missing { node: share.node, pages, of }));
        }
    }
    Ok(())
}

/// Carries out all of `work`, whose threads run where `crews` say, one crew for each. When the host
/// gives no more threads, those that it gave do the rest; when it gives none, the caller does all.
fn labour(work: &[Work], crews: &[Vec<Option<u32>>], page: u64, hands: &mut impl Hands) {
    let gate = Gate::default();
    let gate = &gate;
    thread::scope(|scope| {
        let mut started = 0;
        let places =
            crews.iter().enumerate().flat_map(|(own, crew)| crew.iter().map(move |c| (own, c)));
        for (own, cpu) in places {
            let part = move || {
                if let Some(cpu) = cpu {
                    // Elsewhere it is slower, not wrong: the node is bound already.
                    let _ = run_on(*cpu);
                }
                gate.arrive();
                // Its own share first, and then what others have not begun.
                let (before, after) = work.split_at(own);
                after.iter().chain(before).for_each(|work| work.carry_out(page));
            };
            if hands.start(scope, part).is_err() {
                break;
            }
            started += 1;
        }
        gate.open(started);
        if started == 0 {
            work.iter().for_each(|work| work.carry_out(page));
        }
    });
}

/// What starts threads.
trait Hands {
    /// Starts one thread that does `part`. Errors: the host has no thread for it, and `part` is not
    /// done.
    fn start<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        part: impl FnOnce() + Send + 'scope,
    ) -> io::Result<()>;
}

/// Threads of the host.
struct Threads;

impl Hands for Threads {
    fn start<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        part: impl FnOnce() + Send + 'scope,
    ) -> io::Result<()> {
        thread::Builder::new().name("populate".into()).spawn_scoped(scope, part).map(drop)
    }
}

/// Where threads wait for each other. How many there are is known only when all are started.
#[derive(Default)]
struct Gate {
    state: Mutex<Arrivals>,
    changed: Condvar,
}

#[derive(Default)]
struct Arrivals {
    arrived: usize,
    /// How many come; none while that is not known.
    expected: Option<usize>,
}

impl Gate {
    /// Waits until all have arrived that come.
    fn arrive(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.arrived += 1;
        if state.is_complete() {
            self.changed.notify_all();
        }
        let waited = self.changed.wait_while(state, |state| !state.is_complete());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Lets `expected` threads pass as soon as so many have arrived.
    fn open(&self, expected: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.expected = Some(expected);
        self.changed.notify_all();
    }
}

impl Arrivals {
    fn is_complete(&self) -> bool {
        self.expected.is_some_and(|expected| self.arrived >= expected)
    }
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
    use std::{sync::mpsc, time::Duration};

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

    /// A host that gives so many threads, and looks at the file behind the memory before each.
    struct Few<'a> {
        left: usize,
        file: &'a std::fs::File,
    }

    /// Returns the bytes of a file that are there.
    fn there(file: &std::fs::File) -> u64 {
        u64::try_from(rustix::fs::fstat(file).expect("told").st_blocks).expect("some") * 512
    }

    impl Hands for Few<'_> {
        fn start<'scope>(
            &mut self,
            scope: &'scope Scope<'scope, '_>,
            part: impl FnOnce() + Send + 'scope,
        ) -> io::Result<()> {
            // Those that run already have time to begin.
            thread::sleep(Duration::from_millis(20));
            assert_eq!(there(self.file), 0, "a page was touched before all threads were there");
            self.left = self.left.checked_sub(1).ok_or(io::ErrorKind::WouldBlock)?;
            Threads.start(scope, part)
        }
    }

    /// Fetches four pages in two shares, with two CPUs wanted for each, on a host that gives `few`
    /// threads. Returns the bytes that are there then.
    fn fetched_by(few: usize) -> u64 {
        let file = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC);
        let file = std::fs::File::from(file.expect("a file"));
        file.set_len(4 * 4096).expect("grown");
        let pages = vm_memory::FileOffset::new(file.try_clone().expect("a copy"), 0);
        let map = vm_memory::MmapRegion::<()>::from_file(pages, 4 * 4096).expect("mapped");
        let at = map.as_ptr() as u64;
        let looked_at = file.try_clone().expect("a copy");
        let (done, wait) = mpsc::channel();
        // A thread that nobody waits for: what hangs is an error, not the end of all tests.
        thread::spawn(move || {
            let shares =
                [share(&[(at, 2 * 4096)], &[0, 0]), share(&[(at + 2 * 4096, 2 * 4096)], &[0, 0])];
            let work = shares.each_ref().map(|share| Work::new(share, 4096));
            let crews = [vec![Some(0), Some(0)], vec![Some(0), Some(0)]];
            labour(&work, &crews, 4096, &mut Few { left: few, file: &looked_at });
            let missing = work.iter().map(|work| work.missing.load(Ordering::Relaxed)).sum::<u64>();
            let _ = done.send(missing);
        });
        let missing = wait.recv_timeout(Duration::from_secs(20)).expect("it ends");
        assert_eq!(missing, 0);
        drop(map);
        there(&file)
    }

    #[test]
    fn a_host_that_gives_fewer_threads_than_are_wanted_holds_nobody_up() {
        assert_eq!(fetched_by(2), 4 * 4096, "the third is refused: the second share has no thread");
        assert_eq!(fetched_by(1), 4 * 4096);
        assert_eq!(fetched_by(0), 4 * 4096, "the caller does it");
        assert_eq!(fetched_by(4), 4 * 4096);
    }

    #[test]
    fn a_cpu_that_cannot_be_is_refused() {
        assert!(run_on(MAX_CPUS).is_err());
    }
}
