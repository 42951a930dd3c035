//! The description of the API in OpenAPI, generated from the declarations below.
//!
//! `lease` keeps the bodies and knows nothing of OpenAPI, which nodes have no use for; the
//! schemas here say the same for readers of the document. `tests/http/document.rs` compares both,
//! and the tests' client compares every answer with what is described here.

#![allow(dead_code, reason = "declarations from which the document is generated")]

use serde::Serialize;
use utoipa::{OpenApi, ToSchema};

/// Returns the document.
pub fn document() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Holdfast gateway",
        version = "1",
        description = "Rents machines on provider nodes. Requests about machines are signed by the renter's Ed25519 key: RFC 9421 over \"@method\" \"@path\" \"@query\", \"content-digest\" (RFC 9530, when there is a body) and \"idempotency-key\" (when given), with created, nonce, keyid (hexadecimal public key) and alg=\"ed25519\". Every error is a problem document (RFC 9457)."
    ),
    paths(
        health,
        openapi,
        nodes,
        node,
        release_device,
        restart_agent,
        update,
        read_content,
        head_content,
        write_content,
        remove_content,
        show_lease,
        machines,
        create_machine,
        machine,
        delete_machine,
        start_machine,
        stop_machine,
        restart_machine,
        renew_lease,
        receipts,
        console,
        interrupt_machine,
        pause_machine,
        resume_machine,
        attachments,
        attach,
        detach,
        counters,
        events,
        metrics,
        dump,
        tunnel
    ),
    components(schemas(
        Problem,
        NodeView,
        PciDevice,
        DeviceState,
        Health,
        OpenApiDocument,
        Releasing,
        Restarting,
        Updating,
        StandingLease,
        StoredContent,
        Octets,
        CreateMachine,
        LeaseRenewal,
        Envelope,
        Signature,
        Image,
        Seed,
        Hardware,
        DiskModel,
        Switch,
        Placement,
        MemoryPlace,
        MemoryBacking,
        Attach,
        Attachment,
        AttachmentState,
        Attachments,
        RateLimit,
        Rate,
        Machine,
        MachineShape,
        MachineEvent,
        MachineState,
        Receipts,
        SignedReceipt,
        Receipt,
        Counters,
        ExitCounters,
        DeviceCounters,
        MemoryCounters,
        Events,
        Event,
        EventKind
    ))
)]
struct Description;

/// A problem document (RFC 9457).
#[derive(ToSchema)]
struct Problem {
    /// Names the kind of problem, as `/problems/not-found`.
    r#type: String,
    /// The same sentence for all problems of this kind.
    title: String,
    /// HTTP status.
    status: u16,
    /// What was wrong, where, and what would be right.
    detail: String,
}

/// A node and what it offers.
#[derive(ToSchema)]
struct NodeView {
    /// Public key, 64 hexadecimal digits.
    node: String,
    name: String,
    release: String,
    /// Seconds since 1970.
    issued: u64,
    /// Seconds since 1970.
    expires: u64,
    vcpus: u32,
    memory_mib: u64,
    disk_mib: u64,
    devices: Vec<PciDevice>,
    /// UDP addresses.
    addresses: Vec<String>,
    last_heard_s: u64,
}

/// A PCI device of a node.
#[derive(ToSchema)]
struct PciDevice {
    /// As `0000:01:00.0`.
    address: String,
    vendor: u16,
    device: u16,
    class: u32,
    iommu_group: Option<u32>,
    numa_node: Option<u32>,
    state: DeviceState,
}

/// What a node can do with a device now.
#[derive(ToSchema, Serialize)]
#[serde(rename_all = "snake_case", tag = "is")]
enum DeviceState {
    Free,
    Leased {
        machine: String,
    },
    Resetting,
    /// The reset failed, or the device does not answer.
    Quarantined {
        reason: String,
        /// When, in Unix seconds by the node's clock.
        since: Option<u64>,
    },
    /// The host needs it or something in its IOMMU group.
    Refused {
        reason: String,
    },
}

