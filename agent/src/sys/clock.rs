//! Running the system clock a little faster or slower, and the clock that nobody sets.
//! Source: `adjtimex(2)`, `adjtime(3)`; `clock_gettime(2)`, "CLOCK_BOOTTIME".

use std::io;

use rustix::time::{ClockId, clock_gettime};

/// The kernel takes no more at once.
const MOST_US: libc::c_long = 2_000_000;

/// Lets the clock catch up by so many microseconds, half a thousandth faster or slower meanwhile.
///
/// Replaces what was left of an earlier correction. Fails when it is more than two seconds.
pub(crate) fn slew(offset_us: i64) -> io::Result<()> {
    if offset_us.abs() > MOST_US {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: every bit pattern of zeroes is a valid `timex`, which holds integers only.
    let mut request: libc::timex = unsafe { std::mem::zeroed() };
    request.modes = libc::ADJ_OFFSET_SINGLESHOT;
    request.offset = offset_us;
    // SAFETY: the call reads and writes the structure that the pointer names, which outlives it.
    let ret = unsafe { libc::adjtimex(&raw mut request) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the milliseconds since the node started, which no change of the calendar moves.
pub(crate) fn boot_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

#[cfg(test)]
mod tests {
    #[test]
    fn too_much_is_refused_before_the_kernel_is_asked() {
        assert!(super::slew(2_000_001).is_err());
        assert!(super::slew(i64::from(i32::MIN)).is_err());
    }
}
