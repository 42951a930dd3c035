//! Guests: unmodified Debian kernels with a small initramfs of busybox and dropbear, made from
//! Debian's packages and nothing of ours but two scripts.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use image::cpio::{self, Entry, Kind};

use super::{packages, tools::Tool};

/// Modules the guest loads, in this order. Everything else it needs is built into Debian's kernel.
const MODULES: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio-rng",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
    "evdev",
    "button",
    "pvpanic",
    "pvpanic-mmio",
    "qemu_fw_cfg",
];

/// Shared libraries of dropbear.
const LIBRARIES: &[&str] = &[
    "libtomcrypt.so.1",
    "libtommath.so.1",
    "libgmp.so.10",
    "libz.so.1",
    "libcrypt.so.1",
    "libc.so.6",
];

/// A guest that can be rented: a kernel and an initramfs on disk.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Debian's bzImage, as packaged.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
}

/// Makes a guest in `folder` that lets the holder of `ssh_public_key` in as root, and that runs
/// `script` once it is up.
pub fn make(folder: &Path, ssh_public_key: &str, script: Option<&str>) -> Result<Guest> {
    let root = packages::guest_root()?;
    let mut entries = system(&root)?;
    if let Some(script) = script {
        entries.push(file("guest-test", 0o755, script.as_bytes().to_vec()));
    }
    finish(&root, folder, ssh_public_key, entries)
}

/// The same without a script, and with `probe` and the perl that runs it.
pub fn make_probing(folder: &Path, ssh_public_key: &str) -> Result<Guest> {
    let root = packages::guest_root()?;
    let mut entries = system(&root)?;
    entries.extend(perl(&root)?);
    entries.push(file("usr/bin/probe", 0o755, include_bytes!("../../guest/probe.pl").to_vec()));
    finish(&root, folder, ssh_public_key, entries)
}

/// A guest without the renter's key, with perl, that runs `script` once it is up.
pub fn make_with_perl(folder: &Path, script: &str) -> Result<Guest> {
    let root = packages::guest_root()?;
    let mut entries = system(&root)?;
    entries.extend(perl(&root)?);
    entries.push(file("guest-test", 0o755, script.as_bytes().to_vec()));
    finish(&root, folder, "", entries)
}

/// A guest with a program of Debian's and its libraries, in their places, that runs `script` once it is up.
pub fn make_with(tool: &Tool, folder: &Path, script: &str) -> Result<Guest> {
    let root = packages::guest_root()?;
    let mut entries = system(&root)?;
    entries.push(file(&format!("usr/bin/{}", tool.name), 0o755, fs::read(tool.program())?));
    let present: Vec<String> = entries.iter().map(|entry| entry.name.clone()).collect();
    for (name, path) in tool.libraries()? {
        let name = format!("lib/x86_64-linux-gnu/{name}");
        if !present.contains(&name) {
            entries.push(file(&name, 0o755, fs::read(path)?));
        }
    }
    entries.push(file("guest-test", 0o755, script.as_bytes().to_vec()));
    finish(&root, folder, "", entries)
}

fn finish(root: &Path, target: &Path, ssh_public_key: &str, system: Vec<Entry>) -> Result<Guest> {
    let kernel = one_file(&root.join("boot"), "vmlinuz-")?;
    let mut entries = system;
    entries.push(file("init", 0o755, include_bytes!("../../guest/init").to_vec()));
    entries.push(file("etc/udhcpc.sh", 0o755, include_bytes!("../../guest/udhcpc.sh").to_vec()));
    let key = format!("{}\n", ssh_public_key.trim()).into_bytes();
    entries.push(file("root/.ssh/authorized_keys", 0o600, key));
    let initrd = target.join("guest-initrd");
    fs::write(&initrd, cpio::write(&entries)?)?;
    Ok(Guest { kernel, initrd })
}

