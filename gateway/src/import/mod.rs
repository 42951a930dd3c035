//! Disk images of other systems become raw files: qcow2, VMDK, VHD, VHDX and raw.
//!
//! Runs with the renter's own rights on the renter's own computer. What is made is the only form
//! that gateway, node and VMM ever see, so that none of them parses a foreign format.
//!
//! A format is a [`Disk`]: asked for an offset, it returns a piece, which is zeroes or bytes. No
//! piece is larger than [`MAX_PIECE`], no table larger than [`MAX_TABLE`], so memory is bounded
//! whatever the file says; one table of the second kind is kept at a time. The one exception is what
//! a single block of zstd makes inside of its library: for that, the command limits its own address
//! space (`cli::bounds`). Zeroes become holes; everything counts in the SHA-256 that names the result.

pub mod efi;
pub mod file;
mod foreign;
mod qcow2;
mod raw;
mod vhd;
mod vhdx;
mod vmdk;
mod write;
mod zstd;

use std::{io, path::PathBuf};

pub use file::{Folder, Input};
pub use write::{Imported, import};

/// Largest piece, in bytes: a cluster of qcow2.
pub const MAX_PIECE: u64 = 2 << 20;
/// Largest table of a format, in bytes.
pub const MAX_TABLE: u64 = 64 << 20;
/// Largest disk, in bytes: nodes keep disks as files on ext4, which have at most 2^32 - 1 blocks of 4 KiB.
pub const MAX_DISK: u64 = (16 << 40) - 4096;
/// Disks have whole sectors.
pub const SECTOR: u64 = 512;

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// The bytes of the disk, and nothing else.
    Raw,
    /// Microsoft's older format, fixed or dynamic.
    Vhd,
    /// Microsoft's newer format, fixed or dynamic.
    Vhdx,
    /// VMware's format: sparse, stream-optimized, or a text that names flat files.
    Vmdk,
}

impl Format {
    /// Returns the name that people use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Vmdk => "VMDK",
        }
    }

    /// Returns the format whose marks `input` bears; a file without marks is raw, one with the marks
    /// of something else is refused.
    pub fn of(input: &Input) -> Result<Self, ImportError> {
        let mut head = [0; 8192];
        input.read_padded(0, &mut head)?;
        let found = if head.starts_with(&qcow2::MAGIC) {
            Self::Qcow2
        } else if head.starts_with(vhdx::MAGIC) {
            Self::Vhdx
        } else if head.starts_with(vmdk::MAGIC) || vmdk::is_descriptor(&head[..512]) {
            Self::Vmdk
        } else if vhd::is_vhd(input, &head)? {
            Self::Vhd
        } else {
            foreign::check(input, &head)?;
            Self::Raw
        };
        Ok(found)
    }
}

/// Why an image cannot be imported.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ImportError {
    #[error("cannot read the image")]
    Read { source: io::Error },
    #[error("cannot {operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{} is read by this import, and what comes of it is written under that name until it is whole; name \
         another file to write, or rename this one",
        path.display()
    )]
    Own { path: PathBuf },
    #[error("the file is {what}, which is not supported; {instead}")]
    Foreign { what: &'static str, instead: &'static str },
    #[error("the {format} image {problem}, which is not supported; {instead}")]
    Unsupported { format: &'static str, problem: String, instead: &'static str },
    #[error("the {format} image is damaged: {problem}")]
    Damaged { format: &'static str, problem: String },
    #[error(
        "the disk in the {format} image has {found} bytes, and nodes make none of more than {MAX_DISK} \
         (16 TiB); divide what is on it between several disks"
    )]
    Large { format: &'static str, found: u64 },
    #[error("{what} of the {format} image is {found}; at most {limit} is possible")]
    Limit { format: &'static str, what: &'static str, found: u64, limit: u64 },
}

/// A disk inside an image.
pub trait Disk {
    /// Returns its size in bytes, at most [`MAX_DISK`].
    fn size(&self) -> u64;

    /// Returns the piece at `offset`, below [`Self::size`]. Its length is at least one byte, and it
    /// may reach past the end of the disk. Bytes go to `buffer`, which is empty.
    fn piece(&mut self, offset: u64, buffer: &mut Vec<u8>) -> Result<Piece, ImportError>;
}

/// A piece of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// So many zeroes.
    Zeroes(u64),
    /// The buffer's bytes.
    Bytes,
}

/// Opens the disk in `input`, whose neighbours are in `folder`.
pub fn open(
    format: Format,
    input: Input,
    folder: &dyn Folder,
) -> Result<Box<dyn Disk>, ImportError> {
    Ok(match format {
        Format::Qcow2 => Box::new(qcow2::Qcow2::open(input)?),
        Format::Raw => Box::new(raw::Raw::open(input)?),
        Format::Vhd => Box::new(vhd::Vhd::open(input)?),
        Format::Vhdx => Box::new(vhdx::Vhdx::open(input)?),
        Format::Vmdk => Box::new(vmdk::Vmdk::open(input, folder)?),
    })
}

/// Reads big-endian and little-endian numbers at fixed places; those past the end are zero.
pub(super) fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).unwrap_or([0; N])
}

/// Returns a disk's size in bytes, unless it is empty or no node could make it.
pub(super) fn sized(format: Format, found: u64) -> Result<u64, ImportError> {
    match found {
        0 => Err(ImportError::Damaged {
            format: format.name(),
            problem: "its disk is empty".to_owned(),
        }),
        1..=MAX_DISK => Ok(found),
        found => Err(ImportError::Large { format: format.name(), found }),
    }
}

/// Checks a number against a limit.
pub(super) fn limited(
    format: Format,
    what: &'static str,
    (found, limit): (u64, u64),
) -> Result<u64, ImportError> {
    if found <= limit {
        return Ok(found);
    }
    Err(ImportError::Limit { format: format.name(), what, found, limit })
}
