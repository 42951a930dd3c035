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

/// fio and every library that it is linked with.
const FIO: &[&str] = &[
    "fio",
    "libacl1",
    "libaio1",
    "libargon2-1",
    "libblkid1",
    "libboost-iostreams1.74.0",
    "libboost-thread1.74.0",
    "libbz2-1.0",
    "libc6",
    "libcom-err2",
    "libcryptsetup12",
    "libdaxctl1",
    "libdevmapper1.02.1",
    "libffi8",
    "libfmt9",
    "libgcc-s1",
    "libgfapi0",
    "libgfrpc0",
    "libgfxdr0",
    "libglusterfs0",
    "libgmp10",
    "libgnutls30",
    "libgssapi-krb5-2",
    "libhogweed6",
    "libibverbs1",
    "libicu72",
    "libidn2-0",
    "libjson-c5",
    "libk5crypto3",
    "libkeyutils1",
    "libkmod2",
    "libkrb5-3",
    "libkrb5support0",
    "liblzma5",
    "libnbd0",
    "libndctl6",
    "libnettle8",
    "libnl-3-200",
    "libnl-route-3-200",
    "libnuma1",
    "libp11-kit0",
    "libpcre2-8-0",
    "libpmem1",
    "libpmemblk1",
    "librados2",
    "librbd1",
    "librdmacm1",
    "libselinux1",
    "libssl3",
    "libstdc++6",
    "libtasn1-6",
    "libtirpc3",
    "libudev1",
    "libunistring2",
    "libuuid1",
    "libxml2",
    "libzstd1",
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

/// Returns the folder that fio is unpacked in, with its libraries.
pub fn fio_root() -> Result<PathBuf> {
    image::unpacked(&image::default_cache(), SUITE, FIO).context("cannot have fio")
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
