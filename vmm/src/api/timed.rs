//! Exchanges with a client that end in time, however slowly it sends and takes: a socket's own limits are those of one
//! call and begin anew with each.
//! Source: socket(7), SO_RCVTIMEO and SO_SNDTIMEO.

use std::{
    io::{self, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    time::{Duration, Instant},
};

use super::devices;

/// Most bytes that are written at once. The kernel parts them into buffers, each of which waits as long as the socket's
/// limit is for room (Linux net/unix/af_unix.c, `unix_stream_sendmsg`); these are one, of up to 32 KiB.
const PIECE: usize = 16 << 10;

/// A stream up to a deadline.
pub(super) struct Timed<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    /// All that is read and written may take `limit` from now on.
    pub(super) fn new(stream: &'a UnixStream, limit: Duration) -> Self {
        Self { stream, deadline: Instant::now() + limit }
    }

    /// Reads what is there of a request, as [`devices::read`] does.
    pub(super) fn read(&self, buffer: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        devices::read(self.stream, buffer, files)
    }

    /// Returns the time that is left, which is some.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes.get(..PIECE).unwrap_or(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Whether a call ended since its time was over.
pub(super) fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use std::{io::Read, iter, thread};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn each_read_waits_as_long_as_there_is_time() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        far.write_all(b"abc").expect("written");
        let mut timed = Timed::new(&near, 2 * HOUR);
        let read = |timed: &Timed<'_>| {
            timed.read(&mut [0], &mut Vec::new()).map_err(|error| is_late(&error))
        };
        let limit = || near.read_timeout().expect("told").expect("some");
        assert_eq!(read(&timed), Ok(1));
        assert!(limit() > HOUR, "{:?}", limit());
        timed.deadline -= HOUR;
        assert_eq!(read(&timed), Ok(1));
        assert!(limit() <= HOUR, "{:?}", limit());
        timed.deadline = Instant::now();
        assert_eq!(read(&timed), Err(true), "there is something, and no time");
    }

    #[test]
    fn an_answer_that_is_taken_slowly_ends_in_time() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let taker = thread::spawn(move || {
            let taken = iter::repeat_with(|| far.read(&mut [0]));
            taken.take_while(|read| matches!(read, Ok(1))).count()
        });
        // Byte by byte it takes many times as long.
        let whole = vec![0_u8; 64 << 20];
        let written = Timed::new(&near, Duration::from_millis(200)).write_all(&whole);
        assert!(written.is_err_and(|error| is_late(&error)));
        drop(near);
        assert!(taker.join().expect("it ended") < whole.len());
    }
}
