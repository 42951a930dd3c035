//! Schemas: what is said of machines and what they cost.

use serde::Serialize;
use utoipa::ToSchema;

/// Asks for the machine of a lease.
#[derive(ToSchema)]
pub(super) struct CreateMachine {
    lease: Envelope,
    image: Image,
    #[schema(required = false)]
    hardware: Hardware,
}

/// Brings a later lease of the same machine.
#[derive(ToSchema)]
pub(super) struct LeaseRenewal {
    lease: Envelope,
}

/// A lease in a DSSE v1 envelope.
#[derive(ToSchema)]
pub(super) struct Envelope {
    /// Canonical JSON of the lease, in base64.
    payload: String,
    /// `application/vnd.holdfast.lease+json`.
    #[schema(rename = "payloadType")]
    payload_type: String,
    signatures: Vec<Signature>,
}

/// A signature of an authority.
#[derive(ToSchema)]
pub(super) struct Signature {
    /// Public key, 64 hexadecimal digits.
    keyid: String,
    /// Ed25519 signature in base64.
    sig: String,
}

/// What a machine starts from; each file named by its SHA-256.
#[derive(ToSchema)]
pub(super) struct Image {
    /// Without a kernel, UEFI firmware starts what is on the disk.
    kernel: Option<String>,
    initrd: Option<String>,
    /// What the machine's disk holds at first.
    disk: Option<String>,
    #[schema(required = false)]
    cmdline: String,
    seed: Option<Seed>,
}

/// What cloud-init finds at the first start, on a volume labelled cidata.
#[derive(ToSchema)]
pub(super) struct Seed {
    hostname: Option<String>,
    /// Lines of `authorized_keys` for the image's usual user, each at most 4,096 bytes of UTF-8. Nobody gets them where user data is a cloud-config with `users` of its own and no `default` among them; a configuration for Ignition carries its own.
    #[schema(required = false)]
    ssh_keys: Vec<String>,
    /// Text, not gzip: passed on as it is, at most 131,072 bytes. JSON with `ignition.version` is shown to Ignition, too, by fw_cfg.
    user_data: Option<String>,
}

/// A machine as its node sees it.
#[derive(ToSchema)]
pub(super) struct Machine {
    /// 32 hexadecimal digits, the id of its lease.
    id: String,
    node: String,
    renter: String,
    serial: u64,
    /// Seconds since 1970.
    start: u64,
    /// Seconds since 1970.
    end: u64,
    shape: MachineShape,
    image: Image,
    hardware: Hardware,
    /// Where on the node it is since its latest start.
    placement: Option<Placement>,
    state: MachineState,
    detail: String,
    addresses: Vec<String>,
    /// Seconds since 1970.
    created: u64,
    events: Vec<MachineEvent>,
}

/// Size of a machine.
#[derive(ToSchema)]
pub(super) struct MachineShape {
    vcpus: u32,
    memory_mib: u64,
    disk_mib: u64,
    /// PCI addresses on the node.
    devices: Vec<String>,
    /// Most that its disks move together, if that is bounded.
    #[schema(required = false, nullable = false)]
    disk_limit: Option<RateLimit>,
}

/// Most that disks may move; reads and writes count together.
#[derive(ToSchema)]
pub(super) struct RateLimit {
    /// Bytes, if they are bounded.
    bytes: Option<Rate>,
    /// Requests of any size, if they are bounded.
    operations: Option<Rate>,
}

/// A steady rate, and what may be saved up for a burst.
#[derive(ToSchema)]
pub(super) struct Rate {
    per_second: u64,
    burst: u64,
}

/// What is chosen of a machine's hardware.
#[derive(ToSchema)]
pub(super) struct Hardware {
    #[schema(required = false)]
    disk_model: DiskModel,
    /// Whether the guest finds the interfaces that Windows knows from Hyper-V.
    #[schema(required = false)]
    hyperv: Switch,
    /// Size of the machine's own disk; all of the lease's disk space unless given.
    disk_mib: Option<u64>,
    /// Empty ports for disks that are attached while the machine runs, at most 8.
    #[schema(required = false)]
    spare_ports: u8,
    /// Devices of the lease that are attached later, by address.
    #[schema(required = false)]
    plugged_later: Vec<String>,
}

