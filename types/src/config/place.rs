//! Where in a document a key is, and what it says there. For documents that were read already.

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// Longest value that is repeated, in characters.
const MAX_SAID: usize = 80;
/// Tables and lists within each other that are looked into: twice as many as a configuration has.
const MAX_DEPTH: usize = 16;

/// Finds a key, as `network.uplinks[1].mtu`. Returns the offset of what there is on the way to it, in bytes,
/// and what the document says: the key with its value, unless that is a list or a table.
pub(super) fn find(text: &str, key: &str) -> (usize, String) {
    let Ok(document) = DeTable::parse(text) else { return (0, key.to_owned()) };
    let missing = |offset| (offset, format!("{key} is left out"));
    let (mut table, mut offset, mut found) = (Some(document.get_ref()), 0, None);
    for step in key.split('.') {
        let (name, item) = numbered(step);
        let entry = table.and_then(|table| table.iter().find(|(key, _)| key.get_ref() == name));
        let Some((name, mut value)) = entry else { return missing(offset) };
        offset = name.span().start;
        if let Some(item) = item {
            let list = value.get_ref().as_array();
            let Some(one) = list.and_then(|list| list.get(item)) else { return missing(offset) };
            (value, offset) = (one, one.span().start);
        }
        (table, found) = (value.get_ref().as_table(), Some(value));
    }
    let scalar =
        found.filter(|value| !matches!(value.get_ref(), DeValue::Array(_) | DeValue::Table(_)));
    let said = scalar.and_then(|value| text.get(value.span())).map(shown);
    (offset, said.map_or_else(|| key.to_owned(), |said| format!("{key} = {said}")))
}

/// Whether a document is TOML, whatever it says.
pub(super) fn is_whole(text: &str) -> bool {
    DeTable::parse(text).is_ok()
}

/// Returns the key whose value, or part of it, begins at this offset.
pub(super) fn key(text: &str, offset: usize) -> Option<String> {
    let document = DeTable::parse(text).ok()?;
    in_table(document.get_ref(), offset, MAX_DEPTH)
}

/// Returns the table that has a key at this offset; empty for the document itself.
pub(super) fn holder(text: &str, offset: usize) -> Option<String> {
    let document = DeTable::parse(text).ok()?;
    holding(document.get_ref(), offset, MAX_DEPTH)
}

fn holding(table: &DeTable<'_>, offset: usize, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    table.iter().find_map(|(name, value)| {
        if name.span().start == offset {
            return Some(String::new());
        }
        let list = value.get_ref().as_array().into_iter().flat_map(|list| list.iter());
        let mut below =
            std::iter::once(value).chain(list).filter_map(|one| one.get_ref().as_table());
        let below = below.find_map(|table| holding(table, offset, depth))?;
        let dot = if below.is_empty() { "" } else { "." };
        Some(format!("{}{dot}{below}", name.get_ref()))
    })
}

fn in_table(table: &DeTable<'_>, offset: usize, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    table.iter().find_map(|(name, value)| {
        let below = in_value(value, offset, depth)?;
        Some(format!("{}{below}", name.get_ref()))
    })
}

/// The rest of the key, from the value on.
fn in_value(value: &Spanned<DeValue<'_>>, offset: usize, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    let (table, list) = (value.get_ref().as_table(), value.get_ref().as_array());
    let below = table.and_then(|table| Some(format!(".{}", in_table(table, offset, depth)?)));
    let below = below.or_else(|| {
        let item = |(at, item)| Some(format!("[{at}]{}", in_value(item, offset, depth)?));
        list?.iter().enumerate().find_map(item)
    });
    below.or_else(|| (value.span().start == offset).then(String::new))
}

/// Splits `name[1]`.
fn numbered(step: &str) -> (&str, Option<usize>) {
    match step.strip_suffix(']').and_then(|step| step.split_once('[')) {
        Some((name, item)) => (name, item.parse().ok()),
        None => (step, None),
    }
}

/// A value in one line.
fn shown(value: &str) -> String {
    let line = value.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_SAID) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}
