//! What holds of many operations alike: who has to sign, and the form of what stands in paths.

use serde_json::json;
use utoipa::openapi::{
    OpenApi, PathItem, RefOr, Schema, Server,
    path::{Operation, Parameter},
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

/// Adds all this to a description.
pub(super) fn complete(document: &mut OpenApi) {
    document.servers = Some(vec![Server::new("/")]);
    let components = document.components.get_or_insert_default();
    for name in FIELDS {
        let mut field = ApiKeyValue::new(name);
        field.description = Some(format!("Field {name} of RFC 9421, as the description says"));
        components.add_security_scheme(name, SecurityScheme::ApiKey(ApiKey::Header(field)));
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

/// Says which texts are names at all.
fn shape(path: &str, parameter: &mut RefOr<Parameter>) {
    let RefOr::T(parameter) = parameter else { return };
    let Some(RefOr::T(Schema::Object(schema))) = &mut parameter.schema else { return };
    let pattern = match parameter.name.as_str() {
        "id" if path.starts_with("/v1/nodes/") => "^[0-9a-f]{64}$",
        "id" => "^[0-9a-f]{32}$",
        "sha256" => "^[0-9a-f]{64}$",
        "address" => "^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]$",
        "idempotency-key" => "^[A-Za-z0-9_-]{1,64}$",
        "word" => {
            schema.enum_values = Some(WORDS.map(|word| json!(word)).to_vec());
            return;
        }
        _ => return,
    };
    schema.pattern = Some(pattern.to_owned());
}

#[cfg(test)]
mod tests {
    use crate::api::{openapi::document, routes};

    #[test]
    fn what_is_described_as_open_is_what_nobody_signs() {
        let json = serde_json::to_value(document()).expect("plain data");
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
}
