//! Readings for people and for Prometheus. Pure.

use types::gpu::{Gpu, GpuReading, NvLink};

use crate::{
    dashboard::text::{bytes, plain},
    local::exposition::{Exposition, Metric, Millis},
};

/// Width of a GPU's name in a line.
const NAME: usize = 32;

/// Largest number of a failure that is counted by itself: NVIDIA's "Xid Errors" has some two hundred, the
/// library says 999 for one that it does not know.
const MAX_XID: u64 = 999;

/// Returns a reading as lines for people.
pub fn lines(reading: &GpuReading) -> Vec<String> {
    let mut lines = vec![format!(
        "driver {}, CUDA {}, {} GPUs",
        plain(&reading.driver, NAME),
        plain(&reading.cuda, NAME),
        reading.gpus.len()
    )];
    for gpu in &reading.gpus {
        lines.push(one(gpu));
        lines.extend(health(gpu));
    }
    for xid in &reading.xids {
        lines.push(format!("Xid {} on {}", xid.code, plain(&xid.gpu, 64)));
    }
    lines
}

/// Returns a GPU in one line: model, work, memory, heat, power.
pub fn one(gpu: &Gpu) -> String {
    if let Some(error) = &gpu.error {
        let name = plain(&gpu.name, NAME);
        return format!("{} {name}: no answer: {}", gpu.index, plain(error, 64));
    }
    let number = |value: Option<u32>, unit: &str| {
        value.map_or(format!("? {unit}"), |value| format!("{value} {unit}"))
    };
    let size = |value: Option<u64>| value.map_or("?".to_owned(), bytes);
    let watts = gpu.power_mw.map(|milliwatts| milliwatts / 1000);
    format!(
        "{} {}: {} busy, {} of {}, {}, {}, {}",
        gpu.index,
        plain(&gpu.name, NAME),
        number(gpu.busy_percent, "%"),
        size(gpu.memory_used_bytes),
        size(gpu.memory_total_bytes),
        number(gpu.temperature_c, "C"),
        number(watts, "W"),
        number(gpu.clock_sm_mhz, "MHz"),
    )
}

/// Returns what is not as it should be, and what the GPU is divided into.
fn health(gpu: &Gpu) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(count) = gpu.ecc_uncorrected.filter(|count| *count > 0) {
        lines.push(format!("  {count} memory errors that were not corrected"));
    }
    if gpu.rows_failed == Some(true) {
        lines.push(
            "  a row of its memory is bad and cannot be replaced: the board has to be".to_owned(),
        );
    }
    if gpu.rows_pending == Some(true) {
        lines.push("  a row of its memory is bad and is replaced when the GPU is reset".to_owned());
    }
    let dead: Vec<_> = gpu.nvlinks.iter().filter(|link| !link.active).collect();
    if !gpu.nvlinks.is_empty() {
        let active = gpu.nvlinks.len() - dead.len();
        lines.push(format!("  {active} of {} NVLinks work", gpu.nvlinks.len()));
    }
    if !gpu.throttled.is_empty() {
        lines.push(format!("  clocks lowered: {}", plain(&gpu.throttled.join(", "), 120)));
    }
    if gpu.mig == Some(true) {
        lines.push(format!("  divided into {} parts", gpu.mig_devices.len()));
    }
    lines
}

/// What is told of a GPU by one number: the metric, and where it stands.
struct Number {
    metric: Metric,
    read: fn(&Gpu) -> Option<u64>,
}

const NUMBERS: [Number; 19] = [
    gauge("gpu_answers", "Whether a GPU answers its driver.", |gpu| {
        Some(u64::from(gpu.error.is_none()))
    }),
    gauge("gpu_memory_bytes", "Memory of a GPU.", |gpu| gpu.memory_total_bytes),
    gauge("gpu_memory_used_bytes", "Memory of a GPU in use.", |gpu| gpu.memory_used_bytes),
    gauge("gpu_busy_percent", "Share of time in which a GPU ran something.", |gpu| {
        gpu.busy_percent.map(u64::from)
    }),
    gauge("gpu_temperature_celsius", "Temperature of a GPU.", |gpu| {
        gpu.temperature_c.map(u64::from)
    }),
    gauge("gpu_memory_temperature_celsius", "Temperature of a GPU's memory.", |gpu| {
        gpu.memory_temperature_c.map(u64::from)
    }),
    gauge(
        "gpu_rows_corrected",
        "Rows of memory replaced after errors that were corrected.",
        |gpu| gpu.rows_corrected,
    ),
    gauge("gpu_rows_uncorrected", "Rows of memory replaced after errors that were not.", |gpu| {
        gpu.rows_uncorrected
    }),
    gauge("gpu_rows_pending", "Whether a row of memory is replaced at the next reset.", |gpu| {
        gpu.rows_pending.map(u64::from)
    }),
    gauge("gpu_rows_failed", "Whether a row of memory could not be replaced.", |gpu| {
        gpu.rows_failed.map(u64::from)
    }),
    gauge("gpu_clock_hertz", "Clock of a GPU's processors.", |gpu| {
        gpu.clock_sm_mhz.map(|mhz| u64::from(mhz) * 1_000_000)
    }),
    gauge("gpu_memory_clock_hertz", "Clock of a GPU's memory.", |gpu| {
        gpu.clock_memory_mhz.map(|mhz| u64::from(mhz) * 1_000_000)
    }),
    gauge("gpu_pcie_generation", "Generation of a GPU's PCIe link now.", |gpu| {
        gpu.pcie_generation.map(u64::from)
    }),
    gauge("gpu_pcie_lanes", "Lanes of a GPU's PCIe link in use.", |gpu| {
        gpu.pcie_lanes.map(u64::from)
    }),
    gauge("gpu_parts", "Parts that a GPU is divided into (MIG).", |gpu| {
        gpu.mig.map(|_| u64::try_from(gpu.mig_devices.len()).unwrap_or(0))
    }),
    gauge("gpu_processes", "Programs that compute on a GPU.", |gpu| gpu.processes.map(u64::from)),
    counter("gpu_ecc_corrected_total", "Memory errors that were corrected.", |gpu| {
        gpu.ecc_corrected
    }),
    counter("gpu_ecc_uncorrected_total", "Memory errors that were not.", |gpu| gpu.ecc_uncorrected),
    counter("gpu_pcie_replays_total", "Times that a GPU's PCIe link sent again.", |gpu| {
        gpu.pcie_replays.map(u64::from)
    }),
];

