//! `openapi.json` describes the members of what is attached, in both directions: each that the type writes, and no
//! other.

use std::collections::BTreeSet;

use serde_json::Value;
use types::{
    devices::{AttachDevice, AttachRequest},
    disk_key::{DiskKey, KEY_BYTES},
    vm::{DiskModel, Rate, RateLimit},
};

fn document() -> Value {
    serde_json::from_str(include_str!("../openapi.json")).expect("the document is JSON")
}

fn members(value: &Value) -> BTreeSet<String> {
    value.as_object().expect("an object").keys().cloned().collect()
}

/// A disk with everything.
fn disk() -> AttachDevice {
    let rate = Some(Rate { per_second: 1, burst: 2 });
    AttachDevice::Disk {
        read_only: true,
        serial: "data".into(),
        model: DiskModel::Nvme,
        limit: Some(RateLimit { bytes: rate, operations: rate }),
        key: Some(DiskKey::from_bytes([7; KEY_BYTES])),
    }
}

/// Returns what the document says of a disk in a schema.
fn described<'a>(document: &'a Value, schema: &str) -> &'a Value {
    let device = &document["components"]["schemas"][schema]["properties"]["device"]["oneOf"];
    let disk = device.as_array().expect("kinds").iter();
    let mut disk = disk.filter(|kind| kind["properties"]["kind"]["const"] == "disk");
    &disk.next().expect("a disk")["properties"]
}

#[test]
fn the_document_describes_all_of_a_disk_that_is_attached() {
    let document = document();
    let request = AttachRequest { id: "data".into(), device: disk() };
    let written = serde_json::to_value(&request).expect("plain data");
    assert_eq!(members(described(&document, "AttachRequest")), members(&written["device"]));
    let shown = serde_json::to_value(disk().without_key()).expect("plain data");
    assert_eq!(members(described(&document, "AttachedDevice")), members(&shown));
    let digits = written["device"]["key"].as_str().expect("text").len();
    let pattern = &described(&document, "AttachRequest")["key"]["pattern"];
    assert_eq!(*pattern, format!("^[0-9a-f]{{{digits}}}$"));
}

#[test]
fn the_document_describes_all_of_a_rate_limit() {
    let document = document();
    let written = serde_json::to_value(disk()).expect("plain data");
    let schemas = &document["components"]["schemas"];
    assert_eq!(members(&schemas["RateLimit"]["properties"]), members(&written["limit"]));
    assert_eq!(members(&schemas["Rate"]["properties"]), members(&written["limit"]["bytes"]));
    for schema in ["AttachRequest", "AttachedDevice"] {
        let limit = &described(&document, schema)["limit"]["oneOf"][0]["$ref"];
        assert_eq!(*limit, "#/components/schemas/RateLimit");
    }
}
