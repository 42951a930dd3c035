//! What a driver tells of GPUs at one moment: the document that `gpu-telemetry` writes, on a host
//! whose driver holds them, or in a guest, where nobody but the guest answers for it. Guests and nodes have
//! releases of their own: what a reader does not know it leaves out, and a version that rises says that
//! what it knows means something else.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::units::UnixSeconds;

/// Version of the document.
pub const READING_VERSION: u32 = 1;

/// Largest document that is read, in bytes.
pub const MAX_READING: usize = 256 << 10;

/// vsock port on which a node takes its guests' readings.
pub const READINGS_PORT: u32 = 4601;

/// Most GPUs, links of one, MIG devices of one, and failures of one reading.
pub const MAX_GPUS: usize = 64;
/// Most links of one GPU.
pub const MAX_LINKS: usize = 36;
/// Most MIG devices of one GPU.
pub const MAX_MIG: usize = 16;
/// Most failures (Xid) that are told.
pub const MAX_XIDS: usize = 64;
/// Longest text, in bytes.
pub const MAX_TEXT: usize = 128;

/// A reading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReading {
    /// [`READING_VERSION`].
    pub version: u32,
    /// When, by the clock of whoever read.
    pub at: UnixSeconds,
    /// How it came about.
    pub origin: Origin,
    /// Version of the driver.
    pub driver: String,
    /// Newest CUDA version that the driver knows, as `12.2`; empty if it does not tell.
    #[serde(default)]
    pub cuda: String,
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// Failures since the program started, the newest last.
    #[serde(default)]
    pub xids: Vec<Xid>,
}

/// How a reading came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// NVIDIA's management library told it.
    Nvml,
    /// It was written down for a test; no GPU said so.
    Recorded,
}

/// A GPU. `None`: the driver or the GPU does not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// Its number.
    pub index: u32,
    /// Its model.
    pub name: String,
    /// Its name for ever, as `GPU-…`.
    pub uuid: String,
    /// Serial number of its board.
    pub serial: Option<String>,
    /// Where it sits, as whoever read sees it.
    pub address: String,
    /// Version of its firmware.
    pub vbios: Option<String>,
    /// Its memory, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Memory in use.
    pub memory_used_bytes: Option<u64>,
    /// Share of time in which something ran, in percent.
    pub busy_percent: Option<u32>,
    /// Share of time in which memory was read or written, in percent.
    pub memory_busy_percent: Option<u32>,
    /// Clock of its processors, in MHz.
    pub clock_sm_mhz: Option<u32>,
    /// Clock of its memory, in MHz.
    pub clock_memory_mhz: Option<u32>,
    /// Temperature of the die, in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Temperature of its memory, in degrees Celsius.
    pub memory_temperature_c: Option<u32>,
    /// Power it takes, in milliwatts.
    pub power_mw: Option<u32>,
    /// Power it may take, in milliwatts.
    pub power_limit_mw: Option<u32>,
    /// Energy it took since the driver was loaded, in millijoules.
    pub energy_mj: Option<u64>,
    /// Why its clocks are lower than they could be, as `sw-power-cap`.
    pub throttled: Vec<String>,
    /// Whether its memory has error correction.
    pub ecc: Option<bool>,
    /// Errors of memory that were corrected since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Errors of memory that were not.
    pub ecc_uncorrected: Option<u64>,
    /// Errors of memory that were not corrected, since it was built.
    pub ecc_uncorrected_ever: Option<u64>,
    /// Rows of memory that were replaced by spare ones, since it was built: after errors that were corrected.
    pub rows_corrected: Option<u64>,
    /// The same after errors that were not.
    pub rows_uncorrected: Option<u64>,
    /// Whether one is replaced at the next reset only.
    pub rows_pending: Option<bool>,
    /// Whether one could not be replaced: the board has to be.
    pub rows_failed: Option<bool>,
    /// Generation of its PCIe link now.
    pub pcie_generation: Option<u32>,
    /// Lanes of it in use.
    pub pcie_lanes: Option<u32>,
    /// Times that something had to be sent again on it.
    pub pcie_replays: Option<u32>,
    /// Its NVLinks.
    pub nvlinks: Vec<NvLink>,
    /// Whether it is divided (MIG); `None` where it cannot be.
    pub mig: Option<bool>,
    /// Its parts.
    pub mig_devices: Vec<MigDevice>,
    /// Programs that compute on it.
    pub processes: Option<u32>,
    /// Why it does not answer; then it has nothing else but what it was called when it last did.
    pub error: Option<String>,
}

