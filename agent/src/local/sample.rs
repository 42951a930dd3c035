//! A node of which everything is known, for tests.

use types::{
    evidence::LastBoot,
    ids::{MachineId, NodeId, PublicKey},
    logs::{Level, LogLine, LogSource},
    node::{DeviceState, MachineShape, PciDevice},
    operations::{DeviceCounters, ExitCounters, VmCounters},
    status::{
        BootPhase, ClockView, DeviceFacts, DeviceView, FreeView, GuestGpus, HostView,
        InterfaceView, LinkErrors, MachineView, MemberView, NetworkView, NodeStatus, OverlayView,
        RefusedReadings, STATUS_VERSION, Setting, Slot, Traffic, Trust, VolumeView, WatchdogView,
    },
    units::{Mebibytes, UnixSeconds},
    updates::{FailedRelease, UpdatesView},
    volumes::{Protection, VolumeReport},
};

use super::metrics::Counted;

/// A name that would clear a terminal, end a label, and be wide.
pub(crate) const HOSTILE: &str = "\u{1b}[2J\u{9b}31m\"}\n\u{202e}name\u{4e2d}\u{0}";

pub(crate) fn machine_id() -> MachineId {
    MachineId::from_bytes([0x5a; 16])
}

pub(crate) fn line(number: u64, level: Level, text: &str) -> LogLine {
    let source = LogSource::Agent;
    LogLine { number, at_ms: 61_234, level, source, machine: None, text: text.to_owned() }
}

pub(crate) fn status() -> NodeStatus {
    NodeStatus {
        version: STATUS_VERSION,
        node: NodeId::from_bytes([0xab; 32]),
        name: "rack 7".into(),
        release: "0.1.0".into(),
        config: "volume /dev/vda".into(),
        settings: vec![
            setting("name", "\"rack 7\"", "volume /dev/vda"),
            setting("machines.grace_s", "10", "default"),
        ],
        serving: true,
        time: UnixSeconds(1_796_083_200),
        uptime_ms: 3_723_456,
        boot: vec![BootPhase { name: "init-ready".into(), at_ms: 912 }],
        install: String::new(),
        claim: String::new(),
        volumes: volumes(),
        trouble: String::new(),
        trust: trust(),
        slot: Slot::Installed,
        updates: updates(),
        clock: ClockView { sources: 2, offset_ms: -12, error: String::new() },
        network: network(),
        overlay: overlay(),
        host: host(),
        devices: devices(),
        missing_devices: vec!["0000:09:00.0".parse().expect("an address")],
        guests: guests(),
        refused_readings: vec![RefusedReadings {
            machine: machine_id(),
            count: 2,
            age_ms: 65_000,
            reason: "the guest sent a reading a moment ago".into(),
        }],
        machines: vec![MachineView {
            id: machine_id(),
            renter: PublicKey::from_bytes([0xcd; 32]),
            state: "running".into(),
            address: Some([10, 77, 0, 2].into()),
            shape: MachineShape {
                vcpus: 8,
                memory_mib: Mebibytes(65_536),
                disk_mib: Mebibytes(102_400),
                devices: vec!["0000:02:00.0".parse().expect("an address")],
                disk_limit: None,
            },
            start: UnixSeconds(1_796_080_000),
            end: UnixSeconds(1_796_090_000),
            last_stop: String::new(),
        }],
        last_boot: LastBoot::default(),
        errors: vec![line(9, Level::Error, "holdfast: event=trouble place=store reason=\"full\"")],
    }
}

fn network() -> NetworkView {
    NetworkView {
        interfaces: vec![InterfaceView {
            name: "eth0".into(),
            hardware: "02:00:00:00:00:01".into(),
            carrier: true,
            mtu: 1500,
            addresses: vec!["203.0.113.15/24".into(), "fe80::1/64".into()],
            traffic: Traffic {
                received_bytes: 5_000_000,
                sent_bytes: 70_000,
                ..Traffic::default()
            },
        }],
        gateways: vec!["203.0.113.1".parse().expect("an address")],
        dns: vec!["203.0.113.3".parse().expect("an address")],
        error: String::new(),
    }
}

fn trust() -> Trust {
    Trust {
        secure_boot: Some(true),
        setup_mode: Some(false),
        lockdown: Some("integrity".into()),
        tpm: Some("2".into()),
        measured: Some("f7".repeat(32)),
        sealed: false,
        notice: "NOT SEALED".into(),
    }
}

fn volumes() -> Vec<VolumeReport> {
    let protection = Protection::Unsealed { reason: "no TPM".into() };
    vec![VolumeReport { name: "holdfast-state".into(), protection }]
}

