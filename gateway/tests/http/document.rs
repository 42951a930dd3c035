//! The served document says what the bodies are: each schema is compared with real values of the
//! type it describes, in both directions.

use std::{collections::BTreeMap, fmt::Debug};

use gateway::api::bodies::{Health, StandingLease, StoredContent};
use lease::{
    api::{
        Attestation, CreateMachine, Image, LeaseRenewal, Machine, MachineEvent, MachineState,
        NodeView, RecoveryKeys, Releasing, Restarting, Seed, Updating,
    },
    attestation::{Challenge, Credential, Evidence, TpmCertificate},
    document::{Envelope, Signature},
    hardware::{Attach, Hardware, Placement},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use types::{
    forward::Problem,
    ids::{ContentId, MachineId, NodeId, PublicKey},
    node::{Bdf, DeviceState, MachineShape, PciDevice},
    operations::{
        DeviceCounters, ExitCounters, MemoryCounters, VmCounters, VmEvent, VmEventKind, VmEvents,
    },
    units::UnixSeconds,
    vm::{DiskModel, HyperV},
    volumes::EscrowedKey,
};

use super::hardware;
use crate::harness::{
    Serving, create, lease,
    node::{machine, offer, receipts},
    renter,
    schema::{check, document},
    signed_lease,
};

/// A value as JSON, after it went through its type again.
fn real<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: T) -> Value {
    let json = serde_json::to_value(&value).unwrap();
    assert_eq!(serde_json::from_value::<T>(json.clone()).unwrap(), value);
    json
}

fn states() -> Vec<MachineState> {
    use MachineState::{
        Destroyed, Failed, Pending, Retained, Running, Starting, Stopped, Stopping, Warned,
    };
    // A state that is added must be added here: this match is checked to be complete.
    let listed = |state| match state {
        Pending | Starting | Running | Warned | Stopping | Stopped | Failed | Retained
        | Destroyed => state,
    };
    [Pending, Starting, Running, Warned, Stopping, Stopped, Failed, Retained, Destroyed]
        .map(listed)
        .to_vec()
}

fn device_states() -> Vec<DeviceState> {
    use DeviceState::{Free, Leased, Quarantined, Refused, Resetting};
    let listed = |state| match state {
        Free | Leased { .. } | Resetting | Quarantined { .. } | Refused { .. } => state,
    };
    let (machine, reason) = (MachineId::from_bytes([1; 16]), "seen".to_owned());
    let quarantined =
        Quarantined { reason: reason.clone(), since: Some(UnixSeconds(1_700_000_000)) };
    [Free, Leased { machine }, Resetting, quarantined, Refused { reason }].map(listed).to_vec()
}

fn event_kinds() -> Vec<VmEventKind> {
    use VmEventKind::{
        DeadlineNear, DeviceAttached, DeviceDetached, DeviceFailed, Dumped, FirmwareUnsupported,
        GuestCrashKernel, GuestPanicked, Interrupted, Paused, Reset, Resumed, Started, Stopped,
    };
    let listed = |kind| match kind {
        DeadlineNear | DeviceAttached | DeviceDetached | DeviceFailed | Dumped
        | FirmwareUnsupported | GuestCrashKernel | GuestPanicked | Interrupted | Paused | Reset
        | Resumed | Started | Stopped => kind,
    };
    let system = [
        DeadlineNear,
        FirmwareUnsupported,
        GuestCrashKernel,
        GuestPanicked,
        Reset,
        Started,
        Stopped,
    ];
    let others =
        [DeviceAttached, DeviceDetached, DeviceFailed, Dumped, Interrupted, Paused, Resumed];
    system.into_iter().chain(others).map(listed).collect()
}

fn happened(kind: VmEventKind) -> VmEvent {
    VmEvent { number: 3, at_ms: 5, kind, detail: "seen".into() }
}

fn counters() -> VmCounters {
    VmCounters {
        vcpus: vec![ExitCounters::default()],
        devices: vec![DeviceCounters::default()],
        ..VmCounters::default()
    }
}

