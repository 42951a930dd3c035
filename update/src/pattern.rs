//! Path patterns of delegations, and the percent encoding of role names.
//!
//! A pattern matches a target path component by component: `*` and `?` never match `/`, and both
//! must have the same number of components. Within a component the wildcards are those of the
//! shell: `*`, `?`, `[abc]`, `[a-c]`, `[!a-c]`.
//! Source: TUF specification 1.0.34, section 4.5, `PATHPATTERN`.

/// Whether `pattern` matches the whole of `path`.
pub fn matches(pattern: &str, path: &str) -> bool {
    let mut patterns = pattern.split('/');
    let mut parts = path.split('/');
    loop {
        match (patterns.next(), parts.next()) {
            (None, None) => return true,
            (Some(pattern), Some(part)) if component(pattern, part) => {}
            _ => return false,
        }
    }
}

/// Matches one component, in time of at most the product of the two lengths: after a mismatch only
/// the last `*` is tried again, one character further.
fn component(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut p, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&'*') {
            retry = Some((p + 1, t));
            p += 1;
        } else if let Some(next) = one(&pattern, p, text[t]) {
            p = next;
            t += 1;
        } else if let Some((after_star, from)) = retry {
            retry = Some((after_star, from + 1));
            p = after_star;
            t = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|rest| *rest == '*')
}

/// Matches one character at `p` and returns where the pattern goes on.
fn one(pattern: &[char], p: usize, found: char) -> Option<usize> {
    match pattern.get(p)? {
        '?' => Some(p + 1),
        '[' => match set(pattern, p) {
            Some((inside, negated, next)) => (in_set(inside, found) != negated).then_some(next),
            None => (found == '[').then_some(p + 1),
        },
        literal => (*literal == found).then_some(p + 1),
    }
}

/// Returns the characters of the set that opens at `p`, whether it is negated, and where the
/// pattern goes on. A set that never closes is no set: its bracket stands for itself.
fn set(pattern: &[char], p: usize) -> Option<(&[char], bool, usize)> {
    let negated = pattern.get(p + 1) == Some(&'!');
    let start = p + 1 + usize::from(negated);
    // A closing bracket at the first place is a member.
    let length = pattern.get(start + 1..)?.iter().position(|c| *c == ']')? + 1;
    Some((&pattern[start..start + length], negated, start + length + 1))
}

fn in_set(mut inside: &[char], found: char) -> bool {
    while let [first, rest @ ..] = inside {
        if let ['-', last, after @ ..] = rest {
            if (*first..=*last).contains(&found) {
                return true;
            }
            inside = after;
        } else {
            if *first == found {
                return true;
            }
            inside = rest;
        }
    }
    false
}

/// Percent-encodes all but letters, digits and `_.-~`, so that a role name is one path component
/// of a URL and one file name. Distinct names stay distinct.
pub fn encode(name: &str) -> String {
    encode_keeping(name, "")
}

/// Percent-encodes a target path for a URL, keeping its `/`.
pub fn encode_path(path: &str) -> String {
    encode_keeping(path, "/")
}

fn encode_keeping(name: &str, kept: &str) -> String {
    let mut encoded = String::new();
    for byte in name.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "_.-~".contains(c) || kept.contains(c) {
            encoded.push(c);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wildcards_stay_within_a_component() {
        let cases = [
            ("*", "a", true),
            ("*", "a/b", false),
            ("targets/*.tgz", "targets/foo.tgz", true),
            ("targets/*.tgz", "targets/foo.txt", false),
            ("foo-version-?.tgz", "foo-version-2.tgz", true),
            ("foo-version-?.tgz", "foo-version-alpha.tgz", false),
            ("a/*", "a/", true),
            ("a/*", "a", false),
            ("*/b", "a/b", true),
            ("", "", true),
            ("", "a", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]", "]", true),
            ("[ab", "[ab", true),
            ("[ab", "a", false),
            ("[a-]", "-", true),
        ];
        let found = cases.map(|(pattern, path, _)| matches(pattern, path));
        assert_eq!(found, cases.map(|(.., expected)| expected));
    }

    #[test]
    fn encoded_names_are_one_component() {
        assert_eq!(encode("../a b?#é%41"), "..%2Fa%20b%3F%23%C3%A9%2541");
        assert_eq!(encode_path("a/b c"), "a/b%20c");
    }

    /// The obvious definition, exponential in the number of stars.
    fn naive(pattern: &[char], text: &[char]) -> bool {
        match (pattern, text) {
            ([], []) => true,
            (['*', rest @ ..], _) => (0..=text.len()).any(|skipped| naive(rest, &text[skipped..])),
            (['?', rest @ ..], [_, after @ ..]) => naive(rest, after),
            ([first, rest @ ..], [found, after @ ..]) => first == found && naive(rest, after),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_definition(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            let p: Vec<char> = pattern.chars().collect();
            let t: Vec<char> = text.chars().collect();
            prop_assert_eq!(matches(&pattern, &text), naive(&p, &t));
        }
    }
}
