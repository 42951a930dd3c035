//! Programs of Debian's that measure, and that read what was measured, for guests and hosts: they run with the libraries of their own suite,
//! whatever this machine has.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::packages::SUITE;

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

/// iperf3 and every library that it is linked with.
const IPERF3: &[&str] = &["iperf3", "libc6", "libiperf0", "libsctp1", "libssl3"];
/// lspci and every library that it is linked with.
const LSPCI: &[&str] = &[
    "pciutils", "libc6", "libkmod2", "liblzma5", "libpci3", "libssl3", "libudev1", "libzstd1",
    "zlib1g",
];
/// nvme and every library that it is linked with.
const NVME: &[&str] = &[
    "nvme-cli",
    "libc6",
    "libcap2",
    "libdbus-1-3",
    "libgcrypt20",
    "libgpg-error0",
    "libjson-c5",
    "liblz4-1",
    "liblzma5",
    "libnvme1",
    "libssl3",
    "libsystemd0",
    "libzstd1",
    "zlib1g",
];
/// The dynamic loader of the packages' libraries.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// A program, and where the packages that it needs are unpacked.
#[derive(Debug, Clone)]
pub struct Tool {
    /// What it is called.
    pub name: &'static str,
    root: PathBuf,
}

impl Tool {
    /// Returns fio.
    pub fn fio() -> Result<Self> {
        Self::new("fio", FIO)
    }

    /// Returns iperf3.
    pub fn iperf3() -> Result<Self> {
        Self::new("iperf3", IPERF3)
    }

    /// Returns lspci.
    pub fn lspci() -> Result<Self> {
        Self::new("lspci", LSPCI)
    }

    /// Returns nvme.
    pub fn nvme() -> Result<Self> {
        Self::new("nvme", NVME)
    }

    fn new(name: &'static str, list: &[&str]) -> Result<Self> {
        let root = image::unpacked(&image::default_cache(), SUITE, list);
        Ok(Self { name, root: root.with_context(|| format!("cannot have {name}"))? })
    }

    /// Returns where its file is.
    pub fn program(&self) -> PathBuf {
        let places = ["usr/bin", "usr/sbin"].map(|folder| self.root.join(folder).join(self.name));
        let found = places.iter().find(|path| path.is_file());
        found.unwrap_or(&places[0]).clone()
    }

    /// Returns what runs it here.
    pub fn command(&self) -> Result<Command> {
        let folders = self.folders().collect::<Vec<_>>();
        let loader = folders.iter().map(|path| path.join(LOADER)).find(|path| path.is_file());
        let mut command = Command::new(loader.context("no loader in the packages")?);
        command.arg("--library-path").arg(std::env::join_paths(folders)?).arg(self.program());
        Ok(command)
    }

    /// Returns name and path of each library that the loader maps for it.
    pub fn libraries(&self) -> Result<Vec<(String, PathBuf)>> {
        let search: Vec<String> = self.folders().map(|path| path.display().to_string()).collect();
        let program = self.program();
        let output = Command::new("ldd")
            .arg(&program)
            .env("LD_LIBRARY_PATH", search.join(":"))
            .output()
            .context("cannot start ldd")?;
        let mut found = Vec::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some((name, path)) = line.trim().split_once(" => ") else { continue };
            let path = path.split(" (").next().unwrap_or_default();
            if path == "not found" {
                bail!("no package of the list holds {name}, which {} needs", program.display());
            }
            found.push((name.to_owned(), PathBuf::from(path)));
        }
        Ok(found)
    }

    /// Returns it for a host that has nothing of it: names below `folder`, and paths here.
    pub fn whole(&self, folder: &str) -> Result<Vec<(String, PathBuf)>> {
        let mut all = self.libraries()?;
        let loader = self.folders().map(|path| path.join(LOADER)).find(|path| path.is_file());
        all.push((LOADER.to_owned(), loader.context("no loader in the packages")?));
        all.push((self.name.to_owned(), self.program()));
        Ok(all.into_iter().map(|(name, path)| (format!("{folder}/{name}"), path)).collect())
    }

    /// Returns the words that run it where all of it is in `folder`.
    pub fn words(&self, folder: &str) -> Vec<String> {
        let loader = format!("/{folder}/{LOADER}");
        let program = format!("/{folder}/{}", self.name);
        vec![loader, "--library-path".to_owned(), format!("/{folder}"), program]
    }

    fn folders(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let root: &Path = &self.root;
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"]
            .iter()
            .map(|folder| root.join(folder))
    }
}
