//! Everything that is counted, as text that Prometheus reads. Pure: documents in, text out.
//!
//! Names are an interface: dashboards and alerts use them.

use std::collections::BTreeMap;

use types::{
    ids::MachineId,
    logs::{Level, LogSource},
    node::DeviceState,
    operations::VmCounters,
    status::{GuestGpus, InterfaceView, LinkErrors, NodeStatus},
};

use super::exposition::{Exposition, Metric, Millis};
use crate::{gpu::show, machines::metrics as vm};

/// What is counted beside the status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counted {
    /// Lines of the log, by writer and level.
    pub lines: Vec<(LogSource, Level, u64)>,
    /// How often lines were overwritten before they were read.
    pub gaps: u64,
    /// Failures, by place.
    pub troubles: Vec<(String, u64)>,
    /// Events, by name.
    pub events: Vec<(String, u64)>,
    /// Counters of machines that run.
    pub machines: Vec<(MachineId, VmCounters)>,
    /// What guests say of GPUs, as far as it is counted.
    pub guests: Vec<GuestGpus>,
}

/// States of devices, in the order in which they are shown.
const DEVICE_STATES: [&str; 5] = ["free", "leased", "resetting", "quarantined", "refused"];

/// States of machines.
const MACHINE_STATES: [&str; 5] = ["starting", "running", "stopping", "stopped", "ended"];

/// Roles of members.
const ROLES: [&str; 3] = ["gateway", "provider", "seed"];

/// Returns the text.
pub fn text(status: &NodeStatus, counted: &Counted) -> String {
    let mut out = Exposition::default();
    node(&mut out, status);
    trust(&mut out, status);
    updates(&mut out, status);
    network(&mut out, status);
    overlay(&mut out, status);
    host(&mut out, status);
    devices(&mut out, status);
    links(&mut out, status);
    machines(&mut out, status);
    guests(&mut out, status, counted);
    log(&mut out, counted);
    vm::write(&mut out, &counted.machines);
    out.finish()
}

fn node(out: &mut Exposition, status: &NodeStatus) {
    let id = status.node.to_string();
    out.metric(Metric::gauge("node_info", "Who the node is; always 1."))
        .sample(&[("node", &id), ("name", &status.name), ("release", &status.release)], 1);
    let about = "Whether the node has a configuration that it can use and serves machines.";
    out.number(Metric::gauge("node_serving", about), u8::from(status.serving));
    let about = "The node's time, in seconds since 1970.";
    out.number(Metric::gauge("node_time_seconds", about), status.time.0);
    let about = "Time since the kernel started.";
    out.number(Metric::gauge("node_uptime_seconds", about), Millis(status.uptime_ms));
    let about = "When a part of the node was up first, in seconds since the kernel started.";
    let mut phases = out.metric(Metric::gauge("boot_phase_seconds", about));
    for phase in &status.boot {
        phases.sample(&[("phase", &phase.name)], Millis(phase.at_ms));
    }
    if let Some(starts) = status.host.agent_starts {
        let about = "How often the node service was started since the boot.";
        out.number(Metric::counter("agent_starts_total", about), starts);
    }
    let about = "Independent time sources that agreed at the last poll.";
    out.number(Metric::gauge("clock_sources", about), status.clock.sources);
    let about = "True time minus the node's before it was corrected last.";
    let offset = status.clock.offset_ms;
    let sign = if offset < 0 { "-" } else { "" };
    let text = format!("{sign}{}", Millis(offset.unsigned_abs()));
    out.number(Metric::gauge("clock_offset_seconds", about), text);
}

fn trust(out: &mut Exposition, status: &NodeStatus) {
    let trust = &status.trust;
    let mut said = |name, about, value: Option<bool>| {
        if let Some(value) = value {
            out.number(Metric::gauge(name, about), u8::from(value));
        }
    };
    let about = "Whether the firmware checked signatures; absent where there is no such firmware.";
    said("trust_secure_boot", about, trust.secure_boot);
    let about = "Whether firmware takes keys from anybody; absent where there is no such firmware.";
    said("trust_setup_mode", about, trust.setup_mode);
    let about = "Whether STATE and DATA are sealed to this machine's TPM and to signed releases; unless \
                 holdfast_trust_secure_boot is 1, whoever starts another program on this machine opens them.";
    said("trust_sealed", about, Some(trust.sealed));
    let about = "Whether there is a TPM.";
    said("trust_tpm", about, Some(trust.tpm.is_some()));
    let about = "How a volume of the disk is protected; always 1.";
    let mut volumes = out.metric(Metric::gauge("volume_protection_info", about));
    for volume in &status.volumes {
        volumes.sample(&[("volume", &volume.name), ("protection", volume.protection.name())], 1);
    }
    if let Some(lockdown) = &trust.lockdown {
        let about = "The kernel's lockdown; always 1.";
        out.metric(Metric::gauge("trust_lockdown_info", about)).sample(&[("mode", lockdown)], 1);
    }
}

