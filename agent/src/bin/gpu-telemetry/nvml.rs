//! NVIDIA's management library as a source of readings. What a GPU does not tell stays `None`.
//! Source: NVML API Reference (nvml.h).

use agent::gpu::{Library, LibraryError};
use nvml_wrapper::{
    Device, Nvml,
    bitmasks::{device::ThrottleReasons, event::EventTypes},
    cuda_driver_version_major, cuda_driver_version_minor,
    enum_wrappers::{
        device::{Clock, EccCounter, MemoryError, TemperatureSensor},
        nv_link::ErrorCounter,
    },
    error::NvmlError,
    event::EventSet,
};
use types::gpu::{Gpu, MAX_LINKS, MAX_MIG, MAX_XIDS, MigDevice, NvLink, Origin};

/// Time that a failure is waited for, in milliseconds: it is there, or it is not.
const EVENT_WAIT_MS: u32 = 1;

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

/// The library. It lives as long as the process.
pub(crate) struct Nvidia {
    nvml: &'static Nvml,
    events: Option<EventSet<'static>>,
}

impl Nvidia {
    /// Loads the library, which talks to the driver.
    pub(crate) fn load() -> Result<Self, LibraryError> {
        let nvml =
            Nvml::init().map_err(|error| LibraryError::Absent { reason: error.to_string() })?;
        let nvml: &'static Nvml = Box::leak(Box::new(nvml));
        Ok(Self { nvml, events: register(nvml) })
    }
}

/// Asks for failures of every GPU; without them, readings have none.
fn register(nvml: &'static Nvml) -> Option<EventSet<'static>> {
    let mut events = nvml.create_event_set().ok()?;
    for index in 0..nvml.device_count().unwrap_or(0) {
        let device = nvml.device_by_index(index).ok()?;
        events = device.register_events(EventTypes::CRITICAL_XID_ERROR, events).ok()?;
    }
    Some(events)
}

fn failed(what: &'static str) -> impl FnOnce(NvmlError) -> LibraryError {
    move |error| LibraryError::Failed { what, reason: error.to_string() }
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
        let lost = |error: NvmlError| LibraryError::Gpu { index, reason: error.to_string() };
        let device = self.nvml.device_by_index(index).map_err(lost)?;
        let name = device.name().map_err(lost)?;
        let uuid = device.uuid().map_err(lost)?;
        let mut gpu = Gpu { index, name, uuid, ..Gpu::default() };
        identity(&mut gpu, &device);
        work(&mut gpu, &device);
        health(&mut gpu, &device);
        gpu.nvlinks = links(&device);
        gpu.mig = device.mig_mode().ok().map(|mode| mode.current == 1);
        gpu.mig_devices = parts(&device);
        Ok(gpu)
    }

    fn failures(&mut self) -> Vec<(String, u64)> {
        let Some(events) = &self.events else { return Vec::new() };
        let mut failures = Vec::new();
        while failures.len() < MAX_XIDS
            && let Ok(event) = events.wait(EVENT_WAIT_MS)
        {
            let code = event.event_data.map(|xid| match xid {
                nvml_wrapper::enums::event::XidError::Value(code) => code,
                nvml_wrapper::enums::event::XidError::Unknown => 0,
            });
            failures.extend(code.map(|code| (event.device.uuid().unwrap_or_default(), code)));
        }
        failures
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
}

/// Links up to the first that the GPU does not have.
fn links(device: &Device<'_>) -> Vec<NvLink> {
    let most = u32::try_from(MAX_LINKS).unwrap_or(0);
    let link = |number| {
        let link = device.link_wrapper_for(number);
        let active = link.is_active().ok()?;
        let errors = |counter| link.error_counter(counter).ok();
        Some(NvLink {
            link: number,
            active,
            replays: errors(ErrorCounter::DlReplay),
            recoveries: errors(ErrorCounter::DlRecovery),
            crc_errors: errors(ErrorCounter::DlCrcFlit),
        })
    };
    (0..most).map_while(link).collect()
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
