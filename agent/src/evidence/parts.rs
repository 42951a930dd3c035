//! What the kernel left of its log when it crashed, put together from the pieces that firmware or a
//! reserved memory kept. Pure.
//!
//! Source: the kernel's fs/pstore (`pstore_dump` writes the newest lines as part 1, each part behind a
//! line such as `Panic#1 Part2`; `pstore_mkfile` names the files) and drivers/firmware/efi/efi-pstore.c
//! (the number in a name is time, part and count: `generic_id`). `pstore_dump` takes the time anew for each
//! part.

/// Longest piece that counts, in bytes; firmware keeps 1 KiB in each, before they are unpacked.
pub const MAX_PIECE: u64 = 256 << 10;
/// Most pieces that are looked at.
pub const MAX_PIECES: usize = 512;
/// Most bytes that are kept of one crash: its end.
pub const MAX_TEXT: usize = 128 << 10;
/// Longest time between two parts of one crash, in seconds: erasing flash memory takes firmware a second or
/// two, and a server that crashes again has started in between.
const MAX_PAUSE_S: u64 = 60;
/// How names of pieces begin that firmware's variables keep.
const EFI: &str = "dmesg-efi_pstore-";
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
    let mut placed: Vec<(Place, Piece)> = pieces.into_iter().map(|it| (place(&it), it)).collect();
    placed.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut crashes: Vec<Vec<(Place, Piece)>> = Vec::new();
    for (place, piece) in placed {
        match crashes.last_mut() {
            Some(crash) if crash.last().is_some_and(|(last, _)| place.continues(last)) => {
                crash.push((place, piece));
            }
            _ => crashes.push(vec![(place, piece)]),
        }
    }
    // Each list begins with what was written first: when it happened.
    crashes.sort_by_key(|crash| crash.first().map(|(place, _)| place.time));
    crashes.into_iter().map(report).collect()
}

/// Makes a crash of its pieces: the part with the highest number is the oldest.
fn report(crash: Vec<(Place, Piece)>) -> Report {
    let mut report = Report { text: String::new(), names: Vec::new() };
    for (_, Piece { name, bytes }) in crash.into_iter().rev() {
        report.text.push_str(&printable(&without_head(&bytes)));
        report.names.push(name);
    }
    shortened(report)
}

/// Where a piece belongs. In this order, pieces of one crash follow each other as they were written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Who kept it, as the name says, and which crash of its boot it is: as the line before the text says,
    /// and as the name counts.
    crash: (String, String, u64),
    /// When it was written, in seconds since 1970; 0 where the name does not tell. Each part has a time of its
    /// own: firmware may take seconds for all of them.
    time: u64,
    /// Which of its time it is.
    order: u64,
    part: u64,
    name: String,
}

impl Place {
    /// Whether this is of the same crash as the piece before it. A crash of another boot may be called the
    /// same: it begins with a part that was there already, or long after.
    fn continues(&self, last: &Self) -> bool {
        let alike = self.crash == last.crash && (self.part > last.part || self.part == 0);
        alike && self.time - last.time <= MAX_PAUSE_S
    }
}

fn place(piece: &Piece) -> Place {
    let head = head(&piece.bytes);
    let stem = piece.name.trim_end_matches(".enc.z");
    let kind = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = stem[kind.len()..].parse::<u64>().unwrap_or(0);
    let name = piece.name.clone();
    if kind != EFI {
        let (head, part) = head.unwrap_or_default();
        let crash = (kind.to_owned(), head, 0);
        return Place { crash, time: 0, order: number, part, name };
    }
    // Seconds, a hundred parts, a thousand crashes of a boot. A part above a hundred counts as a second.
    let (head, part) = head.unwrap_or_else(|| (String::new(), number / 1000 % 100));
    let time = (number / 1000).saturating_sub(part) / 100;
    let crash = (kind.to_owned(), head, number % 1000);
    Place { crash, time, order: part, part, name }
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

    fn efi(time: u64, part: u64, count: u64) -> Piece {
        let name = format!("dmesg-efi_pstore-{}", (time * 100 + part) * 1000 + count);
        piece(&name, &format!("Panic#{count} Part{part}\n<6>[1.0] {time} part {part}\n"))
    }

    fn lines(pieces: Vec<Piece>) -> Vec<Vec<String>> {
        let line = |line: &str| line.trim_start_matches("<6>[1.0] ").to_owned();
        reports(pieces).iter().map(|report| report.text.lines().map(line).collect()).collect()
    }

    #[test]
    fn a_crash_that_was_written_for_seconds_is_one() {
        let pieces = vec![efi(1005, 3, 1), efi(1000, 1, 1), efi(1001, 2, 1), efi(1005, 4, 1)];
        let whole = ["1005 part 4", "1005 part 3", "1001 part 2", "1000 part 1"];
        assert_eq!(lines(pieces), [whole]);
        // The number in a name has two digits for the part only.
        let long: Vec<_> = (1..=250).map(|part| efi(1000 + part / 50, part, 1)).collect();
        let found = lines(long);
        assert_eq!((found.len(), found[0].len()), (1, 250));
        assert_eq!(
            (found[0][0].as_str(), found[0][249].as_str()),
            ("1005 part 250", "1000 part 1")
        );
    }

    #[test]
    fn crashes_of_several_boots_stay_apart() {
        // The first of each boot is called the same.
        let soon = vec![efi(1040, 1, 1), efi(1000, 1, 1), efi(1001, 2, 1), efi(1041, 2, 1)];
        let one = ["1001 part 2", "1000 part 1"];
        assert_eq!(lines(soon), [one, ["1041 part 2", "1040 part 1"]]);
        let late = vec![efi(1000, 1, 1), efi(1061, 2, 1)];
        assert_eq!(lines(late), [["1000 part 1"], ["1061 part 2"]]);
        // Two of one boot, the second of which began before the first was written.
        let both = vec![efi(1000, 1, 1), efi(1001, 1, 2), efi(1002, 2, 1), efi(1003, 2, 2)];
        assert_eq!(lines(both), [["1002 part 2", "1000 part 1"], ["1003 part 2", "1001 part 1"]]);
        let memory = |number, part| {
            piece(&format!("dmesg-ramoops-{number}"), &format!("Panic#1 Part{part}\n{number}\n"))
        };
        let boots = vec![memory(10, 2), memory(8, 2), memory(9, 1), memory(7, 1)];
        assert_eq!(lines(boots), [["8", "7"], ["10", "9"]]);
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