fn updates(out: &mut Exposition, status: &NodeStatus) {
    let updates = &status.updates;
    let about = "Where the node was started from and which release it is to run; always 1.";
    out.metric(Metric::gauge("update_info", about))
        .sample(&[("slot", &updates.slot), ("offered", &updates.offered)], 1);
    let about = "Whether the running release is on trial.";
    out.number(Metric::gauge("update_trial", about), u8::from(updates.trial));
    let about = "Whether an operator keeps the node on the running release.";
    out.number(Metric::gauge("update_held", about), u8::from(updates.held));
    let about = "Releases that failed on this node and are not tried again.";
    out.number(Metric::gauge("update_failed_releases", about), updates.failed.len());
    let about = "Looks at the repository since the node service started.";
    out.number(Metric::counter("update_checks_total", about), updates.checks);
    let about = "Looks at the repository that failed.";
    out.number(Metric::counter("update_failed_checks_total", about), updates.failed_checks);
    let about = "Bytes of programs written to slots since the node service started.";
    out.number(Metric::counter("update_written_bytes_total", about), updates.written_bytes);
    let about = "Bytes of programs fetched for that: less, when the rest was there already.";
    out.number(Metric::counter("update_fetched_bytes_total", about), updates.fetched_bytes);
}

fn network(out: &mut Exposition, status: &NodeStatus) {
    let interfaces = &status.network.interfaces;
    let about = "An address of an uplink; always 1.";
    let mut addresses = out.metric(Metric::gauge("network_address_info", about));
    for interface in interfaces {
        for address in &interface.addresses {
            addresses.sample(&[("interface", &interface.name), ("address", address)], 1);
        }
    }
    let mut each = |metric, value: fn(&InterfaceView) -> u64| {
        let mut samples = out.metric(metric);
        for interface in interfaces {
            samples.sample(&[("interface", &interface.name)], value(interface));
        }
    };
    let about = "Whether an uplink's cable carries a signal.";
    each(Metric::gauge("network_carrier", about), |one| u64::from(one.carrier));
    let about = "Largest frame payload of an uplink.";
    each(Metric::gauge("network_mtu_bytes", about), |one| u64::from(one.mtu));
    let about = "Bytes received on an uplink.";
    each(Metric::counter("network_received_bytes_total", about), |one| one.traffic.received_bytes);
    let about = "Bytes sent on an uplink.";
    each(Metric::counter("network_sent_bytes_total", about), |one| one.traffic.sent_bytes);
    let about = "Frames received damaged on an uplink.";
    each(Metric::counter("network_receive_errors_total", about), |one| one.traffic.receive_errors);
    let about = "Frames that an uplink could not send.";
    each(Metric::counter("network_send_errors_total", about), |one| one.traffic.send_errors);
    let about = "Frames received on an uplink and thrown away.";
    each(Metric::counter("network_receive_drops_total", about), |one| one.traffic.receive_drops);
}

fn overlay(out: &mut Exposition, status: &NodeStatus) {
    let overlay = &status.overlay;
    let about = "Other members of the overlay that are known.";
    out.number(Metric::gauge("overlay_members", about), overlay.members);
    let neighbours = overlay.listed.iter().filter(|member| member.neighbour);
    let about = "Members with which the node keeps a link, by what they are for.";
    let mut samples = out.metric(Metric::gauge("overlay_neighbours", about));
    for role in ROLES {
        let count = neighbours.clone().filter(|member| member.role == role).count();
        samples.sample(&[("role", role)], count);
    }
    let about = "Time of a round trip to a neighbour.";
    let mut samples = out.metric(Metric::gauge("overlay_round_trip_seconds", about));
    for member in neighbours {
        if let Some(micros) = member.round_trip_us {
            let seconds = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
            samples.sample(&[("member", &member.node.to_string())], seconds);
        }
    }
    let about = "Bytes of datagrams sent to other members.";
    out.number(Metric::counter("overlay_sent_bytes_total", about), overlay.sent_bytes);
    let about = "Bytes of datagrams received from other members.";
    out.number(Metric::counter("overlay_received_bytes_total", about), overlay.received_bytes);
    let about = "Packets to other members that were lost.";
    out.number(Metric::counter("overlay_lost_packets_total", about), overlay.lost_packets);
}