/// An NVLink of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLink {
    /// Its number.
    pub link: u32,
    /// Whether it works.
    pub active: bool,
    /// Times that something had to be sent again.
    pub replays: Option<u64>,
    /// Times that the link had to recover.
    pub recoveries: Option<u64>,
    /// Damaged pieces that arrived.
    pub crc_errors: Option<u64>,
}

/// A part of a divided GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// Its number.
    pub index: u32,
    /// Its name for ever, as `MIG-…`.
    pub uuid: String,
    /// Its memory, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Memory in use.
    pub memory_used_bytes: Option<u64>,
}

/// A failure that a driver reports (Xid).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xid {
    /// When.
    pub at: UnixSeconds,
    /// The GPU, by its UUID.
    pub gpu: String,
    /// Number of the failure in NVIDIA's "Xid Errors".
    pub code: u64,
}

/// Why bytes are no reading.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum ReadingError {
    #[error("the reading has {found} bytes; at most {MAX_READING} are read")]
    TooLarge { found: usize },
    #[error("the reading is no document of this release: {reason}")]
    Document { reason: String },
    #[error("the reading has version {found}; this release reads version {READING_VERSION}")]
    Version { found: u32 },
    #[error("the reading lists {found} {what}; at most {most} are read")]
    TooMany { what: &'static str, found: usize, most: usize },
}

impl GpuReading {
    /// Parses a reading. Whoever wrote it may be a guest: lists are bounded, texts are cut to
    /// [`MAX_TEXT`] printable ASCII characters, and of GPUs with one number or one UUID the first counts.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReadingError> {
        if bytes.len() > MAX_READING {
            return Err(ReadingError::TooLarge { found: bytes.len() });
        }
        // A document of another version need not look like this one's.
        let Versioned { version } = json(bytes)?;
        if version != READING_VERSION {
            return Err(ReadingError::Version { found: version });
        }
        let mut reading: Self = json(bytes)?;
        bounded("GPUs", reading.gpus.len(), MAX_GPUS)?;
        bounded("Xids", reading.xids.len(), MAX_XIDS)?;
        for gpu in &mut reading.gpus {
            bounded("NVLinks of a GPU", gpu.nvlinks.len(), MAX_LINKS)?;
            bounded("parts of a GPU", gpu.mig_devices.len(), MAX_MIG)?;
            bounded("reasons for lower clocks", gpu.throttled.len(), MAX_MIG)?;
            gpu.clean();
        }
        let (mut numbers, mut uuids) = (BTreeSet::new(), BTreeSet::new());
        reading.gpus.retain(|gpu| {
            let other = gpu.uuid.is_empty() || uuids.insert(gpu.uuid.clone());
            other && numbers.insert(gpu.index)
        });
        for text in [&mut reading.driver, &mut reading.cuda] {
            *text = printable(text);
        }
        for xid in &mut reading.xids {
            xid.gpu = printable(&xid.gpu);
        }
        Ok(reading)
    }
}

impl Gpu {
    fn clean(&mut self) {
        let texts = [&mut self.name, &mut self.uuid, &mut self.address];
        let maybe = [&mut self.serial, &mut self.vbios, &mut self.error].into_iter().flatten();
        let parts = self.mig_devices.iter_mut().map(|part| &mut part.uuid);
        for text in texts.into_iter().chain(maybe).chain(parts).chain(&mut self.throttled) {
            *text = printable(text);
        }
    }
}

/// What every version of the document says.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

fn json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ReadingError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ReadingError::Document { reason: printable(&error.to_string()) })
}

fn bounded(what: &'static str, found: usize, most: usize) -> Result<(), ReadingError> {
    if found > most { Err(ReadingError::TooMany { what, found, most }) } else { Ok(()) }
}

