//! What drivers tell of GPUs: readings are made by `gpu-telemetry`, a program of its own, because
//! NVIDIA's library cannot live in a static process; a node takes its guests' readings over vsock.
//!
//! [`Library`] is what a reading is made from: NVIDIA's library in `gpu-telemetry`, a recorded
//! document in tests. `show`, `series` and [`Reader`] are pure; `guests` listens.

pub mod guests;
pub mod series;
pub mod show;

use std::collections::{BTreeMap, VecDeque};

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
    #[error("the NVIDIA driver was unloaded or replaced, and its library is loaded anew: {reason}")]
    Gone { reason: String },
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
    /// Returns failures since it was asked last, the oldest first, without waiting.
    fn failures(&mut self) -> Vec<Xid>;
}

/// Makes readings, and remembers between them failures and what GPUs are called.
#[derive(Debug)]
pub struct Reader<L, F> {
    load: F,
    library: Option<L>,
    xids: VecDeque<Xid>,
    /// By number: what a GPU was when it answered last, without what it told of its work.
    known: BTreeMap<u32, Gpu>,
}

impl<L: Library, F: FnMut() -> Result<L, LibraryError>> Reader<L, F> {
    /// Reads by way of a library, which `load` loads when it is wanted first, and again after its driver was
    /// unloaded or replaced.
    pub fn new(load: F) -> Self {
        Self { load, library: None, xids: VecDeque::new(), known: BTreeMap::new() }
    }

    /// Makes a reading. A GPU that does not answer is told as what it was, and why: the others are told
    /// nevertheless.
    pub fn read(&mut self, at: UnixSeconds) -> Result<GpuReading, LibraryError> {
        let mut library = match self.library.take() {
            Some(library) => library,
            None => (self.load)()?,
        };
        let read = self.ask(&mut library, at);
        // One whose driver is gone ends here, before another one is loaded.
        if !matches!(read, Err(LibraryError::Gone { .. })) {
            self.library = Some(library);
        }
        read
    }

    fn ask(&mut self, library: &mut L, at: UnixSeconds) -> Result<GpuReading, LibraryError> {
        for xid in library.failures() {
            if self.xids.len() >= MAX_XIDS {
                self.xids.pop_front();
            }
            self.xids.push_back(xid);
        }
        let (driver, cuda) = library.versions()?;
        let most = u32::try_from(MAX_GPUS).unwrap_or(u32::MAX);
        let gpus = (0..library.count()?.min(most)).map(|index| match library.gpu(index) {
            Err(error @ LibraryError::Gone { .. }) => Err(error),
            Err(error) => Ok(self.silent(index, &error)),
            Ok(gpu) => {
                self.known.insert(index, called(&gpu));
                Ok(gpu)
            }
        });
        Ok(GpuReading {
            version: READING_VERSION,
            at,
            origin: library.origin(),
            driver,
            cuda,
            gpus: gpus.collect::<Result<_, _>>()?,
            xids: self.xids.iter().cloned().collect(),
        })
    }

    /// Returns a GPU that does not answer.
    fn silent(&self, index: u32, error: &LibraryError) -> Gpu {
        let known = self.known.get(&index).cloned().unwrap_or_default();
        let reason = match error {
            LibraryError::Gpu { reason, .. } => reason.clone(),
            other @ (LibraryError::Absent { .. }
            | LibraryError::Gone { .. }
            | LibraryError::Failed { .. }) => other.to_string(),
        };
        Gpu { index, error: Some(reason), ..known }
    }
}

/// Returns what a GPU is called, and nothing of how it is.
fn called(gpu: &Gpu) -> Gpu {
    let (name, uuid, address) = (gpu.name.clone(), gpu.uuid.clone(), gpu.address.clone());
    Gpu { name, uuid, address, ..Gpu::default() }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
