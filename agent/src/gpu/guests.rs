//! Takes guests' readings over vsock. A guest connects to the host ([`READINGS_PORT`]) and sends one
//! document; then the connection ends. Which machine it is the kernel says: a guest's context id is
//! its process's user id, and no guest can choose it. What a guest says is its own word: it is shown
//! beside what the host knows, and decides nothing.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, getpeername, listen, setsockopt,
    socket, sockopt,
};
use types::gpu::{GpuReading, MAX_READING, READINGS_PORT, ReadingError};

use crate::{events::Event, init::boot::chain};

/// Readings that are listened to at the same time.
const MAX_SPEAKERS: usize = 16;

/// Of these, readings of one guest: one that hangs, and the next one.
const MAX_OF_ONE: usize = 2;

/// Machines whose readings are kept.
const MAX_KEPT: usize = 256;

/// A guest says everything within this time; it may pause, but not stretch it.
const LIMIT: Duration = Duration::from_secs(5);

/// Readings that are older count no more.
const STALE: Duration = Duration::from_secs(120);

/// A guest may send again after this time.
const PAUSE: Duration = Duration::from_millis(500);

/// Context ids of hosts, to bind to (`VMADDR_CID_ANY`).
const ANY: u32 = u32::MAX;

/// The newest readings, by context id, and the last refusals. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct GuestReadings {
    kept: Arc<Mutex<BTreeMap<u32, Kept>>>,
    refused: Arc<Mutex<BTreeMap<u32, Refused>>>,
    /// Readings that are listened to.
    speakers: Arc<Mutex<BTreeMap<u32, usize>>>,
}

#[derive(Debug)]
struct Kept {
    at: Instant,
    reading: GpuReading,
}

/// The last reading of a guest that was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// When.
    pub at: Instant,
    /// What was wrong.
    pub reason: String,
    /// How many there were.
    pub count: u64,
}

/// A place for a reading that is listened to.
#[derive(Debug)]
struct Place {
    cid: u32,
    speakers: Arc<Mutex<BTreeMap<u32, usize>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut speakers = self.speakers.lock().unwrap_or_else(PoisonError::into_inner);
        match speakers.get_mut(&self.cid) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(speakers.remove(&self.cid)),
        }
    }
}

/// Why a guest's reading was not taken.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum GuestError {
    #[error("the guest was not understood")]
    Guest { source: ReadingError },
    #[error("the guest stopped in the middle")]
    Broken { source: io::Error },
    #[error("the guest sent more than {MAX_READING} bytes")]
    TooLarge,
    #[error("the guest sent a reading a moment ago")]
    TooOften,
    #[error("{MAX_KEPT} machines send readings already")]
    TooMany,
    #[error("{MAX_OF_ONE} readings of the guest are being sent already")]
    Hurry,
    #[error("{MAX_SPEAKERS} readings of guests are being sent already")]
    Busy,
    #[error("the node has no thread for it")]
    Thread { source: io::Error },
}

impl GuestReadings {
    /// Starts to listen. A host without vsock has no readings.
    pub fn start() -> Self {
        let readings = Self::default();
        let listening = listener().and_then(|socket| {
            let readings = readings.clone();
            let thread = std::thread::Builder::new().name("gpu-readings".to_owned());
            thread.spawn(move || readings.serve(&socket))
        });
        match listening {
            Ok(_) => {}
            // The kernel has no such sockets, or nothing that carries them: no machine has one.
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(error) => {
                let reason = format!("no readings from guests: {error}");
                eprintln!("{}", Event::Trouble { place: "gpu-readings", reason });
            }
        }
        readings
    }

