//! What a VMM says of its guest while it runs: numbered events, and counters that only grow.

use serde::{Deserialize, Serialize};

/// Something that happened to a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmEvent {
    /// Its number: the first is 0, each next one higher by one.
    pub number: u64,
    /// Milliseconds since the machine was built.
    pub at_ms: u64,
    /// What happened.
    pub kind: VmEventKind,
    /// The same in words, with the device's name where one is meant; may be empty.
    pub detail: String,
}

/// Kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmEventKind {
    /// The machine's deadline is near: the guest's power button was pressed.
    DeadlineNear,
    /// A device was attached while the guest ran.
    DeviceAttached,
    /// A device was detached while the guest ran.
    DeviceDetached,
    /// A device does not work any more.
    DeviceFailed,
    /// The guest's memory was read out.
    Dumped,
    /// The guest's firmware needs what the machine does not have, and goes no further.
    FirmwareUnsupported,
    /// The guest was sent a non-maskable interrupt.
    Interrupted,
    /// The guest said that its system has failed.
    GuestPanicked,
    /// The guest said that its system has failed and its crash kernel takes over.
    GuestCrashKernel,
    /// vCPUs were stopped for a while.
    Paused,
    /// The guest wants to start anew; the process is about to exit.
    Reset,
    /// vCPUs go on.
    Resumed,
    /// vCPUs began to run.
    Started,
    /// The guest is off; the process is about to exit.
    Stopped,
}

/// What a VMM answers to `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmEvents {
    /// The events, oldest first.
    pub events: Vec<VmEvent>,
    /// Number of the next event: what to ask for as `from`.
    pub next: u64,
    /// Number of the oldest event that is kept.
    pub oldest: u64,
}

/// What a VMM answers to `GET /v1/counters`. All numbers count from the start of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmCounters {
    /// Milliseconds since the machine was built.
    pub uptime_ms: u64,
    /// Virtual CPUs, in order.
    pub vcpus: Vec<ExitCounters>,
    /// Devices whose work passes through this process, by name. One that was detached is gone, and the
    /// next of its kind may have its name.
    pub devices: Vec<DeviceCounters>,
    /// Memory.
    pub memory: MemoryCounters,
}

/// How often a virtual CPU left the guest for this process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCounters {
    /// Reads of I/O ports.
    pub port_reads: u64,
    /// Writes to I/O ports.
    pub port_writes: u64,
    /// Reads of memory that is no RAM.
    pub memory_reads: u64,
    /// Writes to memory that is no RAM.
    pub memory_writes: u64,
    /// Signals from other threads.
    pub kicks: u64,
    /// Locks of the whole memory bus: atomic accesses that cross a cache line, or go to uncached memory.
    /// Such an exit counts as `others` or under its other reason too. 0 where the host does not tell.
    #[serde(default)]
    pub bus_locks: u64,
    /// Everything else.
    pub others: u64,
}

/// What a device did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCounters {
    /// Its name, as `blk0`.
    pub name: String,
    /// Requests that were answered.
    pub requests: u64,
    /// Bytes that the guest was given.
    pub read_bytes: u64,
    /// Bytes that the guest gave.
    pub written_bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Those of them that failed since what the host keeps the data on did.
    #[serde(default)]
    pub media_errors: u64,
    /// Interrupts that were raised by this process.
    pub interrupts: u64,
}

/// Guest memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryCounters {
    /// Bytes that the guest has.
    pub guest_bytes: u64,
    /// Bytes of them for which the host gave pages.
    pub resident_bytes: u64,
}
