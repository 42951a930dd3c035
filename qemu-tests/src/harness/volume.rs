//! The FAT volume that carries a node's configuration.

use std::{fs::OpenOptions, io::Write, path::Path};

use anyhow::{Context, Result};

/// Size of the volume, in bytes.
const SIZE: u64 = 4 << 20;

/// Writes a FAT volume labelled `HOLDFAST` with `holdfast.toml` to the file at `path`.
pub fn write(path: &Path, config: &str) -> Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .with_context(|| format!("{}", path.display()))?;
    file.set_len(SIZE)?;
    let label = *b"HOLDFAST   ";
    fatfs::format_volume(&file, fatfs::FormatVolumeOptions::new().volume_label(label))?;
    let volume = fatfs::FileSystem::new(&file, fatfs::FsOptions::new())?;
    volume.root_dir().create_file("holdfast.toml")?.write_all(config.as_bytes())?;
    volume.unmount()?;
    Ok(())
}
