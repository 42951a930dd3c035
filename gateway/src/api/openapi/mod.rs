//! The description of the API in OpenAPI, generated from the declarations below.
//!
//! `lease` keeps the bodies and knows nothing of OpenAPI, which nodes have no use for; the
//! schemas here say the same for readers of the document. `tests/http/document.rs` compares both,
//! and the tests' client compares every answer with what is described here.

#![allow(dead_code, reason = "declarations from which the document is generated")]

mod counters;
mod form;
mod machines;
mod nodes;

use utoipa::OpenApi;

use counters::*;
use machines::*;
use nodes::*;

/// Returns the document.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Description::openapi();
    form::complete(&mut document);
    document
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
        attest,
        release_device,
        recovery_key,
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
        type_in,
        terminal,
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
        Attestation,
        TpmCertificate,
        Challenge,
        Credential,
        Evidence,
        PciDevice,
        DeviceState,
        Health,
        OpenApiDocument,
        Releasing,
        RecoveryKeys,
        EscrowedKey,
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
describe!(attest, post, "/v1/nodes/{id}/attestation", "Asks the node to prove by its TPM which release it runs. Not signed; the client judges the answer itself", (("id" = String, Path)) takes (content = Challenge) answers 200 (body = Evidence));
describe!(release_device, post, "/v1/nodes/{id}/devices/{address}/release", "Resets a quarantined device once more and offers it again if it answers. A drive is erased, with what its last renter wrote. Signed by an operator of the node", (("id" = String, Path), ("address" = String, Path)) answers 202 (body = Releasing));
describe!(recovery_key, get, "/v1/nodes/{id}/recovery-key", "The recovery key of the node's disk, as it was sealed to operators when it was installed. Signed by an operator of the node", (("id" = String, Path)) answers 200 (body = RecoveryKeys));
describe!(restart_agent, post, "/v1/nodes/{id}/restart-agent", "Restarts the node's service; its machines go on. Signed by an operator of the node", (("id" = String, Path)) answers 202 (body = Restarting));
describe!(update, post, "/v1/nodes/{id}/updates/{word}", "Tells the node about its updates: `apply` the offered release now, although machines run on it; `check` the repository now; `forget` which releases failed; `hold` on to what runs until told to `resume`. Signed by an operator of the node", (("id" = String, Path), ("word" = String, Path)) answers 202 (body = Updating));
describe!(show_lease, put, "/v1/leases/{id}", "Shows the gateway a lease of the signer, which opens uploading", (("id" = String, Path)) takes (content = Envelope) answers 200 (body = StandingLease));
describe!(read_content, get, "/v1/content/{sha256}", "Downloads content that the signer uploaded", (("sha256" = String, Path)) answers 200 (body = Octets, content_type = "application/octet-stream"));
describe!(head_content, head, "/v1/content/{sha256}", "Says whether content that the signer uploaded is here", (("sha256" = String, Path)) answers 200 (body = Octets, content_type = "application/octet-stream"));
describe!(write_content, put, "/v1/content/{sha256}", "Uploads content, for a signer whose lease the gateway was shown. The signature covers no content-digest: the path names it. A signer's uploads come one after the other: another one is refused (429) meanwhile", (("sha256" = String, Path)) takes (content = Octets, content_type = "application/octet-stream") answers 201 (body = StoredContent));
describe!(remove_content, delete, "/v1/content/{sha256}", "Removes content that the signer uploaded", (("sha256" = String, Path)) answers 204 ());
describe!(machines, get, "/v1/machines", "Lists the signer's machines; the field holdfast-unreachable-nodes names nodes that did not answer", () answers 200 (body = Vec<Machine>, headers(("holdfast-unreachable-nodes" = String, description = "Nodes that did not answer, if there are some, parted by blanks"))));
describe!(create_machine, post, "/v1/machines", "Makes the machine of a lease, from content that the signer uploaded", (("idempotency-key" = String, Header)) takes (content = CreateMachine) answers 201 (body = Machine, headers(("idempotency-replayed" = String, description = "`true` where the same was answered before under this key: the body tells how the machine was then"))));
describe!(machine, get, "/v1/machines/{id}", "Shows a machine", (("id" = String, Path)) answers 200 (body = Machine));
describe!(delete_machine, delete, "/v1/machines/{id}", "Ends the machine and destroys its disk", (("id" = String, Path)) answers 202 (body = Machine));
describe!(start_machine, post, "/v1/machines/{id}/start", "Starts it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(stop_machine, post, "/v1/machines/{id}/stop", "Asks it to stop, then stops it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(restart_machine, post, "/v1/machines/{id}/restart", "Restarts it", (("id" = String, Path)) answers 202 (body = Machine));
describe!(renew_lease, put, "/v1/machines/{id}/lease", "Brings a lease with a higher serial", (("id" = String, Path)) takes (content = LeaseRenewal) answers 200 (body = Machine));
describe!(console, get, "/v1/machines/{id}/console", "What the console showed; with follow=1, what it shows from then on too; with previous=1, what it showed last before the latest start. Of a machine that is off, the last 64 KiB", (("id" = String, Path), ("follow" = Option<u8>, Query), ("from" = Option<u64>, Query), ("previous" = Option<u8>, Query)) answers 200 (body = Octets, content_type = "application/octet-stream", headers(("holdfast-console-from" = u64, description = "Offset of the first byte of the answer, counted from the guest's start; not with follow=1"), ("holdfast-console-end" = u64, description = "Offset behind the last byte of the answer, which is what to ask for as `from` next; not with follow=1"))));
describe!(type_in, post, "/v1/machines/{id}/console", "Types at the console: all of the body, at most 4,096 bytes, or nothing (429) while the guest does not read what was typed before", (("id" = String, Path)) takes (content = Octets, content_type = "application/octet-stream") answers 204 ());
describe!(terminal, get, "/v1/machines/{id}/terminal", "A WebSocket to the console, to be read and typed at: binary frames both ways, from the client text too. It begins with the last lines so far, as text without control sequences; with `from`, at that byte. What is typed waits for a guest that does not read, and where it cannot wait any longer, a BEL (7) says that it was let go. The close frame's code is 1000 when the machine runs no more and 1011 when its node is gone", (("id" = String, Path), ("from" = Option<u64>, Query)) answers 101 ());
describe!(interrupt_machine, post, "/v1/machines/{id}/nmi", "Sends every virtual CPU an interrupt that cannot be masked", (("id" = String, Path)) answers 200 (body = Machine));
describe!(pause_machine, post, "/v1/machines/{id}/pause", "Makes the guest wait until it is resumed", (("id" = String, Path)) answers 200 (body = Machine));
describe!(resume_machine, post, "/v1/machines/{id}/resume", "Lets the guest go on", (("id" = String, Path)) answers 200 (body = Machine));
describe!(attachments, get, "/v1/machines/{id}/devices", "Lists what is attached while the machine runs, and what is kept", (("id" = String, Path)) answers 200 (body = Attachments));
describe!(attach, post, "/v1/machines/{id}/devices", "Attaches a disk or a device; to a machine that is off, with its next start", (("id" = String, Path)) takes (content = Attach) answers 202 (body = Attachment));
describe!(detach, delete, "/v1/machines/{id}/devices/{name}", "Asks the guest to let go of what was attached; with pull=1, takes it at once; with erase=1, destroys what is kept of a detached disk", (("id" = String, Path), ("name" = String, Path), ("pull" = Option<u8>, Query), ("erase" = Option<u8>, Query)) answers 202 (body = Attachment));
describe!(counters, get, "/v1/machines/{id}/counters", "What the machine's process counted", (("id" = String, Path)) answers 200 (body = Counters));
describe!(events, get, "/v1/machines/{id}/events", "What happened to the guest, from an event's number on", (("id" = String, Path), ("from" = Option<u64>, Query)) answers 200 (body = Events));
describe!(metrics, get, "/v1/machines/{id}/metrics", "The counters as text that Prometheus reads", (("id" = String, Path)) answers 200 (body = String, content_type = "text/plain"));
describe!(dump, post, "/v1/machines/{id}/dump", "Reads registers and memory of the guest, which waits meanwhile: an ELF core file, as long as the memory that the guest has touched and a few pages", (("id" = String, Path)) answers 200 (body = Octets, content_type = "application/x-elf"));
describe!(tunnel, get, "/v1/machines/{id}/tunnel/{port}", "A WebSocket to a TCP port of the guest: binary frames, an empty one ends the client's direction. Its close frame has code 1000 when the guest ended it, and another one when something is missing", (("id" = String, Path), ("port" = u16, Path)) answers 101 ());
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
            return;
        }
        let other = generated.lines().zip(committed.lines()).position(|(new, old)| new != old);
        let line = other.map(|at| at + 1);
        assert!(
            generated == committed,
            "it differs from line {line:?} on (none: in length); run again with HOLDFAST_WRITE_OPENAPI=1"
        );
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
