//! What formats read from: a file or bytes in memory, at any place.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, SeekFrom},
    io::Errno,
};

use super::ImportError;

/// Something to read at places.
#[derive(Debug)]
pub enum Input {
    /// A file and its length.
    File(File, u64),
    /// Bytes.
    Memory(Vec<u8>),
}

impl Input {
    /// Opens the file at `path`.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let fail = |source| ImportError::File { operation: "open", path: path.to_owned(), source };
        let kind = std::fs::metadata(path).map_err(fail)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            // Opening a named pipe would wait for its writer.
            let what = if kind.is_dir() { "a folder" } else { "a pipe or a device without an end" };
            let instead = "an image is read at any place: save it as a file, and import that";
            return Err(ImportError::Foreign { what, instead });
        }
        let file = File::open(path).map_err(fail)?;
        // Block devices have no length of their own, but an end.
        let length = rustix::fs::seek(&file, SeekFrom::End(0)).map_err(|e| fail(e.into()))?;
        Ok(Self::File(file, length))
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Self::File(_, length) => *length,
            Self::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// Fills `buffer` from `offset`; past the end there are zeroes.
    pub fn read_padded(&self, offset: u64, buffer: &mut [u8]) -> Result<(), ImportError> {
        let there = self.length().saturating_sub(offset);
        let there = usize::try_from(there).unwrap_or(usize::MAX).min(buffer.len());
        let (part, rest) = buffer.split_at_mut(there);
        rest.fill(0);
        match self {
            Self::File(file, _) => {
                file.read_exact_at(part, offset).map_err(|source| ImportError::Read { source })
            }
            Self::Memory(bytes) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                if let Some(found) = bytes.get(from..).and_then(|rest| rest.get(..there)) {
                    part.copy_from_slice(found);
                }
                Ok(())
            }
        }
    }

    /// Appends `length` bytes at `offset` to `buffer`; past the end there are zeroes.
    pub fn append(
        &self,
        offset: u64,
        length: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ImportError> {
        let from = buffer.len();
        buffer.resize(from + usize::try_from(length).unwrap_or(0), 0);
        self.read_padded(offset, &mut buffer[from..])
    }

    /// Returns how many bytes from `offset` on are a hole, 0 if there is data.
    pub fn hole(&self, offset: u64) -> u64 {
        let Self::File(file, length) = self else { return 0 };
        match rustix::fs::seek(file, SeekFrom::Data(offset)) {
            Ok(data) => data.saturating_sub(offset),
            Err(rustix::io::Errno::NXIO) => length.saturating_sub(offset),
            // The file system knows no holes.
            Err(_) => 0,
        }
    }
}

/// Where the neighbours of an image are.
pub trait Folder {
    /// Returns the image's own name.
    fn image(&self) -> &str;

    /// Opens the file `name`, which has no separators and is no link to another.
    fn open(&self, name: &str) -> Result<Input, ImportError>;
}

/// The folder of an image on the file system.
#[derive(Debug)]
pub struct Beside {
    folder: PathBuf,
    image: String,
    /// What is written by the import, and must not be read by it.
    written: PathBuf,
}

impl Beside {
    /// The folder of the image at `from`. What is written goes to `written` first.
    pub fn new(from: &Path, written: PathBuf) -> Self {
        let folder = from.parent().map_or_else(PathBuf::new, Path::to_owned);
        let image = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { folder, image, written }
    }

    /// Returns a file that was opened unless it is what is written.
    pub fn foreign(&self, input: Input) -> Result<Input, ImportError> {
        let identity = |facts: std::fs::Metadata| (facts.dev(), facts.ino());
        let written = std::fs::symlink_metadata(&self.written).ok().map(identity);
        match &input {
            Input::File(file, _) if written.is_some() => {
                let read = file.metadata().map(identity);
                let read = read.map_err(|source| ImportError::Read { source })?;
                if written == Some(read) {
                    return Err(ImportError::Own { path: self.written.clone() });
                }
                Ok(input)
            }
            Input::File(..) | Input::Memory(_) => Ok(input),
        }
    }
}

impl Folder for Beside {
    fn image(&self) -> &str {
        &self.image
    }

    fn open(&self, name: &str) -> Result<Input, ImportError> {
        let path = self.folder.join(name);
        let fail = |source| ImportError::File { operation: "open", path: path.clone(), source };
        // Opening a named pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::LOOP) => {
                let what = "it is a symbolic link, and an image's own pieces lie beside it: put the file there itself";
                return Err(fail(io::Error::other(what)));
            }
            Err(error) => return Err(fail(error.into())),
        };
        let facts = file.metadata().map_err(fail)?;
        if !facts.is_file() {
            let what = "it is no file, and nothing else is read beside an image";
            return Err(fail(io::Error::other(what)));
        }
        self.foreign(Input::File(file, facts.len()))
    }
}

/// A folder without files.
#[derive(Debug)]
pub struct Nowhere;

impl Folder for Nowhere {
    fn image(&self) -> &str {
        ""
    }

    fn open(&self, name: &str) -> Result<Input, ImportError> {
        let source = io::Error::from(io::ErrorKind::NotFound);
        Err(ImportError::File { operation: "open", path: name.into(), source })
    }
}
