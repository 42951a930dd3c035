//! Compares JSON with the served document, strictly: a member that is not described is as wrong
//! as a described one that is absent, and a schema that says nothing is wrong too.

use std::{collections::BTreeSet, sync::OnceLock};

use serde_json::{Map, Value};
use types::forward::ForwardedRequest;

use super::client::Answer;

/// Keywords that say nothing about the form of a value, or what its type says already, or what holds of every schema
/// here: that nothing else is a member.
const SILENT: [&str; 6] =
    ["additionalProperties", "description", "format", "minimum", "pattern", "summary"];

/// The document that gateways serve.
pub(crate) fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| serde_json::to_value(gateway::api::openapi::document()).unwrap())
}

/// Compares a request that was accepted, and any answer, with what is described.
pub(crate) fn check_exchange(request: &ForwardedRequest, answer: &Answer) {
    let Some(operation) = operation(&request.method, request.path()) else {
        assert!(matches!(answer.status, 404 | 405), "{request:?} is not described");
        return;
    };
    let what = format!("{} {} {}", request.method, request.target, answer.status);
    let success = answer.status < 300;
    let described = &operation["requestBody"]["content"]["application/json"]["schema"];
    if success && described.is_object() {
        let body = serde_json::from_slice(&request.body).unwrap();
        check(described, &body).unwrap_or_else(|error| panic!("request of {what}: {error}"));
    }
    let responses = operation["responses"].as_object().unwrap();
    let class = format!("{}XX", answer.status / 100);
    let response = responses.get(&answer.status.to_string()).or_else(|| responses.get(&class));
    let response = response.unwrap_or_else(|| panic!("{what} is not described"));
    for name in answer.headers.keys().filter(|name| name.as_str().starts_with("holdfast-")) {
        assert!(response["headers"][name.as_str()].is_object(), "{what}: {name} is not described");
    }
    let Some(content) = response["content"].as_object() else {
        assert!(answer.body.is_empty(), "{what}: a body is not described");
        return;
    };
    let media = answer.field("content-type");
    let schema = content.get(media).unwrap_or_else(|| panic!("{what}: {media:?} not described"));
    if media.ends_with("json") && request.method != "HEAD" {
        let body = serde_json::from_slice(&answer.body).unwrap();
        check(&schema["schema"], &body).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

fn operation(method: &str, path: &str) -> Option<&'static Value> {
    let paths = document()["paths"].as_object().unwrap();
    let fits = |template: &str| {
        let (a, b) = (template.split('/'), path.split('/'));
        template.split('/').count() == path.split('/').count()
            && a.zip(b).all(|(a, b)| a.starts_with('{') || a == b)
    };
    let (_, methods) = paths.iter().find(|(template, _)| fits(template))?;
    methods.get(method.to_lowercase())
}

/// Compares a value with a schema; an error names the place.
pub(crate) fn check(schema: &Value, value: &Value) -> Result<(), String> {
    let keywords = schema.as_object().ok_or("no schema")?;
    let mut said = false;
    for (keyword, argument) in keywords {
        let rule = match keyword.as_str() {
            silent if SILENT.contains(&silent) => continue,
            "$ref" => check(named(argument), value),
            "enum" => {
                let known = argument.as_array().is_some_and(|known| known.contains(value));
                known.then_some(()).ok_or(format!("{value} is none of {argument}"))
            }
            "items" => {
                value.as_array().into_iter().flatten().enumerate().try_for_each(|(index, item)| {
                    check(argument, item).map_err(|error| format!("[{index}]{error}"))
                })
            }
            "oneOf" => {
                let fitting = argument.as_array().into_iter().flatten();
                match fitting.filter(|schema| check(schema, value).is_ok()).count() {
                    1 => Ok(()),
                    count => Err(format!(": {count} of the variants fit {value}")),
                }
            }
            "properties" => check_members(keywords, argument, value),
            // Read together with the members.
            "required" => Ok(()),
            "type" => check_type(argument, value),
            other => Err(format!(": keyword {other} is not known here")),
        };
        rule?;
        said = true;
    }
    said.then_some(()).ok_or(": the schema says nothing".to_owned())
}

fn named(reference: &Value) -> &'static Value {
    let pointer = reference.as_str().and_then(|text| text.strip_prefix('#'));
    document().pointer(pointer.unwrap()).unwrap()
}

fn check_type(types: &Value, value: &Value) -> Result<(), String> {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let known = types == found || types.as_array().is_some_and(|all| all.contains(&found.into()));
    known.then_some(()).ok_or(format!(": {value} is {found}, not {types}"))
}

fn check_members(
    schema: &Map<String, Value>,
    described: &Value,
    value: &Value,
) -> Result<(), String> {
    let (Some(described), Some(members)) = (described.as_object(), value.as_object()) else {
        return Err(format!(": {value} is no object"));
    };
    let names: BTreeSet<_> = described.keys().collect();
    let found: BTreeSet<_> = members.keys().collect();
    // What is not required may be null or absent.
    let required = schema.get("required").and_then(Value::as_array);
    let required = |name: &String| required.is_some_and(|all| all.contains(&Value::from(&**name)));
    if !found.is_subset(&names) || names.difference(&found).any(|name| required(name)) {
        return Err(format!(": described are {names:?}, found {found:?}"));
    }
    for (name, member) in members {
        if required(name) || !member.is_null() {
            check(&described[name], member).map_err(|error| format!(".{name}{error}"))?;
        }
    }
    Ok(())
}
