//! What holds of many operations alike: who has to sign, and the form of what stands in paths, queries and bodies.

use serde_json::json;
use utoipa::openapi::{
    OpenApi, PathItem, RefOr, Schema, Server,
    path::{Operation, Parameter},
    schema::{AdditionalProperties, ArrayItems},
    security::{ApiKey, ApiKeyValue, SecurityRequirement, SecurityScheme},
};

/// Paths and methods that anybody may ask, unsigned.
const OPEN: [(&str, &str); 5] = [
    ("/v1/healthz", "GET"),
    ("/v1/nodes", "GET"),
    ("/v1/nodes/{id}", "GET"),
    ("/v1/nodes/{id}/attestation", "POST"),
    ("/v1/openapi.json", "GET"),
];

/// The fields of a signature (RFC 9421 §4), which come together.
const FIELDS: [&str; 2] = ["signature-input", "signature"];

/// The words of `/v1/nodes/{id}/updates/{word}`.
const WORDS: [&str; 5] = ["apply", "check", "forget", "hold", "resume"];

/// A key, or SHA-256 of something: 32 bytes.
const HEX: &str = "^[0-9a-f]{64}$";

/// Base64 with padding (RFC 4648 §4) in which no bit is left over (§3.5).
const BASE64: &str =
    "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$";

/// Address of a PCI device.
const ADDRESS: &str = "^[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\\.[0-7]$";

/// What is sent: objects that may have no other members than those that are described.
const CLOSED: [&str; 10] = [
    "Attach",
    "Challenge",
    "CreateMachine",
    "Credential",
    "Envelope",
    "Hardware",
    "Image",
    "LeaseRenewal",
    "Seed",
    "Signature",
];

/// Members of those that are texts of a form, or lists of such texts.
const TEXTS: [(&str, &str, &str); 12] = [
    ("Attach", "address", ADDRESS),
    ("Attach", "content", HEX),
    ("Challenge", "nonce", HEX),
    ("Credential", "blob", BASE64),
    ("Credential", "secret", BASE64),
    ("Envelope", "payload", BASE64),
    ("Hardware", "plugged_later", ADDRESS),
    ("Image", "disk", HEX),
    ("Image", "initrd", HEX),
    ("Image", "kernel", HEX),
    ("Signature", "keyid", HEX),
    ("Signature", "sig", BASE64),
];

