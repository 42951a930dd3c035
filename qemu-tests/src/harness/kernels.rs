//! Kernels for guests, other than the one that a guest is made with: the ELF image inside a
//! bzImage, and kernels of other packages with their modules.
//! Source: Linux Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header"; lib/decompress_unlz4.c.
//!
//! | Offset | Size | Field of the header                                   |
//! |--------|------|-------------------------------------------------------|
//! | 0x1f1  | 1    | setup_sects: sectors of setup code after the first    |
//! | 0x202  | 4    | "HdrS"                                                |
//! | 0x248  | 4    | payload_offset, from the end of the setup code        |
//! | 0x24c  | 4    | payload_length, with the four bytes that tell its size|

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use image::cpio::{self, Entry, Kind};

use super::{guest::Guest, packages};

/// First bytes of the form of LZ4 that kernels are compressed with.
const LZ4_LEGACY: [u8; 4] = 0x184c_2102_u32.to_le_bytes();
/// Most bytes that one block of it unpacks to.
const LZ4_BLOCK: usize = 8 << 20;

/// Returns the same guest with the ELF image of its kernel, which starts by PVH.
pub fn as_elf(guest: &Guest, folder: &Path) -> Result<Guest> {
    let image = fs::read(&guest.kernel)?;
    let kernel = folder.join("guest-vmlinux");
    let elf = elf_image(&image).with_context(|| guest.kernel.display().to_string())?;
    fs::write(&kernel, elf)?;
    Ok(Guest { kernel, ..guest.clone() })
}

/// Returns the same guest with Debian's kernel for any machine and that kernel's modules.
pub fn as_generic(guest: &Guest, folder: &Path) -> Result<Guest> {
    let root = packages::generic_kernel_root()?;
    let kernel = boot_file(&root, "vmlinuz-")?;
    let modules = modules_by_name(&root.join("lib/modules"))?;
    let mut entries = cpio::read(&fs::read(&guest.initrd)?)?;
    for entry in &mut entries {
        let Some(module) = entry.name.strip_prefix("modules/").filter(|n| n.ends_with(".ko"))
        else {
            continue;
        };
        let path = modules.get(module).with_context(|| format!("no {module} in the package"))?;
        entry.kind = Kind::File(fs::read(path)?);
    }
    let initrd = folder.join("generic-initrd");
    fs::write(&initrd, cpio::write(&entries)?)?;
    Ok(Guest { kernel, initrd })
}

/// Returns the same guest with the program `name` at its root, mode 755.
pub fn with_program(guest: &Guest, folder: &Path, name: &str, content: Vec<u8>) -> Result<Guest> {
    let mut entries = cpio::read(&fs::read(&guest.initrd)?)?;
    entries.push(Entry { name: name.to_owned(), mode: 0o755, kind: Kind::File(content) });
    let initrd = folder.join(format!("{name}-initrd"));
    fs::write(&initrd, cpio::write(&entries)?)?;
    Ok(Guest { initrd, ..guest.clone() })
}

/// Unpacks the ELF image that a bzImage carries.
pub fn elf_image(bzimage: &[u8]) -> Result<Vec<u8>> {
    if bzimage.get(0x202..0x206) != Some(b"HdrS") {
        bail!("no bzImage: there is no header");
    }
    let sectors = match bzimage[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1) * 512 + word(bzimage, 0x248)?;
    let payload = bzimage
        .get(start..start.saturating_add(word(bzimage, 0x24c)?))
        .context("the payload passes the end of the file")?;
    let (compressed, size) =
        payload.split_at_checked(payload.len().wrapping_sub(4)).context("no payload")?;
    let elf = unpack_lz4(compressed, word(size, 0)?)?;
    if !elf.starts_with(b"\x7fELF") {
        bail!("the payload is no ELF image");
    }
    Ok(elf)
}

fn unpack_lz4(compressed: &[u8], size: usize) -> Result<Vec<u8>> {
    let mut rest = compressed.strip_prefix(&LZ4_LEGACY).with_context(|| {
        format!("the payload begins with {:x?}, not as LZ4 does", compressed.get(..4))
    })?;
    let mut unpacked = vec![0; size];
    let mut at = 0;
    while at < size {
        let (length, after) = (word(rest, 0)?, rest.get(4..).unwrap_or_default());
        let block = after.get(..length).context("a block passes the end")?;
        let end = size.min(at + LZ4_BLOCK);
        at += lz4_flex::block::decompress_into(block, &mut unpacked[at..end])?;
        rest = &after[length..];
    }
    Ok(unpacked)
}

fn word(bytes: &[u8], at: usize) -> Result<usize> {
    let bytes = bytes.get(at..at + 4).context("the file is cut short")?;
    Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
}

fn boot_file(root: &Path, prefix: &str) -> Result<PathBuf> {
    let files = fs::read_dir(root.join("boot"))?.filter_map(Result::ok);
    let mut found = files.filter(|file| file.file_name().to_string_lossy().starts_with(prefix));
    Ok(found.next().with_context(|| format!("no {prefix}* in the package"))?.path())
}

fn modules_by_name(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)?.filter_map(Result::ok) {
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                all.insert(entry.file_name().to_string_lossy().into_owned(), entry.path());
            }
        }
    }
    Ok(all)
}
