//! Running other programs from the workspace's root.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Returns the workspace's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// Returns the folder that keeps what is slow to make, outside the checkout.
pub(crate) fn cache() -> PathBuf {
    let own = env::var_os("HOLDFAST_CACHE").map(PathBuf::from);
    let xdg = env::var_os("XDG_CACHE_HOME").map(|path| PathBuf::from(path).join("holdfast"));
    let home = env::var_os("HOME").map(|path| PathBuf::from(path).join(".cache/holdfast"));
    own.or(xdg).or(home).unwrap_or_else(|| PathBuf::from("/var/cache/holdfast"))
}

/// Returns a cargo command at the workspace's root.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments).env("PATH", search_path());
    command
}

/// Where programs are looked for. Debian keeps those that make and check file systems where only
/// root's shell looks.
pub(crate) fn search_path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let all: Vec<PathBuf> = env::split_paths(&path).chain(system).collect();
    env::join_paths(all).unwrap_or(path)
}

/// Runs `command` to its end, with its output going where ours goes.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = format!("{command:?}");
    let status = command.status().with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} failed: {status}");
    }
    Ok(())
}
