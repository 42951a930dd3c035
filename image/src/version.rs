//! The order of Debian versions.
//!
//! Pure. Source: Debian Policy, §5.6.12 "Version".

use std::cmp::Ordering;

/// Compares two versions: epoch, upstream version, revision.
pub(crate) fn compare(a: &str, b: &str) -> Ordering {
    let (a_epoch, a_rest) = epoch(a);
    let (b_epoch, b_rest) = epoch(b);
    let (a_upstream, a_revision) = a_rest.rsplit_once('-').unwrap_or((a_rest, ""));
    let (b_upstream, b_revision) = b_rest.rsplit_once('-').unwrap_or((b_rest, ""));
    a_epoch
        .cmp(&b_epoch)
        .then_with(|| part(a_upstream, b_upstream))
        .then_with(|| part(a_revision, b_revision))
}

fn epoch(version: &str) -> (u64, &str) {
    match version.split_once(':') {
        Some((epoch, rest)) => (epoch.parse().unwrap_or(0), rest),
        None => (0, version),
    }
}

/// Compares one part: stretches of non-digits and of digits in turn.
fn part(mut a: &str, mut b: &str) -> Ordering {
    loop {
        let (a_text, a_rest) = split(a, |c| !c.is_ascii_digit());
        let (b_text, b_rest) = split(b, |c| !c.is_ascii_digit());
        let (a_digits, a_next) = split(a_rest, |c| c.is_ascii_digit());
        let (b_digits, b_next) = split(b_rest, |c| c.is_ascii_digit());
        let order = text(a_text, b_text).then_with(|| number(a_digits, b_digits));
        if order != Ordering::Equal || (a_next.is_empty() && b_next.is_empty()) {
            return order;
        }
        (a, b) = (a_next, b_next);
    }
}

fn split(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

/// Tilde before the end, the end before letters, letters before everything else.
fn text(a: &str, b: &str) -> Ordering {
    let rank = |c: Option<char>| match c {
        Some('~') => (0, '~'),
        None => (1, '\0'),
        Some(letter) if letter.is_ascii_alphabetic() => (2, letter),
        Some(other) => (3, other),
    };
    let (mut a, mut b) = (a.chars(), b.chars());
    loop {
        let (left, right) = (a.next(), b.next());
        let order = rank(left).cmp(&rank(right));
        if order != Ordering::Equal || (left.is_none() && right.is_none()) {
            return order;
        }
    }
}

fn number(a: &str, b: &str) -> Ordering {
    let (a, b) = (a.trim_start_matches('0'), b.trim_start_matches('0'));
    a.len().cmp(&b.len()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_ascending_order() {
        let ascending = [
            "6.12.95-1~bpo12+1",
            "7.2.6-1~bpo13+1",
            "7.2.12-1~bpo13+1",
            "7.3.4-1~bpo13+1",
            "7.3.4-1",
            "7.3.4-1+b1",
            "7.3.4-2~bpo12+1",
            "7.3.10-1",
            "1:0.1-1",
        ];
        let mut shuffled = ascending.to_vec();
        shuffled.reverse();
        shuffled.sort_by(|a, b| compare(a, b));
        assert_eq!(shuffled, ascending);
    }

    #[test]
    fn leading_zeros_do_not_count() {
        assert_eq!(compare("1.02", "1.2"), Ordering::Equal);
    }
}
