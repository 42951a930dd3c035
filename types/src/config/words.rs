//! Makes what the TOML reader says of a document understandable to somebody who writes one and no programs: what
//! was found, and what is right instead. The reader's words are those of `serde::de::Error` and of the crate `toml`.

use super::place;

/// The document's own keys, outside of any section.
pub(super) const TOP: [&str; 13] = [
    "version",
    "name",
    "network",
    "overlay",
    "authority",
    "operators",
    "machines",
    "metrics",
    "disk",
    "time",
    "install",
    "secure_boot",
    "updates",
];

/// Most characters of a key that is repeated.
const MAX_KEY: usize = 40;

/// Says what the reader's `message` means at this offset of the document.
pub(super) fn told(text: &str, offset: usize, message: &str) -> String {
    if let Some(rest) = message.strip_prefix("unknown field ") {
        return unknown(text, offset, rest);
    }
    let key = place::key(text, offset);
    let prefix = key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default();
    let what = key_text(message)
        .or_else(|| typed(text, key.as_deref().unwrap_or_default(), message))
        .or_else(|| syntax(text, offset, message).filter(|_| !place::is_whole(text)))
        .unwrap_or_else(|| message.to_owned());
    format!("{prefix}{what}")
}

/// A text that is no key of somebody's.
fn key_text(message: &str) -> Option<String> {
    let what = message.strip_prefix("PublicKey ");
    let what =
        what.map(|what| format!("{what}; `holdfast keygen` prints a public key as it is right"));
    let node = || message.strip_prefix("NodeId ");
    what.or_else(|| Some(format!("{}; a node or gateway tells its own as it is right", node()?)))
}

/// A value of another type than is right, or none.
fn typed(text: &str, key: &str, message: &str) -> Option<String> {
    if let Some(field) = message.strip_prefix("missing field ") {
        return Some(format!("{field} is left out; it is needed here"));
    }
    if message == "wanted string or table" {
        let (_, said) = place::find(text, key);
        let found = said.split_once(" = ").map_or("something else", |(_, value)| value);
        return Some(format!("found {found}; text in quotes, as \"...\", is right"));
    }
    let (found, right) = message.split_once(", expected ")?;
    if let Some(variant) = found.strip_prefix("unknown variant ") {
        let right =
            right.strip_prefix("one of ").map_or(right.to_owned(), |r| format!("one of {r}"));
        return Some(format!("found {variant}; {right} is right").replace('`', "\""));
    }
    let found = found.strip_prefix("invalid type: ").or(found.strip_prefix("invalid value: "))?;
    let found = found.strip_suffix(" as i128").unwrap_or(found).replace('`', "");
    let right = match right {
        "u8" => whole(u8::MAX.into()),
        "u16" => whole(u16::MAX.into()),
        "u32" => whole(u32::MAX.into()),
        "u64" | "usize" => "a whole number, 0 or more, without quotes, unit or point,".to_owned(),
        "a boolean" => "true or false, without quotes,".to_owned(),
        "a string" => "text in quotes, as \"...\",".to_owned(),
        "a sequence" if found == "map" => format!("a list, [[{key}]] with two brackets,"),
        "a sequence" => "a list in brackets, as [\"...\"],".to_owned(),
        other if other.starts_with("struct ") => {
            "a section of its own, or a table in braces, as { key = \"...\" },".to_owned()
        }
        other => other.to_owned(),
    };
    let found = if found == "map" { "a table".to_owned() } else { found };
    Some(format!("found {found}; {right} is right"))
}

fn whole(most: u64) -> String {
    format!("a whole number from 0 to {most}, without quotes, unit or point,")
}

