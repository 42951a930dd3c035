//! NVIDIA's management library as a source of readings. What a GPU does not tell stays `None`.
//! Source: NVML API Reference (nvml.h).

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent::gpu::{Library, LibraryError};
use nvml_wrapper::{
    Device, Nvml,
    bitmasks::{device::ThrottleReasons, event::EventTypes},
    cuda_driver_version_major, cuda_driver_version_minor,
    enum_wrappers::{
        device::{Clock, EccCounter, MemoryError, TemperatureSensor},
        nv_link::ErrorCounter,
    },
    enums::{device::SampleValue, event::XidError},
    error::NvmlError,
    structs::device::FieldId,
    sys_exports::field_id,
};
use types::{
    gpu::{Gpu, MAX_GPUS, MAX_LINKS, MAX_MIG, MAX_XIDS, MigDevice, NvLink, Origin, Xid},
    units::UnixSeconds,
};

/// What the library says of a failure that it does not know.
const UNKNOWN_XID: u64 = 999;

/// Time that a failure is waited for at once, in milliseconds: as long as the program takes to end.
const EVENT_WAIT_MS: u32 = 200;

/// Pause of a thread whose GPU is lost: waiting fails at once then, for ever or until it is back.
const LOST_PAUSE: Duration = Duration::from_millis(500);

/// Reasons for lower clocks, by their names here.
const THROTTLES: [(ThrottleReasons, &str); 7] = [
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "applications-clocks"),
    (ThrottleReasons::SW_POWER_CAP, "sw-power-cap"),
    (ThrottleReasons::HW_SLOWDOWN, "hw-slowdown"),
    (ThrottleReasons::SYNC_BOOST, "sync-boost"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "sw-thermal"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hw-thermal"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power-brake"),
];

/// What is asked for by number: the memory's temperature, and its rows that were replaced.
const FIELDS: [u32; 5] = [
    field_id::NVML_FI_DEV_MEMORY_TEMP,
    field_id::NVML_FI_DEV_REMAPPED_COR,
    field_id::NVML_FI_DEV_REMAPPED_UNC,
    field_id::NVML_FI_DEV_REMAPPED_PENDING,
    field_id::NVML_FI_DEV_REMAPPED_FAILURE,
];

/// The library, and a thread for each GPU that waits for its failures.
pub(crate) struct Nvidia {
    nvml: Arc<Nvml>,
    noted: Arc<Noted>,
    threads: Vec<JoinHandle<()>>,
}

/// Failures that threads noted.
#[derive(Debug, Default)]
struct Noted {
    xids: Mutex<VecDeque<Xid>>,
    ended: AtomicBool,
}

impl Noted {
    fn note(&self, gpu: &str, code: u64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let xid = Xid { at: UnixSeconds(now.as_secs()), gpu: gpu.to_owned(), code };
        let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
        if xids.len() >= MAX_XIDS {
            xids.pop_front();
        }
        xids.push_back(xid);
    }

    fn take(&self) -> Vec<Xid> {
        self.xids.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
}

impl Nvidia {
    /// Loads the library, which talks to the driver.
    pub(crate) fn load() -> Result<Self, LibraryError> {
        let nvml =
            Nvml::init().map_err(|error| LibraryError::Absent { reason: error.to_string() })?;
        let (nvml, noted) = (Arc::new(nvml), Arc::new(Noted::default()));
        let thread = |index| {
            let (nvml, noted) = (Arc::clone(&nvml), Arc::clone(&noted));
            let thread = std::thread::Builder::new().name(format!("xid-{index}"));
            // Without it, readings have no failures of this GPU.
            thread.spawn(move || watch(&nvml, index, &noted)).ok()
        };
        let most = u32::try_from(MAX_GPUS).unwrap_or(u32::MAX);
        let count = nvml.device_count().unwrap_or(0).min(most);
        let threads = (0..count).filter_map(thread).collect();
        Ok(Self { nvml, noted, threads })
    }
}

impl Drop for Nvidia {
    /// Threads have the library, too, and it is unloaded with the last: another one of the same name could not
    /// be loaded before.
    fn drop(&mut self) {
        self.noted.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}

/// Notes failures of a GPU until the library is wanted no more. Each GPU has a set of its own: one that is lost,
/// or that has no such events, takes nothing from the others. Its name is read now; a lost one tells it no more.
fn watch(nvml: &Nvml, index: u32, noted: &Noted) {
    let Ok(device) = nvml.device_by_index(index) else { return };
    let uuid = device.uuid().unwrap_or_default();
    let Ok(set) = nvml.create_event_set() else { return };
    let Ok(set) = device.register_events(EventTypes::CRITICAL_XID_ERROR, set) else { return };
    while !noted.ended.load(Ordering::Relaxed) {
        match set.wait(EVENT_WAIT_MS) {
            Ok(event) => match event.event_data {
                Some(XidError::Value(code)) => noted.note(&uuid, code),
                Some(XidError::Unknown) => noted.note(&uuid, UNKNOWN_XID),
                None => {}
            },
            Err(NvmlError::Timeout) => {}
            Err(_) => std::thread::sleep(LOST_PAUSE),
        }
    }
}

/// Whether a library that says so is of no use any more: its driver was unloaded or replaced.
fn is_gone(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch
    )
}

fn failed(what: &'static str) -> impl FnOnce(NvmlError) -> LibraryError {
    move |error| {
        let reason = error.to_string();
        if is_gone(&error) {
            LibraryError::Gone { reason }
        } else {
            LibraryError::Failed { what, reason }
        }
    }
}

fn lost(index: u32) -> impl Fn(NvmlError) -> LibraryError {
    move |error| {
        let reason = error.to_string();
        if is_gone(&error) {
            LibraryError::Gone { reason }
        } else {
            LibraryError::Gpu { index, reason }
        }
    }
}

impl Library for Nvidia {
    fn origin(&self) -> Origin {
        Origin::Nvml
    }

