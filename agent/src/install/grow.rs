//! Growing DATA to its partition: images and templates hold the smallest file system there is.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::Path,
};

use rustix::fs::{makedev, stat};

use crate::sys;

/// Bytes of an ext4 block, as the image's builder makes them.
const BLOCK: u64 = 4096;

/// Grows the file system mounted at `path` to the length of the device it lies on; does nothing for
/// one in memory. Returns the device's length in bytes when there is one.
pub fn grow(path: &Path) -> io::Result<Option<u64>> {
    let device = stat(path)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    debug_assert_eq!(device, makedev(major, minor));
    let size = format!("/sys/dev/block/{major}:{minor}/size");
    let sectors = match fs::read_to_string(&size) {
        Ok(text) => text.trim().parse::<u64>().map_err(io::Error::other)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let bytes = sectors * 512;
    sys::block::resize_ext4(File::open(path)?.as_fd(), bytes / BLOCK)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
    use super::*;

    #[test]
    fn what_lies_in_memory_stays_as_it_is() {
        assert_eq!(grow(Path::new("/proc")).unwrap(), None);
        assert!(grow(Path::new("/nonexistent")).is_err());
    }
}
