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

/// The suite that the TUF project publishes, where `HOLDFAST_TUF_CONFORMANCE` names a checkout of it and
/// `python3` has what it needs.
#[test]
fn client_passes_the_conformance_suite() {
    let Some(checkout) = std::env::var_os("HOLDFAST_TUF_CONFORMANCE") else {
        println!("skipped: the TUF conformance suite: HOLDFAST_TUF_CONFORMANCE names no checkout");
        return;
    };
    let done = Command::new("python3")
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tuf_conformance", "--entrypoint"])
        .arg(env!("CARGO_BIN_EXE_holdfast-update"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(checkout)
        .output()
        .expect("python3 runs");
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && output.contains(" passed"), "{output}{complaint}");
}
