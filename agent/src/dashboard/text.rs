//! Words of others, made harmless for a terminal. Pure.

use types::units::UnixSeconds;

/// Returns `text` as printable ASCII, at most `width` characters; `~` at the end says that more was
/// there. What is none becomes `?`, so that nothing that a name holds ever reaches the terminal as
/// a command, turns the line around, or is wider than it counts.
pub fn plain(text: &str, width: usize) -> String {
    let printable = |character: char| match character {
        ' '..='~' => character,
        _ => '?',
    };
    let mut plain: String = text.chars().take(width).map(printable).collect();
    if text.chars().nth(width).is_some() && plain.pop().is_some() {
        plain.push('~');
    }
    plain
}

/// Returns a span of time in words that fit a column: `3d 04h`, `2h 05m`, `7m 03s`, `12s`.
pub fn span(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    if days > 0 {
        format!("{days}d {hours:02}h")
    } else if hours > 0 {
        format!("{hours}h {minutes:02}m")
    } else if minutes > 0 {
        format!("{minutes}m {:02}s", seconds % 60)
    } else {
        format!("{seconds}s")
    }
}

/// Returns the time in UTC, as `2026-11-21 18:03:00`.
pub fn time(at: UnixSeconds) -> String {
    let second = i64::try_from(at.0).ok().and_then(|at| jiff::Timestamp::from_second(at).ok());
    second.map_or("?".to_owned(), |time| time.strftime("%Y-%m-%d %H:%M:%S").to_string())
}

/// Returns a size in the largest unit that keeps it at least 1, with one digit after the point.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut tenths, mut unit) = (u128::from(count) * 10 / 1024, 0);
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_but_printable_characters() {
        let hostile = crate::local::sample::HOSTILE;
        let plain = plain(hostile, 80);
        assert_eq!(plain, "?[2J?31m\"}??name??");
        assert_eq!(super::plain("abcdef", 6), "abcdef");
        assert_eq!(super::plain("abcdefg", 6), "abcde~");
        assert_eq!(super::plain("x", 0), "");
    }

    #[test]
    fn spans_and_sizes_are_short() {
        let spans = [12, 423, 7_500, 273_600].map(span);
        assert_eq!(spans, ["12s", "7m 03s", "2h 05m", "3d 04h"]);
        let sizes = [512, 1024, 1_572_864, 137_438_953_472, u64::MAX].map(bytes);
        assert_eq!(sizes, ["512 B", "1.0 KiB", "1.5 MiB", "128.0 GiB", "16383.9 PiB"]);
        assert_eq!(time(UnixSeconds(1_796_083_200)), "2026-12-01 00:00:00");
        assert_eq!(time(UnixSeconds(u64::MAX)), "?");
    }
}