/// What the guest sees a disk as.
#[derive(ToSchema, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DiskModel {
    VirtioBlk,
    Nvme,
}

/// Whether something is there.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
pub(super) enum Switch {
    Off,
    On,
}

/// Where on its node a machine is.
#[derive(ToSchema)]
pub(super) struct Placement {
    /// Host CPU of each virtual one, which no other machine was promised; empty when they run
    /// anywhere.
    cpus: Vec<u32>,
    /// Where memory comes from, in the order of its addresses.
    memory: Vec<MemoryPlace>,
    /// NUMA nodes that the guest sees; 0 when it is told of none.
    numa_nodes: u32,
    /// `cdev` or `group`: the kernel's interface for the devices, when there are any.
    interface: Option<String>,
    /// Whether devices reach each other's memory.
    peer_to_peer: bool,
    /// GPUs whose driver is told that they reach each other directly, by address.
    cliques: Vec<Vec<String>>,
    /// What is not as it would be best, and why.
    notes: Vec<String>,
}

/// Memory of one kind and place.
#[derive(ToSchema)]
pub(super) struct MemoryPlace {
    /// NUMA node of the host; none for wherever there is room.
    node: Option<u32>,
    memory_mib: u64,
    backing: MemoryBacking,
}

/// What memory is made of.
#[derive(ToSchema)]
pub(super) enum MemoryBacking {
    #[schema(rename = "memfd")]
    Memfd,
    #[schema(rename = "hugetlb-2m")]
    Hugetlb2M,
    #[schema(rename = "hugetlb-1g")]
    Hugetlb1G,
}

/// What is attached.
#[derive(ToSchema, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub(super) enum Attach {
    Disk {
        /// 1 to 20 lower-case letters, digits and hyphens.
        name: String,
        /// Size of a new disk, out of the lease's disk space.
        size_mib: Option<u64>,
        #[schema(required = false)]
        model: DiskModel,
        /// SHA-256 of what is on it at first; without a size, it can only be read.
        content: Option<String>,
    },
    Pci {
        /// A device that `hardware.plugged_later` names.
        address: String,
    },
}

/// Something that is attached, or was and is kept.
#[derive(ToSchema)]
pub(super) struct Attachment {
    /// Name by which it is detached and attached again.
    id: String,
    device: Attach,
    state: AttachmentState,
    detail: String,
}

/// How far an attachment is.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
pub(super) enum AttachmentState {
    Pending,
    Waiting,
    Attached,
    Leaving,
    Detached,
    Failed,
}

/// Everything that is attached to a machine.
#[derive(ToSchema)]
pub(super) struct Attachments {
    devices: Vec<Attachment>,
}

/// What a machine does.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
pub(super) enum MachineState {
    Pending,
    Starting,
    Running,
    Warned,
    Stopping,
    Stopped,
    Failed,
    Retained,
    Destroyed,
}

/// Something that happened to a machine.
#[derive(ToSchema)]
pub(super) struct MachineEvent {
    at: u64,
    what: String,
}

/// What a machine used, oldest first.
#[derive(ToSchema)]
pub(super) struct Receipts {
    receipts: Vec<SignedReceipt>,
    /// What to ask for as `after` to get the next ones; none when these are the last.
    next: Option<u64>,
}

/// A receipt and its node's signature.
#[derive(ToSchema)]
pub(super) struct SignedReceipt {
    receipt: Receipt,
    /// Ed25519 signature by the node, in hexadecimal, over DSSE's pre-authentication encoding of
    /// `application/vnd.holdfast.receipt+json` and the receipt's canonical JSON.
    signature: String,
}

/// What a machine used from one time to another.
#[derive(ToSchema)]
pub(super) struct Receipt {
    /// Id of lease and machine.
    lease: String,
    serial: u64,
    node: String,
    /// First second, since 1970.
    from: u64,
    /// First second after it, since 1970.
    to: u64,
    /// Seconds in between in which the machine ran.
    running_s: u64,
    /// What that costs, in millionths of the unit.
    micro: u64,
    unit: String,
}
