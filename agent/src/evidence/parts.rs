//! What the kernel left of its log when it crashed, put together from the pieces that firmware or a
//! reserved memory kept. Pure.
//!
//! Source: the kernel's fs/pstore (`pstore_dump` writes the newest lines as part 1, each part behind a
//! line such as `Panic#1 Part2`; `pstore_mkfile` names the files) and drivers/firmware/efi/efi-pstore.c
//! (the number in a name is time, part and count).

/// Longest piece that counts, in bytes; firmware keeps 1 KiB in each, before they are unpacked.
pub const MAX_PIECE: u64 = 256 << 10;
/// Most pieces that are looked at.
pub const MAX_PIECES: usize = 512;
/// Most bytes that are kept of one crash: its end.
pub const MAX_TEXT: usize = 128 << 10;
/// Longest line that is shown.
const MAX_LINE: usize = 200;

/// What begins a line that says why.
const REASONS: [&str; 8] = [
    "Kernel panic - not syncing",
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "Unable to handle kernel",
    "watchdog: ",
    "Out of memory",
    "WARNING: ",
];

/// One file of the kernel's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A crash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Its text, the oldest line first.
    pub text: String,
    /// The files that it was made of.
    pub names: Vec<String>,
}

/// Puts crashes together; the oldest first.
pub fn reports(pieces: Vec<Piece>) -> Vec<Report> {
    let mut keyed: Vec<(Key, Piece)> = pieces.into_iter().map(|it| (key(&it), it)).collect();
    keyed.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut reports: Vec<(String, Report)> = Vec::new();
    for (Key { crash, .. }, Piece { name, bytes }) in keyed {
        let text = printable(&without_head(&bytes));
        match reports.last_mut().filter(|(last, _)| *last == crash) {
            Some((_, report)) => {
                report.text.push_str(&text);
                report.names.push(name);
            }
            None => reports.push((crash, Report { text, names: vec![name] })),
        }
    }
    reports.into_iter().map(|(_, report)| shortened(report)).collect()
}

/// Where a piece belongs: crashes by time, their pieces from the highest number on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    crash: String,
    part: std::cmp::Reverse<u64>,
    name: String,
}

fn key(piece: &Piece) -> Key {
    let (head, part) = head(&piece.bytes).unwrap_or_default();
    // Seconds, two digits of the part, three of the count; others have no time.
    let stem = piece.name.trim_end_matches(".enc.z");
    let number = stem.rsplit('-').next().and_then(|digits| digits.parse::<u64>().ok());
    let time = number.filter(|number| *number >= 100_000).map_or(0, |number| number / 100_000);
    let kind = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let crash = format!("{time:020} {kind} {head}");
    Key { crash, part: std::cmp::Reverse(part), name: piece.name.clone() }
}

/// Reads the line before a piece's text: what happened, and which part this is.
fn head(bytes: &[u8]) -> Option<(String, u64)> {
    let line = bytes.split(|byte| *byte == b'\n').next().filter(|line| line.len() < 64)?;
    let (what, part) = std::str::from_utf8(line).ok()?.split_once(" Part")?;
    Some((what.to_owned(), part.trim().parse().ok()?))
}

fn without_head(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == b'\n').filter(|_| head(bytes).is_some());
    let mut text = bytes[end.map_or(0, |end| end + 1)..].to_vec();
    if text.last().is_some_and(|byte| *byte != b'\n') {
        text.push(b'\n');
    }
    text
}

/// What devices and guests made the kernel log goes to a console.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() && c != '\n' { '?' } else { c }).collect()
}

fn shortened(mut report: Report) -> Report {
    if report.text.len() > MAX_TEXT {
        let from = report.text.len() - MAX_TEXT;
        let from = report.text[from..].find('\n').map_or(from, |end| from + end + 1);
        report.text = report.text.get(from..).unwrap_or_default().to_owned();
    }
    report
}

