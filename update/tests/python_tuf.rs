//! Interoperation with python-tuf, an implementation that shares no code with ours.
//!
//! python-tuf makes the repositories in `tests/python/cases.py`, with the faults that each case
//! names, and drives `holdfast-update` by the command line protocol of the TUF conformance suite.

#[path = "python/environment.rs"]
mod environment;

use std::process::Command;

/// Cases that there are at least; fewer means that the script lost some.
const CASES: usize = 130;

#[test]
fn client_does_what_repositories_of_python_tuf_ask() {
    let Some(mut python) = environment::python("repositories of python-tuf") else {
        return;
    };
    if Command::new("faketime").arg("--version").output().is_err() {
        println!("skipped: repositories of python-tuf: faketime is not installed");
        return;
    }
    let script = environment::script("cases.py");
    let done = python.arg(script).arg(env!("CARGO_BIN_EXE_holdfast-update")).output();
    let output = String::from_utf8(done.expect("python runs").stdout).expect("the script's text");
    let good = output.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(output.trim_end().ends_with(" 0 failed") && good >= CASES, "{output}");
}
