//! Places of files that this crate does not know: other nodes, volumes that somebody plugged in.

use std::{io, pin::Pin};

use tokio::io::AsyncRead;

/// Which bytes of a file are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub from: u64,
    /// The one after the last; to the file's end without it.
    pub to: Option<u64>,
}

impl Span {
    /// From a byte to the file's end.
    pub fn from(from: u64) -> Self {
        Self { from, to: None }
    }

    /// Whether the whole file is meant.
    pub fn is_whole(self) -> bool {
        self == Self::default()
    }
}

/// What is asked of [`Elsewhere`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// URL of the file.
    pub url: String,
    /// Which bytes of it.
    pub span: Span,
}

/// Opens files at URLs whose scheme is neither `https`, `http` nor `file`. Nothing that they hold is
/// believed.
pub trait Elsewhere: Send + Sync {
    /// Begins to read a file.
    fn open(&self, wanted: Wanted) -> Opening;
}

/// Bytes that arrive.
pub struct Bytes(pub Box<dyn AsyncRead + Send + Unpin>);

/// What [`Elsewhere`] answers with; `None` when there is no such file.
pub struct Opening(pub Pin<Box<dyn Future<Output = io::Result<Option<Bytes>>> + Send>>);
