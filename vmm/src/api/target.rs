//! The target of a request, and the host that it names.
//! Source: RFC 9112 §3.2; RFC 9110 §4.2 and §7.2; RFC 3986 §2 and §3.2 to §3.4.

/// Returns path and query of a target, which proxies are sent with an authority before it (RFC 9112 §3.2.2), or the
/// asterisk that asks of the server as a whole (§3.2.4).
pub(super) fn origin_form(method: &str, target: &str) -> Option<String> {
    if target == "*" && method == "OPTIONS" {
        return Some(target.to_owned());
    }
    let fits = |byte: u8| is_plain(byte) || b":@/?%".contains(&byte);
    local_form(target).filter(|form| form.bytes().all(fits))
}

/// Returns what is behind the authority, if there is one.
fn local_form(target: &str) -> Option<String> {
    if target.starts_with('/') {
        return Some(target.to_owned());
    }
    let scheme = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"))?;
    let rest = &target[scheme.len()..];
    let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    if !is_authority(authority) {
        return None;
    }
    Some(if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") })
}

/// Returns whether a text is a host, with a port or without. Nobody's name and password are before it: they are a
/// way to mislead (RFC 9110 §4.2.4).
pub(super) fn is_authority(text: &str) -> bool {
    let (fits, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((literal, port)) = rest.split_once(']') else { return false };
        let fits = |byte: u8| is_plain(byte) || byte == b':';
        (!literal.is_empty() && literal.bytes().all(fits), port)
    } else {
        let (name, port) = text.split_at(text.find(':').unwrap_or(text.len()));
        let fits = |byte: u8| is_plain(byte) || byte == b'%';
        (!name.is_empty() && has_whole_escapes(name) && name.bytes().all(fits), port)
    };
    let digits = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    fits && (port.is_empty() || port.strip_prefix(':').is_some_and(digits))
}

/// Returns whether two hexadecimal digits are behind each `%`.
fn has_whole_escapes(text: &str) -> bool {
    let is_whole = |piece: &str| piece.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    text.split('%').skip(1).all(is_whole)
}

/// Unreserved characters, and delimiters within a component (RFC 3986 §2.2 and §2.3).
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_reduced_to_path_and_query() {
        let form = |target: &str| origin_form("GET", target);
        let cases = [
            ("/v1/state?x=1", "/v1/state?x=1"),
            ("HTTP://a:1/v1/state?x=1", "/v1/state?x=1"),
            ("http://a?x=/v1/state", "/?x=/v1/state"),
            ("http://a", "/"),
            ("http://[::1]:80/", "/"),
        ];
        for (target, expected) in cases {
            assert_eq!(form(target).as_deref(), Some(expected), "{target}");
        }
        let wrong = ["http:///v1/state", "http://?x", "http://a:b/", "http://u@a/", "http://a#/x"];
        for target in wrong.iter().chain(&["https://a/", "v1/state", "a:443", "http:/", "*"]) {
            assert_eq!(form(target), None, "{target}");
        }
        assert_eq!(origin_form("OPTIONS", "*").as_deref(), Some("*"));
    }

    /// RFC 3986 §3.3 and §3.4. What a fragment is stays with its client (RFC 9110 §7.1).
    #[test]
    fn paths_and_queries_have_the_characters_of_theirs() {
        let form = |target: &str| origin_form("GET", target);
        let all = "/-._~!$&'()*+,;=:@/%41?-._~!$&'()*+,;=:@/?%41";
        assert_eq!(form(all).as_deref(), Some(all));
        let wrong = ["#", "\"", "<", ">", "\\", "^", "`", "{", "|", "}", "[", "]", "ä", "\u{7f}"];
        for wrong in wrong {
            for target in [format!("/{wrong}"), format!("/?{wrong}"), format!("http://a/{wrong}")] {
                assert_eq!(form(&target), None, "{target}");
            }
        }
    }

    #[test]
    fn hosts_have_the_characters_of_hosts() {
        for right in ["a", "a.b-c:80", "a:", "[::1]", "[v1.x]:8080", "127.0.0.1", "a%20b", "a_b~"] {
            assert!(is_authority(right), "{right}");
        }
        let wrong = ["", ":80", "a b", "a/b", "a,b c", "a:b", "a:+1", "u@a", "a%2", "[::1", "[]"];
        for wrong in wrong.iter().chain(&["[::1]80", "[a/b]", "ä", "a\"", "a?b", "a#b", "a:1:2"]) {
            assert!(!is_authority(wrong), "{wrong}");
        }
    }
}