fn host(out: &mut Exposition, status: &NodeStatus) {
    let host = &status.host;
    let load = format!("{}.{:03}", host.load_milli / 1000, host.load_milli % 1000);
    let mut number = |name, about, value: u64| out.number(Metric::gauge(name, about), value);
    number("host_cpus", "Processors of the server.", u64::from(host.cpus));
    number("host_memory_bytes", "Memory of the server.", host.memory_bytes);
    let about = "Memory that could be had now.";
    number("host_memory_available_bytes", about, host.memory_available_bytes);
    number("host_huge_pages_bytes", "Memory set aside as huge pages.", host.huge_bytes);
    number("host_huge_pages_free_bytes", "What of it is free.", host.huge_free_bytes);
    number("agent_memory_bytes", "Memory of the node service.", host.agent_bytes);
    number("free_vcpus", "Virtual processors that can be rented.", u64::from(host.free.vcpus));
    let about = "Memory that can be rented.";
    number("free_memory_bytes", about, host.free.memory_mib.saturating_mul(1 << 20));
    let about = "Disk space that can be rented.";
    number("free_disk_bytes", about, host.free.disk_mib.saturating_mul(1 << 20));
    out.number(Metric::gauge("host_load1", "Load average over a minute."), load);
    let about = "Size of a file system; kind tmpfs is lost at power off.";
    let mut sizes = out.metric(Metric::gauge("volume_size_bytes", about));
    for volume in &host.volumes {
        sizes.sample(&[("path", &volume.path), ("kind", &volume.kind)], volume.size_bytes);
    }
    let mut free = out.metric(Metric::gauge("volume_free_bytes", "Free space of a file system."));
    for volume in &host.volumes {
        free.sample(&[("path", &volume.path), ("kind", &volume.kind)], volume.free_bytes);
    }
    let about = "Whether a watchdog counts.";
    let mut armed = out.metric(Metric::gauge("watchdog_armed", about));
    for watchdog in &host.watchdogs {
        armed.sample(&[("watchdog", &watchdog.name)], u8::from(watchdog.armed));
    }
    let about = "Time without init until a watchdog resets the server.";
    let mut timeouts = out.metric(Metric::gauge("watchdog_timeout_seconds", about));
    for watchdog in &host.watchdogs {
        timeouts.sample(&[("watchdog", &watchdog.name)], watchdog.timeout_s);
    }
}

/// Returns a state's name.
pub fn device_state(state: &DeviceState) -> &'static str {
    match state {
        DeviceState::Free => "free",
        DeviceState::Leased { .. } => "leased",
        DeviceState::Resetting => "resetting",
        DeviceState::Quarantined { .. } => "quarantined",
        DeviceState::Refused { .. } => "refused",
    }
}

fn devices(out: &mut Exposition, status: &NodeStatus) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for view in &status.devices {
        *counts.entry(device_state(&view.device.state)).or_default() += 1;
    }
    let mut samples = out.metric(Metric::gauge("devices", "Devices, by what they do."));
    for state in DEVICE_STATES {
        samples.sample(&[("state", state)], counts.get(state).copied().unwrap_or(0));
    }
    let about = "Devices that the configuration names and the server does not have.";
    out.number(Metric::gauge("devices_missing", about), status.missing_devices.len());
    let about = "A device and what it does; always 1.";
    let mut samples = out.metric(Metric::gauge("device_info", about));
    for view in &status.devices {
        let device = &view.device;
        let id = format!("{:04x}:{:04x}", device.vendor, device.device);
        let class = format!("{:06x}", device.class);
        let facts = &view.facts;
        let word = |word: &Option<String>| word.clone().unwrap_or_default();
        samples.sample(
            &[
                ("device", &device.address.to_string()),
                ("id", &id),
                ("class", &class),
                ("state", device_state(&device.state)),
                ("driver", &word(&facts.driver)),
                ("power", &word(&facts.power_state)),
                ("product", &word(&facts.product)),
                ("serial", &word(&facts.serial)),
            ],
            1,
        );
    }
}

