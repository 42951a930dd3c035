//! What drivers tell of GPUs: readings are made by `gpu-telemetry`, a program of its own, because
//! NVIDIA's library cannot live in a static process; a node takes its guests' readings over vsock.
//!
//! [`Library`] is what a reading is made from: NVIDIA's library in `gpu-telemetry`, a recorded
//! document in tests. `show`, `series` and [`Reader`] are pure; `guests` listens.

pub mod guests;
pub mod series;
pub mod show;

use std::collections::VecDeque;

use types::{
    gpu::{Gpu, GpuReading, MAX_GPUS, MAX_XIDS, Origin, READING_VERSION, Xid},
    units::UnixSeconds,
};

/// Why a driver's library told nothing.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum LibraryError {
    #[error("no NVIDIA driver answers: {reason}")]
    Absent { reason: String },
    #[error("the driver's library failed to tell {what}: {reason}")]
    Failed { what: &'static str, reason: String },
    #[error("GPU {index} does not answer: {reason}")]
    Gpu { index: u32, reason: String },
}

/// What tells of GPUs.
pub trait Library {
    /// Returns how its words come about.
    fn origin(&self) -> Origin;
    /// Returns the versions of the driver and of CUDA.
    fn versions(&self) -> Result<(String, String), LibraryError>;
    /// Returns how many GPUs there are.
    fn count(&self) -> Result<u32, LibraryError>;
    /// Tells of one GPU. What it does not tell stays `None`.
    fn gpu(&self, index: u32) -> Result<Gpu, LibraryError>;
    /// Returns failures since it was asked last, each with its GPU's UUID, without waiting.
    fn failures(&mut self) -> Vec<(String, u64)>;
}

/// Makes readings, and remembers failures between them.
#[derive(Debug)]
pub struct Reader<L> {
    library: L,
    xids: VecDeque<Xid>,
}

impl<L: Library> Reader<L> {
    /// Reads by way of `library`.
    pub fn new(library: L) -> Self {
        Self { library, xids: VecDeque::new() }
    }

    /// Makes a reading. A GPU that does not answer has a name that says so, and nothing else: the
    /// others are told nevertheless.
    pub fn read(&mut self, at: UnixSeconds) -> Result<GpuReading, LibraryError> {
        for (gpu, code) in self.library.failures() {
            if self.xids.len() >= MAX_XIDS {
                self.xids.pop_front();
            }
            self.xids.push_back(Xid { at, gpu, code });
        }
        let (driver, cuda) = self.library.versions()?;
        let count = self.library.count()?;
        let most = u32::try_from(MAX_GPUS).unwrap_or(u32::MAX);
        let gpu = |index| {
            self.library.gpu(index).unwrap_or_else(|error| Gpu {
                index,
                name: format!("no answer: {error}"),
                ..Gpu::default()
            })
        };
        Ok(GpuReading {
            version: READING_VERSION,
            at,
            origin: self.library.origin(),
            driver,
            cuda,
            gpus: (0..count.min(most)).map(gpu).collect(),
            xids: self.xids.iter().cloned().collect(),
        })
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
