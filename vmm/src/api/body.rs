//! Bodies: documents, which are JSON objects, as `openapi.json` describes them; and bytes.
//! Source: RFC 8259; RFC 9110 §8.3 and §15.5.16.

use serde::de::DeserializeOwned;

use super::{Answer, Request, answer::problem};

const JSON: &str = "application/json";
const BYTES: &str = "application/octet-stream";

/// Returns the body as it is.
pub(super) fn bytes(request: &Request) -> Result<&[u8], Box<Answer>> {
    check_type(request, BYTES).map(|()| request.body.as_slice())
}

/// Reads the body as an object. `expected` says in a refusal what would be right.
pub(super) fn object<T: DeserializeOwned>(
    request: &Request,
    expected: &str,
) -> Result<T, Box<Answer>> {
    check_type(request, JSON)?;
    let wrong =
        |what: &str| Box::new(problem(400, "bad body", &format!("{what}; expected {expected}")));
    // Serde takes the members of an object in their order, without names, as an array. No document here has one.
    if request.body.trim_ascii_start().first() != Some(&b'{') {
        return Err(wrong("the body is no JSON object"));
    }
    if has_array(&request.body) {
        return Err(wrong("there is an array in the body, and no array is right"));
    }
    serde_json::from_slice(&request.body).map_err(|error| wrong(&error.to_string()))
}

/// Checks that the body is of type `taken`, whatever its parameters, if it is said to be of any.
fn check_type(request: &Request, taken: &str) -> Result<(), Box<Answer>> {
    let Some(found) = request.content_type.as_deref() else { return Ok(()) };
    let name = found.split(';').next().unwrap_or_default();
    if name.trim_ascii().eq_ignore_ascii_case(taken) {
        return Ok(());
    }
    let detail = format!("the body is said to be {found:?}; this request takes {taken}");
    let mut refusal = problem(415, "unsupported media type", &detail);
    refusal.headers.push(("accept", taken.to_owned()));
    Err(Box::new(refusal))
}

/// Whether JSON has an array in it.
fn has_array(json: &[u8]) -> bool {
    let (mut quoted, mut escaped) = (false, false);
    json.iter().any(|byte| {
        let is_escaped = std::mem::take(&mut escaped);
        match byte {
            b'"' if !is_escaped => quoted = !quoted,
            b'\\' if quoted => escaped = !is_escaped,
            b'[' => return !quoted,
            _ => {}
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use types::{devices::AttachRequest, vm::Deadline};

    use super::*;

    fn request(content_type: Option<&str>, body: &str) -> Request {
        Request {
            method: "PUT".to_owned(),
            target: "/".to_owned(),
            content_type: content_type.map(str::to_owned),
            body: body.as_bytes().to_vec(),
        }
    }

    fn read<T: DeserializeOwned>(content_type: Option<&str>, body: &str) -> Result<T, u16> {
        object(&request(content_type, body), "another").map_err(|refusal| refusal.status)
    }

    const DEADLINE: &str = " \r\n{\"at_boot_ms\": 1.0, \"grace_ms\": 2}";

    #[test]
    fn only_objects_are_documents() {
        let expected = Deadline { at_boot_ms: 1, grace_ms: 2 };
        assert_eq!(read::<Deadline>(None, DEADLINE), Ok(expected));
        for wrong in ["[0,0]", "", "null", "5", "{}", "{\"at_boot_ms\":1,\"grace_ms\":2,\"x\":3}"] {
            assert_eq!(read::<Deadline>(None, wrong), Err(400), "{wrong}");
        }
    }

    #[test]
    fn no_part_of_a_document_is_an_array() {
        let attach = |device: &str| {
            let body = format!("{{\"id\":\"\\\\\\\"[\",\"device\":{device}}}");
            read::<AttachRequest>(None, &body).map(drop)
        };
        let disk = |limit: &str| {
            let rest = "\"read_only\":true,\"serial\":\"[\\\"[\"";
            attach(&format!("{{\"kind\":\"disk\",{rest},\"limit\":{limit}}}"))
        };
        assert_eq!(disk("{\"bytes\":{\"per_second\":1,\"burst\":1}}"), Ok(()));
        assert_eq!(disk("{\"bytes\":[1,1]}"), Err(400));
        assert_eq!(disk("[null,null]"), Err(400));
        assert_eq!(attach("[\"pci\",\"0000:01:00.0\"]"), Err(400));
    }

    #[test]
    fn a_body_that_is_said_to_be_something_else_is_not_read() {
        let read = |content_type| read::<Deadline>(Some(content_type), DEADLINE).map(drop);
        for right in ["application/json", "Application/JSON;charset=utf-8", "application/json ;x"] {
            assert_eq!(read(right), Ok(()), "{right}");
        }
        for wrong in ["", "text/plain", "application/jsonl", "application/json, text/plain"] {
            assert_eq!(read(wrong), Err(415), "{wrong}");
        }
    }

    #[test]
    fn bytes_are_not_said_to_be_a_document() {
        let read = |content_type| {
            let read = bytes(&request(content_type, "ls")).map(<[u8]>::to_vec);
            read.map_err(|refusal| (refusal.status, refusal.headers))
        };
        for right in [None, Some("application/octet-stream"), Some("Application/Octet-Stream ;x")] {
            assert_eq!(read(right), Ok(b"ls".to_vec()), "{right:?}");
        }
        let refused = Err((415, vec![("accept", BYTES.to_owned())]));
        for wrong in [JSON, "", "application/x-www-form-urlencoded", "text/plain"] {
            assert_eq!(read(Some(wrong)), refused, "{wrong}");
        }
    }
}
