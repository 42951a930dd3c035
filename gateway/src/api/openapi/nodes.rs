//! Schemas: what is said of nodes, leases and content, and of what went wrong.

use serde::Serialize;
use utoipa::ToSchema;

/// A problem document (RFC 9457).
#[derive(ToSchema)]
pub(super) struct Problem {
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
pub(super) struct NodeView {
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
    attestation: Option<Attestation>,
}

/// What a gateway found when it asked a node to prove what it runs.
#[derive(ToSchema)]
pub(super) struct Attestation {
    /// When it asked, in seconds since 1970.
    at: u64,
    /// The release that the node was started with, by its TPM's word.
    release: Option<String>,
    /// Its TPM: SHA-256 of the endorsement key's public area.
    tpm: Option<String>,
    certificate: Option<TpmCertificate>,
    /// Why it proved none.
    refused: Option<String>,
}

/// What became of the certificate by which a TPM's maker vouches for it.
#[derive(ToSchema, Serialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub(super) enum TpmCertificate {
    Checked {
        /// Name of the authority that vouches for it.
        authority: String,
        /// Maker, model and firmware's version.
        tpm: String,
    },
    /// The node sent none.
    Missing,
    Refused {
        /// What is wrong with it.
        reason: String,
    },
}

/// A question to a node.
#[derive(ToSchema)]
pub(super) struct Challenge {
    /// 32 random bytes, 64 hexadecimal digits; new for each question.
    nonce: String,
    credential: Option<Credential>,
}

/// A secret for one TPM and one key in it (`TPM2_MakeCredential`).
#[derive(ToSchema)]
pub(super) struct Credential {
    /// `TPM2B_ID_OBJECT` without its length, base64.
    blob: String,
    /// `TPM2B_ENCRYPTED_SECRET` without its length, base64.
    secret: String,
}

/// What a node proves by its TPM: a quote over its registers, a digest of the question and the node's name.
#[derive(ToSchema)]
pub(super) struct Evidence {
    /// Public key, 64 hexadecimal digits.
    node: String,
    /// `TPMS_ATTEST`, base64.
    quote: String,
    /// `TPMT_SIGNATURE`, base64.
    signature: String,
    /// `TPMT_PUBLIC`, base64.
    attestation_key: String,
    /// `TPMT_PUBLIC`, base64.
    endorsement_key: String,
    /// The maker's certificate of that key as the TPM keeps it, base64: DER, perhaps with something after it.
    endorsement_certificate: Option<String>,
    /// Certificates of the maker's authorities as the TPM keeps them, base64: DER, one after the other.
    endorsement_chain: Option<String>,
    /// The registers' values by their numbers, hexadecimal digits.
    #[schema(value_type = Object)]
    registers: String,
    /// What was measured of the volumes: JSON.
    volumes: String,
    /// The secret in the credential, hexadecimal digits.
    activated: Option<String>,
    /// The firmware's log of what it measured, base64; nothing signs it but the registers.
    log: Option<String>,
    /// Ed25519 by the node's key, hexadecimal digits.
    node_signature: String,
}

/// A PCI device of a node.
#[derive(ToSchema)]
pub(super) struct PciDevice {
    /// As `0000:01:00.0`.
    address: String,
    vendor: u16,
    device: u16,
    class: u32,
    iommu_group: Option<u32>,
    numa_node: Option<u32>,
    /// Addresses of what it reaches past the IOMMU, as GPUs that it is linked to directly: a lease names all of them.
    /// Left out when there are none.
    #[schema(required = false)]
    linked: Vec<String>,
    /// Whether it says which GPUs of the node reach each other. Left out when it does not.
    #[schema(required = false)]
    fabric: bool,
    state: DeviceState,
}

/// What a node can do with a device now.
#[derive(ToSchema, Serialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub(super) enum DeviceState {
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
pub(super) struct Health {
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
pub(super) struct OpenApiDocument(String);

/// A disk's recovery key as it was sealed to operators.
#[derive(ToSchema)]
pub(super) struct RecoveryKeys {
    keys: Vec<EscrowedKey>,
}

/// A recovery key, sealed to an operator.
#[derive(ToSchema)]
pub(super) struct EscrowedKey {
    /// Public key, 64 hexadecimal digits.
    operator: String,
    /// Base64.
    sealed: String,
}

/// What the node does.
#[derive(ToSchema)]
pub(super) struct Restarting {
    /// `agent`.
    restarting: String,
}

/// What the node does about its updates.
#[derive(ToSchema)]
pub(super) struct Updating {
    /// `apply`, `check`, `forget`, `hold` or `resume`.
    updating: String,
}

/// What the node does with a quarantined device; how it went is what the node then tells of it.
#[derive(ToSchema)]
pub(super) struct Releasing {
    /// The device's address.
    releasing: String,
}

/// A lease that the gateway was shown, and what follows for its renter's content.
#[derive(ToSchema)]
pub(super) struct StandingLease {
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
    /// Bytes that one upload may have.
    content_max_bytes: u64,
    /// Bytes that the renter has here.
    content_used: u64,
}

/// Content that is kept now.
#[derive(ToSchema)]
pub(super) struct StoredContent {
    /// SHA-256, 64 hexadecimal digits.
    content: String,
    bytes: u64,
}

/// Bytes as they are.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
pub(super) struct Octets(Vec<u8>);