fn links(out: &mut Exposition, status: &NodeStatus) {
    let mut each = |metric, value: fn(&types::status::DeviceFacts) -> Option<u32>| {
        let mut samples = out.metric(metric);
        for view in &status.devices {
            if let Some(value) = value(&view.facts) {
                samples.sample(&[("device", &view.device.address.to_string())], value);
            }
        }
    };
    let about = "Million transfers per second of a device's link now.";
    each(Metric::gauge("device_link_mts", about), |facts| facts.link_mts);
    let about = "The most that a device's link is capable of.";
    each(Metric::gauge("device_link_mts_max", about), |facts| facts.link_mts_max);
    let about = "Lanes of a device's link in use.";
    each(Metric::gauge("device_link_lanes", about), |facts| facts.link_width);
    let about = "Lanes that a device's link has.";
    each(Metric::gauge("device_link_lanes_max", about), |facts| facts.link_width_max);
    let about = "Errors of a device's link since the boot, by severity (AER).";
    let mut samples = out.metric(Metric::counter("device_link_errors_total", about));
    for view in &status.devices {
        let Some(LinkErrors { correctable, nonfatal, fatal }) = view.facts.link_errors else {
            continue;
        };
        let address = view.device.address.to_string();
        for (severity, count) in
            [("correctable", correctable), ("nonfatal", nonfatal), ("fatal", fatal)]
        {
            samples.sample(&[("device", &address), ("severity", severity)], count);
        }
    }
}

fn machines(out: &mut Exposition, status: &NodeStatus) {
    let mut samples = out.metric(Metric::gauge("machines", "Machines, by what they do."));
    for state in MACHINE_STATES {
        let count = status.machines.iter().filter(|machine| machine.state == state).count();
        samples.sample(&[("state", state)], count);
    }
    let about = "First second after a machine's lease, in seconds since 1970.";
    let mut samples = out.metric(Metric::gauge("machine_lease_end_time_seconds", about));
    for machine in &status.machines {
        samples.sample(&[("machine", &machine.id.to_string())], machine.end.0);
    }
    let about = "What a machine does; always 1.";
    let mut samples = out.metric(Metric::gauge("machine_info", about));
    for machine in &status.machines {
        let address = machine.address.map(|address| address.to_string()).unwrap_or_default();
        samples.sample(
            &[
                ("machine", &machine.id.to_string()),
                ("state", &machine.state),
                ("address", &address),
            ],
            1,
        );
    }
}

fn guests(out: &mut Exposition, status: &NodeStatus, counted: &Counted) {
    let ids: Vec<_> = counted.guests.iter().map(|guest| guest.machine.to_string()).collect();
    let told: Vec<_> = ids
        .iter()
        .zip(&counted.guests)
        .map(|(machine, guest)| show::Told { machine, reading: &guest.reading })
        .collect();
    show::metrics(out, &told);
    let about =
        "Time since a machine's guest said what it sees of its GPUs; absent when that is long ago.";
    let mut samples = out.metric(Metric::gauge("gpu_reading_age_seconds", about));
    for guest in &status.guests {
        samples.sample(&[("machine", &guest.machine.to_string())], Millis(guest.age_ms));
    }
    let about = "Readings of a machine's guest that were not taken; its page says why.";
    let mut samples = out.metric(Metric::counter("gpu_readings_refused_total", about));
    for machine in &status.machines {
        let refused = status.refused_readings.iter().find(|refused| refused.machine == machine.id);
        let count = refused.map_or(0, |refused| refused.count);
        samples.sample(&[("machine", &machine.id.to_string())], count);
    }
}

fn log(out: &mut Exposition, counted: &Counted) {
    let about = "Lines of the node's log, by who wrote them and how much they matter.";
    let mut samples = out.metric(Metric::counter("log_lines_total", about));
    for (source, level, count) in &counted.lines {
        samples.sample(&[("source", source.name()), ("level", level.name())], count);
    }
    let about = "Times that lines were overwritten before they were read.";
    out.number(Metric::counter("log_gaps_total", about), counted.gaps);
    let about = "Failures that no machine is to blame for, by place.";
    let mut samples = out.metric(Metric::counter("troubles_total", about));
    for (place, count) in &counted.troubles {
        samples.sample(&[("place", place)], count);
    }
    let about = "Events of the node, by name.";
    let mut samples = out.metric(Metric::counter("events_total", about));
    for (name, count) in &counted.events {
        samples.sample(&[("event", name)], count);
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
