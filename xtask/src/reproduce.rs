//! `cargo xtask reproduce`: the image is built twice, from two checkouts at different places, with
//! programs compiled in different target folders, and every file has to be the same.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::{checkout, run};

/// What the second build shares with the first: packages as Debian signed them, and the tools.
const SHARED: &[&str] = &["apt", "apt-bookworm", "stub", "tools", "unpacked"];
/// What it shares unless the kernel is to be built again, which takes about ten minutes.
const SHARED_KERNEL: &[&str] = &["kernel", "kernel-build"];

/// Has cargo build the image; options follow.
const IMAGE: &[&str] = &["run", "--quiet", "--package", "image", "--"];

/// Whether the second build compiles the kernel too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Taken from the first build.
    Shared,
    /// Built again.
    Again,
}

/// Builds the image twice and compares. The second build's compiled dependencies stay in the cache.
pub(crate) fn check(kernel: Kernel) -> Result<()> {
    run::run(&mut run::cargo(IMAGE))?;
    compare(kernel, run::run)?;
    println!("two builds are the same, byte for byte");
    Ok(())
}

/// Builds the image once more and compares, while the image is in use: on processors that nobody else wants,
/// and silently.
pub(crate) fn compare_beside() -> Result<()> {
    compare(Kernel::Shared, |command| {
        let mut idle = Command::new("nice");
        idle.args(["-n", "19"]).arg(command.get_program()).args(command.get_args());
        idle.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        let output = idle.current_dir(run::root()).output().context("cannot start nice")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command:?} failed: {}\n{errors}", output.status);
        Ok(())
    })
}

/// Builds the image a second time by a command that `build` runs, and compares it with the first.
fn compare(kernel: Kernel, build: impl Fn(&mut Command) -> Result<()>) -> Result<()> {
    let root = run::root();
    let place = run::cache().join("reproduce");
    let cache = place.join("cache");
    share(&run::cache(), &cache, kernel)?;
    let elsewhere = place.join("at/another/place");
    checkout::copy(&root, &elsewhere)?;
    let output = place.join("image");
    let mut command = run::cargo(IMAGE);
    command.arg("--workspace").arg(&elsewhere).arg("--cache").arg(&cache);
    build(command.arg("--output").arg(&output))?;
    let sums = |folder: &Path| {
        let path = folder.join("SHA256SUMS");
        fs::read_to_string(&path).with_context(|| format!("{}", path.display()))
    };
    let different = differences(&sums(&root.join("target/image"))?, &sums(&output)?);
    if !different.is_empty() {
        bail!(
            "two builds differ in {}; compare target/image with {}",
            different.join(", "),
            output.display()
        );
    }
    Ok(fs::remove_dir_all(&output)?)
}

/// Makes the second build's cache, which shares with the first what `kernel` allows.
fn share(cache: &Path, second: &Path, kernel: Kernel) -> Result<()> {
    fs::create_dir_all(second)?;
    for name in SHARED_KERNEL {
        let own = second.join(name);
        if own.is_symlink() {
            fs::remove_file(&own)?;
        } else if own.exists() {
            fs::remove_dir_all(&own)?;
        }
    }
    let shared_kernel = SHARED_KERNEL.iter().filter(|_| kernel == Kernel::Shared);
    for name in SHARED.iter().chain(shared_kernel) {
        let link = second.join(name);
        if !link.is_symlink() {
            symlink(cache.join(name), &link).with_context(|| format!("{}", link.display()))?;
        }
    }
    Ok(())
}

/// Returns the names of the files whose sums are not the same, or that only one list has.
fn differences(first: &str, second: &str) -> Vec<String> {
    let only = |these: &str, others: &str| -> Vec<String> {
        let others: Vec<&str> = others.lines().collect();
        let different = these.lines().filter(|line| !others.contains(line));
        different.filter_map(|line| line.split_whitespace().nth(1)).map(str::to_owned).collect()
    };
    let mut names = only(first, second);
    names.extend(only(second, first));
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_sums_and_missing_files_are_named() {
        let first = "aa  cmdline\nbb  holdfast.efi\ncc  holdfast.iso\n";
        assert_eq!(differences(first, first), Vec::<String>::new());
        let second = "aa  cmdline\nb0  holdfast.efi\n";
        assert_eq!(differences(first, second), ["holdfast.efi", "holdfast.iso"]);
    }
}