    fn versions(&self) -> Result<(String, String), LibraryError> {
        let driver = self.nvml.sys_driver_version().map_err(failed("its version"))?;
        let cuda = self.nvml.sys_cuda_driver_version().map(|version| {
            let (major, minor) =
                (cuda_driver_version_major(version), cuda_driver_version_minor(version));
            format!("{major}.{minor}")
        });
        Ok((driver, cuda.unwrap_or_default()))
    }

    fn count(&self) -> Result<u32, LibraryError> {
        self.nvml.device_count().map_err(failed("how many GPUs there are"))
    }

    fn gpu(&self, index: u32) -> Result<Gpu, LibraryError> {
        let device = self.nvml.device_by_index(index).map_err(lost(index))?;
        let name = device.name().map_err(lost(index))?;
        let uuid = device.uuid().map_err(lost(index))?;
        let mut gpu = Gpu { index, name, uuid, ..Gpu::default() };
        identity(&mut gpu, &device);
        work(&mut gpu, &device);
        health(&mut gpu, &device);
        gpu.nvlinks = links(&device);
        gpu.mig = device.mig_mode().ok().map(|mode| mode.current == 1);
        gpu.mig_devices = parts(&device);
        Ok(gpu)
    }

    fn failures(&mut self) -> Vec<Xid> {
        self.noted.take()
    }
}

fn identity(gpu: &mut Gpu, device: &Device<'_>) {
    gpu.serial = device.serial().ok();
    gpu.address = device.pci_info().map(|pci| pci.bus_id).unwrap_or_default();
    gpu.vbios = device.vbios_version().ok();
    gpu.pcie_generation = device.current_pcie_link_gen().ok();
    gpu.pcie_lanes = device.current_pcie_link_width().ok();
}

fn work(gpu: &mut Gpu, device: &Device<'_>) {
    if let Ok(memory) = device.memory_info() {
        (gpu.memory_total_bytes, gpu.memory_used_bytes) = (Some(memory.total), Some(memory.used));
    }
    if let Ok(rates) = device.utilization_rates() {
        (gpu.busy_percent, gpu.memory_busy_percent) = (Some(rates.gpu), Some(rates.memory));
    }
    gpu.clock_sm_mhz = device.clock_info(Clock::SM).ok();
    gpu.clock_memory_mhz = device.clock_info(Clock::Memory).ok();
    gpu.processes = device.running_compute_processes_count().ok();
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    let names = THROTTLES.iter().filter(|(reason, _)| reasons.contains(*reason));
    gpu.throttled = names.map(|(_, name)| (*name).to_owned()).collect();
}

fn health(gpu: &mut Gpu, device: &Device<'_>) {
    gpu.temperature_c = device.temperature(TemperatureSensor::Gpu).ok();
    gpu.power_mw = device.power_usage().ok();
    gpu.power_limit_mw = device.enforced_power_limit().ok();
    gpu.energy_mj = device.total_energy_consumption().ok();
    gpu.pcie_replays = device.pcie_replay_counter().ok();
    gpu.ecc = device.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled);
    let errors = |kind, since| device.total_ecc_errors(kind, since).ok();
    gpu.ecc_corrected = errors(MemoryError::Corrected, EccCounter::Volatile);
    gpu.ecc_uncorrected = errors(MemoryError::Uncorrected, EccCounter::Volatile);
    gpu.ecc_uncorrected_ever = errors(MemoryError::Uncorrected, EccCounter::Aggregate);
    let [temperature, rows @ ..] = fields(device, FIELDS);
    // A GPU without such a sensor tells 0.
    gpu.memory_temperature_c = temperature.filter(|degrees| *degrees > 0).and_then(narrow);
    [gpu.rows_corrected, gpu.rows_uncorrected] = [rows[0], rows[1]];
    [gpu.rows_pending, gpu.rows_failed] = [rows[2], rows[3]].map(|told| told.map(|told| told != 0));
}