fn device(state: DeviceState) -> PciDevice {
    PciDevice {
        address: "0000:01:00.0".parse::<Bdf>().unwrap(),
        vendor: 0x10de,
        device: 0x2330,
        class: 0x0003_0200,
        iommu_group: Some(7),
        numa_node: None,
        linked: vec!["0000:02:00.0".parse::<Bdf>().unwrap()],
        fabric: true,
        state,
    }
}

/// A seed with everything.
fn seed() -> Seed {
    Seed {
        hostname: Some("web-1".into()),
        ssh_keys: vec!["ssh-ed25519 AAAA".into()],
        user_data: Some("#cloud-config\n".into()),
    }
}

/// Those that are about hardware.
fn hardware_samples() -> BTreeMap<&'static str, Vec<Value>> {
    BTreeMap::from([
        ("Hardware", vec![real(hardware::chosen()), real(Hardware::default())]),
        ("DiskModel", [DiskModel::VirtioBlk, DiskModel::Nvme].map(real).to_vec()),
        ("Switch", [HyperV::Off, HyperV::On].map(real).to_vec()),
        ("Placement", vec![real(hardware::placement()), real(Placement::default())]),
        ("MemoryPlace", hardware::placement().memory.into_iter().map(real).collect()),
        ("MemoryBacking", hardware::BACKINGS.map(real).to_vec()),
        ("RateLimit", vec![real(hardware::LIMIT)]),
        ("Rate", hardware::LIMIT.bytes.into_iter().map(real).collect()),
        ("Attach", hardware::attached().into_iter().map(real).collect()),
        ("Attachment", hardware::attachments().devices.into_iter().map(real).collect()),
        ("AttachmentState", hardware::states().map(real).to_vec()),
        ("Attachments", vec![real(hardware::attachments())]),
    ])
}

/// A recovery key that was sealed to an operator.
fn escrowed() -> EscrowedKey {
    EscrowedKey { operator: PublicKey::from_bytes([6; 32]), sealed: vec![1, 2] }
}

/// What a gateway found of a node.
fn attestation() -> Attestation {
    let (release, tpm) = (Some("1".to_owned()), Some("ab".repeat(32)));
    let certificate = Some(certificates()[0].clone());
    let refused = Some("no TPM".to_owned());
    Attestation { at: UnixSeconds(1), release, tpm, certificate, refused }
}

/// What becomes of TPMs' certificates.
fn certificates() -> [TpmCertificate; 3] {
    let (authority, tpm) = ("CN=Maker".to_owned(), "IFX".to_owned());
    [
        TpmCertificate::Checked { authority, tpm },
        TpmCertificate::Missing,
        TpmCertificate::Refused { reason: "it ended".to_owned() },
    ]
}

/// Those of what nodes prove.
fn attestation_samples() -> BTreeMap<&'static str, Vec<Value>> {
    let credential = Credential { blob: vec![1], secret: vec![2] };
    let nonce = "ab".repeat(32);
    let open = Challenge { nonce: nonce.clone(), credential: None };
    let whole = Challenge { nonce, credential: Some(credential.clone()) };
    let recorded = include_bytes!("../../../lease/fuzz/corpus/attestation/evidence");
    let evidence: Evidence = serde_json::from_slice(recorded).unwrap();
    let certified = Evidence {
        endorsement_certificate: vec![1],
        endorsement_chain: vec![2],
        log: vec![3],
        ..evidence.clone()
    };
    BTreeMap::from([
        ("Attestation", vec![real(attestation())]),
        ("Challenge", vec![real(whole), real(open)]),
        ("Credential", vec![real(credential)]),
        ("Evidence", vec![real(evidence), real(certified)]),
        ("TpmCertificate", certificates().map(real).to_vec()),
    ])
}

