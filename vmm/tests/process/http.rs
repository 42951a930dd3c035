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

/// Asks without a body.
fn ask(machine: &Machine, line: &str) -> String {
    say(machine, &format!("{line} HTTP/1.1\r\nhost: a\r\n\r\n"))
}

/// Asks with a body, and further lines about it.
fn send(machine: &Machine, line: &str, about: &str, body: &str) -> String {
    let length = body.len();
    let head = format!("{line} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n{about}\r\n");
    say(machine, &(head + body))
}

fn status(answer: &str) -> String {
    answer.split(' ').nth(1).map(str::to_owned).unwrap_or_default()
}

/// RFC 9110 §6.6.1, §9.1, §9.3.2 and §15.6.2; RFC 9112 §3.2.
#[test]
fn requests_are_answered_as_http_has_them() {
    let Some(machine) = start(1, |_| {}) else { return };
    let request = |line: &str| ask(&machine, line);
    let (whole, head) = (request("GET /v1/openapi.json"), request("HEAD /v1/openapi.json"));
    // The second may be answered a second later.
    let undated = |head: &str| {
        let (dates, others): (Vec<_>, Vec<_>) =
            head.lines().map(str::to_owned).partition(|line| line.starts_with("date: "));
        assert!(dates.len() == 1 && dates[0].ends_with(" GMT"), "{head}");
        others
    };
    assert_eq!(undated(whole.split_once("\r\n\r\n").unwrap().0), undated(head.trim_end()));
    assert!(head.ends_with("\r\n\r\n"), "{head}");
    assert_eq!(status(&request("BREW /v1/state")), "501");
    assert_eq!(status(&request("PATCH /v1/state")), "405");
    assert_eq!(status(&request("GET http://somewhere/v1/state")), "200");
    assert_eq!(status(&request("GET v1/state")), "400");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTP/1.1\r\n\r\n")), "400");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTP/1.0\r\n\r\n")), "200");
    assert_eq!(status(&request("GET http://somewhere?x=/v1/state")), "404");
    assert_eq!(status(&request("GET http:///v1/state")), "400");
    assert_eq!(status(&request("OPTIONS *")), "405");
    assert_eq!(status(&request("GET *")), "400");
    assert_eq!(status(&request("GET /v1/%73tate")), "200");
    assert_eq!(status(&request("GET /v1/%zztate")), "400");
    assert_eq!(status(&request("GET /v1/console?fro%6D=%30")), "200");
    assert_eq!(status(&request("GET /v1/console?from=+0")), "400");
    assert_eq!(status(&request("GET /v1/console?from=0&from=0")), "400");
    let misspelt = request("GET /v1/console?form=7");
    let detail = r#"\"form\" in the query is no parameter of this; from, wait_ms is right"#;
    assert!(status(&misspelt) == "400" && misspelt.contains(detail), "{misspelt}");
    assert_eq!(status(&request("DELETE /v1/devices/a?Pull=1")), "400");
    assert_ne!(status(&request("DELETE /v1/devices/a?pull=1")), "400");
    assert_eq!(status(&request("GET /v1/state#x")), "400");
    assert_eq!(status(&request("GET /v1/state?\"")), "400");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTP/2.0\r\nhost: a\r\n\r\n")), "505");
    assert_eq!(status(&say(&machine, "GET /v1/state HTTPS/1.1\r\nhost: a\r\n\r\n")), "400");
    // A name that is escaped is the name; there is nothing to detach on this machine.
    let named = request("DELETE /v1/devices/0000%3A41%3A00.0");
    assert!(!named.contains("%3A") && status(&named) != "400", "{named}");
    assert_eq!(status(&request("DELETE /v1/devices/%zz")), "400");
}

/// RFC 9110 §15.5.9 and §15.5.15; RFC 6585 §5; RFC 9112 §6.1 and §7.1.
#[test]
fn what_cannot_be_read_is_told_by_its_status() {
    let Some(machine) = start(1, |_| {}) else { return };
    let typed = |about: &str, body: &str| {
        let head = format!("POST /v1/console HTTP/1.1\r\nhost: a\r\n{about}\r\n\r\n");
        say(&machine, &(head + body))
    };
    let chunked = typed("transfer-encoding: chunked", "1;a=b\r\nx\r\n2\r\nyz\r\n0\r\nc: d\r\n\r\n");
    assert!(chunked.ends_with("{\"taken\":3}"), "{chunked}");
    assert_eq!(status(&typed("transfer-encoding: chunked", "1\r\nxy\r\n0\r\n\r\n")), "400");
    assert_eq!(status(&typed("transfer-encoding: gzip, chunked", "")), "501");
    assert_eq!(status(&typed("transfer-encoding: chunked, gzip", "")), "400");
    assert_eq!(status(&typed("transfer-encoding: identity", "x")), "400");
    let both = "transfer-encoding: chunked\r\ncontent-length: 5";
    assert_eq!(status(&typed(both, "0\r\n\r\n")), "400");
    let long = "x".repeat(10_000);
    assert_eq!(status(&ask(&machine, &format!("GET /{long}"))), "414");
    assert_eq!(status(&typed(&format!("a: {long}"), "")), "431");
    assert_eq!(status(&typed(&"a: b\r\n".repeat(40), "")), "431");
    assert_eq!(status(&say(&machine, "GET / HTTP/1.1\r\nhost: a b\r\n\r\n")), "400");
    let head = ask(&machine, "HEAD nowhere");
    assert!(status(&head) == "400" && head.ends_with("\r\n\r\n"), "{head}");
}

/// As `openapi.json` has them.
#[test]
fn bodies_are_the_documents_that_are_described() {
    let Some(machine) = start(1, |_| {}) else { return };
    let deadline = "{\"at_boot_ms\": 1e15, \"grace_ms\": 0.0}";
    let put = |about: &str, body: &str| status(&send(&machine, "PUT /v1/deadline", about, body));
    assert_eq!(put("", "[0,0]"), "400");
    assert_eq!(put("content-type: text/plain\r\n", deadline), "415");
    assert_eq!(put("content-type: Application/json; charset=utf-8\r\n", deadline), "202");
    let post = |path: &str, body: &str| {
        let line = format!("POST /v1/{path}");
        status(&send(&machine, &line, "content-type: application/json\r\n", body))
    };
    assert_eq!(post("power", "{\"action\":{\"stop\":null}}"), "400");
    assert_eq!(post("power", "[\"stop\"]"), "400");
    let device = "{\"id\":\"a\",\"device\":{\"kind\":\"pci\",\"address\":\"0000:01:00.0\"}}";
    assert_eq!(post("devices", device), "409");
    assert_eq!(post("devices", &device.replace("0000:", "+000:")), "400");
    assert_eq!(post("devices", "{\"id\":\"a\",\"device\":[\"pci\",\"0000:01:00.0\"]}"), "400");
    let disk = "{\"id\":\"a\",\"device\":{\"kind\":\"disk\",\"read_only\":false,\"serial\":\"s\"}}";
    assert_eq!(post("devices", disk), "409");
    assert_eq!(post("devices", &disk.replace("\"s\"", "\"s\",\"key\":null")), "400");
    assert_eq!(post("console", "x"), "415");
    assert_eq!(status(&ask(&machine, "POST /v1/console")), "200");
    assert_eq!(phase(&machine), "running");
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
