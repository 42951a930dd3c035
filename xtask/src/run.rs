//! Running other programs from the workspace's root.

use std::{
    env,
    ffi::OsString,
    fs,
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

/// Returns a cargo command at the workspace's root. In CI, where every checkout is fresh, compiled
/// dependencies are kept in the cache, and nothing is for a second build of the workspace's own crates.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments).env("PATH", search_path());
    if let Some(target) = shared_target() {
        command.env("CARGO_TARGET_DIR", target).env("CARGO_INCREMENTAL", "0");
    }
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

/// The target folder that checkouts share in CI; `None` elsewhere.
fn shared_target() -> Option<PathBuf> {
    let shares = env::var_os("CI").is_some() && env::var_os("CARGO_TARGET_DIR").is_none();
    shares.then(|| cache().join("target"))
}

/// Forgets what another checkout left of the workspace's own crates in the shared target folder.
/// Cargo knows them by their place in the workspace and by the age of their files, so it would take
/// those of a checkout whose files are older for this one's.
pub(crate) fn leave_other_checkouts() -> Result<()> {
    let Some(target) = shared_target() else { return Ok(()) };
    let (stamp, own) = (target.join("checkout"), root().display().to_string());
    if fs::read_to_string(&stamp).is_ok_and(|last| last == own) {
        return Ok(());
    }
    run(&mut cargo(&["clean", "--quiet", "--workspace"]))?;
    fs::create_dir_all(&target)?;
    fs::write(&stamp, own).with_context(|| format!("{}", stamp.display()))
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