const fn gauge(name: &'static str, help: &'static str, read: fn(&Gpu) -> Option<u64>) -> Number {
    Number { metric: Metric::gauge(name, help), read }
}

const fn counter(name: &'static str, help: &'static str, read: fn(&Gpu) -> Option<u64>) -> Number {
    Number { metric: Metric::counter(name, help), read }
}

/// What is counted of a link: its kind, and where it stands.
struct Errors(&'static str, fn(&NvLink) -> Option<u64>);

const LINKS: [Errors; 3] = [
    Errors("replay", |link| link.replays),
    Errors("recovery", |link| link.recoveries),
    Errors("crc", |link| link.crc_errors),
];

/// A reading, and the machine whose guest made it; empty for the host's.
#[derive(Debug, Clone, Copy)]
pub struct Told<'a> {
    /// The machine, or nothing.
    pub machine: &'a str,
    /// What was read.
    pub reading: &'a GpuReading,
}

/// Writes metrics of readings. A GPU is called by its number: what else it is called stands in one metric, so
/// that it cannot begin all the others anew.
pub fn metrics(out: &mut Exposition, told: &[Told<'_>]) {
    let each = || told.iter().flat_map(|told| told.reading.gpus.iter().map(move |gpu| (told, gpu)));
    let about = "A GPU as its driver sees it; always 1. With a machine, its guest says so.";
    let mut samples = out.metric(Metric::gauge("gpu_info", about));
    for (told, gpu) in each() {
        samples.sample(
            &[
                ("machine", told.machine),
                ("gpu", &gpu.index.to_string()),
                ("uuid", &gpu.uuid),
                ("model", &gpu.name),
                ("address", &gpu.address),
                ("driver", &told.reading.driver),
            ],
            1,
        );
    }
    for Number { metric, read } in NUMBERS {
        let mut samples = out.metric(metric);
        for (told, gpu) in each() {
            if let Some(value) = read(gpu) {
                samples
                    .sample(&[("machine", told.machine), ("gpu", &gpu.index.to_string())], value);
            }
        }
    }
    let mut milli = |metric, read: fn(&Gpu) -> Option<u64>| {
        let mut samples = out.metric(metric);
        for (told, gpu) in each() {
            if let Some(value) = read(gpu) {
                samples.sample(
                    &[("machine", told.machine), ("gpu", &gpu.index.to_string())],
                    Millis(value),
                );
            }
        }
    };
    milli(Metric::gauge("gpu_power_watts", "Power that a GPU takes."), |gpu| {
        gpu.power_mw.map(u64::from)
    });
    milli(Metric::gauge("gpu_power_limit_watts", "Power that a GPU may take."), |gpu| {
        gpu.power_limit_mw.map(u64::from)
    });
    milli(Metric::counter("gpu_energy_joules_total", "Energy that a GPU took."), |gpu| {
        gpu.energy_mj
    });
    links(out, told);
    failures(out, told);
}

fn links(out: &mut Exposition, told: &[Told<'_>]) {
    let about = "NVLinks of a GPU that work.";
    let mut samples = out.metric(Metric::gauge("gpu_nvlinks", about));
    for told in told {
        for gpu in told.reading.gpus.iter().filter(|gpu| !gpu.nvlinks.is_empty()) {
            let active = gpu.nvlinks.iter().filter(|link| link.active).count();
            samples.sample(&[("machine", told.machine), ("gpu", &gpu.index.to_string())], active);
        }
    }
    let about = "Errors of a GPU's NVLinks, by kind.";
    let mut samples = out.metric(Metric::counter("gpu_nvlink_errors_total", about));
    for told in told {
        for gpu in told.reading.gpus.iter().filter(|gpu| !gpu.nvlinks.is_empty()) {
            for Errors(kind, read) in LINKS {
                // What no link counts is not 0.
                let counts = gpu.nvlinks.iter().filter_map(read);
                let Some(sum) = counts.reduce(u64::saturating_add) else { continue };
                samples.sample(
                    &[("machine", told.machine), ("gpu", &gpu.index.to_string()), ("kind", kind)],
                    sum,
                );
            }
        }
    }
}

fn failures(out: &mut Exposition, told: &[Told<'_>]) {
    let about = "Failures that a GPU's driver reports (Xid) and that are remembered, by number.";
    let mut samples = out.metric(Metric::gauge("gpu_xids", about));
    for told in told {
        let mut counts = std::collections::BTreeMap::new();
        for xid in &told.reading.xids {
            let gpu = told.reading.gpus.iter().find(|gpu| gpu.uuid == xid.gpu);
            let gpu = gpu.map(|gpu| gpu.index.to_string()).unwrap_or_default();
            let known = xid.code <= MAX_XID;
            let code = if known { xid.code.to_string() } else { "other".to_owned() };
            *counts.entry((gpu, code)).or_insert(0u32) += 1;
        }
        for ((gpu, code), count) in counts {
            samples.sample(&[("machine", told.machine), ("gpu", &gpu), ("xid", &code)], count);
        }
    }
}
