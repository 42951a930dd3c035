//! What an agent tells about its node, asked as its screen and a Prometheus ask: a real agent in
//! namespaces of its own, without a virtual machine.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::MetadataExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use qemu_tests::harness::{
    agent::{LoneAgent, exchange},
    packages,
    programs::program,
};
use types::{
    logs::{Level, LogSource, Logs, NodeEvents},
    status::NodeStatus,
};

/// A configuration that rents no device and lets metrics be read at a port.
const CONFIG: &str = "version = 1\nname = \"lone\"\n[machines]\ndevices = []\n\
    [metrics]\nlisten = \"127.0.0.1:9187\"\n[authority]\nthreshold = 1\n\
    keys = [\"d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a\"]\n";

/// The group that may read beside root.
const READERS: u32 = 90_000;

fn start(folder: &tempfile::TempDir) -> Option<LoneAgent> {
    if let Some(reason) = LoneAgent::missing() {
        println!("skipped: a lone agent: {reason}");
        return None;
    }
    Some(LoneAgent::start(&program("agent").unwrap(), folder.path(), CONFIG).unwrap())
}

fn get<T: serde::de::DeserializeOwned>(agent: &LoneAgent, target: &str) -> T {
    let (status, body) = agent.ask("GET", target).unwrap();
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[test]
fn a_node_tells_how_it_is_and_promtool_reads_its_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let Some(agent) = start(&folder) else { return };
    let status: NodeStatus = get(&agent, "/v1/status");
    assert!(status.serving);
    assert_eq!((status.name.as_str(), status.overlay.port), ("lone", 4600));
    assert_eq!(status.config, "kernel command line");
    let setting = |key: &str| {
        let found = status.settings.iter().find(|setting| setting.key == key).unwrap();
        (found.value.as_str(), found.source.as_str())
    };
    assert_eq!(setting("name"), ("\"lone\"", "kernel command line"));
    assert_eq!(setting("machines.grace_s"), ("10", "default"));
    assert!(agent.said().contains("event=config-value key=name value=\"\\\"lone\\\"\""));
    assert!(status.host.memory_bytes > 0 && status.host.agent_bytes > 0 && status.host.cpus > 0);
    assert!(status.devices.is_empty(), "{:?}", status.devices);

    let (code, text) = agent.ask("GET", "/metrics").unwrap();
    assert_eq!(code, 200);
    assert!(text.contains("\nholdfast_node_serving 1\n"), "{text}");
    let mut promtool = Command::new(packages::promtool().unwrap())
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{}: {said}\n{text}", output.status);
}

#[test]
fn only_readers_ask_and_nobody_changes_anything() {
    let folder = tempfile::tempdir().unwrap();
    let Some(agent) = start(&folder) else { return };
    let socket = fs::metadata(agent.socket()).unwrap();
    assert_eq!((socket.mode() & 0o777, socket.uid(), socket.gid()), (0o660, 0, READERS));
    assert_eq!(agent.ask("POST", "/v1/status").unwrap().0, 405);
    assert_eq!(agent.ask("GET", "/v1/logs?level=loud").unwrap().0, 400);
    assert_eq!(agent.ask("GET", "/v1/machines").unwrap().0, 404);

    let network = File::open(format!("/proc/{}/ns/net", agent.pid())).unwrap();
    let scraped = std::thread::spawn(move || {
        setns(network, CloneFlags::CLONE_NEWNET).unwrap();
        ["/metrics", "/v1/status", "/v1/logs"].map(|target| {
            exchange(TcpStream::connect("127.0.0.1:9187").unwrap(), "GET", target).unwrap()
        })
    });
    let scraped = scraped.join().unwrap();
    assert_eq!(scraped.each_ref().map(|(status, _)| *status), [200, 404, 404]);
    assert!(scraped[0].1.contains("holdfast_node_info{"), "{}", scraped[0].1);
}

/// Reads what a program draws until it has drawn `wanted`: a word, as blanks are not drawn.
fn drawn(terminal: &mut File, wanted: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        assert!(Instant::now() < deadline, "{wanted:?}: {}", String::from_utf8_lossy(&seen));
        let count = terminal.read(&mut buffer).unwrap();
        seen.extend(&buffer[..count]);
    }
}

#[test]
fn the_screen_is_drawn_by_a_program_without_privileges() {
    let folder = tempfile::tempdir().unwrap();
    let Some(agent) = start(&folder) else { return };
    let dashboard = program("dashboard").unwrap();
    let (mut reader, mut terminal) = agent.beside(&dashboard, READERS).unwrap();
    drawn(&mut terminal, "installed:");
    // What stands there already is not drawn again, unless everything is.
    terminal.write_all(b"2r").unwrap();
    drawn(&mut terminal, "expected");
    reader.kill().unwrap();
    reader.wait().unwrap();

    let (mut stranger, mut terminal) = agent.beside(&dashboard, 65_534).unwrap();
    drawn(&mut terminal, "Permission");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

/// Returns what a program wrote as a record of the kernel's log, which escapes what is no printable ASCII
/// and the backslash (kernel/printk/printk.c, `msg_add_ext_text`).
fn kernels(number: u32, written: &str) -> String {
    let escaped = |byte: u8| match byte {
        b'\\' => "\\x5c".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    let text: String = written.bytes().map(escaped).collect();
    format!("13,{number},2500000,-;{text}\n")
}

#[test]
fn the_log_is_told_line_by_line_and_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut agent) = start(&folder) else { return };
    agent.log("6,100,1000000,-;usb 1-1: new device\n").unwrap();
    let logs: Logs = get(&agent, "/v1/logs?from=100&wait_ms=20000");
    assert_eq!((logs.lines[0].number, logs.lines[0].source), (100, LogSource::Kernel));
    assert_eq!(logs.next, 101);

    agent
        .log(&kernels(107, "holdfast: event=trouble place=store reason=\"no \\\"room\\\"\""))
        .unwrap();
    let logs: Logs = get(&agent, "/v1/logs?from=101&level=error&wait_ms=20000");
    assert_eq!((logs.lines[0].number, logs.lines[0].level), (107, Level::Error));
    let events: NodeEvents = get(&agent, "/v1/events");
    assert_eq!(events.events[0].name, "trouble");
    assert_eq!(events.events[0].fields["reason"], "no \"room\"");
    let status: NodeStatus = get(&agent, "/v1/status");
    assert_eq!(status.errors[0].number, 107);

    // What the agent says of its own configuration comes back through the log as it was.
    let said = agent.said();
    let value = said.lines().find(|line| line.contains("event=config-value key=name ")).unwrap();
    agent.log(&kernels(108, value)).unwrap();
    let events: NodeEvents = get(&agent, "/v1/events?from=108&wait_ms=20000");
    let field = |key: &str| events.events[0].fields[key].as_str();
    assert_eq!(events.events[0].name, "config-value");
    assert_eq!((field("key"), field("value")), ("name", "\"lone\""));
    assert_eq!(field("source"), "kernel command line");

    let begin = Instant::now();
    let none: NodeEvents = get(&agent, "/v1/events?from=109&wait_ms=700");
    assert!(none.events.is_empty() && begin.elapsed() >= Duration::from_millis(700));
    assert_eq!(none.next, 109);
}
