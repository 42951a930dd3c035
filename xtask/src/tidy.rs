//! Rules that no compiler checks. Each finding says file, line and what would be right.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

/// The only edges between crates: who may depend on whom.
const EDGES: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("overlay", &["types"]),
    ("lease", &["types"]),
    ("update", &["types"]),
    ("vmm", &["types"]),
    ("agent", &["overlay", "lease", "update", "types"]),
    ("gateway", &["overlay", "lease", "types"]),
    ("image", &["update", "types"]),
    ("qemu-tests", &["image", "types"]),
    ("xtask", &[]),
];

/// Longest file, in lines, tests not counted.
const MAX_FILE_LINES: usize = 1000;
/// Longest function, in lines.
const MAX_FUNCTION_LINES: usize = 70;
/// Crates that hold unsafe code, each in one module tree named `sys`.
const UNSAFE_CRATES: &[&str] = &["agent", "vmm", "qemu-tests"];
/// Words that promise instead of doing.
const BANNED: &[&str] = &["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("];

/// Checks the workspace at `root`; an error lists every finding.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut findings = edges(root)?;
    for (crate_name, _) in EDGES {
        for file in rust_files(&root.join(crate_name))? {
            let text = fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
            let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            findings.extend(file_findings(crate_name, &name, &text));
        }
        findings.extend(corpora(root, crate_name)?);
    }
    if findings.is_empty() {
        println!("tidy: clean");
        return Ok(());
    }
    bail!("tidy found {} things to mend:\n  {}", findings.len(), findings.join("\n  "))
}

fn edges(root: &Path) -> Result<Vec<String>> {
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        EDGES.iter().map(|(name, to)| (*name, to.iter().copied().collect())).collect();
    let mut findings = Vec::new();
    for (name, to) in &allowed {
        let path = root.join(name).join("Cargo.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let manifest: toml::Table = toml::from_str(&text)?;
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let keys = manifest.get(section).and_then(toml::Value::as_table);
            for dependency in keys.into_iter().flat_map(toml::Table::keys) {
                if allowed.contains_key(dependency.as_str()) && !to.contains(dependency.as_str()) {
                    findings.push(format!(
                        "{name}/Cargo.toml: {name} must not depend on {dependency}; allowed are {to:?}"
                    ));
                }
            }
        }
    }
    Ok(findings)
}

fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in walkdir::WalkDir::new(folder).sort_by_file_name() {
        let entry = entry?;
        let skipped = entry.path().components().any(|part| part.as_os_str() == "target");
        if !skipped && entry.path().extension().is_some_and(|extension| extension == "rs") {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

fn file_findings(crate_name: &str, name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let code = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let lines = code.lines().count();
    if lines > MAX_FILE_LINES {
        findings.push(format!(
            "{name}: {lines} lines; split it by meaning, {MAX_FILE_LINES} is the most"
        ));
    }
    let own = crate_name == "xtask";
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        if !own && let Some(word) = BANNED.iter().find(|word| line.contains(**word)) {
            findings.push(format!("{name}:{number}: {word} promises; do it or say it in an issue"));
        }
        let allows = line.trim_start().starts_with("#[allow(unsafe_code")
            || line.trim_start().starts_with("#![allow(unsafe_code");
        if allows && !unsafe_allowed(crate_name, name, text, number) {
            findings.push(format!(
                "{name}:{number}: unsafe code belongs into the crate's `sys` module"
            ));
        }
    }
    findings.extend(long_functions(name, code));
    findings.extend(borrowed_twice(name, code));
    findings
}

/// Finds statements that borrow twice. Of a `tokio::sync::watch` the first borrow lasts to the statement's end, a
/// writer that came in between waits for it, and the second borrow waits behind the writer: both for ever.
fn borrowed_twice(name: &str, code: &str) -> Vec<String> {
    let (mut findings, mut borrows) = (Vec::new(), 0);
    for (number, line) in code.lines().enumerate() {
        let line = line.split("//").next().unwrap_or(line);
        for piece in line.split_inclusive([';', '{', '}']) {
            borrows += piece.matches(".borrow()").count();
            borrows += piece.matches(".borrow_and_update()").count();
            if borrows > 1 {
                let number = number + 1;
                findings.push(format!(
                    "{name}:{number}: a statement that borrows twice waits for ever if somebody writes in \
                     between; keep the first borrow in a variable"
                ));
            }
            if borrows > 1 || piece.ends_with([';', '{', '}']) {
                borrows = 0;
            }
        }
    }
    findings
}

/// The one place where a crate lets unsafe code in: the line before `mod sys`.
fn unsafe_allowed(crate_name: &str, name: &str, text: &str, number: usize) -> bool {
    let next = text.lines().skip(number).find(|line| !line.trim_start().starts_with("#["));
    let before_sys = next.is_some_and(|line| line.trim_end().ends_with("mod sys;"));
    let test_file = name.contains("/tests/") || name.contains("/examples/");
    UNSAFE_CRATES.contains(&crate_name) && (before_sys || test_file)
}

/// Finds functions that are too long, by the indentation that rustfmt guarantees.
fn long_functions(name: &str, code: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let mut open: Vec<(usize, usize, String)> = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if starts_function(trimmed) && !trimmed.ends_with(';') {
            let signature = trimmed.split('(').next().unwrap_or(trimmed).to_owned();
            open.push((indent, number, signature));
        }
        let closes = trimmed == "}" && open.last().is_some_and(|(level, ..)| *level == indent);
        if closes && let Some((_, start, signature)) = open.pop() {
            let length = number - start + 1;
            if length > MAX_FUNCTION_LINES {
                findings.push(format!(
                    "{name}:{}: `{signature}` has {length} lines; {MAX_FUNCTION_LINES} is the most",
                    start + 1
                ));
            }
        }
    }
    findings
}

