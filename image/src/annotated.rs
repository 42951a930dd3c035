//! The line format of `kernel-config/*.config` and `rootfs/cmdline.txt`: a value, then `#`, then
//! the reason for it. Comment lines and empty lines are free text.
//!
//! Pure: text in, lines out. What a value means is left to the caller.

/// One value with the reason beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Annotated<'a> {
    /// 1-based line number.
    pub(crate) line: usize,
    /// Everything before the reason, trimmed.
    pub(crate) value: &'a str,
    /// Everything after `#`, trimmed; never empty.
    pub(crate) reason: &'a str,
}

/// Why a line cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum AnnotationError {
    #[error("{file}:{line}: `{value}` has no reason; write `{value}  # why it is there`")]
    NoReason { file: String, line: usize, value: String },
    #[error("{file}:{line}: the quotation mark is not closed")]
    OpenQuote { file: String, line: usize },
}

/// Reads all annotated lines of `text`; `file` is only named in errors.
pub(crate) fn parse<'a>(file: &str, text: &'a str) -> Result<Vec<Annotated<'a>>, AnnotationError> {
    let mut lines = Vec::new();
    for (index, raw) in text.lines().enumerate() {
        let line = index + 1;
        let trimmed = raw.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let hash = reason_start(trimmed)
            .map_err(|OpenQuote| AnnotationError::OpenQuote { file: file.to_owned(), line })?;
        let (value, reason) = match hash {
            Some(at) => (trimmed[..at].trim(), trimmed[at + 1..].trim()),
            None => (trimmed, ""),
        };
        if reason.is_empty() {
            return Err(AnnotationError::NoReason {
                file: file.to_owned(),
                line,
                value: value.to_owned(),
            });
        }
        lines.push(Annotated { line, value, reason });
    }
    Ok(lines)
}

/// A quotation mark without its partner.
struct OpenQuote;

/// Position of the first `#` outside quotation marks.
fn reason_start(line: &str) -> Result<Option<usize>, OpenQuote> {
    let mut quoted = false;
    for (at, character) in line.char_indices() {
        match character {
            '"' => quoted = !quoted,
            '#' if !quoted => return Ok(Some(at)),
            _ => {}
        }
    }
    if quoted { Err(OpenQuote) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_and_reason_are_split_at_the_first_bare_hash() {
        let lines = parse("f", "# free\n\nA=\"x # y\"  # because # really\n");
        assert_eq!(
            lines,
            Ok(vec![Annotated { line: 3, value: "A=\"x # y\"", reason: "because # really" }])
        );
    }

    #[test]
    fn a_line_without_reason_is_refused_by_number() {
        assert_eq!(
            parse("f", "\nA=y\n"),
            Err(AnnotationError::NoReason {
                file: "f".to_owned(),
                line: 2,
                value: "A=y".to_owned(),
            })
        );
    }

    #[test]
    fn an_empty_reason_is_no_reason() {
        assert!(matches!(parse("f", "A=y #  "), Err(AnnotationError::NoReason { .. })));
    }

    #[test]
    fn an_open_quote_is_refused() {
        assert_eq!(
            parse("f", "A=\"b # c"),
            Err(AnnotationError::OpenQuote { file: "f".to_owned(), line: 1 })
        );
    }
}
