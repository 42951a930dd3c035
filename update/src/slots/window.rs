//! When a node may restart for an update, in UTC.

/// Seconds of a day.
const DAY: u64 = 24 * 3600;

/// A time of each day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its begin, in seconds after midnight, less than a day.
    pub begin_s: u64,
    /// Its length in seconds, up to a day.
    pub length_s: u64,
}

impl Window {
    /// Returns in how many seconds after `now`, in seconds since 1970, the window is open next; 0
    /// while it is.
    pub fn opens_in(self, now: u64) -> u64 {
        let since = (now % DAY + DAY - self.begin_s % DAY) % DAY;
        if since < self.length_s { 0 } else { DAY - since }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_may_go_over_midnight() {
        let window = Window { begin_s: 23 * 3600, length_s: 7200 };
        let at = |hour: u64| window.opens_in(1_800_000_000 / DAY * DAY + hour * 3600);
        assert_eq!([at(22), at(23), at(0), at(1), at(12)], [3600, 0, 0, 22 * 3600, 11 * 3600]);
        let always = Window { begin_s: 0, length_s: DAY };
        assert_eq!(always.opens_in(12_345), 0);
    }
}
