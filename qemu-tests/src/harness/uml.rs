//! The shipped image on User-Mode Linux: init, agent, and root are the image's own, the kernel is
//! Debian's and runs as a process, at the speed of this machine's processors. It has no firmware, no
//! PCI, no KVM and no disk: a node in memory only.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};
use image::cpio::{self, Entry, Kind};

use super::{
    guest, packages,
    serial::{Echo, Serial},
};

/// Debian's package `user-mode-linux` puts the kernel and its modules here.
const KERNEL: &str = "/usr/bin/linux.uml";
const MODULES: &str = "/usr/lib/uml/modules";
/// What is process 1 first. The kernel is older than those that mount EROFS from a file, so the
/// root's image lies behind a loop device, which takes its name. Then everything is as it was found.
const FIRST: &str = "\
cd /bed
./bin/busybox mount -t proc none proc
./bin/busybox mount -t devtmpfs none dev
./bin/busybox mount -t hostfs none lib/modules -o /usr/lib/uml/modules
./bin/busybox chroot . /bin/busybox modprobe -a MODULES
./bin/busybox mv /root.erofs /bed/root.erofs
./bin/busybox losetup dev/loop0 root.erofs
./bin/busybox ln -s /dev/loop0 /root.erofs
./bin/busybox umount lib/modules dev proc
cd /
exec /init
";
/// What our kernel has built in and the image uses.
const NEEDED: &[&str] = &[
    "loop",
    "erofs",
    "ipv6",
    "tun",
    "bridge",
    "nf_tables",
    "nft_ct",
    "nft_limit",
    "nft_masq",
    "nft_chain_nat",
    "nft_reject_inet",
];

/// A running one.
pub struct UmlHost {
    process: Child,
    /// What its kernel prints, with times.
    pub serial: Serial,
}

impl UmlHost {
    /// Starts the image in `image` with the configuration `config`, and its first network interface
    /// on `tap`. Its files live in `folder`.
    ///
    /// # Errors
    /// When User-Mode Linux is not installed, and when something cannot be written or started.
    pub fn start(image: &Path, folder: &Path, config: &str, tap: &str) -> Result<Self> {
        if !Path::new(KERNEL).exists() || !Path::new(MODULES).exists() {
            bail!("there is no {KERNEL}; install the package user-mode-linux");
        }
        fs::create_dir_all(folder)?;
        let initrd = folder.join("initrd");
        write_initrd(image, &initrd, config)?;
        let mut process = Command::new(KERNEL)
            .args(["mem=512M", "rootfstype=ramfs", "loglevel=5", "printk.time=1"])
            .args(["con=null", "con0=fd:0,fd:1", "rdinit=/bed/bin/sh"])
            .arg(format!("initrd={}", initrd.display()))
            .arg(format!("vec0:transport=tap,ifname={tap}"))
            .args(["--", "/bed/first"])
            // Its sockets and memory go where they are removed.
            .env("TMPDIR", folder)
            .env("HOME", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {KERNEL}"))?;
        let output = process.stdout.take().context("User-Mode Linux has no output")?;
        let serial = Serial::collect(output, &folder.join("serial.log"), Echo::Quiet)?;
        Ok(Self { process, serial })
    }
}

impl Drop for UmlHost {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Writes the image's initramfs, with what comes before init and the configuration behind it.
fn write_initrd(image: &Path, initrd: &Path, config: &str) -> Result<()> {
    let folder = |name: &str| Entry { name: name.into(), mode: 0o755, kind: Kind::Directory };
    let file = |name: &str, content: Vec<u8>| Entry {
        name: name.to_owned(),
        mode: 0o755,
        kind: Kind::File(content),
    };
    let found = guest::find(&packages::guest_root()?, "busybox").context("no busybox")?;
    let busybox = fs::read(found)?;
    let mut entries: Vec<Entry> =
        ["bed", "bed/bin", "bed/dev", "bed/proc", "bed/lib", "bed/lib/modules", "customised"]
            .map(folder)
            .into();
    entries.extend([
        file("bed/bin/busybox", busybox.clone()),
        file("bed/bin/sh", busybox),
        file("bed/first", FIRST.replace("MODULES", &NEEDED.join(" ")).into_bytes()),
        file("customised/holdfast.toml", config.into()),
    ]);
    let mut whole = fs::read(image.join("pxe/initrd"))?;
    // Archives begin at multiples of four bytes.
    whole.resize(whole.len().next_multiple_of(4), 0);
    whole.extend(cpio::write(&entries)?);
    File::create(initrd)?.write_all(&whole).with_context(|| format!("{}", initrd.display()))
}
