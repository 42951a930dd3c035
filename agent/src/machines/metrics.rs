//! Machines' counters as metrics: of one for its renter, of all for the node's provider.

use types::{
    ids::MachineId,
    operations::{DeviceCounters, ExitCounters, VmCounters},
};

use crate::local::exposition::{Exposition, Metric, Millis};

pub use crate::local::exposition::MEDIA_TYPE;

/// What is counted of a virtual CPU: the label of the reason, and where it stands.
const EXITS: [Column<ExitCounters>; 6] = [
    Column("port_read", |exits| exits.port_reads),
    Column("port_write", |exits| exits.port_writes),
    Column("memory_read", |exits| exits.memory_reads),
    Column("memory_write", |exits| exits.memory_writes),
    Column("kick", |exits| exits.kicks),
    Column("other", |exits| exits.others),
];

struct Column<T>(&'static str, fn(&T) -> u64);

/// What is counted of a device: the metric, and where it stands.
const DEVICES: [Counter; 6] = [
    Counter::new("vm_device_requests_total", "Requests that a device answered.", |one| {
        one.requests
    }),
    Counter::new("vm_device_read_bytes_total", "Bytes that a device gave.", |one| one.read_bytes),
    Counter::new("vm_device_written_bytes_total", "Bytes that a device took.", |one| {
        one.written_bytes
    }),
    Counter::new("vm_device_errors_total", "Requests to a device that failed.", |one| one.errors),
    Counter::new(
        "vm_device_media_errors_total",
        "Requests to a device that failed since what the host keeps its data on did.",
        |one| one.media_errors,
    ),
    Counter::new("vm_device_interrupts_total", "Interrupts of a device.", |one| one.interrupts),
];

struct Counter {
    metric: Metric,
    read: fn(&DeviceCounters) -> u64,
}

impl Counter {
    const fn new(name: &'static str, help: &'static str, read: fn(&DeviceCounters) -> u64) -> Self {
        Self { metric: Metric::counter(name, help), read }
    }
}

/// Returns the metrics of one machine.
pub fn text(machine: MachineId, counters: &VmCounters) -> String {
    let mut out = Exposition::default();
    write(&mut out, &[(machine, counters.clone())]);
    out.finish()
}

/// Writes the metrics of machines.
pub fn write(out: &mut Exposition, machines: &[(MachineId, VmCounters)]) {
    let named: Vec<_> = machines.iter().map(|(id, counters)| (id.to_string(), counters)).collect();
    let about = "Time since the machine's process built it.";
    let mut samples = out.metric(Metric::gauge("vm_uptime_seconds", about));
    for (machine, counters) in &named {
        samples.sample(&[("machine", machine)], Millis(counters.uptime_ms));
    }
    let mut samples = out.metric(Metric::gauge("vm_memory_bytes", "Memory of a guest."));
    for (machine, counters) in &named {
        samples.sample(&[("machine", machine)], counters.memory.guest_bytes);
    }
    let about = "Memory of a guest for which the host gave pages.";
    let mut samples = out.metric(Metric::gauge("vm_memory_resident_bytes", about));
    for (machine, counters) in &named {
        samples.sample(&[("machine", machine)], counters.memory.resident_bytes);
    }
    let about = "Times that a virtual CPU left the guest for its process, by reason.";
    let mut samples = out.metric(Metric::counter("vm_vcpu_exits_total", about));
    for (machine, counters) in &named {
        for (number, vcpu) in counters.vcpus.iter().enumerate() {
            for Column(reason, read) in EXITS {
                let labels = [
                    ("machine", machine.as_str()),
                    ("vcpu", &number.to_string()),
                    ("reason", reason),
                ];
                samples.sample(&labels, read(vcpu));
            }
        }
    }
    let about = "Locks of the whole memory bus by a virtual CPU, as split locks are.";
    let mut samples = out.metric(Metric::counter("vm_vcpu_bus_locks_total", about));
    for (machine, counters) in &named {
        for (number, vcpu) in counters.vcpus.iter().enumerate() {
            let labels = [("machine", machine.as_str()), ("vcpu", &number.to_string())];
            samples.sample(&labels, vcpu.bus_locks);
        }
    }
    for Counter { metric, read } in DEVICES {
        let mut samples = out.metric(metric);
        for (machine, counters) in &named {
            for device in &counters.devices {
                samples.sample(&[("machine", machine), ("device", &device.name)], read(device));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_a_line_under_its_type() {
        let device = DeviceCounters { name: "blk0".into(), requests: 7, ..Default::default() };
        let vcpu = ExitCounters { kicks: 3, bus_locks: 5, ..Default::default() };
        let counters =
            VmCounters { vcpus: vec![vcpu], devices: vec![device], ..Default::default() };
        let text = text(MachineId::from_bytes([1; 16]), &counters);
        let id = "01".repeat(16);
        let line =
            |line: String| assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        line(format!("holdfast_vm_device_requests_total{{machine=\"{id}\",device=\"blk0\"}} 7"));
        line(format!(
            "holdfast_vm_vcpu_exits_total{{machine=\"{id}\",vcpu=\"0\",reason=\"kick\"}} 3"
        ));
        line(format!("holdfast_vm_vcpu_bus_locks_total{{machine=\"{id}\",vcpu=\"0\"}} 5"));
        line("# TYPE holdfast_vm_vcpu_exits_total counter".to_owned());
        let samples = text.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(samples, 4 + EXITS.len() + DEVICES.len());
    }
}