/// Reads `bytes`, a list of names and pieces with zeros between them, as what firmware kept; for the fuzz
/// target and for its corpus. Returns how many crashes that are.
pub fn everything(bytes: &[u8]) -> usize {
    let mut fields = bytes.split(|byte| *byte == 0);
    let mut pieces = Vec::new();
    while let (Some(name), Some(bytes)) = (fields.next(), fields.next())
        && pieces.len() < MAX_PIECES
    {
        let name = String::from_utf8_lossy(name).into_owned();
        pieces.push(Piece { name, bytes: bytes.to_vec() });
    }
    let reports = reports(pieces);
    for report in &reports {
        assert!(report.text.len() <= MAX_TEXT && !report.names.is_empty());
        assert!(!report.text.chars().any(|c| c.is_control() && c != '\n'));
        let _ = (reason(&report.text), last_lines(&report.text, 3));
    }
    reports.len()
}

/// Returns the line that says why the kernel crashed, without its time.
pub fn reason(text: &str) -> String {
    let found = REASONS.iter().find_map(|reason| {
        let line = text.lines().rfind(|line| line.contains(reason))?;
        Some(&line[line.find(reason)?..])
    });
    let last = || text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing was kept");
    found.unwrap_or_else(last).chars().take(MAX_LINE).collect()
}

/// Returns the last lines of a text, the oldest first.
pub fn last_lines(text: &str, count: usize) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(count);
    lines[from..].iter().map(|line| line.chars().take(MAX_LINE).collect()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(name: &str, text: &str) -> Piece {
        Piece { name: name.to_owned(), bytes: text.as_bytes().to_vec() }
    }

    #[test]
    fn pieces_are_put_together_in_their_order() {
        let pieces = vec![
            piece(
                "dmesg-efi_pstore-170000000001001",
                "Panic#1 Part1\n<0>[2.0] Kernel panic - not syncing: No init\n",
            ),
            piece("dmesg-efi_pstore-170000000003001", "Panic#1 Part3\n<6>[0.1] first\n"),
            piece("dmesg-efi_pstore-170000000002001", "Panic#1 Part2\n<6>[1.0] second"),
            piece("dmesg-efi_pstore-160000000001001", "Oops#1 Part1\n<1>[9.0] Oops: 0002\n"),
            piece("console-ramoops-0", "console\x1b[2J\n"),
        ];
        let found = reports(pieces);
        let texts: Vec<&str> = found.iter().map(|report| report.text.as_str()).collect();
        let whole =
            "<6>[0.1] first\n<6>[1.0] second\n<0>[2.0] Kernel panic - not syncing: No init\n";
        assert_eq!(texts, ["console?[2J\n", "<1>[9.0] Oops: 0002\n", whole]);
        assert_eq!(found[2].names.len(), 3);
        assert_eq!(reason(whole), "Kernel panic - not syncing: No init");
        assert_eq!(reason(texts[0]), "console?[2J");
        assert_eq!(reason(""), "nothing was kept");
        assert_eq!(last_lines(whole, 1), ["<0>[2.0] Kernel panic - not syncing: No init"]);
    }

    #[test]
    fn the_end_of_a_long_crash_is_kept() {
        let line = "0123456789abcdef\n";
        let long = format!("Panic#1 Part1\n{}last\n", line.repeat(20_000));
        let found = reports(vec![piece("dmesg-ramoops-0", &long)]);
        assert!(found[0].text.len() <= MAX_TEXT);
        assert!(found[0].text.starts_with(line) && found[0].text.ends_with("last\n"));
    }

    proptest! {
        #[test]
        fn nothing_that_firmware_kept_makes_it_panic(
            pieces in proptest::collection::vec(("[a-z0-9.-]{0,30}", proptest::collection::vec(any::<u8>(), 0..200)), 0..6),
        ) {
            let fields = pieces.into_iter().flat_map(|(name, bytes)| [name.into_bytes(), bytes]);
            everything(&fields.collect::<Vec<_>>().join(&0));
        }
    }
}