fn system(root: &Path) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = ["bin", "dev", "etc", "lib", "lib/x86_64-linux-gnu", "lib64"]
        .iter()
        .chain(&["modules", "proc", "root", "root/.ssh", "sys", "usr", "usr/bin", "usr/sbin"])
        .map(|name| folder(name))
        .collect();
    entries.push(copied(root, "bin/busybox", "bin/busybox")?);
    entries.push(copied(root, "usr/sbin/dropbear", "usr/sbin/dropbear")?);
    let loader = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
    entries.push(copied(root, loader, "lib64/ld-linux-x86-64.so.2")?);
    for library in LIBRARIES {
        let found = find(root, library).with_context(|| format!("no {library} in the packages"))?;
        let name = format!("lib/x86_64-linux-gnu/{library}");
        entries.push(file(&name, 0o755, fs::read(found)?));
    }
    let mut order = String::new();
    for module in MODULES {
        let name = format!("{module}.ko");
        let found = find(&root.join("lib/modules"), &name)
            .with_context(|| format!("Debian's kernel has no module {name}"))?;
        entries.push(file(&format!("modules/{name}"), 0o644, fs::read(found)?));
        order.push_str(&name);
        order.push('\n');
    }
    entries.push(file("modules/order", 0o644, order.into_bytes()));
    entries.push(file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n".to_vec()));
    entries.push(file("etc/group", 0o644, b"root:x:0:\n".to_vec()));
    entries.push(file("etc/shells", 0o644, b"/bin/sh\n".to_vec()));
    Ok(entries)
}

/// The interpreter, the library that only it uses, and the modules of `use constant`.
fn perl(root: &Path) -> Result<Vec<Entry>> {
    const FOLDER: &str = "usr/lib/x86_64-linux-gnu/perl-base";
    let mut entries = vec![
        copied(root, "usr/bin/perl", "usr/bin/perl")?,
        copied(root, "lib/x86_64-linux-gnu/libm.so.6", "lib/x86_64-linux-gnu/libm.so.6")?,
    ];
    for name in ["usr/lib", "usr/lib/x86_64-linux-gnu", FOLDER] {
        entries.push(folder(name));
    }
    entries.push(folder(&format!("{FOLDER}/warnings")));
    for module in ["constant", "strict", "warnings", "warnings/register"] {
        let name = format!("{FOLDER}/{module}.pm");
        entries.push(copied(root, &name, &name)?);
    }
    Ok(entries)
}

fn folder(name: &str) -> Entry {
    Entry { name: name.to_owned(), mode: 0o755, kind: Kind::Directory }
}

fn file(name: &str, mode: u32, content: Vec<u8>) -> Entry {
    Entry { name: name.to_owned(), mode, kind: Kind::File(content) }
}

fn copied(root: &Path, from: &str, to: &str) -> Result<Entry> {
    let path = [root.join(from), root.join("usr").join(from)]
        .into_iter()
        .find(|path| path.exists())
        .with_context(|| format!("no {from} in the packages"))?;
    let mode = fs::metadata(&path)?.permissions().mode() & 0o777;
    Ok(file(to, mode, fs::read(&path)?))
}

/// Finds a file by name below `folder`, following symbolic links to files.
pub(super) fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.filter_map(Result::ok) {
            let kind = entry.file_type().ok()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if entry.file_name() == name {
                return Some(entry.path());
            }
        }
    }
    None
}

fn one_file(folder: &Path, prefix: &str) -> Result<PathBuf> {
    for entry in fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            return Ok(entry.path());
        }
    }
    bail!("no {prefix}* in {}", folder.display())
}

/// A key pair for the renter's ssh.
#[derive(Debug, Clone)]
pub struct SshKey {
    /// File of the private key.
    pub private: PathBuf,
    /// The public key's line.
    pub public: String,
}

/// Makes an Ed25519 key pair for ssh in `folder`.
pub fn ssh_key(folder: &Path) -> Result<SshKey> {
    let private = folder.join("ssh.key");
    let status = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "renter", "-f"])
        .arg(&private)
        .status()
        .context("cannot start ssh-keygen (package openssh-client)")?;
    if !status.success() {
        bail!("ssh-keygen failed: {status}");
    }
    let public = fs::read_to_string(private.with_extension("key.pub"))?;
    Ok(SshKey { private, public })
}
