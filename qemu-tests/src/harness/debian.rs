//! A whole Debian system on a disk, as the makers of images for clouds put one together: Debian's packages,
//! installed by apt, with its GRUB, systemd, cloud-init and SSH server. Nothing in it knows of us.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use image::disk::{
    Slice,
    gpt::{BlockSize, Partition, TYPE_ESP, TYPE_LINUX, Table, Uuid},
};
use sha2::{Digest, Sha256};

use super::packages::SUITE;
use crate::bed::firmware;

/// What is installed beside what is essential.
const PACKAGES: &[&str] = &[
    "cloud-guest-utils",
    "cloud-init",
    "dbus",
    "fdisk",
    "initramfs-tools",
    "linux-image-cloud-amd64",
    "openssh-server",
    "pciutils",
    "systemd-sysv",
    "udev",
    "zstd",
];

/// What is left out, as in Debian's own images for containers.
const LEFT_OUT: [&str; 3] = ["doc", "man", "locale"];

/// What an image's maker sets up: the file systems, the boot loader's menu, the network by systemd, and an identity
/// that each machine makes for itself; what apt fetched is not left in it. Then the tree becomes a file system; beside it, not in it, are /proc and
/// whatever else is mounted on it.
const SET_UP: &str = r#"set -e
root="$1"
printf 'LABEL=root / ext4 errors=remount-ro 0 1\nLABEL=ESP /boot/efi vfat umask=0077 0 1\n' > "$root/etc/fstab"
mkdir -p "$root/boot/efi" "$root/boot/grub"
cd "$root/boot"
cat > grub/grub.cfg <<MENU
set timeout=0
menuentry Debian {
  linux /boot/$(ls vmlinuz-*) root=LABEL=root ro console=ttyS0
  initrd /boot/$(ls initrd.img-*)
}
MENU
chroot "$root" systemctl enable --quiet systemd-networkd
: > "$root/etc/machine-id"
chroot "$root" apt-get clean
rm -rf "$root"/var/lib/apt/lists/*
tree=$(mktemp -d)
mount --bind "$root" "$tree"
size=$(du -sm "$tree" | cut -f1)
mke2fs -q -t ext4 -L root -d "$tree" "$HOLDFAST_OUTPUT" $((size * 9 / 8 + 64))M
umount "$tree"
"#;

/// What the boot loader's program reads beside itself.
const LOADER: &str =
    "search --label root --set=root\nset prefix=($root)/boot/grub\nconfigfile $prefix/grub.cfg\n";

/// Length of the EFI system partition.
const ESP_BYTES: u64 = 38 << 20;

/// Returns the disk, which is made once for each version of what is in it.
pub fn disk() -> Result<PathBuf> {
    let cache = image::default_cache();
    let found = image::candidates(&cache, SUITE, PACKAGES).context("cannot look up packages")?;
    let mut digest = Sha256::new();
    digest.update(include_str!("debian.rs"));
    digest.update(&found.versions);
    let name: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let folder = cache.join("systems");
    fs::create_dir_all(&folder)?;
    let disk = folder.join(format!("{SUITE}-{name}.img"));
    let lock = File::create(folder.join("in-use"))?;
    lock.lock()?;
    if !disk.is_file() {
        // Those of earlier versions are of no use any more.
        for entry in fs::read_dir(&folder)?.flatten() {
            if entry.path().extension().is_some_and(|end| end == "img") {
                fs::remove_file(entry.path())?;
            }
        }
        let place = tempfile::tempdir_in(&folder)?;
        let root = install(place.path(), &found.sources)?;
        let whole = place.path().join("disk");
        assemble(&whole, &root)?;
        fs::rename(&whole, &disk)?;
    }
    Ok(disk)
}

/// Installs the system and returns its file system.
fn install(place: &Path, sources: &str) -> Result<PathBuf> {
    let (list, set_up, root) =
        (place.join("sources.list"), place.join("set-up"), place.join("root"));
    fs::write(&list, sources)?;
    fs::write(&set_up, SET_UP)?;
    let without = LEFT_OUT.map(|folder| format!("--dpkgopt=path-exclude=/usr/share/{folder}/*"));
    let output = Command::new("mmdebstrap")
        .args(["--variant=apt", "--format=null"])
        .args(without)
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg(format!("--customize-hook=sh {} \"$1\"", set_up.display()))
        .args([SUITE, "/dev/null"])
        .arg(&list)
        .env("HOLDFAST_OUTPUT", &root)
        .output()
        .context("cannot start mmdebstrap")?;
    let told = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mmdebstrap: {}", told);
    Ok(root)
}

/// Puts a boot loader and the system's file system on a disk.
fn assemble(path: &Path, root: &Path) -> Result<()> {
    let id = |number: u128| Uuid::from_u128(0x484f_4c44_4641_5354_9000_0000_0000_0000 + number);
    let bytes = fs::metadata(root)?.len().next_multiple_of(1 << 20);
    let partitions = vec![
        Partition { kind: TYPE_ESP, id: id(1), name: "EFI system", bytes: ESP_BYTES },
        Partition { kind: TYPE_LINUX, id: id(2), name: "root", bytes },
    ];
    let table = Table::new(id(0), BlockSize::B512, partitions)?;
    let mut disk = File::options().read(true).write(true).create_new(true).open(path)?;
    disk.set_len(table.bytes)?;
    for (offset, bytes) in table.writes() {
        disk.seek(SeekFrom::Start(offset))?;
        disk.write_all(&bytes)?;
    }
    let volume = Slice::new(&disk, table.placed[0].0, ESP_BYTES);
    firmware::loader_volume(volume, *b"ESP        ", LOADER)?;
    let copied = Command::new("dd")
        .arg(format!("if={}", root.display()))
        .arg(format!("of={}", path.display()))
        .args(["bs=1M", "conv=notrunc,sparse", "oflag=seek_bytes", "status=none"])
        .arg(format!("seek={}", table.placed[1].0))
        .status()?;
    ensure!(copied.success(), "dd: {copied}");
    Ok(())
}
