//! `cargo xtask fuzz`: builds the fuzz targets with libFuzzer and AddressSanitizer, and runs them.
//!
//! The sanitizers are in the nightly compiler only; everything else of the project keeps to the
//! pinned one. Tests replay the committed corpora without any of this. What a run finds is left in
//! `<crate>/fuzz/artifacts/<target>/`; once fixed, it belongs into `<crate>/fuzz/corpus/<target>/`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use walkdir::WalkDir;

use crate::run;

/// What cargo-fuzz passes too: coverage counters and traced comparisons for libFuzzer.
const FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
    "-Ccodegen-units=1",
];
/// The checks of a debug build, but where the workspace's profiles have none either.
const PROFILE: &[&str] = &[
    "profile.release.debug-assertions=true",
    "profile.release.overflow-checks=true",
    "profile.release.package.fatfs.overflow-checks=false",
];
/// The triple is named so that build scripts are built without the flags.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Longest that one input may take, in seconds.
const INPUT_LIMIT_S: u32 = 10;
/// Most memory that a target may take, in MiB.
const MEMORY_LIMIT_MIB: u32 = 2048;

/// One fuzz target.
struct Target {
    /// Folder of the fuzz crate, as `<root>/vmm/fuzz`.
    folder: PathBuf,
    /// The crate that it is about.
    package: String,
    name: String,
}

/// Runs every target, or those that `wanted` names (`vmm`, `kernel` or `vmm/kernel`), for `seconds`
/// each, and prints a table.
pub(crate) fn fuzz(wanted: Option<&str>, seconds: u32) -> Result<()> {
    let root = run::root();
    let all = targets(&root)?;
    let chosen = |target: &&Target| {
        wanted.is_none_or(|wanted| {
            wanted == target.package
                || wanted == target.name
                || wanted == format!("{}/{}", target.package, target.name)
        })
    };
    let chosen: Vec<&Target> = all.iter().filter(chosen).collect();
    if chosen.is_empty() {
        let names: Vec<_> = all.iter().map(|t| format!("{}/{}", t.package, t.name)).collect();
        let wanted = wanted.unwrap_or_default();
        bail!("there is no fuzz target {wanted:?}; the targets are {}", names.join(", "));
    }
    let output = build_folder();
    let mut results = Vec::new();
    let mut built: Option<&Path> = None;
    for target in chosen {
        if built != Some(&target.folder) {
            build(&root, target, &output)?;
            built = Some(&target.folder);
        }
        println!("\n== {}/{} ==", target.package, target.name);
        let start = Instant::now();
        let outcome = run_target(target, &output, seconds);
        results.push((target, start.elapsed(), outcome));
    }
    report(&results)
}

/// Lists the targets of all fuzz crates.
fn targets(root: &Path) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for entry in WalkDir::new(root).min_depth(2).max_depth(2).sort_by_file_name() {
        let folder = entry?.into_path();
        let manifest = folder.join("Cargo.toml");
        if folder.file_name().is_none_or(|name| name != "fuzz") || !manifest.is_file() {
            continue;
        }
        let text = fs::read_to_string(&manifest)?;
        let document: toml::Table =
            toml::from_str(&text).with_context(|| manifest.display().to_string())?;
        let package = folder.parent().and_then(Path::file_name).unwrap_or_default();
        let bins = document.get("bin").and_then(toml::Value::as_array);
        for bin in bins.into_iter().flatten() {
            let name = bin.get("name").and_then(toml::Value::as_str);
            let name = name.with_context(|| format!("a target without name in {manifest:?}"))?;
            let package = package.to_string_lossy().into_owned();
            targets.push(Target { folder: folder.clone(), package, name: name.to_owned() });
        }
    }
    Ok(targets)
}

fn build_folder() -> PathBuf {
    let own = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    own.unwrap_or_else(|| run::root().join("target")).join("fuzz")
}

/// Builds all targets of a fuzz crate, with the versions of dependencies that the workspace has.
fn build(root: &Path, target: &Target, output: &Path) -> Result<()> {
    println!("fuzz: building the targets of {}", target.package);
    fs::copy(root.join("Cargo.lock"), target.folder.join("Cargo.lock"))?;
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", "cargo", "build", "--quiet", "--release", "--target", TRIPLE])
        .args(PROFILE.iter().flat_map(|setting| ["--config", setting]))
        .arg("--manifest-path")
        .arg(target.folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(output)
        .env("RUSTFLAGS", FLAGS.join(" "))
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTUP_TOOLCHAIN");
    run::run(&mut command).context("the targets need `rustup toolchain install nightly` and g++")
}

/// Runs one target and returns its last line of statistics.
fn run_target(target: &Target, output: &Path, seconds: u32) -> Result<String> {
    let found = output.join("corpus").join(&target.package).join(&target.name);
    let artifacts = target.folder.join("artifacts").join(&target.name);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&artifacts)?;
    let log = output.join(format!("{}-{}.log", target.package, target.name));
    let status = Command::new(output.join(TRIPLE).join("release").join(&target.name))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_LIMIT_S}"))
        .arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(&found)
        .arg(target.folder.join("corpus").join(&target.name))
        .env("ASAN_OPTIONS", "detect_odr_violation=0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log)?)
        .status()
        .with_context(|| format!("cannot start {}", target.name))?;
    let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    if !status.success() {
        let lines: Vec<&str> = said.lines().collect();
        println!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        bail!("{status}; the input is in {}, the log is {}", artifacts.display(), log.display());
    }
    let done = said.lines().rev().find(|line| line.starts_with("Done "));
    Ok(done.unwrap_or("it said nothing").to_owned())
}

fn report(results: &[(&Target, Duration, Result<String>)]) -> Result<()> {
    println!("\ntarget                        seconds  what happened");
    for (target, time, outcome) in results {
        let name = format!("{}/{}", target.package, target.name);
        let happened = match outcome {
            Ok(line) => line.clone(),
            Err(error) => format!("FOUND: {error:#}"),
        };
        println!("{name:28} {:8.1}  {happened}", time.as_secs_f64());
    }
    let failed = results.iter().filter(|(_, _, outcome)| outcome.is_err()).count();
    if failed > 0 {
        bail!("{failed} targets found something");
    }
    Ok(())
}
