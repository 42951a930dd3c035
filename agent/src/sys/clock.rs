//! Running the system clock a little faster or slower, saying that it is right, and the clock that nobody
//! sets.
//! Source: `adjtimex(2)`, `adjtime(3)`; `clock_gettime(2)`, "CLOCK_BOOTTIME".

use std::{io, time::Duration};

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
    let mut request = nothing();
    request.modes = libc::ADJ_OFFSET_SINGLESHOT;
    request.offset = offset_us;
    adjust(&mut request)
}

/// Tells the kernel that the clock is right within `error`.
///
/// It writes the time to the hardware clock then, soon and every eleven minutes, until the error, to which it
/// adds half a thousandth of what passes, is more than sixteen seconds, or the clock is set.
pub(crate) fn confirm(error: Duration) -> io::Result<()> {
    let mut before = nothing();
    adjust(&mut before)?;
    adjust(&mut confirmation(before.status, error))
}

/// The request of [`confirm`] when the kernel's status is `status`, of which the rest stays.
fn confirmation(status: libc::c_int, error: Duration) -> libc::timex {
    let mut request = nothing();
    request.modes = libc::ADJ_STATUS | libc::ADJ_MAXERROR | libc::ADJ_ESTERROR;
    request.status = status & !libc::STA_UNSYNC;
    let error_us = libc::c_long::try_from(error.as_micros()).unwrap_or(libc::c_long::MAX);
    (request.maxerror, request.esterror) = (error_us, error_us);
    request
}

/// A request that changes nothing.
fn nothing() -> libc::timex {
    // SAFETY: every bit pattern of zeroes is a valid `timex`, which holds integers only.
    unsafe { std::mem::zeroed() }
}

/// Has the kernel do what a request says, which holds the kernel's answer then.
fn adjust(request: &mut libc::timex) -> io::Result<()> {
    // SAFETY: the call reads and writes the structure that the reference names, which outlives it.
    let ret = unsafe { libc::adjtimex(request) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the milliseconds since the node started, which no change of the calendar moves.
pub(crate) fn boot_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    #[test]
    fn too_much_is_refused_before_the_kernel_is_asked() {
        assert!(super::slew(2_000_001).is_err());
        assert!(super::slew(i64::from(i32::MIN)).is_err());
    }

    #[test]
    fn a_confirmation_says_how_right_the_clock_is_and_leaves_the_rest_of_the_status() {
        let status = libc::STA_UNSYNC | libc::STA_PLL | libc::STA_INS;
        let request = super::confirmation(status, Duration::from_millis(7));
        assert_eq!(request.status, libc::STA_PLL | libc::STA_INS);
        assert_eq!((request.maxerror, request.esterror), (7000, 7000));
        assert_eq!(request.modes, libc::ADJ_STATUS | libc::ADJ_MAXERROR | libc::ADJ_ESTERROR);
        let endless = super::confirmation(status, Duration::MAX);
        assert_eq!(endless.maxerror, libc::c_long::MAX);
    }

    #[test]
    fn asking_the_kernel_for_its_status_changes_nothing_and_needs_no_right() {
        assert!(super::adjust(&mut super::nothing()).is_ok());
    }
}