fn printable(text: &str) -> String {
    text.chars().filter(|character| (' '..='~').contains(character)).take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(gpus: &str) -> String {
        format!(
            "{{\"version\":1,\"at\":5,\"origin\":\"recorded\",\"driver\":\"1\\u001b[2J\",\"gpus\":[{gpus}]}}"
        )
    }

    #[test]
    fn what_a_driver_does_not_tell_is_left_out() {
        let reading = GpuReading::parse(document("{\"name\":\"H200\"}").as_bytes()).expect("read");
        assert_eq!((reading.gpus[0].name.as_str(), reading.gpus[0].ecc), ("H200", None));
        assert_eq!(reading.driver, "1[2J");
        let again = serde_json::to_vec(&reading).expect("written");
        assert_eq!(GpuReading::parse(&again), Ok(reading));
    }

    #[test]
    fn what_a_later_release_tells_beside_is_left_out() {
        let gpu = "{\"name\":\"H200\",\"fans\":[1],\"nvlinks\":[{\"link\":0,\"active\":true,\"speed\":7}],\
            \"mig_devices\":[{\"index\":0,\"uuid\":\"MIG-1\",\"more\":1}]}";
        let told = document(gpu).replace("\"at\":5", "\"at\":5,\"weather\":{\"sun\":1}");
        let xids = ",\"xids\":[{\"at\":1,\"gpu\":\"G\",\"code\":79,\"words\":\"lost\"}]}";
        let told = format!("{}{xids}", told.strip_suffix('}').expect("an object"));
        let reading = GpuReading::parse(told.as_bytes()).expect("read");
        let gpu = &reading.gpus[0];
        assert_eq!((gpu.name.as_str(), gpu.nvlinks[0].active), ("H200", true));
        assert_eq!((gpu.mig_devices[0].uuid.as_str(), reading.xids[0].code), ("MIG-1", 79));
        let other = b"{\"version\":2,\"when\":\"now\"}";
        assert_eq!(GpuReading::parse(other), Err(ReadingError::Version { found: 2 }));
    }

    #[test]
    fn one_gpu_is_told_once() {
        let gpu = |index: u32, uuid: &str| format!("{{\"index\":{index},\"uuid\":\"{uuid}\"}}");
        let gpus = [gpu(0, "a"), gpu(1, "a"), gpu(0, "b"), gpu(2, ""), gpu(3, ""), gpu(4, "a\\n")];
        let reading = GpuReading::parse(document(&gpus.join(",")).as_bytes()).expect("read");
        let told: Vec<_> = reading.gpus.iter().map(|gpu| (gpu.index, gpu.uuid.as_str())).collect();
        assert_eq!(told, [(0, "a"), (2, ""), (3, "")]);
    }

    #[test]
    fn readings_are_bounded() {
        let many = vec!["{}"; MAX_GPUS + 1].join(",");
        let refusal = GpuReading::parse(document(&many).as_bytes());
        assert!(matches!(refusal, Err(ReadingError::TooMany { found: 65, .. })), "{refusal:?}");
        let links = vec![
            "{\"link\":1,\"active\":true,\"replays\":null,\"recoveries\":null,\"crc_errors\":null}";
            40
        ];
        let gpu = format!("{{\"nvlinks\":[{}]}}", links.join(","));
        let refusal = GpuReading::parse(document(&gpu).as_bytes());
        assert!(matches!(refusal, Err(ReadingError::TooMany { found: 40, .. })), "{refusal:?}");
        let long = format!("{{\"name\":\"{}\"}}", "x".repeat(999));
        let reading = GpuReading::parse(document(&long).as_bytes()).expect("read");
        assert_eq!(reading.gpus[0].name.len(), MAX_TEXT);
        let refusal = GpuReading::parse(&vec![b' '; MAX_READING + 1]);
        assert!(matches!(refusal, Err(ReadingError::TooLarge { .. })));
        let other = document("").replace("\"version\":1", "\"version\":2");
        assert_eq!(GpuReading::parse(other.as_bytes()), Err(ReadingError::Version { found: 2 }));
        assert!(matches!(GpuReading::parse(b"{"), Err(ReadingError::Document { .. })));
    }
}
