//! The Debian packages that building, the demo and the tests use, and their installation.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// A package and why it is needed.
struct Package {
    name: &'static str,
    reason: &'static str,
}

const fn package(name: &'static str, reason: &'static str) -> Package {
    Package { name, reason }
}

const PACKAGES: &[Package] = &[
    package("acpica-tools", "iasl reads the VMM's ACPI tables in a test"),
    package("bc", "the kernel's build"),
    package("bison", "the kernel's build"),
    package("busybox-static", "user space of the demo's guest"),
    package("ca-certificates", "downloads"),
    package("chrony", "a real time server, with NTS, for the tests"),
    package("cpio", "reads our initramfs back in a test"),
    package("cryptsetup-bin", "opens our encrypted volumes in a test"),
    package("debian-archive-keyring", "checks signatures of downloaded kernel sources"),
    package("dnsmasq-base", "a real DHCP, RA and TFTP server for the tests"),
    package("dosfstools", "FAT volumes"),
    package("e2fsprogs", "STATE and DATA file systems of the disk image"),
    package("erofs-utils", "the root file system"),
    package(
        "faketime",
        "runs the update client at other times in a test; slows an emulator's clocks",
    ),
    package("fdisk", "reads our partition tables back in a test"),
    package("flex", "the kernel's build"),
    package("gcc", "the kernel's build and the C in aws-lc"),
    package("iproute2", "test networks"),
    package("iputils-ping", "test networks"),
    package("ipxe-qemu", "network boot in QEMU"),
    package("kea-dhcp4-server", "a real DHCP server for the tests, behind a relay"),
    package("kea-dhcp6-server", "a real DHCPv6 server for the tests"),
    package("kmod", "the kernel's build"),
    package("libc6-dev", "static programs"),
    package("libelf-dev", "the kernel's build"),
    package("libssl-dev", "the kernel's build"),
    package("lz4", "compressed initramfs"),
    package("make", "the kernel's build"),
    package("mmdebstrap", "makes a whole Debian system, which a test's renter starts"),
    package("mtools", "the EFI system partition"),
    package("nftables", "reads our firewall rules back in a test"),
    package("openssh-client", "the renter's ssh"),
    package("openssl", "keys and certificates of the tests"),
    package("ovmf", "UEFI firmware for QEMU"),
    package("pkg-config", "the kernel's build"),
    package("python3", "the kernel's build"),
    package("python3-venv", "python-tuf, which the update client is tested against"),
    package("qemu-system-x86", "the emulated host"),
    package("qemu-utils", "disk images of other formats, which imports are compared with"),
    package("radvd", "router advertisements for the tests"),
    package("rsync", "the kernel's build"),
    package("sbsigntool", "checks our signatures of boot programs in a test"),
    package("softhsm2", "a PKCS#11 token for the release tool's test"),
    package("strace", "shows which system calls the VMM's threads make"),
    package("swtpm", "a TPM for the emulated host"),
    package("systemd-boot-efi", "the UEFI stub of the UKI"),
    package(
        "user-mode-linux",
        "a kernel with bonds and VLANs for the tests, where ours lacks them",
    ),
    package("xorriso", "the ISO"),
    package("xz-utils", "unpacks the kernel source"),
    package("zstd", "compresses the kernel"),
];

/// Whether missing packages are installed or only listed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Install {
    /// Installed with apt.
    Yes,
    /// Listed; an error if any is missing.
    ListOnly,
}

impl From<bool> for Install {
    fn from(no_install: bool) -> Self {
        if no_install { Self::ListOnly } else { Self::Yes }
    }
}

/// Makes sure that every package is there: says what is missing and installs it with apt, as root
/// or through sudo.
pub(crate) fn ensure(install: Install) -> Result<()> {
    let missing: Vec<&Package> =
        PACKAGES.iter().filter(|package| !installed(package.name)).collect();
    if missing.is_empty() {
        println!("packages: all {} are installed", PACKAGES.len());
        return Ok(());
    }
    println!("packages: these are missing");
    for package in &missing {
        println!("  {:24} {}", package.name, package.reason);
    }
    if install == Install::ListOnly {
        bail!("{} packages are missing; run without --no-install to install them", missing.len());
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    apt(&["update"])?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(names);
    apt(&arguments)
}

fn installed(name: &str) -> bool {
    Command::new("dpkg-query")
        .args(["--show", "--showformat=${db:Status-Status}", name])
        .output()
        .is_ok_and(|output| output.stdout == b"installed")
}

fn apt(arguments: &[&str]) -> Result<()> {
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let mut command = if root { Command::new("apt-get") } else { Command::new("sudo") };
    if !root {
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]);
    }
    println!("packages: apt-get {}", arguments.join(" "));
    let status = command
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .context("cannot run apt-get; Debian 12, Debian 13 or a recent Ubuntu is needed")?;
    if !status.success() {
        bail!("apt-get {} failed: {status}", arguments.join(" "));
    }
    Ok(())
}
