//! Test programs: cargo builds them all at once, so that nothing is compiled twice for different sets of packages,
//! and each is run by itself, several at a time.

use std::{
    env,
    ffi::OsString,
    num::NonZero,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    pool::{self, AtOnce, Job},
    run,
    summary::Counts,
};

/// The package whose tests boot the image.
const QEMU_TESTS: &str = "qemu-tests";
/// Programs of tests that boot nothing, for each processor: half of their time they wait.
const PROGRAMS_A_PROCESSOR: usize = 2;
/// Most programs of QEMU's tests for each processor, and of all: a host has 1 to 2 GiB of memory.
const HOSTS_A_PROCESSOR: usize = 3;
const MOST_HOSTS: usize = 8;

/// What tests use and nobody wants installed, since Debian would start it: servers, and a checker that is a part
/// of one. Of this suite, which machines of later ones can run.
const UNPACKED: [&str; 5] =
    ["bookworm", "isc-dhcp-relay", "isc-dhcp-server", "ntpsec", "prometheus"];

/// Runs the tests of all packages that boot nothing.
pub(crate) fn unit() -> Result<Counts> {
    let built = build()?.into_iter().filter(|program| program.package != QEMU_TESTS);
    let mut jobs: Vec<Job> = built.map(|program| program.job).collect();
    let path = with_unpacked(run::search_path())?;
    for job in &mut jobs {
        job.command.env("PATH", &path);
    }
    let mut documentation = run::cargo(&["test", "--workspace", "--exclude", QEMU_TESTS]);
    documentation.args(["--doc", "--no-fail-fast", "--", "--show-output"]);
    jobs.push(Job { name: "documentation".to_owned(), command: documentation });
    pool::run(jobs, AtOnce::Count(PROGRAMS_A_PROCESSOR * processors()), None)
}

/// Runs the tests that boot the image. Those of one program run one after the other: each boots a host of its
/// own, which emulates one processor and waits for some of the time; how much differs. None begins after `until`.
pub(crate) fn qemu(until: Option<Instant>) -> Result<Counts> {
    let built = build()?.into_iter().filter(|program| program.package == QEMU_TESTS);
    let mut jobs: Vec<Job> = built.map(|program| program.job).collect();
    for job in &mut jobs {
        job.command.args(["--test-threads", "1"]);
    }
    let processors = processors();
    // Nested guests among more than two busy hosts for each processor would run into the tests' time limits.
    let unknown = (processors * 3).div_ceil(2).min(MOST_HOSTS);
    let most = (processors * HOSTS_A_PROCESSOR).min(MOST_HOSTS);
    pool::run(jobs, AtOnce::Filling { processors, unknown, most }, until)
}

/// Returns `path` with the folders of what is unpacked behind it. Where it cannot be had, tests that use it say so
/// themselves.
fn with_unpacked(path: OsString) -> Result<OsString> {
    let mut unpack = run::cargo(&["run", "--quiet", "--package", "image", "--example", "unpacked"]);
    let output = unpack.arg("--").args(UNPACKED).stderr(Stdio::inherit()).output();
    let output = output.context("cannot start cargo run")?;
    if !output.status.success() {
        return Ok(path);
    }
    let root = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let folders = ["usr/sbin", "usr/bin"].map(|folder| root.join(folder));
    Ok(env::join_paths(env::split_paths(&path).chain(folders))?)
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// A test program.
pub(crate) struct Program {
    /// The package that it is of.
    package: String,
    job: Job,
}

/// Builds all test programs of the workspace, and the programs and examples that their tests use.
pub(crate) fn build() -> Result<Vec<Program>> {
    let mut build = run::cargo(&["test", "--workspace", "--no-run"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let output = build.stderr(Stdio::inherit()).output().context("cannot start cargo test")?;
    if !output.status.success() {
        bail!("the tests cannot be built: {}", output.status);
    }
    Ok(programs(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns each test program that cargo says it built, to be run in the folder of its package.
fn programs(messages: &str) -> Vec<Program> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter_map(|message| program(&message)).collect()
}

fn program(message: &Value) -> Option<Program> {
    let is_test = message.pointer("/profile/test")?.as_bool()?;
    let path = message["executable"].as_str().filter(|_| is_test)?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let target = &message["target"];
    let (kind, name) = (target["kind"][0].as_str()?, target["name"].as_str()?);
    let package = folder.file_name()?.to_str()?;
    let mut command = Command::new(path);
    command.current_dir(folder).arg("--show-output").env("CARGO_MANIFEST_DIR", folder);
    // As for cargo itself: where it is, and where programs are.
    let cargo = run::cargo(&[]);
    command.env("CARGO", cargo.get_program());
    command.envs(cargo.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let job = Job { name: format!("{package} {kind} {name}"), command };
    Some(Program { package: package.to_owned(), job })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_programs_are_run_each_where_its_package_is() {
        let messages = r#"{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["test"],"name":"pci"},"profile":{"test":true},"executable":"/t/pci-1"}
{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["bin"],"name":"holdfast-vmm"},"profile":{"test":false},"executable":"/t/holdfast-vmm"}
{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["lib"],"name":"vmm"},"profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}
"#;
        let programs = programs(messages);
        let [Program { package, job }] = &programs[..] else { panic!("{}", programs.len()) };
        assert_eq!((package.as_str(), job.name.as_str()), ("vmm", "vmm test pci"));
        assert_eq!(job.command.get_program(), "/t/pci-1");
        assert_eq!(job.command.get_current_dir(), Some(Path::new("/w/vmm")));
    }
}
