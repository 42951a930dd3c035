//! Dependency policy: cargo-deny with `deny.toml`, kept in the cache and installed when absent.

use std::{env, process::Command};

use anyhow::Result;

use crate::run;

/// The release of cargo-deny that reads `deny.toml`.
const VERSION: &str = "0.20";

/// Checks licences, sources and banned or doubled crates. Advisories are left out: their database
/// is not in a package registry, and this check must give the same answer everywhere.
pub(crate) fn check() -> Result<()> {
    let home = run::cache().join("tools/cargo-deny");
    let program = home.join("bin/cargo-deny");
    if !program.exists() {
        println!("deny: installing cargo-deny {VERSION} into {}", home.display());
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        run::run(
            Command::new(cargo)
                .args(["install", "cargo-deny", "--locked", "--version", VERSION, "--root"])
                .arg(&home)
                .env("CARGO_TARGET_DIR", run::cache().join("tools/target")),
        )?;
    }
    run::run(Command::new(program).current_dir(run::root()).args([
        "--log-level",
        "error",
        "check",
        "--hide-inclusion-graph",
        "licenses",
        "bans",
        "sources",
    ]))
}
