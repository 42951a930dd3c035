//! What clients may say that are not the agent.

use std::io::{Read, Write};

use super::*;

/// Says `text` on a connection of its own; returns all that is answered.
fn say(machine: &Machine, text: &str) -> String {
    let mut stream = machine.connect();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// RFC 9110 §9.1, §9.3.2 and §15.6.2; RFC 9112 §3.2.
#[test]
fn requests_are_answered_as_http_has_them() {
    let Some(machine) = start(1, |_| {}) else { return };
    let request = |line: &str| say(&machine, &format!("{line} HTTP/1.1\r\nhost: a\r\n\r\n"));
    let status = |answer: &str| answer.split(' ').nth(1).map(str::to_owned).unwrap_or_default();
    let (whole, head) = (request("GET /v1/openapi.json"), request("HEAD /v1/openapi.json"));
    assert_eq!(whole.split_once("\r\n\r\n").unwrap().0.to_owned() + "\r\n\r\n", head);
    assert_eq!(status(&request("BREW /v1/state")), "501");
    assert_eq!(status(&request("PATCH /v1/state")), "405");
    assert_eq!(status(&request("GET http://somewhere/v1/state")), "200");
    assert_eq!(status(&request("GET v1/state")), "400");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTP/1.1\r\n\r\n")), "400");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTP/1.0\r\n\r\n")), "200");
    let chunked = "POST /v1/power HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    assert_eq!(status(&say(&machine, chunked)), "411");
    // A name that is escaped is the name; there is nothing to detach on this machine.
    let named = request("DELETE /v1/devices/0000%3A41%3A00.0");
    assert!(!named.contains("%3A") && status(&named) != "400", "{named}");
    assert_eq!(status(&request("DELETE /v1/devices/%zz")), "400");
}

/// RFC 9112 §9.6: whoever sends more than is taken learns why, instead of that the connection broke.
#[test]
fn a_refusal_reaches_a_client_that_is_still_sending() {
    let Some(machine) = start(1, |_| {}) else { return };
    let mut stream = machine.connect();
    let head = "POST /v1/console HTTP/1.1\r\nhost: a\r\ncontent-length: 1048576\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    for _ in 0..256 {
        stream.write_all(&[b'x'; 4096]).unwrap();
    }
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

/// RFC 9110 §10.1.1.
#[test]
fn a_client_that_waits_to_go_on_is_told_so() {
    let Some(machine) = start(1, |_| {}) else { return };
    let mut stream = machine.connect();
    let head =
        "POST /v1/console HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut told = [0; 25];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"x").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}
