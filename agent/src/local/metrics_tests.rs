use std::collections::BTreeSet;

use super::*;
use crate::local::sample;

/// Names of all metrics that a text introduces.
fn names(text: &str) -> BTreeSet<&str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split(' ').next())
        .collect()
}

fn has(text: &str, line: &str) {
    assert!(text.lines().any(|found| found == line), "{line}\n{text}");
}

#[test]
fn a_node_is_counted() {
    let text = text(&sample::status(), &sample::counted());
    has(&text, "holdfast_node_uptime_seconds 3723.456");
    has(&text, "holdfast_boot_phase_seconds{phase=\"init-ready\"} 0.912");
    has(&text, "holdfast_clock_offset_seconds -0.012");
    has(&text, "holdfast_network_received_bytes_total{interface=\"eth0\"} 5000000");
    has(&text, "holdfast_overlay_neighbours{role=\"gateway\"} 1");
    has(&text, "holdfast_overlay_neighbours{role=\"provider\"} 0");
    has(&text, "holdfast_devices{state=\"leased\"} 1");
    has(&text, "holdfast_devices_missing 1");
    has(
        &text,
        "holdfast_device_link_errors_total{device=\"0000:02:00.0\",severity=\"correctable\"} 3",
    );
    has(&text, "holdfast_machines{state=\"running\"} 1");
    let machine = sample::machine_id();
    has(
        &text,
        &format!("holdfast_machine_lease_end_time_seconds{{machine=\"{machine}\"}} 1796090000"),
    );
    has(&text, &format!("holdfast_gpu_reading_age_seconds{{machine=\"{machine}\"}} 3.000"));
    has(&text, &format!("holdfast_gpu_readings_refused_total{{machine=\"{machine}\"}} 2"));
    has(&text, "holdfast_watchdog_armed{watchdog=\"iTCO_wdt\"} 1");
    has(&text, "holdfast_troubles_total{place=\"store\"} 1");
    has(&text, &format!("holdfast_vm_uptime_seconds{{machine=\"{machine}\"}} 4.200"));
}

#[test]
fn every_metric_is_introduced_once() {
    let text = text(&sample::status(), &sample::counted());
    let introduced = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
    assert_eq!(introduced, names(&text).len());
    assert!(introduced > 50, "{introduced}");
}

#[test]
fn what_others_say_stays_in_its_label() {
    let mut status = sample::status();
    status.name = sample::HOSTILE.to_owned();
    status.machines[0].state = sample::HOSTILE.to_owned();
    let text = text(&status, &sample::counted());
    let shaped = |line: &str| line.starts_with("# ") || line.starts_with("holdfast_");
    assert_eq!(text.lines().find(|line| !shaped(line)), None);
    assert!(!text.contains('\u{1b}'));
}

/// Words of a query that are names of our metrics.
fn used(query: &str) -> impl Iterator<Item = &str> {
    query
        .split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        .filter(|word| word.starts_with("holdfast_"))
}

/// Every text under a key `expr` or `query` of a document.
fn queries(value: &serde_json::Value) -> Vec<String> {
    words(value, &["expr", "query"])
}

/// Every text under one of these keys of a document.
fn words(value: &serde_json::Value, keys: &[&str]) -> Vec<String> {
    if let Some(fields) = value.as_object() {
        let own = fields.iter().filter(|(key, _)| keys.contains(&key.as_str()));
        let own = own.filter_map(|(_, value)| value.as_str()).map(str::to_owned);
        return own.chain(fields.values().flat_map(|value| words(value, keys))).collect();
    }
    value.as_array().into_iter().flatten().flat_map(|value| words(value, keys)).collect()
}

fn dashboard() -> serde_json::Value {
    serde_json::from_str(include_str!("../../dashboards/holdfast.json")).expect("JSON")
}

#[test]
fn the_dashboard_fits_every_interval_of_scrapes() {
    let queries = queries(&dashboard());
    let ranges = queries.iter().flat_map(|query| query.split('[').skip(1));
    let ranges: Vec<_> = ranges.map(|rest| rest.split(']').next().unwrap_or(rest)).collect();
    assert!(ranges.len() > 25, "{ranges:?}");
    // A rate needs two scrapes. Only what is counted by the hour has a range of its own.
    let fixed = ranges.iter().find(|range| !["$__rate_interval", "1h"].contains(range));
    assert_eq!(fixed, None);
}

#[test]
fn the_dashboard_calls_a_gpu_by_its_machine_and_number() {
    let legends = words(&dashboard(), &["legendFormat"]);
    let gpus: Vec<_> = legends.iter().filter(|legend| legend.contains("{{gpu}}")).collect();
    assert!(gpus.len() > 15, "{gpus:?}");
    let alone = gpus.iter().find(|legend| !legend.starts_with("{{machine}} GPU {{gpu}}"));
    assert_eq!(alone, None);
}

#[test]
fn the_dashboard_asks_only_for_what_there_is() {
    let text = text(&sample::status(), &sample::counted());
    let served = names(&text);
    let queries = queries(&dashboard());
    assert!(queries.len() > 20, "{}", queries.len());
    let asked: BTreeSet<&str> = queries.iter().flat_map(|query| used(query)).collect();
    let unknown: Vec<_> = asked.difference(&served).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    // What is counted is shown; the rest is said here, so that a new metric is thought about.
    let unseen: Vec<_> = served.difference(&asked).copied().collect();
    assert_eq!(unseen, ["holdfast_network_mtu_bytes", "holdfast_trust_setup_mode"]);
}

#[test]
fn promtool_finds_nothing_wrong_with_any_metric() {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };
    let started = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = started else {
        println!("skipped: promtool and metrics of guests: no promtool in PATH");
        return;
    };
    let text = text(&sample::status(), &sample::counted());
    let mut input = promtool.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("written");
    drop(input);
    let output = promtool.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}\n{text}");
}
