//! `openapi.json` describes the members of what is attached, in both directions: each that the type writes, and no
//! other.

use std::collections::BTreeSet;

use serde_json::Value;
use types::{
    devices::{AttachDevice, AttachRequest},
    disk_key::{DiskKey, KEY_BYTES},
    node::Bdf,
    vm::{Deadline, DiskModel, Rate, RateLimit},
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

/// What is asked with has the members that are described, and a request with others is refused.
#[test]
fn the_document_closes_what_is_asked_with() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    for schema in ["AttachRequest", "Deadline", "Power", "Rate", "RateLimit"] {
        assert_eq!(schemas[schema]["additionalProperties"], false, "{schema}");
    }
    let kinds = &schemas["AttachRequest"]["properties"]["device"]["oneOf"];
    for kind in kinds.as_array().expect("kinds") {
        assert_eq!(kind["additionalProperties"], false, "{kind}");
    }
    let more = r#"{"at_boot_ms":1,"grace_ms":0,"more":0}"#;
    assert!(serde_json::from_str::<Deadline>(more).is_err());
}

#[test]
fn the_document_bounds_numbers_as_they_are_read() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    let fields = [
        ("Deadline", "at_boot_ms", 0),
        ("Deadline", "grace_ms", 0),
        ("Rate", "per_second", 1),
        ("Rate", "burst", 0),
    ];
    for (schema, field, least) in fields {
        let described = &schemas[schema]["properties"][field];
        assert_eq!(described["minimum"], least, "{field}");
        assert_eq!(described["maximum"], u64::MAX, "{field}");
    }
    let rate = |per_second: u64| {
        let text = format!(r#"{{"per_second":{per_second},"burst":{}}}"#, u64::MAX);
        serde_json::from_str::<Rate>(&text)
    };
    assert!(rate(0).is_err() && rate(1).is_ok() && rate(u64::MAX).is_ok());
}

#[test]
fn the_document_describes_addresses_of_devices() {
    let document = document();
    let kinds = &document["components"]["schemas"]["AttachRequest"]["properties"]["device"];
    let address = &kinds["oneOf"][0]["properties"]["address"];
    let pattern = r"^[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]$";
    assert_eq!(address["pattern"], pattern);
    assert!("FFff:0a:1F.7".parse::<Bdf>().is_ok());
    assert!("0000:0a:2f.0".parse::<Bdf>().is_err());
}

/// Nothing may be typed, too.
#[test]
fn the_document_leaves_input_of_the_console_free() {
    let document = document();
    let body = &document["paths"]["/v1/console"]["post"]["requestBody"];
    assert_eq!(body["required"], false);
    assert_eq!(members(&body["content"]), BTreeSet::from(["application/octet-stream".to_owned()]));
}
