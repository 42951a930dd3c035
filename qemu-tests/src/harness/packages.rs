//! Debian packages of the guest, and what else the tests use without installing it, unpacked once
//! into the cache.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// The suite whose kernel runs as a nested guest under emulation; newer ones may not.
pub(super) const SUITE: &str = "bookworm";
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

/// cloud-init, and what it imports, from a suite that every Python since 3.11 can run.
const CLOUD_INIT: &[&str] = &[
    "cloud-init",
    "python3-attr",
    "python3-certifi",
    "python3-chardet",
    "python3-charset-normalizer",
    "python3-configobj",
    "python3-idna",
    "python3-jinja2",
    "python3-json-pointer",
    "python3-jsonpatch",
    "python3-jsonschema",
    "python3-jsonschema-specifications",
    "python3-markupsafe",
    "python3-oauthlib",
    "python3-referencing",
    "python3-requests",
    "python3-typing-extensions",
    "python3-urllib3",
    "python3-yaml",
];

/// Returns the folder of Python packages with cloud-init.
pub fn cloud_init() -> Result<PathBuf> {
    let root = image::unpacked(&image::default_cache(), "trixie", CLOUD_INIT);
    Ok(root.context("cannot have cloud-init")?.join("usr/lib/python3/dist-packages"))
}

/// Returns dmidecode, which reads a guest's SMBIOS tables here.
pub fn dmidecode() -> Result<PathBuf> {
    let root = image::unpacked(&image::default_cache(), SUITE, &["dmidecode"]);
    Ok(root.context("cannot have dmidecode")?.join("usr/sbin/dmidecode"))
}

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

/// Returns Prometheus' promtool, which checks what is to be scraped.
pub fn promtool() -> Result<PathBuf> {
    let root = image::unpacked(&image::default_cache(), SUITE, &["prometheus"]);
    Ok(root.context("cannot have promtool")?.join("usr/bin/promtool"))
}