/// That the gateway runs, and what it sees.
#[derive(ToSchema)]
struct Health {
    /// `ok`.
    status: String,
    /// Public key, 64 hexadecimal digits.
    gateway: String,
    members: u64,
    nodes: u64,
}

/// An OpenAPI 3.1 document.
#[derive(ToSchema)]
#[schema(value_type = Object)]
struct OpenApiDocument(String);

/// What the node does.
#[derive(ToSchema)]
struct Restarting {
    /// `agent`.
    restarting: String,
}

/// What the node does about its updates.
#[derive(ToSchema)]
struct Updating {
    /// `apply`, `check` or `forget`.
    updating: String,
}

/// What the node does with a quarantined device; how it went is what the node then tells of it.
#[derive(ToSchema)]
struct Releasing {
    /// The device's address.
    releasing: String,
}

/// A lease that the gateway was shown, and what follows for its renter's content.
#[derive(ToSchema)]
struct StandingLease {
    /// 32 hexadecimal digits.
    id: String,
    /// The highest that was shown.
    serial: u64,
    /// Seconds since 1970.
    end: u64,
    /// Until when the renter's content is kept, in seconds since 1970.
    content_until: u64,
    /// Bytes that the renter may have here.
    content_limit: u64,
    /// Bytes that the renter has here.
    content_used: u64,
}

/// Content that is kept now.
#[derive(ToSchema)]
struct StoredContent {
    /// SHA-256, 64 hexadecimal digits.
    content: String,
    bytes: u64,
}

/// Bytes as they are.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
struct Octets(Vec<u8>);

/// Asks for the machine of a lease.
#[derive(ToSchema)]
struct CreateMachine {
    lease: Envelope,
    image: Image,
    #[schema(required = false)]
    hardware: Hardware,
}

/// Brings a later lease of the same machine.
#[derive(ToSchema)]
struct LeaseRenewal {
    lease: Envelope,
}

/// A lease in a DSSE v1 envelope.
#[derive(ToSchema)]
struct Envelope {
    /// Canonical JSON of the lease, in base64.
    payload: String,
    /// `application/vnd.holdfast.lease+json`.
    #[schema(rename = "payloadType")]
    payload_type: String,
    signatures: Vec<Signature>,
}

/// A signature of an authority.
#[derive(ToSchema)]
struct Signature {
    /// Public key, 64 hexadecimal digits.
    keyid: String,
    /// Ed25519 signature in base64.
    sig: String,
}

/// What a machine starts from; each file named by its SHA-256.
#[derive(ToSchema)]
struct Image {
    /// Without a kernel, UEFI firmware starts what is on the disk.
    kernel: Option<String>,
    initrd: Option<String>,
    /// What the machine's disk holds at first.
    disk: Option<String>,
    #[schema(required = false)]
    cmdline: String,
    seed: Option<Seed>,
}

/// What cloud-init finds at the first start, on a volume labelled CIDATA.
#[derive(ToSchema)]
struct Seed {
    hostname: Option<String>,
    /// Lines of `authorized_keys` for the image's usual user.
    #[schema(required = false)]
    ssh_keys: Vec<String>,
    /// Passed on as it is.
    user_data: Option<String>,
}

