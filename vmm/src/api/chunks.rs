//! Bodies that come in chunks, each with its length before it.
//! Source: RFC 9112 §7.1. Extensions and trailer fields are skipped: nothing here has a use for them.

use super::http::RequestError;

/// Most bytes of lengths, extensions and trailer fields: enough for a body of [`super::MAX_BODY`] whose bytes
/// come one by one.
const MAX_FRAMING: usize = 32 << 10;
const _: () = assert!(super::MAX_BODY * b"1\r\n\r\n".len() < MAX_FRAMING);

const MALFORMED: RequestError = RequestError::Length {
    reason: "a chunk is its length in hexadecimal and its bytes, a line's end behind each, and \
             little else",
};

/// Puts the chunks together that `bytes` begin with; `None` while more bytes are needed.
pub(super) fn join(mut bytes: &[u8], max_body: usize) -> Result<Option<Vec<u8>>, RequestError> {
    let (mut body, mut room) = (Vec::new(), MAX_FRAMING);
    loop {
        let Some(line) = take_line(&mut bytes, &mut room)? else { return Ok(None) };
        let size = match size(line).ok_or(MALFORMED)? {
            0 => break,
            size => size,
        };
        let found = size.saturating_add(body.len() as u64);
        let size = match usize::try_from(size) {
            Ok(size) if size <= max_body - body.len() => size,
            Ok(_) | Err(_) => return Err(RequestError::LargeBody { found, most: max_body }),
        };
        let Some((data, rest)) = bytes.split_at_checked(size) else { return Ok(None) };
        body.extend_from_slice(data);
        bytes = rest;
        match take_line(&mut bytes, &mut room)? {
            None => return Ok(None),
            Some([]) => {}
            Some(_) => return Err(MALFORMED),
        }
    }
    loop {
        match take_line(&mut bytes, &mut room)? {
            None => return Ok(None),
            Some([]) => return Ok(Some(body)),
            Some(_) => {}
        }
    }
}

/// Takes a line, for which there must be room; `None` when it has no end yet.
fn take_line<'a>(bytes: &mut &'a [u8], room: &mut usize) -> Result<Option<&'a [u8]>, RequestError> {
    let all = *bytes;
    let end = all.iter().position(|byte| *byte == b'\n');
    let length = end.map_or(all.len(), |end| end + 1);
    *room = room.checked_sub(length).ok_or(MALFORMED)?;
    if end.is_none() {
        return Ok(None);
    }
    let (line, rest) = all.split_at(length);
    *bytes = rest;
    // Neither half of a line's end counts alone: somebody before us may have read it otherwise (RFC 9112 §2.2).
    let line = line.strip_suffix(b"\r\n").filter(|line| !line.contains(&b'\r'));
    line.map(Some).ok_or(MALFORMED)
}

/// Reads a chunk's length, behind which extensions may be.
fn size(line: &[u8]) -> Option<u64> {
    let digits = match line.iter().position(|byte| *byte == b';') {
        Some(end) => line[..end].trim_ascii_end(),
        None => line,
    };
    let fits = (1..=16).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let digits = std::str::from_utf8(digits).ok().filter(|_| fits)?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_put_together() {
        let whole = b"3;name=\"x;y\"\r\n{\"a\r\n0002 ;z\r\n\":\r\n2\r\n1}\r\n0\r\nx: y\r\n\r\nnext";
        assert_eq!(join(whole, 7), Ok(Some(b"{\"a\":1}".to_vec())));
        let end = whole.len() - b"next".len();
        for length in 0..end {
            assert_eq!(join(&whole[..length], 7), Ok(None), "{length}");
        }
        assert_eq!(join(b"0\r\n\r\n", 0), Ok(Some(Vec::new())));
        let large = Err(RequestError::LargeBody { found: 7, most: 6 });
        assert_eq!(join(whole, 6), large);
        let large = Err(RequestError::LargeBody { found: u64::MAX, most: 6 });
        assert_eq!(join(b"1\r\nx\r\nffffffffffffffff\r\n", 6), large);
    }

    #[test]
    fn what_is_no_chunk_is_refused() {
        let lines = ["\r\n", "x\r\n", "+1\r\n", " 1\r\n", "1 \r\n", "1\n", "1;\rx\r\n", ";x\r\n"];
        let more = ["11111111111111111\r\n", "1\r\nab\r\n", "1\r\na\n", "0\r\nx: y\n"];
        for wrong in lines.iter().chain(&more) {
            assert_eq!(join(wrong.as_bytes(), 64), Err(MALFORMED), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_skipped_has_an_end() {
        let long = "x".repeat(MAX_FRAMING);
        for endless in [format!("1;{long}"), format!("0\r\n{long}")] {
            assert_eq!(join(endless.as_bytes(), 64), Err(MALFORMED));
        }
        let bytes = "1\r\nx\r\n".repeat(crate::api::MAX_BODY) + "0\r\n\r\n";
        let joined = join(bytes.as_bytes(), crate::api::MAX_BODY);
        assert_eq!(joined.map(|body| body.map(|body| body.len())), Ok(Some(crate::api::MAX_BODY)));
    }
}
