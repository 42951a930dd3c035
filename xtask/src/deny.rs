//! Dependency policy: cargo-deny with `deny.toml`, kept in the cache and installed when absent.

use std::{env, fs, process::Command};

use anyhow::{Context, Result};

use crate::run;

/// The release of cargo-deny that reads `deny.toml`.
const VERSION: &str = "0.20.2";

/// Checks licences, sources and banned or doubled crates. Advisories are left out: their database
/// is not in a package registry, and this check must give the same answer everywhere.
pub(crate) fn check() -> Result<()> {
    let home = run::cache().join("tools").join(format!("cargo-deny-{VERSION}"));
    let program = home.join("bin/cargo-deny");
    if !program.exists() {
        println!("deny: installing cargo-deny {VERSION} into {}", home.display());
        let built = run::cache().join("tools/target");
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        run::run(
            // Without optimisation: it is built once and then runs for a second.
            Command::new(cargo)
                .args([
                    "install",
                    "cargo-deny",
                    "--locked",
                    "--debug",
                    "--version",
                    VERSION,
                    "--root",
                ])
                .arg(&home)
                .env("CARGO_TARGET_DIR", &built),
        )?;
        fs::remove_dir_all(&built).with_context(|| format!("cannot remove {}", built.display()))?;
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