fn narrow(value: u64) -> Option<u32> {
    value.try_into().ok()
}

/// Asks for fields by their numbers; what is not told, or is no whole number, is `None`.
fn fields<const N: usize>(device: &Device<'_>, numbers: [u32; N]) -> [Option<u64>; N] {
    let mut told = device.field_values_for(&numbers.map(FieldId)).unwrap_or_default().into_iter();
    numbers.map(|_| told.next()?.ok()?.value.ok().and_then(whole))
}

fn whole(value: SampleValue) -> Option<u64> {
    match value {
        SampleValue::U32(value) => Some(value.into()),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => value.try_into().ok(),
        SampleValue::F64(_) => None,
    }
}

/// Links of a GPU. Where errors are counted by field values only (NVLink 5), they stay `None`: those are asked for
/// by link, which the wrapper has no safe call for.
fn links(device: &Device<'_>) -> Vec<NvLink> {
    let most = u32::try_from(MAX_LINKS).unwrap_or(0);
    let link = |number| {
        let link = device.link_wrapper_for(number);
        let errors = |counter| link.error_counter(counter).ok();
        Ok(NvLink {
            link: number,
            active: link.is_active()?,
            replays: errors(ErrorCounter::DlReplay),
            recoveries: errors(ErrorCounter::DlRecovery),
            crc_errors: errors(ErrorCounter::DlCrcFlit),
        })
    };
    up_to_the_last((0..most).map(link))
}

/// Returns what was told, up to the first that the GPU does not have. One that could not be told is left out.
fn up_to_the_last<T>(told: impl Iterator<Item = Result<T, NvmlError>>) -> Vec<T> {
    let there =
        |error: &NvmlError| !matches!(error, NvmlError::InvalidArg | NvmlError::NotSupported);
    told.take_while(|told| told.as_ref().err().is_none_or(there)).flatten().collect()
}

fn parts(device: &Device<'_>) -> Vec<MigDevice> {
    let most = u32::try_from(MAX_MIG).unwrap_or(0);
    let part = |index| {
        let part = device.mig_device_by_index(index).ok()?;
        let memory = part.memory_info().ok();
        Some(MigDevice {
            index,
            uuid: part.uuid().ok()?,
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
        })
    };
    (0..device.mig_device_count().unwrap_or(0).min(most)).filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_end_with_the_first_that_is_not_there() {
        let lost = || Err(NvmlError::GpuLost);
        let told = [Ok(0), lost(), Ok(2), Err(NvmlError::InvalidArg), Ok(4)];
        assert_eq!(up_to_the_last(told.into_iter()), [0, 2]);
        let told = [Ok(0), Err(NvmlError::NotSupported), Ok(2)];
        assert_eq!(up_to_the_last(told.into_iter()), [0]);
    }

    #[test]
    fn only_whole_numbers_are_told() {
        let told = [SampleValue::U32(1), SampleValue::U64(2), SampleValue::I64(3)].map(whole);
        assert_eq!(told, [Some(1), Some(2), Some(3)]);
        assert_eq!([SampleValue::I64(-1), SampleValue::F64(1.0)].map(whole), [None, None]);
    }

    #[test]
    fn failures_are_noted_each_with_its_gpu() {
        let noted = Noted::default();
        noted.note("GPU-1", 31);
        noted.note("GPU-2", 79);
        let told: Vec<_> = noted.take().into_iter().map(|xid| (xid.gpu, xid.code)).collect();
        assert_eq!(told, [("GPU-1".to_owned(), 31), ("GPU-2".to_owned(), 79)]);
        assert_eq!(noted.take(), []);
        (0..1000).for_each(|code| noted.note("GPU-1", code));
        let told = noted.take();
        assert_eq!((told.len(), told.last().map(|xid| xid.code)), (MAX_XIDS, Some(999)));
    }

    #[test]
    fn a_driver_that_went_is_not_a_gpu_that_is_lost() {
        for error in
            [NvmlError::Uninitialized, NvmlError::DriverNotLoaded, NvmlError::LibRmVersionMismatch]
        {
            assert!(matches!(lost(0)(error), LibraryError::Gone { .. }));
        }
        assert!(matches!(failed("x")(NvmlError::Uninitialized), LibraryError::Gone { .. }));
        assert!(matches!(lost(0)(NvmlError::GpuLost), LibraryError::Gpu { index: 0, .. }));
    }
}