/// A key that nobody knows, `rest` being it and those that are known there.
fn unknown(text: &str, offset: usize, rest: &str) -> String {
    let (found, known) = rest.split_once(", expected ").unwrap_or((rest, ""));
    let found = found.trim_matches('`');
    let section = place::holder(text, offset).unwrap_or_default();
    let place = match &*section {
        "" => "outside of a section".to_owned(),
        section => format!("in [{section}]"),
    };
    let names = known.split('`').skip(1).step_by(2);
    let meant = match names.min_by_key(|name| distance(found, name)) {
        Some(name) if distance(found, name) <= (found.len() / 2).min(3) => {
            format!("is `{name}` meant? Known")
        }
        _ if !section.is_empty() && TOP.contains(&found) => {
            "it belongs above the first section. Known".to_owned()
        }
        _ => "known".to_owned(),
    };
    format!("there is no key `{found}` {place}; {meant} are {}", known.replace("one of ", ""))
}

/// How many letters differ between two names (Levenshtein); small and capital ones are the same.
fn distance(one: &str, other: &str) -> usize {
    let (one, other) = (one.to_ascii_lowercase(), other.to_ascii_lowercase());
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (above, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = above + 1;
        for (at, b) in other.chars().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[at + 1];
            row[at + 1] = changed.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

/// What is no TOML. The value is not repeated: it may be a secret, and nobody knows where it ends.
fn syntax(text: &str, offset: usize, message: &str) -> Option<String> {
    let start = text.get(..offset)?.rfind('\n').map_or(0, |end| end + 1);
    let rest = text.get(offset..)?;
    if message == "duplicate key" {
        let name = rest.split([' ', '\t', '=', ']', '\r', '\n']).next().unwrap_or_default();
        return Some(format!("`{name}` is there a second time; leave one out"));
    }
    let line = text.get(start..)?.lines().next().unwrap_or_default();
    let name = line.split(['=', ':', '"', '\'', '{', '#']).next().unwrap_or_default().trim();
    let name: String = name.chars().filter(|c| !c.is_control()).take(MAX_KEY).collect();
    let at = if name.is_empty() { String::new() } else { format!(" at `{name}`") };
    let hint = match message {
        "key with no value, expected `=`" => {
            "; TOML is written as key = value, and # begins a comment"
        }
        _ => hint(rest),
    };
    Some(format!("{message}{at}{hint}"))
}

/// What people type, or their editors for them, that TOML does not know.
fn hint(rest: &str) -> &'static str {
    match rest.chars().next() {
        Some('“' | '”' | '„' | '‘' | '’' | '«' | '»') => {
            "; these are typographic quotes, and only straight ones count: \" or '"
        }
        Some('\u{a0}' | '\u{202f}' | '\u{200b}' | '\u{feff}') => {
            "; an invisible character that is no blank stands here: delete it"
        }
        Some('0'..='9') => "; text needs quotes, and a number has no unit",
        Some(_) | None if rest.starts_with("True") || rest.starts_with("False") => {
            "; true and false have small letters"
        }
        Some(_) | None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::NodeSpec;

    const KEY: &str = "0101010101010101010101010101010101010101010101010101010101010101";

    /// What is told of a document with `top` in line 2 and `sections` from line 6 on.
    fn told(top: &str, sections: &str) -> String {
        let authority = format!("[authority]\nthreshold = 1\nkeys = [\"{KEY}\"]");
        let text = format!("version = 1\n{top}\n{authority}\n{sections}\n");
        let told = NodeSpec::parse(text.as_bytes()).expect_err("refused").to_string();
        told.strip_prefix("configuration line ").expect("a line").to_owned()
    }

    #[test]
    fn values_of_another_type_are_told_in_words_that_providers_know() {
        let number = "a whole number from 0 to 4294967295, without quotes, unit or point, is right";
        let cases = [
            ("vcpus = \"8\"", format!("7, column 9: machines.vcpus: found string \"8\"; {number}")),
            ("vcpus = -1", format!("7, column 9: machines.vcpus: found integer -1; {number}")),
            ("vcpus = 1.5", format!("7, column 9: machines.vcpus: found floating point 1.5; {number}")),
            (
                "huge_page = \"2M\"",
                "7, column 13: machines.huge_page: found \"2M\"; \"2m\" or \"1g\" is right".to_owned(),
            ),
            (
                "inbound = true",
                "7, column 11: machines.inbound: found true; text in quotes, as \"...\", is right".to_owned(),
            ),
            (
                "devices = \"0000:01:00.0\"",
                "7, column 11: machines.devices: found string \"0000:01:00.0\"; a list in brackets, as [\"...\"], is right".to_owned(),
            ),
        ];
        let found = cases.each_ref().map(|(text, _)| told("", &format!("[machines]\n{text}")));
        assert_eq!(found, cases.map(|(_, right)| right));
        let one = told("", "[overlay.seeds]\nnode = \"x\"\naddress = \"192.0.2.1:4600\"");
        assert!(one.contains("[[overlay.seeds]] with two brackets"), "{one}");
        let card = told("", "[[network.uplinks]]\nname = \"a\"\ncard = \"eth0\"");
        assert!(
            card.contains("network.uplinks[0].card: found string \"eth0\"; a section"),
            "{card}"
        );
        let key = told("operators = [\"ssh-ed25519 AAAA\"]", "");
        assert!(
            key.starts_with("2, column 13: operators: \"ssh-ed25519 AAAA\": expected 64"),
            "{key}"
        );
        assert!(key.ends_with("`holdfast keygen` prints a public key as it is right"), "{key}");
        let disk = told("", "[install]\ndisk = \"/dev/sda\"");
        assert!(!disk.contains("struct"), "{disk}");
    }

    #[test]
    fn unknown_keys_are_told_with_the_one_that_may_be_meant() {
        let name = told("nmae = \"x\"", "");
        assert!(
            name.starts_with("2, column 1: there is no key `nmae` outside of a section; is `name`")
        );
        let section = told("", "[Machines]\nvcpus = 2");
        assert!(section.contains("is `machines` meant?"), "{section}");
        let enrol = told("", "[secure_boot]\nenroll = \"never\"");
        assert!(enrol.contains("no key `enroll` in [secure_boot]; is `enrol` meant?"), "{enrol}");
        let below = told("", &format!("operators = [\"{KEY}\"]"));
        assert!(below.contains("no key `operators` in [authority]; it belongs above"), "{below}");
        let other = told("zebra = 1", "");
        assert!(!other.contains("meant") && other.contains("`version`, `name`"), "{other}");
        // All that the document knows outside of sections, in its own words.
        let known = super::TOP.map(|name| format!("`{name}`")).join(", ");
        assert!(other.ends_with(&format!("; known are {known}")), "{other}");
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_key_and_never_its_value() {
        let unit = told("", "[machines]\nreserve_mib = 2GB");
        assert!(unit.contains("7, column 15") && unit.contains("at `reserve_mib`"), "{unit}");
        assert!(unit.contains("a number has no unit"), "{unit}");
        assert!(told("name = “rack”", "").contains("typographic quotes"));
        assert!(told("name\u{a0}= \"x\"", "").contains("invisible character"));
        assert!(
            told("", "[[network.uplinks]]\nname=\"a\"\ncard = { carrier = True }")
                .contains("small letters")
        );
        let twice = told("name = \"a\"\nname = \"b\"", "");
        assert_eq!(twice, "3, column 1: `name` is there a second time; leave one out");
        let again = told("", "[authority]\nthreshold = 2");
        assert!(again.contains("`authority` is there a second time"), "{again}");
        assert!(told("name: \"a\"", "").contains("TOML is written as key = value"));
        let secret = told("", "[disk]\nrecovery_key = \"ABCDEF");
        assert!(secret.contains("at `recovery_key`") && !secret.contains("ABCDEF"), "{secret}");
    }

    #[test]
    fn what_is_left_out_is_told() {
        let told = |text: &str| NodeSpec::parse(text.as_bytes()).expect_err("refused").to_string();
        assert!(told("version = 1\n").ends_with("`authority` is left out; it is needed here"));
        let keys = format!("version = 1\n[authority]\nkeys = [\"{KEY}\"]\n");
        assert!(told(&keys).contains("line 2, column 1: authority: `threshold` is left out"));
    }
}
