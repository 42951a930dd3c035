//! Where each value of the configuration comes from: what the document says, and what is the default
//! because it says nothing. Pure.

use toml::{Table, Value};
use types::{config::NodeSpec, status::Setting};

/// Where values come from that the document does not say.
const DEFAULT: &str = "default";
/// What is shown instead of these values.
const SECRET: &str = "(secret)";
const SECRETS: [&str; 1] = ["disk.recovery_key"];
/// Longest value that is shown, in characters.
const MAX_SHOWN: usize = 120;

/// Returns the values that `spec` holds, by key, each with its source: `source` for what `document`
/// says, [`DEFAULT`] for the rest. What has neither a value nor a default is left out.
pub fn list(document: &[u8], spec: &NodeSpec, source: &str) -> Vec<Setting> {
    let said: Table = std::str::from_utf8(document)
        .ok()
        .and_then(|text| toml::from_str(text).ok())
        .unwrap_or_default();
    let mut settings = Vec::new();
    if let Ok(Value::Table(values)) = Value::try_from(spec) {
        collect("", &values, Some(&said), source, &mut settings);
    }
    settings
}

fn collect(
    above: &str,
    values: &Table,
    said: Option<&Table>,
    source: &str,
    settings: &mut Vec<Setting>,
) {
    for (name, value) in values {
        let key = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        let said = said.and_then(|said| said.get(name));
        if let Value::Table(values) = value {
            collect(&key, values, said.and_then(Value::as_table), source, settings);
            continue;
        }
        let value = if SECRETS.contains(&key.as_str()) { SECRET.to_owned() } else { shown(value) };
        let source = if said.is_some() { source } else { DEFAULT };
        settings.push(Setting { key, value, source: source.to_owned() });
    }
}

/// A value in one line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let mut line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((at, _)) = line.char_indices().nth(MAX_SHOWN) {
        line.truncate(at);
        line = format!("{line}... ({} bytes)", text.len());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(more: &str) -> Vec<Setting> {
        let key = "01".repeat(32);
        let text = format!(
            "version = 1\nname = \"n\"\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n{more}"
        );
        let spec = NodeSpec::parse(text.as_bytes()).expect("valid");
        list(text.as_bytes(), &spec, "here")
    }

    fn of<'a>(settings: &'a [Setting], key: &str) -> (&'a str, &'a str) {
        let found = settings.iter().find(|setting| setting.key == key).expect("a value");
        (&found.value, &found.source)
    }

    #[test]
    fn what_the_document_says_and_what_it_does_not() {
        let settings = settings("[machines]\nsubnet = \"10.77.0.0/16\"\nvcpus = 4\n");
        assert_eq!(of(&settings, "name"), ("\"n\"", "here"));
        // Said, although it is the default.
        assert_eq!(of(&settings, "machines.subnet"), ("\"10.77.0.0/16\"", "here"));
        assert_eq!(of(&settings, "machines.vcpus"), ("4", "here"));
        assert_eq!(of(&settings, "machines.grace_s"), ("10", DEFAULT));
        assert_eq!(of(&settings, "overlay.listen"), ("\"[::]:4600\"", DEFAULT));
        assert!(!settings.iter().any(|setting| setting.key.starts_with("install")));
    }

    #[test]
    fn secrets_are_not_shown_and_long_values_are_cut() {
        let long = format!("-----BEGIN CERTIFICATE-----{}", "x".repeat(500));
        let settings = settings(&format!(
            "[disk]\nrecovery_key = \"aaaa-bbbb\"\n[time]\nnts_roots = \"\"\"\n{long}\n\"\"\"\n"
        ));
        assert_eq!(of(&settings, "disk.recovery_key"), (SECRET, "here"));
        let (value, _) = of(&settings, "time.nts_roots");
        assert!(value.len() < 160 && value.contains("... ("), "{value}");
        assert!(!format!("{settings:?}").contains("bbbb"));
    }
}
