//! The clock that deadlines are counted by.
//! Source: clock_gettime(2), "CLOCK_BOOTTIME".

/// Returns the milliseconds since the host started. They go on while it sleeps, and no change of the
/// calendar moves them.
pub fn boot_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the structure that the pointer names, which outlives it. It cannot fail: the
    // clock is there since Linux 2.6.39.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1000 + nanoseconds / 1_000_000
}

#[cfg(test)]
mod tests {
    use rustix::time::{ClockId, clock_gettime};

    #[test]
    fn it_is_the_clock_that_goes_on_while_the_host_sleeps() {
        let before = clock_gettime(ClockId::Boottime).tv_sec;
        let told = i64::try_from(super::boot_ms()).expect("no host is that old");
        let after = clock_gettime(ClockId::Boottime).tv_sec;
        assert!((before..=after).contains(&(told / 1000)), "{before} {told} {after}");
    }
}
