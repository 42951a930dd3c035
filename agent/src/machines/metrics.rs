//! A machine's counters as text that Prometheus reads.
//! Source: Prometheus "Exposition formats", text-based format 0.0.4.

use types::{
    ids::MachineId,
    operations::{DeviceCounters, ExitCounters, VmCounters},
};

/// Media type of the text.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4";

/// What is counted of a virtual CPU: the label of the reason, and where it stands.
const EXITS: [Column<ExitCounters>; 6] = [
    Column("port_read", |exits| exits.port_reads),
    Column("port_write", |exits| exits.port_writes),
    Column("memory_read", |exits| exits.memory_reads),
    Column("memory_write", |exits| exits.memory_writes),
    Column("kick", |exits| exits.kicks),
    Column("other", |exits| exits.others),
];

/// What is counted of a device: the metric's name, and where it stands.
const DEVICES: [Column<DeviceCounters>; 5] = [
    Column("requests_total", |device| device.requests),
    Column("read_bytes_total", |device| device.read_bytes),
    Column("written_bytes_total", |device| device.written_bytes),
    Column("errors_total", |device| device.errors),
    Column("interrupts_total", |device| device.interrupts),
];

struct Column<T>(&'static str, fn(&T) -> u64);

/// Returns the text.
pub fn text(machine: MachineId, counters: &VmCounters) -> String {
    let mut text = String::new();
    let mut metric = |name: &str, kind: &str, samples: Vec<(String, u64)>| {
        if samples.is_empty() {
            return;
        }
        text.push_str(&format!("# TYPE holdfast_vm_{name} {kind}\n"));
        for (labels, value) in samples {
            text.push_str(&format!(
                "holdfast_vm_{name}{{machine=\"{machine}\"{labels}}} {value}\n"
            ));
        }
    };
    let alone = |value| vec![(String::new(), value)];
    metric("uptime_milliseconds", "gauge", alone(counters.uptime_ms));
    metric("memory_bytes", "gauge", alone(counters.memory.guest_bytes));
    metric("memory_resident_bytes", "gauge", alone(counters.memory.resident_bytes));
    let mut exits = Vec::new();
    for (number, vcpu) in counters.vcpus.iter().enumerate() {
        for Column(reason, read) in EXITS {
            exits.push((format!(",vcpu=\"{number}\",reason=\"{reason}\""), read(vcpu)));
        }
    }
    metric("vcpu_exits_total", "counter", exits);
    for Column(name, read) in DEVICES {
        let of = |device: &DeviceCounters| (format!(",device=\"{}\"", device.name), read(device));
        metric(&format!("device_{name}"), "counter", counters.devices.iter().map(of).collect());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_a_line_under_its_type() {
        let device = DeviceCounters { name: "blk0".into(), requests: 7, ..Default::default() };
        let vcpu = ExitCounters { kicks: 3, ..Default::default() };
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
        line("# TYPE holdfast_vm_vcpu_exits_total counter".to_owned());
        let samples = text.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(samples, 3 + EXITS.len() + DEVICES.len());
    }
}