/// A machine as its node sees it.
#[derive(ToSchema)]
struct Machine {
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
struct MachineShape {
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
struct RateLimit {
    /// Bytes, if they are bounded.
    bytes: Option<Rate>,
    /// Requests of any size, if they are bounded.
    operations: Option<Rate>,
}

/// A steady rate, and what may be saved up for a burst.
#[derive(ToSchema)]
struct Rate {
    per_second: u64,
    burst: u64,
}

/// What is chosen of a machine's hardware.
#[derive(ToSchema)]
struct Hardware {
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
enum DiskModel {
    VirtioBlk,
    Nvme,
}

/// Whether something is there.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
enum Switch {
    Off,
    On,
}

/// Where on its node a machine is.
#[derive(ToSchema)]
struct Placement {
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
struct MemoryPlace {
    /// NUMA node of the host; none for wherever there is room.
    node: Option<u32>,
    memory_mib: u64,
    backing: MemoryBacking,
}

/// What memory is made of.
#[derive(ToSchema)]
enum MemoryBacking {
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
enum Attach {
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
struct Attachment {
    /// Name by which it is detached and attached again.
    id: String,
    device: Attach,
    state: AttachmentState,
    detail: String,
}

/// How far an attachment is.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
enum AttachmentState {
    Pending,
    Waiting,
    Attached,
    Leaving,
    Detached,
    Failed,
}

/// Everything that is attached to a machine.
#[derive(ToSchema)]
struct Attachments {
    devices: Vec<Attachment>,
}

/// What a machine does.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
enum MachineState {
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
struct MachineEvent {
    at: u64,
    what: String,
}

/// What a machine used, oldest first.
#[derive(ToSchema)]
struct Receipts {
    receipts: Vec<SignedReceipt>,
    /// What to ask for as `after` to get the next ones; none when these are the last.
    next: Option<u64>,
}

/// A receipt and its node's signature.
#[derive(ToSchema)]
struct SignedReceipt {
    receipt: Receipt,
    /// Ed25519 signature by the node, in hexadecimal, over DSSE's pre-authentication encoding of
    /// `application/vnd.holdfast.receipt+json` and the receipt's canonical JSON.
    signature: String,
}

/// What a machine used from one time to another.
#[derive(ToSchema)]
struct Receipt {
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

/// What was counted since the machine's process started.
#[derive(ToSchema)]
struct Counters {
    uptime_ms: u64,
    /// Virtual CPUs, in order.
    vcpus: Vec<ExitCounters>,
    /// Devices whose work passes through the machine's process.
    devices: Vec<DeviceCounters>,
    memory: MemoryCounters,
}

/// How often a virtual CPU left the guest for the machine's process.
#[derive(ToSchema)]
struct ExitCounters {
    port_reads: u64,
    port_writes: u64,
    memory_reads: u64,
    memory_writes: u64,
    kicks: u64,
    others: u64,
}

/// What a device did.
#[derive(ToSchema)]
struct DeviceCounters {
    /// Kind and order, as `blk0`.
    name: String,
    requests: u64,
    /// Bytes given to the guest.
    read_bytes: u64,
    /// Bytes taken from the guest.
    written_bytes: u64,
    /// Requests that failed.
    errors: u64,
    /// Interrupts raised by the machine's process.
    interrupts: u64,
}

/// Guest memory as it is now.
#[derive(ToSchema)]
struct MemoryCounters {
    guest_bytes: u64,
    /// Bytes for which the node gave pages.
    resident_bytes: u64,
}

/// What happened since the machine's process started; the newest 256 are kept.
#[derive(ToSchema)]
struct Events {
    events: Vec<Event>,
    /// What to ask for as `from` to get later ones.
    next: u64,
    /// Number of the oldest event that is kept.
    oldest: u64,
}

/// Something that happened to a guest.
#[derive(ToSchema)]
struct Event {
    number: u64,
    /// Milliseconds since the machine's process started.
    at_ms: u64,
    kind: EventKind,
    detail: String,
}

/// Kinds of events.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
enum EventKind {
    DeviceAttached,
    DeviceDetached,
    DeviceFailed,
    Dumped,
    Interrupted,
    GuestPanicked,
    GuestCrashKernel,
    Paused,
    Reset,
    Resumed,
    Started,
    Stopped,
}

macro_rules! describe {
    ($name:ident, $method:ident, $path:literal, $summary:literal, ($($parameters:tt)*) $(takes ($($body:tt)*))? answers $status:literal ($($answer:tt)*)) => {
        #[utoipa::path($method, path = $path, summary = $summary, params($($parameters)*),
            $(request_body($($body)*),)?
            responses((status = $status, description = $summary, $($answer)*),
                (status = "4XX", description = "The caller's mistake", body = Problem, content_type = "application/problem+json"),
                (status = "5XX", description = "A failure here or at the node", body = Problem, content_type = "application/problem+json")))]
        fn $name() {}
    };
}

describe!(health, get, "/v1/healthz", "Says that the gateway runs", () answers 200 (body = Health));
describe!(openapi, get, "/v1/openapi.json", "This document", () answers 200 (body = OpenApiDocument));
describe!(nodes, get, "/v1/nodes", "Lists the nodes that offer machines", () answers 200 (body = Vec<NodeView>));
describe!(node, get, "/v1/nodes/{id}", "Shows a node", (("id" = String, Path)) answers 200 (body = NodeView));
describe!(release_device, post, "/v1/nodes/{id}/devices/{address}/release", "Resets a quarantined device once more and offers it again if it answers. Signed by an operator of the node", (("id" = String, Path), ("address" = String, Path)) answers 202 (body = Releasing));
describe!(restart_agent, post, "/v1/nodes/{id}/restart-agent", "Restarts the node's service; its machines go on. Signed by an operator of the node", (("id" = String, Path)) answers 202 (body = Restarting));
describe!(update, post, "/v1/nodes/{id}/updates/{word}", "Tells the node about its updates: `apply` the offered release now, although machines run on it; `check` the repository now; `forget` which releases failed. Signed by an operator of the node", (("id" = String, Path), ("word" = String, Path)) answers 202 (body = Updating));
describe!(show_lease, put, "/v1/leases/{id}", "Shows the gateway a lease of the signer, which opens uploading", (("id" = String, Path)) takes (content = Envelope) answers 200 (body = StandingLease));
describe!(read_content, get, "/v1/content/{sha256}", "Downloads content that the signer uploaded", (("sha256" = String, Path)) answers 200 (body = Octets, content_type = "application/octet-stream"));
describe!(head_content, head, "/v1/content/{sha256}", "Says whether content that the signer uploaded is here", (("sha256" = String, Path)) answers 200 (body = Octets, content_type = "application/octet-stream"));
describe!(write_content, put, "/v1/content/{sha256}", "Uploads content, for a signer whose lease the gateway was shown. The signature covers no content-digest: the path names it", (("sha256" = String, Path)) takes (content = Octets, content_type = "application/octet-stream") answers 201 (body = StoredContent));
describe!(remove_content, delete, "/v1/content/{sha256}", "Removes content that the signer uploaded", (("sha256" = String, Path)) answers 204 ());
describe!(machines, get, "/v1/machines", "Lists the signer's machines; the field holdfast-unreachable-nodes names nodes that did not answer", () answers 200 (body = Vec<Machine>));
describe!(create_machine, post, "/v1/machines", "Makes the machine of a lease, from content that the signer uploaded", (("idempotency-key" = String, Header)) takes (content = CreateMachine) answers 201 (body = Machine));
describe!(machine, get, "/v1/machines/{id}", "Shows a machine", (("id" = String, Path)) answers 200 (body = Machine));
describe!(delete_machine, delete, "/v1/machines/{id}", "Ends the machine and destroys its disk", (("id" = String, Path)) answers 202 (body = Machine));
describe!(start_machine, post, "/v1/machines/{id}/start", "Starts it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(stop_machine, post, "/v1/machines/{id}/stop", "Asks it to stop, then stops it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(restart_machine, post, "/v1/machines/{id}/restart", "Restarts it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(renew_lease, put, "/v1/machines/{id}/lease", "Brings a lease with a higher serial", (("id" = String, Path)) takes (content = LeaseRenewal) answers 200 (body = Machine));
describe!(console, get, "/v1/machines/{id}/console", "What the console showed; with follow=1, what it shows from then on too; with previous=1, what it showed last before the latest start. Of a machine that is off, the last 64 KiB", (("id" = String, Path), ("follow" = Option<u8>, Query), ("from" = Option<u64>, Query), ("previous" = Option<u8>, Query)) answers 200 (body = Octets, content_type = "application/octet-stream"));
describe!(interrupt_machine, post, "/v1/machines/{id}/nmi", "Sends every virtual CPU an interrupt that cannot be masked", (("id" = String, Path)) answers 200 (body = Machine));
describe!(pause_machine, post, "/v1/machines/{id}/pause", "Makes the guest wait until it is resumed", (("id" = String, Path)) answers 200 (body = Machine));
describe!(resume_machine, post, "/v1/machines/{id}/resume", "Lets the guest go on", (("id" = String, Path)) answers 200 (body = Machine));
describe!(attachments, get, "/v1/machines/{id}/devices", "Lists what is attached while the machine runs, and what is kept", (("id" = String, Path)) answers 200 (body = Attachments));
describe!(attach, post, "/v1/machines/{id}/devices", "Attaches a disk or a device; to a machine that is off, with its next start", (("id" = String, Path)) takes (content = Attach) answers 202 (body = Attachment));
describe!(detach, delete, "/v1/machines/{id}/devices/{name}", "Asks the guest to let go of what was attached; with pull=1, takes it at once; with erase=1, destroys what is kept of a detached disk", (("id" = String, Path), ("name" = String, Path), ("pull" = Option<u8>, Query), ("erase" = Option<u8>, Query)) answers 202 (body = Attachment));
describe!(counters, get, "/v1/machines/{id}/counters", "What the machine's process counted", (("id" = String, Path)) answers 200 (body = Counters));
describe!(events, get, "/v1/machines/{id}/events", "What happened to the guest, from an event's number on", (("id" = String, Path), ("from" = Option<u64>, Query)) answers 200 (body = Events));
describe!(metrics, get, "/v1/machines/{id}/metrics", "The counters as text that Prometheus reads", (("id" = String, Path)) answers 200 (body = String, content_type = "text/plain"));
describe!(dump, post, "/v1/machines/{id}/dump", "Reads registers and memory of the guest, which waits meanwhile: an ELF core file, as long as the memory and a few pages", (("id" = String, Path)) answers 200 (body = Octets, content_type = "application/x-elf"));
describe!(tunnel, get, "/v1/machines/{id}/tunnel/{port}", "A WebSocket to a TCP port of the guest: binary frames, an empty one ends the client's direction", (("id" = String, Path), ("port" = u16, Path)) answers 101 ());
describe!(receipts, get, "/v1/machines/{id}/receipts", "What the machine used, signed by its node; receipts outlive their machine", (("id" = String, Path), ("after" = Option<u64>, Query)) answers 200 (body = Receipts));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::routes;

    #[test]
    fn committed_copy_is_the_generated_one() {
        let generated = document().to_pretty_json().expect("plain data") + "\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        if std::env::var_os("HOLDFAST_WRITE_OPENAPI").is_some() {
            std::fs::write(path, &generated).expect("written");
        } else {
            assert_eq!(generated, committed, "run again with HOLDFAST_WRITE_OPENAPI=1");
        }
    }

    #[test]
    fn every_described_path_has_a_route() {
        let json = serde_json::to_value(document()).expect("plain data");
        let digits = "00112233445566778899aabbccddeeff";
        for (path, methods) in json["paths"].as_object().expect("paths") {
            let long = format!("{digits}{digits}");
            let id = if path.contains("/nodes/") { long.as_str() } else { digits };
            let fill = |segment: &str| match segment.trim_matches(['{', '}']) {
                "id" => id.to_owned(),
                "sha256" => long.clone(),
                "port" => "22".to_owned(),
                plain => plain.to_owned(),
            };
            let concrete: Vec<String> = path.split('/').map(fill).collect();
            let concrete = concrete.join("/");
            for method in methods.as_object().expect("methods").keys() {
                let route = routes::route(&method.to_uppercase(), &concrete);
                assert!(route.is_ok(), "{method} {path}: {route:?}");
            }
        }
    }
}