/// Real values for each schema of the document.
fn samples() -> BTreeMap<&'static str, Vec<Value>> {
    let node = NodeId::from_bytes([2; 32]);
    let lease = lease(3, node, &renter(4));
    let wanted: CreateMachine = create(&lease);
    let content = ContentId::from_bytes([5; 32]);
    let image = Image { disk: Some(content), seed: Some(seed()), ..wanted.image.clone() };
    let event = MachineEvent { at: UnixSeconds(1), what: "made".into() };
    let shape = MachineShape {
        devices: vec![device(DeviceState::Free).address],
        disk_limit: Some(hardware::LIMIT),
        ..lease.shape.clone()
    };
    let made = Machine {
        addresses: vec!["10.0.0.2".parse().unwrap()],
        events: vec![event.clone()],
        shape: shape.clone(),
        hardware: hardware::chosen(),
        placement: Some(hardware::placement()),
        ..machine(&lease, image.clone())
    };
    let mut view = NodeView::new(offer(node), vec!["192.0.2.1:4600".parse().unwrap()], 3);
    view.devices = device_states().into_iter().map(device).collect();
    view.attestation = Some(attestation());
    let signature = Signature { keyid: lease.renter, sig: vec![1; 64] };
    let mut all = BTreeMap::from([
        ("Problem", vec![real::<Problem>(lease::problem::Kind::NotFound.because("why"))]),
        ("NodeView", vec![real(view)]),
        ("PciDevice", device_states().into_iter().map(|state| real(device(state))).collect()),
        ("DeviceState", device_states().into_iter().map(real).collect()),
        ("CreateMachine", vec![real(wanted.clone())]),
        ("LeaseRenewal", vec![real(LeaseRenewal { lease: wanted.lease })]),
        ("Envelope", vec![real::<Envelope>(signed_lease(&lease))]),
        ("Signature", vec![real(signature)]),
        ("Image", vec![real(image), real(wanted.image)]),
        ("Seed", vec![real(seed()), real(Seed::default())]),
        ("Machine", vec![real(made)]),
        ("MachineShape", vec![real(shape)]),
        ("MachineEvent", vec![real(event)]),
        ("MachineState", states().into_iter().map(real).collect()),
        ("Receipt", vec![real(receipts(&lease).receipts[0].receipt.clone())]),
        ("SignedReceipt", vec![real(receipts(&lease).receipts[0].clone())]),
        ("Receipts", vec![real(receipts(&lease))]),
        ("RecoveryKeys", vec![real(RecoveryKeys { keys: vec![escrowed()] })]),
        ("EscrowedKey", vec![real(escrowed())]),
        ("Restarting", vec![real(Restarting { restarting: "agent".into() })]),
        ("Updating", vec![real(Updating { updating: "apply".into() })]),
        ("Releasing", vec![real(Releasing { releasing: "0000:41:00.0".into() })]),
        ("Health", vec![real(Health { status: "ok".into(), gateway: node, members: 1, nodes: 1 })]),
        (
            "StandingLease",
            vec![real(StandingLease {
                id: lease.id,
                serial: 1,
                end: lease.end,
                content_until: lease.end,
                content_limit: 2,
                content_max_bytes: 2,
                content_used: 1,
            })],
        ),
        ("StoredContent", vec![real(StoredContent { content, bytes: 9 })]),
        ("OpenApiDocument", vec![document().clone()]),
        // Bytes are no JSON; what is checked of them is their media type.
        ("Octets", vec![json!("")]),
    ]);
    all.extend(hardware_samples());
    all.extend(attestation_samples());
    all.extend(operation_samples());
    all
}

/// Those of what a guest does and did.
fn operation_samples() -> BTreeMap<&'static str, Vec<Value>> {
    BTreeMap::from([
        ("Counters", vec![real(counters())]),
        ("ExitCounters", vec![real(ExitCounters::default())]),
        ("DeviceCounters", vec![real(DeviceCounters::default())]),
        ("MemoryCounters", vec![real(MemoryCounters::default())]),
        ("Event", vec![real(happened(VmEventKind::Started))]),
        (
            "Events",
            vec![real(VmEvents {
                events: event_kinds().into_iter().map(happened).collect(),
                next: 12,
                oldest: 0,
            })],
        ),
        ("EventKind", event_kinds().into_iter().map(real).collect()),
    ])
}

