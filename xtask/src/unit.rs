//! The tests of all crates but those that boot the image: cargo builds them, and their programs run
//! several at a time, where cargo would run one after the other.

use std::{num::NonZero, path::Path, process::Command, process::Stdio, thread};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    pool::{self, Job},
    run,
    summary::Counts,
};

/// Which tests these are, as cargo is told.
const WHICH: [&str; 3] = ["--workspace", "--exclude", "qemu-tests"];

/// Builds and runs them.
pub(crate) fn tests() -> Result<Counts> {
    let mut build = run::cargo(&["test"]);
    build.args(WHICH).args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let output = build.stderr(Stdio::inherit()).output().context("cannot start cargo test")?;
    if !output.status.success() {
        bail!("the tests cannot be built: {}", output.status);
    }
    let mut jobs = programs(&String::from_utf8_lossy(&output.stdout));
    let mut documentation = run::cargo(&["test"]);
    documentation.args(WHICH).args(["--doc", "--no-fail-fast", "--", "--show-output"]);
    jobs.push(Job { name: "documentation".to_owned(), command: documentation });
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    pool::run(jobs, processors)
}

/// Returns a job for each test program that cargo says it built, in the folder of its crate.
fn programs(messages: &str) -> Vec<Job> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter_map(|message| program(&message)).collect()
}

fn program(message: &Value) -> Option<Job> {
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
    Some(Job { name: format!("{package} {kind} {name}"), command })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_test_programs_are_run_each_where_its_crate_is() {
        let messages = r#"{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["test"],"name":"pci"},"profile":{"test":true},"executable":"/t/pci-1"}
{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["bin"],"name":"holdfast-vmm"},"profile":{"test":false},"executable":"/t/holdfast-vmm"}
{"reason":"compiler-artifact","manifest_path":"/w/vmm/Cargo.toml","target":{"kind":["lib"],"name":"vmm"},"profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}
"#;
        let jobs = programs(messages);
        let [job] = &jobs[..] else { panic!("{} jobs", jobs.len()) };
        assert_eq!(job.name, "vmm test pci");
        assert_eq!(job.command.get_program(), "/t/pci-1");
        assert_eq!(job.command.get_current_dir(), Some(Path::new("/w/vmm")));
    }
}
