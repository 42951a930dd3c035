//! Kconfig fragments: reading them, merging them, and comparing a built `.config` with what was
//! asked for.
//!
//! Pure: text in, text and findings out. Running `make` is left to `kernel`.
//! Source: Linux `Documentation/kbuild/kconfig.rst` (`KCONFIG_ALLCONFIG`) for the merged form.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::annotated::{self, AnnotationError};

/// One option that a fragment asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The symbol without `CONFIG_`.
    pub symbol: String,
    /// `y`, `n`, a number, or a string with its quotation marks.
    pub value: String,
    /// The fragment's file name.
    pub file: String,
    /// 1-based line in it.
    pub line: usize,
}

/// Why fragments cannot be merged.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum FragmentError {
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    #[error("{file}:{line}: `{text}` is not of the form CONFIG_NAME=value")]
    NotAnOption { file: String, line: usize, text: String },
    #[error(
        "{file}:{line}: `{value}` is neither y, n, a number nor a quoted string (nothing is a module here)"
    )]
    BadValue { file: String, line: usize, value: String },
    #[error("{file}:{line}: CONFIG_{symbol} was already set in {first_file}:{first_line}")]
    Duplicate { symbol: String, file: String, line: usize, first_file: String, first_line: usize },
}

/// Reads one fragment.
pub fn parse_fragment(file: &str, text: &str) -> Result<Vec<Request>, FragmentError> {
    annotated::parse(file, text)?
        .into_iter()
        .map(|entry| {
            let malformed = || FragmentError::NotAnOption {
                file: file.to_owned(),
                line: entry.line,
                text: entry.value.to_owned(),
            };
            let (name, value) = entry.value.split_once('=').ok_or_else(malformed)?;
            let symbol =
                name.strip_prefix("CONFIG_").filter(|s| is_symbol(s)).ok_or_else(malformed)?;
            if !is_value(value) {
                return Err(FragmentError::BadValue {
                    file: file.to_owned(),
                    line: entry.line,
                    value: value.to_owned(),
                });
            }
            Ok(Request {
                symbol: symbol.to_owned(),
                value: value.to_owned(),
                file: file.to_owned(),
                line: entry.line,
            })
        })
        .collect()
}

fn is_symbol(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn is_value(text: &str) -> bool {
    let quoted = text.len() >= 2 && text.starts_with('"') && text.ends_with('"');
    let hexadecimal =
        text.strip_prefix("0x").is_some_and(|digits| u64::from_str_radix(digits, 16).is_ok());
    text == "y" || text == "n" || quoted || hexadecimal || text.parse::<i64>().is_ok()
}

/// Refuses a symbol that is asked for twice.
pub fn check_unique(requests: &[Request]) -> Result<(), FragmentError> {
    let mut first: BTreeMap<&str, &Request> = BTreeMap::new();
    for request in requests {
        if let Some(earlier) = first.insert(&request.symbol, request) {
            return Err(FragmentError::Duplicate {
                symbol: request.symbol.clone(),
                file: request.file.clone(),
                line: request.line,
                first_file: earlier.file.clone(),
                first_line: earlier.line,
            });
        }
    }
    Ok(())
}

/// The text that `make allnoconfig` reads through `KCONFIG_ALLCONFIG`.
pub fn merged(requests: &[Request]) -> String {
    let mut text = String::new();
    for request in requests {
        text.push_str(&config_line(&request.symbol, &request.value));
        text.push('\n');
    }
    text
}

/// One line of a `.config` file.
fn config_line(symbol: &str, value: &str) -> String {
    if value == "n" {
        format!("# CONFIG_{symbol} is not set")
    } else {
        format!("CONFIG_{symbol}={value}")
    }
}

/// An option whose built value is not the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// What was asked for, and where.
    pub request: Request,
    /// What the kernel's configuration says instead.
    pub found: Found,
}

/// What became of a requested option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No Kconfig file of this kernel defines the symbol.
    Unknown,
    /// The symbol exists, but a dependency keeps it out.
    Absent,
    /// It has another value.
    Other(String),
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { symbol, value, file, line } = &self.request;
        write!(f, "{file}:{line}: CONFIG_{symbol}={value} ")?;
        match &self.found {
            Found::Unknown => write!(f, "is not an option of this kernel"),
            Found::Absent => write!(f, "did not take: a dependency of it is off"),
            Found::Other(other) => write!(f, "became {other}"),
        }
    }
}

/// Values of a built `.config`; options that are off are absent.
pub fn parse_config(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.strip_prefix("CONFIG_")?.split_once('=')).collect()
}

