//! `holdfast content push`: what is uploaded, and what had better not be.

use std::path::Path;

use sha2::{Digest, Sha256};
use tokio::io::AsyncReadExt;
use types::ids::ContentId;

use super::{CliError, quoted};
use crate::import::{Format, ImportError, Input};

/// Last words of names that disks have.
const DISKS: [&str; 9] = ["img", "iso", "qcow", "qcow2", "raw", "vdi", "vhd", "vhdx", "vmdk"];
/// Last words of names of compressed files.
const COMPRESSED: [&str; 8] = ["bz2", "gz", "lz", "lz4", "tgz", "xz", "zst", "zstd"];

/// Refuses a disk in a form that nothing on a node reads; every other file may be a kernel, an initramfs, a raw disk or
/// what its renter knows best.
pub(super) fn check(file: &Path) -> Result<(), CliError> {
    // What cannot be read is told by whoever reads all of it.
    let Ok(input) = Input::open(file) else { return Ok(()) };
    let shown = file.display();
    let message = match Format::of(&input) {
        Ok(Format::Raw) => return Ok(()),
        Ok(format) => {
            let from = quoted(&shown.to_string());
            let raw = file.with_extension("raw");
            let raw = if raw == file { file.with_extension("disk.raw") } else { raw };
            format!(
                "{shown} is a {} image, and machines read raw disks only: push what `holdfast image import {from} \
                 --out {}` makes of it, or the file as it is with --as-is",
                format.name(),
                quoted(&raw.display().to_string())
            )
        }
        // So are most initramfs.
        Err(ImportError::Foreign { what, .. })
            if what.starts_with("compressed ") && !is_named_as_disk(file) =>
        {
            return Ok(());
        }
        Err(error @ ImportError::Foreign { .. }) => {
            format!("{shown} is not pushed: {error}; or push it as it is with --as-is")
        }
        Err(_) => return Ok(()),
    };
    Err(CliError::Usage { message })
}

/// Whether a compressed file's name tells that a disk is inside.
fn is_named_as_disk(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let mut words = name.rsplit('.').skip_while(|word| COMPRESSED.contains(word));
    !name.starts_with("init") && words.next().is_some_and(|word| DISKS.contains(&word))
}

/// Returns the digest of a file.
pub(super) async fn digest(path: &Path) -> std::io::Result<ContentId> {
    let mut file = tokio::fs::File::open(path).await?;
    if !file.metadata().await?.is_file() {
        let message = "it is no file; it is read twice, so save what it gives in one";
        return Err(std::io::Error::other(message));
    }
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; 256 << 10]);
    loop {
        match file.read(&mut chunk).await? {
            0 => return Ok(ContentId::from_bytes(hash.finalize().into())),
            read => hash.update(&chunk[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, bytes: &[u8]) -> Option<String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join(name);
        std::fs::write(&file, bytes).expect("written");
        check(&file).err().map(|error| error.to_string())
    }

    #[test]
    fn foreign_disks_are_told_with_the_command_that_is_right() {
        let ubuntu = told("noble.img", b"QFI\xfb\0\0\0\x03").expect("qcow2");
        assert!(ubuntu.contains("is a qcow2 image"), "{ubuntu}");
        assert!(
            ubuntu.contains("holdfast image import '") && ubuntu.contains("noble.raw'"),
            "{ubuntu}"
        );
        assert!(ubuntu.contains("--as-is"), "{ubuntu}");
        let named = told("disk.raw", b"KDMV").expect("VMDK");
        assert!(named.contains("a VMDK image") && named.contains("disk.disk.raw'"), "{named}");
        assert!(told("a", b"vhdxfile").expect("VHDX").contains("VHDX"));
        let zip = told("a.zip", b"PK\x03\x04").expect("ZIP");
        assert!(zip.contains("a ZIP archive") && zip.contains("--as-is"), "{zip}");
    }

    #[test]
    fn what_is_compressed_is_a_disk_by_its_name() {
        let gzip = b"\x1f\x8b\x08\0";
        for name in ["disk.raw.gz", "Fedora.RAW.XZ", "noble.img", "a.b.iso.gz"] {
            let refused = told(name, gzip).expect(name);
            assert!(refused.contains("unpack it, and import"), "{refused}");
        }
        for name in [
            "initrd.img-6.1.0-amd64",
            "initrd.gz",
            "initramfs.img",
            "initrd.img.gz",
            "x",
            "vmlinuz",
        ] {
            assert_eq!(told(name, gzip), None, "{name}");
        }
        assert_eq!(told("vmlinuz", b"MZ"), None);
        assert_eq!(told("disk.raw", &[0; 4096]), None);
    }
}