fn updates() -> UpdatesView {
    UpdatesView {
        state: "ready; waits for machines to end".into(),
        slot: "A".into(),
        offered: "0.2.0".into(),
        trial: false,
        held: true,
        last: "release 0.1.9 failed: no network".into(),
        failed: vec![FailedRelease { release: "0.1.9".into(), reason: "no network".into() }],
        trouble: String::new(),
        checks: 7,
        failed_checks: 1,
        written_bytes: 20_545_024,
        fetched_bytes: 7_340_032,
        volumes: Vec::new(),
    }
}

fn overlay() -> OverlayView {
    let member = |byte: u8, role: &str, neighbour| MemberView {
        node: NodeId::from_bytes([byte; 32]),
        role: role.to_owned(),
        addresses: vec!["198.51.100.7:4600".parse().expect("an address")],
        last_heard_ms: 1500,
        neighbour,
        round_trip_us: Some(23_456),
    };
    OverlayView {
        port: 4600,
        members: 2,
        sent_bytes: 123_456,
        received_bytes: 654_321,
        lost_packets: 3,
        listed: vec![member(1, "gateway", true), member(2, "provider", false)],
    }
}

fn host() -> HostView {
    let volume = |path: &str, kind: &str| VolumeView {
        path: path.to_owned(),
        kind: kind.to_owned(),
        size_bytes: 8 << 30,
        free_bytes: 6 << 30,
    };
    HostView {
        cpus: 64,
        load_milli: 1_070,
        memory_bytes: 512 << 30,
        memory_available_bytes: 400 << 30,
        huge_bytes: 64 << 30,
        huge_free_bytes: 32 << 30,
        agent_bytes: 21 << 20,
        free: FreeView { vcpus: 56, memory_mib: 400_000, disk_mib: 900_000 },
        volumes: vec![volume("/state", "tmpfs"), volume("/data", "ext4")],
        watchdogs: vec![WatchdogView { name: "iTCO_wdt".into(), armed: true, timeout_s: 60 }],
        agent_starts: Some(1),
    }
}

fn devices() -> Vec<DeviceView> {
    let gpu = PciDevice {
        address: "0000:02:00.0".parse().expect("an address"),
        vendor: 0x10de,
        device: 0x2335,
        class: 0x03_0200,
        iommu_group: Some(8),
        numa_node: Some(1),
        linked: vec!["0000:82:00.0".parse().expect("an address")],
        fabric: false,
        state: DeviceState::Leased { machine: machine_id() },
    };
    let facts = DeviceFacts {
        driver: Some("vfio-pci".into()),
        link_mts: Some(2_500),
        link_mts_max: Some(32_000),
        link_width: Some(16),
        link_width_max: Some(16),
        bars: vec![16 << 20, 0, 256 << 30, 0, 32 << 20, 0],
        power_state: Some("D0".into()),
        reset_methods: vec!["flr".into(), "bus".into()],
        link_errors: Some(LinkErrors { correctable: 3, nonfatal: 0, fatal: 0 }),
        serial: Some("1654022000000".into()),
        product: Some("H200".into()),
    };
    let reason = "the uplink eth0".to_owned();
    let nic = PciDevice {
        address: "0000:03:00.0".parse().expect("an address"),
        class: 0x02_0000,
        state: DeviceState::Refused { reason },
        numa_node: None,
        linked: Vec::new(),
        ..gpu.clone()
    };
    vec![
        DeviceView { device: gpu, facts },
        DeviceView { device: nic, facts: DeviceFacts::default() },
    ]
}

pub(crate) fn counted() -> Counted {
    let counters = VmCounters {
        uptime_ms: 4_200,
        vcpus: vec![ExitCounters::default()],
        devices: vec![DeviceCounters { name: "blk0".into(), ..DeviceCounters::default() }],
        ..VmCounters::default()
    };
    Counted {
        lines: vec![(LogSource::Kernel, Level::Info, 812)],
        gaps: 0,
        troubles: vec![("store".into(), 1)],
        events: vec![("agent-ready".into(), 1)],
        machines: vec![(machine_id(), counters)],
        guests: guests(),
    }
}

fn guests() -> Vec<GuestGpus> {
    let reading = crate::gpu::tests::recorded();
    vec![GuestGpus { machine: machine_id(), age_ms: 3_000, reading }]
}

fn setting(key: &str, value: &str, source: &str) -> Setting {
    Setting { key: key.to_owned(), value: value.to_owned(), source: source.to_owned() }
}