/// Adds all this to a description.
pub(super) fn complete(document: &mut OpenApi) {
    document.servers = Some(vec![Server::new("/")]);
    let components = document.components.get_or_insert_default();
    for name in FIELDS {
        let mut field = ApiKeyValue::new(name);
        field.description = Some(format!("Field {name} of RFC 9421, as the description says"));
        components.add_security_scheme(name, SecurityScheme::ApiKey(ApiKey::Header(field)));
    }
    for (name, schema) in &mut components.schemas {
        if CLOSED.contains(&name.as_str()) {
            close(name, schema);
        }
    }
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            operation.security = Some(if OPEN.contains(&(path, method)) {
                Vec::new()
            } else {
                let scopes: [&str; 0] = [];
                let [input, signature] = FIELDS;
                vec![SecurityRequirement::new(input, scopes).add(signature, scopes)]
            });
            for parameter in operation.parameters.iter_mut().flatten() {
                shape(path, parameter);
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let all = [
        ("DELETE", &mut item.delete),
        ("GET", &mut item.get),
        ("HEAD", &mut item.head),
        ("POST", &mut item.post),
        ("PUT", &mut item.put),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// Says what of an object's members, or of its variants', is taken.
fn close(name: &str, schema: &mut RefOr<Schema>) {
    let RefOr::T(schema) = schema else { return };
    if let Schema::OneOf(variants) = schema {
        variants.items.iter_mut().for_each(|variant| close(name, variant));
        return;
    }
    let Schema::Object(object) = schema else { return };
    object.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
    for (_, member, pattern) in TEXTS.into_iter().filter(|(owner, ..)| *owner == name) {
        if let Some(text) = object.properties.get_mut(member) {
            say(text, pattern);
        }
    }
}

/// Says which texts a member can be, or what is in a list.
fn say(schema: &mut RefOr<Schema>, pattern: &str) {
    let RefOr::T(schema) = schema else { return };
    if let Schema::Array(list) = schema {
        if let ArrayItems::RefOrSchema(item) = &mut list.items {
            say(item, pattern);
        }
        return;
    }
    let Schema::Object(text) = schema else { return };
    text.pattern = Some(pattern.to_owned());
}

/// Says which texts are names at all, and which numbers say yes or no.
fn shape(path: &str, parameter: &mut RefOr<Parameter>) {
    let RefOr::T(parameter) = parameter else { return };
    let Some(RefOr::T(Schema::Object(schema))) = &mut parameter.schema else { return };
    let pattern = match parameter.name.as_str() {
        "id" if path.starts_with("/v1/nodes/") => HEX,
        "id" => "^[0-9a-f]{32}$",
        "sha256" => HEX,
        "address" => ADDRESS,
        "idempotency-key" => "^[A-Za-z0-9_-]{1,64}$",
        "word" => {
            schema.enum_values = Some(WORDS.map(|word| json!(word)).to_vec());
            return;
        }
        "erase" | "follow" | "previous" | "pull" => {
            schema.enum_values = Some(vec![json!(0), json!(1)]);
            return;
        }
        _ => return,
    };
    schema.pattern = Some(pattern.to_owned());
}

#[cfg(test)]
mod tests {
    use lease::{attestation::Credential, document::Signature};
    use proptest::{
        prelude::*,
        string::{RegexGeneratorStrategy, string_regex},
    };
    use serde_json::{Value, json};
    use types::{ids::ContentId, node::Bdf};

    use super::{ADDRESS, BASE64, CLOSED, HEX, TEXTS};
    use crate::api::{openapi::document, routes};

    fn described() -> Value {
        serde_json::to_value(document()).expect("plain data")
    }

    #[test]
    fn what_is_described_as_open_is_what_nobody_signs() {
        let json = described();
        let open = |path: &str, method: &str| {
            json["paths"][path][method]["security"].as_array().expect("said").is_empty()
        };
        assert!(open("/v1/nodes", "get") && open("/v1/nodes/{id}/attestation", "post"));
        assert!(!open("/v1/machines", "get") && !open("/v1/content/{sha256}", "head"));
        assert!(!open("/v1/nodes/{id}/recovery-key", "get"));
        // Every open path is one that there is.
        for (path, method) in super::OPEN {
            assert!(open(path, &method.to_lowercase()), "{method} {path}");
        }
    }

    #[test]
    fn what_a_pattern_refuses_names_nothing() {
        let status = |path: &str| routes::route("GET", path).is_ok();
        let id = "ab".repeat(32);
        assert!(status(&format!("/v1/nodes/{id}")));
        assert!(!status(&format!("/v1/nodes/{}", id.to_uppercase())));
        assert!(!status(&format!("/v1/nodes/{}", &id[1..])));
        assert!(!status(&format!("/v1/machines/{id}")));
        assert!(status(&format!("/v1/machines/{}", &id[..32])));
    }

    #[test]
    fn what_is_sent_is_described_to_the_last_member() {
        let schemas = described()["components"]["schemas"].clone();
        let member = |schema: &str, name: &str| schemas[schema]["properties"][name].clone();
        assert_eq!(member("Challenge", "nonce")["pattern"], HEX);
        assert_eq!(member("Credential", "blob")["pattern"], BASE64);
        assert_eq!(member("Image", "kernel")["pattern"], HEX);
        assert_eq!(member("Hardware", "plugged_later")["items"]["pattern"], ADDRESS);
        assert_eq!(schemas["Attach"]["oneOf"][0]["properties"]["content"]["pattern"], HEX);
        assert_eq!(schemas["Attach"]["oneOf"][1]["properties"]["address"]["pattern"], ADDRESS);
        assert_eq!(schemas["Attach"]["oneOf"][1]["additionalProperties"], false);
        assert_eq!(schemas["Challenge"]["additionalProperties"], false);
        // Each row of the tables is there, and that of Attach twice: it has two variants.
        let all = schemas.to_string();
        assert_eq!(all.matches("\"pattern\":").count(), TEXTS.len());
        assert_eq!(all.matches("\"additionalProperties\":false").count(), CLOSED.len() + 1);
    }

    #[test]
    fn flags_are_described_as_0_or_1() {
        let json = described();
        let values = |path: &str, method: &str, flag: &str| {
            let all = json["paths"][path][method]["parameters"].as_array().expect("said");
            let found = all.iter().find(|parameter| parameter["name"] == flag);
            found.expect("described")["schema"]["enum"].clone()
        };
        let (console, device) = ("/v1/machines/{id}/console", "/v1/machines/{id}/devices/{name}");
        assert_eq!(values(console, "get", "follow"), json!([0, 1]));
        assert_eq!(values(console, "get", "previous"), json!([0, 1]));
        assert_eq!(values(device, "delete", "pull"), json!([0, 1]));
        assert_eq!(values(device, "delete", "erase"), json!([0, 1]));
    }

    /// Makes texts of a pattern, whose anchors no generator knows.
    fn texts(pattern: &str) -> RegexGeneratorStrategy<String> {
        let inner = pattern.trim_start_matches('^').trim_end_matches('$');
        string_regex(inner).expect("a pattern")
    }

    proptest! {
        #[test]
        fn what_a_pattern_describes_is_read(
            digits in texts(HEX),
            bytes in texts(BASE64),
            address in texts(ADDRESS),
        ) {
            prop_assert!(digits.parse::<ContentId>().is_ok());
            prop_assert!(address.parse::<Bdf>().is_ok());
            let credential = json!({"blob": bytes, "secret": ""});
            prop_assert!(serde_json::from_value::<Credential>(credential).is_ok());
            let signature = json!({"keyid": digits, "sig": bytes});
            prop_assert!(serde_json::from_value::<Signature>(signature).is_ok());
        }
    }
}