#[test]
fn every_schema_fits_the_values_it_describes() {
    let samples = samples();
    let schemas = document()["components"]["schemas"].as_object().unwrap();
    let described: Vec<_> = schemas.keys().collect();
    let known: Vec<_> = samples.keys().collect();
    assert_eq!(described, known);
    for (name, values) in &samples {
        for value in values {
            check(&schemas[*name], value).unwrap_or_else(|error| panic!("{name}{error}"));
        }
    }
}

#[test]
fn every_described_state_is_a_real_one() {
    let described = &document()["components"]["schemas"]["MachineState"]["enum"];
    let described: Vec<MachineState> = serde_json::from_value(described.clone()).unwrap();
    assert_eq!(described, states());
    let variants = &document()["components"]["schemas"]["DeviceState"]["oneOf"];
    assert_eq!(variants.as_array().unwrap().len(), device_states().len());
}

/// Removes each member of a value in turn, and compares whether the type still reads it with whether the schema calls
/// it required. Then adds one that nobody knows, which is to be refused by both.
fn check_required<T: DeserializeOwned>(schema: &str) {
    let whole = samples()[schema][0].clone();
    let schemas = &document()["components"]["schemas"];
    let described = schemas[schema].clone();
    for name in whole.as_object().unwrap().keys() {
        let mut part = whole.clone();
        part.as_object_mut().unwrap().remove(name);
        let required = described["required"].as_array();
        let required = required.is_some_and(|names| names.contains(&json!(name)));
        let read = serde_json::from_value::<T>(part).is_ok();
        assert_ne!(required, read, "{schema}.{name}");
    }
    let mut more = whole;
    more.as_object_mut().unwrap().insert("unknown".into(), json!(1));
    assert!(serde_json::from_value::<T>(more).is_err(), "{schema}");
    assert_eq!(described["additionalProperties"], false, "{schema}");
}

#[test]
fn what_is_required_of_a_request_is_what_its_type_needs() {
    check_required::<CreateMachine>("CreateMachine");
    check_required::<Hardware>("Hardware");
    check_required::<Image>("Image");
    check_required::<Seed>("Seed");
    check_required::<Envelope>("Envelope");
    check_required::<Signature>("Signature");
    check_required::<LeaseRenewal>("LeaseRenewal");
    check_required::<Challenge>("Challenge");
    check_required::<Credential>("Credential");
}

#[test]
fn what_is_attached_has_no_members_that_nobody_knows() {
    let refused = hardware::attached().map(|device| {
        let mut more = real(device);
        more.as_object_mut().unwrap().insert("unknown".into(), json!(1));
        serde_json::from_value::<Attach>(more).is_err()
    });
    assert_eq!(refused, [true, true]);
    let variants = &document()["components"]["schemas"]["Attach"]["oneOf"];
    assert_eq!(variants[0]["additionalProperties"], false);
    assert_eq!(variants[1]["additionalProperties"], false);
}

#[test]
fn the_comparison_finds_differences() {
    let schema =
        json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}});
    assert!(check(&schema, &json!({"a": 1})).is_ok());
    assert!(check(&schema, &json!({"a": "1"})).is_err());
    assert!(check(&schema, &json!({"a": 1, "b": 2})).is_err());
    assert!(check(&schema, &json!({})).is_err());
    assert!(check(&schema, &json!({"a": null})).is_err());
    assert!(check(&json!({}), &json!(1)).is_err());
    assert!(check(&json!({"pattern": "x"}), &json!("x")).is_err());
    assert!(check(&json!({"enum": ["x"]}), &json!("y")).is_err());
}

#[tokio::test]
async fn the_served_document_is_the_one_that_was_compared() {
    let gateway = Serving::start().await;
    assert_eq!(&gateway.get("/v1/openapi.json").await.json::<Value>(), document());
}
