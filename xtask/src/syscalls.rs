//! `cargo xtask syscalls`: what the VMM's threads call behind their filters, beside what the filters
//! allow. Runs the VMM's tests that start threads under strace(1), tells threads by their names, and
//! prints for each kind the allowed calls that were not seen: candidates to go.
//!
//! Not seen is not unneeded. The tests drive no tap, vhost or VFIO device; what those need, and what
//! only errors need, has its reason in the table. So this prints and refuses nothing, but for a call
//! that was seen and is not allowed: then the trace was not understood.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::run;

/// The table of what is allowed.
const TABLE: &str = "vmm/src/sandbox/syscalls.rs";
/// Tests whose threads filter themselves.
const TESTS: &[&str] = &["process", "virtio", "nvme"];
/// Beginnings of threads' names, and their kind in the table.
const THREADS: &[(&str, &str)] = &[
    ("holdfast-vmm", "Main"),
    ("vcpu", "Vcpu"),
    ("api", "Api"),
    ("blk-", "Block"),
    ("nvme", "Block"),
    ("rng", "Event"),
    ("vhost-", "Event"),
    ("hotplug", "Plug"),
    ("reset", "Reset"),
    ("deadline", "Timer"),
];

/// System calls by kind of thread.
#[derive(Debug, Default, PartialEq, Eq)]
struct Calls(BTreeMap<String, BTreeSet<String>>);

/// Measures and prints.
pub(crate) fn measure() -> Result<()> {
    let allowed = table(&fs::read_to_string(run::root().join(TABLE))?)?;
    let mut seen = Calls::default();
    let folder = std::env::temp_dir().join(format!("holdfast-syscalls-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    for program in programs()? {
        let trace = folder.join("trace");
        let mut strace = Command::new("strace");
        strace.args(["-f", "--decode-pids=comm", "-qq", "-o"]).arg(&trace).arg(&program);
        run::run(strace.arg("-q").current_dir(run::root().join("vmm")))?;
        let text = fs::read(&trace).context("strace wrote no trace")?;
        read_trace(&String::from_utf8_lossy(&text), &mut seen);
    }
    fs::remove_dir_all(&folder)?;
    report(&allowed, &seen)
}

fn report(allowed: &Calls, seen: &Calls) -> Result<()> {
    let mut strangers = Vec::new();
    for (kind, calls) in &allowed.0 {
        let Some(found) = seen.0.get(kind) else {
            println!("{kind}: no such thread was seen");
            continue;
        };
        let unused: Vec<&str> = calls.difference(found).map(String::as_str).collect();
        println!(
            "{kind}: {} allowed, {} seen; not seen: {}",
            calls.len(),
            found.len(),
            unused.join(" ")
        );
        strangers.extend(found.difference(calls).map(|call| format!("{kind} {call}")));
    }
    if strangers.is_empty() {
        return Ok(());
    }
    bail!("seen and not allowed, so the trace was misread: {}", strangers.join(", "))
}

/// Builds the tests and returns where they are.
fn programs() -> Result<Vec<PathBuf>> {
    let mut cargo = run::cargo(&["test", "-p", "vmm", "--no-run", "--message-format=json"]);
    for test in TESTS {
        cargo.args(["--test", test]);
    }
    let output = cargo.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("the VMM's tests do not compile");
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_test = |message: &Value| {
        let name = message["target"]["name"].as_str().unwrap_or_default();
        TESTS.contains(&name) && message["executable"].is_string()
    };
    let tests = messages.filter(is_test);
    Ok(tests.filter_map(|m| Some(Path::new(m["executable"].as_str()?).to_owned())).collect())
}

/// Reads the rows `row(libc::SYS_name, kinds, …)` of the table, and its lists of kinds.
fn table(text: &str) -> Result<Calls> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = |list: &str| -> Vec<String> {
        list.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let mut lists = BTreeMap::new();
    for part in text.split("const ").skip(1) {
        if let Some((name, rest)) = part.split_once(": &[ThreadKind] = &[")
            && let Some((kinds, _)) = rest.split_once(']')
        {
            lists.insert(name.to_owned(), words(kinds));
        }
    }
    let mut calls = Calls::default();
    for row in text.split("row(").skip(1) {
        let Some((name, rest)) = row.trim_start().split_once(", ") else { continue };
        let Some(name) = name.strip_prefix("libc::SYS_") else { continue };
        let kinds = match rest.strip_prefix("&[") {
            Some(list) => words(list.split(']').next().unwrap_or_default()),
            None => {
                let name = rest.split(',').next().unwrap_or_default();
                lists.get(name).with_context(|| format!("no list of kinds {name}"))?.clone()
            }
        };
        for kind in kinds {
            calls.0.entry(kind).or_default().insert(name.to_owned());
        }
    }
    Ok(calls)
}

/// Adds what the threads of a trace called after they had filtered themselves.
fn read_trace(text: &str, seen: &mut Calls) {
    let mut filtered = BTreeSet::new();
    for line in text.lines() {
        // As `17<api0> read(5, …`; the second half of an interrupted line tells nothing new.
        let Some((thread, call)) = line.split_once('>') else { continue };
        let Some((number, name)) = thread.split_once('<') else { continue };
        let Some((call, arguments)) = call.trim_start().split_once('(') else { continue };
        if !call.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            continue;
        }
        let filters = call == "seccomp" && arguments.starts_with("SECCOMP_SET_MODE_FILTER")
            || call == "prctl" && arguments.starts_with("PR_SET_SECCOMP");
        if filters {
            filtered.insert(number.to_owned());
            continue;
        }
        let kind = THREADS.iter().find(|(beginning, _)| name.starts_with(beginning));
        if let (Some((_, kind)), true) = (kind, filtered.contains(number)) {
            seen.0.entry((*kind).to_owned()).or_default().insert(call.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(all: &[(&str, &[&str])]) -> Calls {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Calls(all.iter().map(|(kind, names)| ((*kind).to_owned(), set(names))).collect())
    }

    #[test]
    fn the_table_is_read_with_its_lists() {
        let text = "const BOTH: &[ThreadKind] = &[Main, Api];\n\
                    row(libc::SYS_read, BOTH, Arguments::Any, \"a\"),\n\
                    row(\n libc::SYS_brk,\n &[Api],\n Arguments::Any,\n \"b\",\n),";
        let expected = calls(&[("Api", &["brk", "read"]), ("Main", &["read"])]);
        assert_eq!(table(text).expect("sound"), expected);
        assert!(table("row(libc::SYS_read, MISSING, Arguments::Any, \"a\")").is_err());
    }

    #[test]
    fn threads_count_from_their_filter_on() {
        let trace = "7<api0> openat(AT_FDCWD, \"/x\") = 3\n\
                     7<api0> seccomp(SECCOMP_SET_MODE_FILTER, 0, {}) = 0\n\
                     7<api0> accept4(5 <unfinished ...>\n\
                     8<vcpu1> ioctl(9, KVM_RUN) = 0\n\
                     7<api0> <... accept4 resumed>) = 6\n";
        let mut seen = Calls::default();
        read_trace(trace, &mut seen);
        assert_eq!(seen, calls(&[("Api", &["accept4"])]));
    }
}