/// Every request that did not survive. `known` holds every symbol that the kernel defines.
pub fn lost(requests: &[Request], config: &str, known: &BTreeSet<String>) -> Vec<Lost> {
    let built = parse_config(config);
    requests
        .iter()
        .filter_map(|request| {
            let found = match built.get(request.symbol.as_str()) {
                _ if !known.contains(&request.symbol) => Found::Unknown,
                Some(value) if *value == request.value => return None,
                Some(value) => Found::Other((*value).to_owned()),
                None if request.value == "n" => return None,
                None => Found::Absent,
            };
            Some(Lost { request: request.clone(), found })
        })
        .collect()
}

/// Symbols that one Kconfig file defines.
pub fn defined_symbols(kconfig: &str) -> impl Iterator<Item = &str> {
    kconfig.lines().filter_map(|line| {
        let line = line.trim();
        line.strip_prefix("config ")
            .or_else(|| line.strip_prefix("menuconfig "))
            .map(str::trim)
            .filter(|symbol| is_symbol(symbol))
    })
}

/// Mitigations of CPU vulnerabilities that this kernel knows and `config` leaves off.
pub fn missing_mitigations(config: &str, known: &BTreeSet<String>) -> Vec<String> {
    let built = parse_config(config);
    known
        .iter()
        .filter(|symbol| symbol.starts_with("MITIGATION_") || *symbol == "CPU_MITIGATIONS")
        .filter(|symbol| built.get(symbol.as_str()) != Some(&"y"))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    fn requests(text: &str) -> Vec<Request> {
        parse_fragment("f.config", text).unwrap()
    }

    fn known(symbols: &[&str]) -> BTreeSet<String> {
        symbols.iter().map(|s| (*s).to_owned()).collect()
    }

    fn findings(fragment: &str, config: &str, symbols: &[&str]) -> Vec<(String, Found)> {
        lost(&requests(fragment), config, &known(symbols))
            .into_iter()
            .map(|lost| (lost.request.symbol, lost.found))
            .collect()
    }

    #[test]
    fn fragments_merge_into_kconfig_syntax() {
        let list =
            requests("CONFIG_A=y # r\nCONFIG_B=n # r\nCONFIG_C=\"x\" # r\nCONFIG_D=19 # r\n");
        assert_eq!(
            merged(&list),
            "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"x\"\nCONFIG_D=19\n"
        );
    }

    #[test]
    fn modules_are_refused() {
        assert!(matches!(
            parse_fragment("f", "CONFIG_A=m # r"),
            Err(FragmentError::BadValue { line: 1, .. })
        ));
    }

    #[test]
    fn a_name_without_prefix_is_refused() {
        assert!(matches!(parse_fragment("f", "KVM=y # r"), Err(FragmentError::NotAnOption { .. })));
    }

    #[test]
    fn asking_twice_is_refused_with_both_places() {
        assert!(matches!(
            check_unique(&requests("CONFIG_A=y # r\nCONFIG_A=n # r\n")),
            Err(FragmentError::Duplicate { line: 2, first_line: 1, .. })
        ));
    }

    #[test]
    fn surviving_options_are_not_reported() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"x\"\n";
        let fragment = "CONFIG_A=y # r\nCONFIG_B=n # r\nCONFIG_C=\"x\" # r\n";
        assert_eq!(findings(fragment, config, &["A", "B", "C"]), []);
    }

    #[test]
    fn a_dependency_that_is_off_is_reported() {
        let found = findings("CONFIG_A=y # r", "# CONFIG_A is not set\n", &["A"]);
        assert_eq!(found, [("A".to_owned(), Found::Absent)]);
    }

    #[test]
    fn a_forced_option_is_reported() {
        let found = findings("CONFIG_A=n # r", "CONFIG_A=y\n", &["A"]);
        assert_eq!(found, [("A".to_owned(), Found::Other("y".to_owned()))]);
    }

    #[test]
    fn a_misspelt_option_is_reported_even_when_off() {
        let found = findings("CONFIG_KVN=n # r", "", &["KVM"]);
        assert_eq!(found, [("KVN".to_owned(), Found::Unknown)]);
    }

    #[test]
    fn symbols_are_found_in_kconfig_files() {
        let text = "menuconfig A\n\tbool\nconfig B\n  config C # no\nif D\nconfig  E\n";
        assert_eq!(defined_symbols(text).collect::<Vec<_>>(), ["A", "B", "E"]);
    }

    #[test]
    fn a_new_mitigation_that_is_off_is_named() {
        let symbols = known(&["CPU_MITIGATIONS", "MITIGATION_OLD", "MITIGATION_NEW", "KVM"]);
        let config = "CONFIG_CPU_MITIGATIONS=y\nCONFIG_MITIGATION_OLD=y\n";
        assert_eq!(missing_mitigations(config, &symbols), ["MITIGATION_NEW"]);
    }
}
