//! Schemas: what is said of what a machine did.

use utoipa::ToSchema;

/// What was counted since the machine's process started.
#[derive(ToSchema)]
pub(super) struct Counters {
    uptime_ms: u64,
    /// Virtual CPUs, in order.
    vcpus: Vec<ExitCounters>,
    /// Devices whose work passes through the machine's process.
    devices: Vec<DeviceCounters>,
    memory: MemoryCounters,
}

/// How often a virtual CPU left the guest for the machine's process.
#[derive(ToSchema)]
pub(super) struct ExitCounters {
    port_reads: u64,
    port_writes: u64,
    memory_reads: u64,
    memory_writes: u64,
    kicks: u64,
    /// Locks of the whole memory bus: atomic accesses that cross a cache line, or go to uncached memory.
    /// Such an exit counts under its reason too. 0 where the node's CPUs do not tell.
    bus_locks: u64,
    others: u64,
}

/// What a device did.
#[derive(ToSchema)]
pub(super) struct DeviceCounters {
    /// Kind and order, as `blk0`.
    name: String,
    requests: u64,
    /// Bytes given to the guest.
    read_bytes: u64,
    /// Bytes taken from the guest.
    written_bytes: u64,
    /// Requests that failed.
    errors: u64,
    /// Those of them that failed since what the node keeps the data on did.
    media_errors: u64,
    /// Interrupts raised by the machine's process.
    interrupts: u64,
}

/// Guest memory as it is now.
#[derive(ToSchema)]
pub(super) struct MemoryCounters {
    guest_bytes: u64,
    /// Bytes for which the node gave pages.
    resident_bytes: u64,
}

/// What happened since the machine's process started; the newest 256 are kept.
#[derive(ToSchema)]
pub(super) struct Events {
    events: Vec<Event>,
    /// What to ask for as `from` to get later ones.
    next: u64,
    /// Number of the oldest event that is kept.
    oldest: u64,
}

/// Something that happened to a guest.
#[derive(ToSchema)]
pub(super) struct Event {
    number: u64,
    /// Milliseconds since the machine's process started.
    at_ms: u64,
    kind: EventKind,
    detail: String,
}

/// Kinds of events.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
pub(super) enum EventKind {
    DeadlineNear,
    DeviceAttached,
    DeviceDetached,
    DeviceFailed,
    Dumped,
    FirmwareUnsupported,
    Interrupted,
    GuestPanicked,
    GuestCrashKernel,
    Paused,
    Reset,
    Resumed,
    Started,
    Stopped,
}