    /// Returns the newest reading of a guest and its age, unless it is stale.
    pub fn newest(&self, cid: u32) -> Option<(Duration, GpuReading)> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.get(&cid)?;
        let age = kept.at.elapsed();
        (age < STALE).then(|| (age, kept.reading.clone()))
    }

    /// Returns the last reading of a guest that was not taken, if that was within `life`. An older one was
    /// that of a guest that had its context id before, and is forgotten.
    pub fn refused(&self, cid: u32, life: Duration) -> Option<Refused> {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.get(&cid)?.at.elapsed() >= life {
            refused.remove(&cid);
        }
        refused.get(&cid).cloned()
    }

    /// Remembers why a reading was not taken.
    pub(super) fn refuse(&self, cid: u32, error: &GuestError) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let before = refused.get(&cid).map_or(0, |refused| refused.count);
        if refused.len() >= MAX_KEPT && before == 0 {
            // It goes with its machine only; whose is the oldest is gone the likeliest.
            let oldest = refused.iter().min_by_key(|(_, refused)| refused.at).map(|(cid, _)| *cid);
            oldest.and_then(|cid| refused.remove(&cid));
        }
        let now = Refused { at: Instant::now(), reason: chain(error), count: before + 1 };
        refused.insert(cid, now);
    }

    /// Returns a place to listen to a guest.
    fn place(&self, cid: u32) -> Result<Place, GuestError> {
        let mut speakers = self.speakers.lock().unwrap_or_else(PoisonError::into_inner);
        if speakers.get(&cid).is_some_and(|count| *count >= MAX_OF_ONE) {
            return Err(GuestError::Hurry);
        }
        if speakers.values().sum::<usize>() >= MAX_SPEAKERS {
            return Err(GuestError::Busy);
        }
        *speakers.entry(cid).or_default() += 1;
        Ok(Place { cid, speakers: Arc::clone(&self.speakers) })
    }

    /// Listens to a guest in a thread of its own.
    pub(super) fn hear(&self, cid: u32, connection: OwnedFd) -> Result<(), GuestError> {
        let place = self.place(cid)?;
        let readings = self.clone();
        let thread = std::thread::Builder::new().name("gpu-reading".to_owned());
        let started = thread.spawn(move || {
            // A guest that is not understood hears nothing: it may be anybody's program.
            if let Err(error) = readings.take(cid, Timed::new(connection)) {
                readings.refuse(cid, &error);
            }
            drop(place);
        });
        started.map(drop).map_err(|source| GuestError::Thread { source })
    }

    /// Takes what a guest sends. `bytes` ends when the guest is done or the time is over.
    pub fn take(&self, cid: u32, bytes: impl Read) -> Result<(), GuestError> {
        let limit = u64::try_from(MAX_READING).unwrap_or(u64::MAX) + 1;
        let mut document = Vec::new();
        let read = bytes.take(limit).read_to_end(&mut document);
        read.map_err(|source| GuestError::Broken { source })?;
        if document.len() > MAX_READING {
            return Err(GuestError::TooLarge);
        }
        let reading =
            GpuReading::parse(&document).map_err(|source| GuestError::Guest { source })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.get(&cid).is_some_and(|kept| kept.at.elapsed() < PAUSE) {
            return Err(GuestError::TooOften);
        }
        kept.retain(|_, kept| kept.at.elapsed() < STALE);
        if kept.len() >= MAX_KEPT && !kept.contains_key(&cid) {
            return Err(GuestError::TooMany);
        }
        kept.insert(cid, Kept { at: Instant::now(), reading });
        Ok(())
    }

    fn serve(self, socket: &OwnedFd) {
        loop {
            let flags = rustix::net::SocketFlags::CLOEXEC;
            let Ok(connection) = rustix::net::accept_with(socket, flags) else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let Ok(peer) = getpeername::<VsockAddr>(connection.as_raw_fd()) else { continue };
            if let Err(error) = self.hear(peer.cid(), connection) {
                self.refuse(peer.cid(), &error);
            }
        }
    }
}

fn listener() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    bind(socket.as_raw_fd(), &VsockAddr::new(ANY, READINGS_PORT))?;
    listen(&socket, Backlog::new(i32::try_from(MAX_SPEAKERS).unwrap_or(1))?)?;
    Ok(socket)
}

/// A connection that ends after [`LIMIT`], however slowly its other end speaks.
struct Timed {
    connection: std::fs::File,
    end: Instant,
}

impl Timed {
    fn new(connection: OwnedFd) -> Self {
        Self { connection: connection.into(), end: Instant::now() + LIMIT }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let micros = i64::try_from(left.as_micros()).unwrap_or(1).max(1);
        let limit = nix::sys::time::TimeVal::new(micros / 1_000_000, micros % 1_000_000);
        setsockopt(&self.connection, sockopt::ReceiveTimeout, &limit)?;
        self.connection.read(buffer)
    }
}
