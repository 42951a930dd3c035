//! Debian packages of the guest, and what else the tests use without installing it, unpacked once
//! into the cache.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// The suite whose kernel runs as a nested guest under emulation; newer ones may not.
const SUITE: &str = "bookworm";
/// What the guest is made of.
const PACKAGES: &[&str] = &[
    "linux-image-cloud-amd64",
    "busybox-static",
    "dropbear-bin",
    "libc6",
    "libcrypt1",
    "libgmp10",
    "libtomcrypt1",
    "libtommath1",
    "perl-base",
    "zlib1g",
];

/// Returns Debian's iPXE as a UEFI program that uses the firmware's own network driver.
pub fn ipxe() -> Result<PathBuf> {
    let root = image::unpacked(&image::default_cache(), SUITE, &["ipxe"]);
    Ok(root.context("cannot have iPXE")?.join("usr/lib/ipxe/snponly.efi"))
}

/// Returns the folder that the guest's packages are unpacked in.
pub fn guest_root() -> Result<PathBuf> {
    image::unpacked(&image::default_cache(), SUITE, PACKAGES)
        .context("cannot have the guest's packages")
}

/// Returns a module of the guest's kernel, by its name.
pub fn guest_module(name: &str) -> Result<PathBuf> {
    let folder = guest_root()?.join("lib/modules");
    super::guest::find(&folder, &format!("{name}.ko"))
        .with_context(|| format!("the guest's kernel has no module {name}"))
}

/// Returns the folder that Debian's kernel for any machine is unpacked in, with its modules.
pub fn generic_kernel_root() -> Result<PathBuf> {
    image::unpacked(&image::default_cache(), SUITE, &["linux-image-amd64"])
        .context("cannot have Debian's generic kernel")
}
