//! What lies under a disk: a regular file or a block device, how large, and what it can do.

use std::{io, os::fd::OwnedFd};

use rustix::fs::{FallocateFlags, FileType, OFlags, SeekFrom};

use crate::devices::virtio::blk::request::{Access, SECTOR, Support};

/// What the file underneath is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Whole 512-byte sectors, at least one.
    pub(crate) sectors: u64,
    /// Bytes of the smallest transfer, a power of two from 512.
    pub(crate) logical_block: u32,
    /// Bytes that the medium writes at once, at least a logical block.
    pub(crate) physical_block: u32,
    /// Whether it may be changed.
    pub(crate) access: Access,
    /// Whether ranges can be given back.
    pub(crate) discard: Support,
    /// Whether ranges can be zeroed without writing them.
    pub(crate) zero: Support,
}

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub(crate) enum BackingError {
    #[error("{what}")]
    Host { what: &'static str, source: io::Error },
    #[error("{problem}")]
    Refused { problem: String },
}

impl Geometry {
    /// Looks at the file, and tries on its end what it can do.
    pub(crate) fn of(file: &OwnedFd, access: Access) -> Result<Self, BackingError> {
        let stat =
            rustix::fs::fstat(file).map_err(|e| host("cannot look at the disk")(e.into()))?;
        let flags =
            rustix::fs::fcntl_getfl(file).map_err(|e| host("cannot look at the disk")(e.into()))?;
        check_flags(flags, access)?;
        let bytes = rustix::fs::seek(file, SeekFrom::End(0))
            .map_err(|e| host("cannot find the end of the disk")(e.into()))?;
        let sectors = bytes / SECTOR;
        if sectors == 0 {
            return Err(refused(format!("the disk has {bytes} bytes, less than one sector")));
        }
        let mut geometry = Self {
            sectors,
            logical_block: 512,
            physical_block: 4096,
            access,
            discard: Support::No,
            zero: Support::No,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => geometry.measure_device(file)?,
            FileType::RegularFile => geometry.probe_file(file, bytes),
            FileType::Symlink
            | FileType::Directory
            | FileType::CharacterDevice
            | FileType::Fifo
            | FileType::Socket
            | FileType::Unknown => {
                return Err(refused("the disk is neither a file nor a block device".to_owned()));
            }
        }
        Ok(geometry)
    }

    fn measure_device(&mut self, file: &OwnedFd) -> Result<(), BackingError> {
        let block = |size: Result<u32, rustix::io::Errno>| {
            size.map_err(|e| host("cannot read the block size")(io::Error::from(e)))
        };
        self.logical_block = block(rustix::fs::ioctl_blksszget(file))?.max(512);
        self.physical_block = block(rustix::fs::ioctl_blkpbszget(file))?.max(self.logical_block);
        if self.access == Access::ReadWrite {
            // Zeroing always works, the kernel writes zeroes where the device cannot; discard
            // that the device cannot do is answered with "not supported".
            self.zero = Support::Yes;
            // Windows' viostor before October 2020 discards other sectors than it means on larger blocks
            // (virtio-win/kvm-guest-drivers-windows, pull request 514).
            self.discard = if self.logical_block == 512 { Support::Yes } else { Support::No };
        }
        Ok(())
    }

    /// Tries both kinds of `fallocate` behind the end of the file, where they change nothing.
    fn probe_file(&mut self, file: &OwnedFd, bytes: u64) {
        if self.access == Access::ReadOnly {
            return;
        }
        let behind = bytes.next_multiple_of(4096);
        let supports = |mode| {
            let mode = mode | FallocateFlags::KEEP_SIZE;
            match rustix::fs::fallocate(file, mode, behind, 4096) {
                Ok(()) => Support::Yes,
                Err(_) => Support::No,
            }
        };
        self.zero = supports(FallocateFlags::ZERO_RANGE);
        // Also takes back what the line above may have reserved behind the end.
        self.discard = supports(FallocateFlags::PUNCH_HOLE);
    }
}

fn check_flags(flags: OFlags, access: Access) -> Result<(), BackingError> {
    if flags.contains(OFlags::DIRECT) {
        return Err(refused(
            "the disk was opened with O_DIRECT, which cannot serve every buffer; open it without"
                .to_owned(),
        ));
    }
    let mode = flags & OFlags::RWMODE;
    if mode == OFlags::WRONLY || (mode == OFlags::RDONLY && access == Access::ReadWrite) {
        return Err(refused(
            "the disk was not opened for reading and writing, and is not marked read-only"
                .to_owned(),
        ));
    }
    Ok(())
}

fn host(what: &'static str) -> impl Fn(io::Error) -> BackingError {
    move |source| BackingError::Host { what, source }
}

fn refused(problem: String) -> BackingError {
    BackingError::Refused { problem }
}
