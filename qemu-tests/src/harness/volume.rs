//! FAT volumes: the one that carries a node's configuration, and sticks with releases.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
};

use anyhow::{Context, Result};

/// Size of the volume, in bytes.
const SIZE: u64 = 4 << 20;

/// Writes a FAT volume labelled `HOLDFAST` with `holdfast.toml` to the file at `path`.
pub fn write(path: &Path, config: &str) -> Result<()> {
    let file = create(path, SIZE)?;
    let label = *b"HOLDFAST   ";
    fatfs::format_volume(&file, fatfs::FormatVolumeOptions::new().volume_label(label))?;
    let volume = fatfs::FileSystem::new(&file, fatfs::FsOptions::new())?;
    volume.root_dir().create_file("holdfast.toml")?.write_all(config.as_bytes())?;
    volume.unmount()?;
    Ok(())
}

/// Size of a stick, in bytes: room for a release or two.
const STICK: u64 = 128 << 20;

/// Writes a FAT volume with a copy of `folder` as `name` to the file at `path`.
pub fn write_folder(path: &Path, folder: &Path, name: &str) -> Result<()> {
    let file = create(path, STICK)?;
    fatfs::format_volume(&file, fatfs::FormatVolumeOptions::new())?;
    let volume = fatfs::FileSystem::new(&file, fatfs::FsOptions::new())?;
    copy(folder, &volume.root_dir().create_dir(name)?)?;
    volume.unmount()?;
    Ok(())
}

fn copy(from: &Path, to: &fatfs::Dir<'_, &File>) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to.create_dir(&name)?)?;
        } else {
            to.create_file(&name)?.write_all(&fs::read(entry.path())?)?;
        }
    }
    Ok(())
}

fn create(path: &Path, bytes: u64) -> Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(true);
    let file = options.open(path).with_context(|| format!("{}", path.display()))?;
    file.set_len(bytes)?;
    Ok(file)
}