fn starts_function(line: &str) -> bool {
    let mut words = line.split_whitespace().skip_while(|word| {
        matches!(*word, "pub" | "const" | "async" | "unsafe" | "extern" | "\"C\"")
            || word.starts_with("pub(")
    });
    words.next() == Some("fn")
}

/// Every fuzz target has a committed corpus, and the crate replays it.
fn corpora(root: &Path, crate_name: &str) -> Result<Vec<String>> {
    let folder = root.join(crate_name).join("fuzz");
    let targets = folder.join("fuzz_targets");
    if !targets.is_dir() {
        return Ok(Vec::new());
    }
    let mut findings = Vec::new();
    for entry in fs::read_dir(&targets)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let inputs = fs::read_dir(folder.join("corpus").join(&stem)).map_or(0, Iterator::count);
        if inputs == 0 {
            findings.push(format!("{crate_name}/fuzz: target {stem} has no committed corpus"));
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_function_is_found_and_short_one_is_not() {
        let long = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(80));
        assert_eq!(long_functions("a.rs", &long).len(), 1);
        assert_eq!(long_functions("a.rs", "fn f() {\n    x();\n}\n"), Vec::<String>::new());
    }

    #[test]
    fn unsafe_code_is_let_in_only_before_sys() {
        let sys = "#[allow(unsafe_code, reason = \"ioctls\")]\nmod sys;\n";
        let other = "#[allow(unsafe_code, reason = \"speed\")]\nmod fast;\n";
        assert_eq!(file_findings("vmm", "vmm/src/lib.rs", sys), Vec::<String>::new());
        assert_eq!(file_findings("vmm", "vmm/src/lib.rs", other).len(), 1);
        assert_eq!(file_findings("lease", "lease/src/lib.rs", sys).len(), 1);
    }

    #[test]
    fn a_second_borrow_in_a_statement_is_found() {
        let twice = "let pair = (\n    v4(&seen.borrow().dns),\n    v6(&seen.borrow().dns),\n);\n";
        let found = borrowed_twice("a.rs", twice);
        assert!(found.len() == 1 && found[0].starts_with("a.rs:3: "), "{found:?}");
        let once = "let seen = seen.borrow();\nlet other = other.borrow_and_update().clone();\n";
        assert_eq!(borrowed_twice("a.rs", once), Vec::<String>::new());
    }

    #[test]
    fn promises_are_found() {
        let text = format!("// {}: later\n", "TODO");
        assert_eq!(file_findings("lease", "lease/src/lib.rs", &text).len(), 1);
    }
}
