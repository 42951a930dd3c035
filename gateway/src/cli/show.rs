//! Tables for people, of the JSON that gateway and lease give.

use std::{collections::BTreeMap, ops::RangeInclusive};

use jiff::Timestamp;
use serde_json::Value;

pub(super) fn nodes(nodes: &Value) -> String {
    let rows = list(nodes).iter().map(|node| {
        vec![
            text(&node["node"]),
            text(&node["name"]),
            text(&node["vcpus"]),
            text(&node["memory_mib"]),
            free_devices(node),
        ]
    });
    table(&["NODE", "NAME", "VCPUS", "MEMORY MiB", "FREE DEVICES"], rows)
}

pub(super) fn node(node: &Value) -> String {
    let mut out = pairs(&[
        ("node", text(&node["node"])),
        ("name", text(&node["name"])),
        ("release", text(&node["release"])),
        ("attested", attestation(&node["attestation"])),
        ("vcpus", text(&node["vcpus"])),
        ("memory", format!("{} MiB", text(&node["memory_mib"]))),
        ("disk", format!("{} MiB", text(&node["disk_mib"]))),
        ("addresses", words(&node["addresses"])),
        ("heard", format!("{} s ago", text(&node["last_heard_s"]))),
    ]);
    let rows = list(&node["devices"]).iter().map(|device| {
        let state = &device["state"];
        let why = if state["reason"].is_string() { &state["reason"] } else { &state["machine"] };
        let linked = &device["linked"];
        let why = match (why.is_null(), linked.is_null()) {
            (true, false) => format!("one lease with {}", words(linked)),
            _ => text(why),
        };
        vec![
            text(&device["address"]),
            format!("{}:{}", hex(&device["vendor"], 4), hex(&device["device"], 4)),
            hex(&device["class"], 6),
            text(&device["iommu_group"]),
            text(&state["is"]),
            why,
        ]
    });
    out.push('\n');
    out.push_str(&table(&["DEVICE", "ID", "CLASS", "GROUP", "STATE", "WHY"], rows));
    out
}

pub(super) fn attested(shown: &Value) -> String {
    let attested = &shown["attested"];
    let volumes = list(&attested["volumes"]).iter().map(|volume| {
        let how = &volume["protection"];
        let bound = how["bound"]
            .as_str()
            .map(|bound| format!(" to {}", harmless(bound)))
            .unwrap_or_default();
        format!("{} {}{bound}", text(&volume["name"]), text(&how["is"]))
    });
    let volumes: Vec<_> = volumes.collect();
    let volumes = match (attested["volumes"].is_array(), volumes.is_empty()) {
        (false, _) => "not measured".to_owned(),
        (true, true) => "none: it runs from memory".to_owned(),
        (true, false) => volumes.join(", "),
    };
    let mut out = pairs(&[
        ("node", text(&shown["node"])),
        ("release", text(&attested["release"])),
        ("tpm", text(&attested["tpm"])),
        ("accepted", text(&shown["accepted"])),
        ("maker", maker(&attested["certificate"])),
        ("volumes", volumes),
    ]);
    let registers = attested["registers"].as_object();
    let mut rows: Vec<_> = registers.into_iter().flatten().collect();
    rows.sort_by_key(|(number, _)| number.parse::<u8>().unwrap_or(u8::MAX));
    for (number, value) in rows {
        out.push_str(&format!("pcr {number:<6} {}\n", text(value)));
    }
    out.push_str(&firmware(&attested["firmware"]));
    out
}

/// What a node's firmware tells of its start.
fn firmware(found: &Value) -> String {
    let Some(events) = found["events"].as_array() else {
        return pairs(&[("firmware", "no log of what it measured".to_owned())]);
    };
    if let Some(reason) = found["unread"].as_str() {
        let reason = harmless(reason);
        return pairs(&[("firmware", format!("its log cannot be read: {reason}"))]);
    }
    let secure_boot = match found["secure_boot"].as_bool() {
        Some(true) => "on, as measured",
        Some(false) => "off, as measured",
        None => "not proved",
    };
    let mut out = pairs(&[
        ("secureboot", secure_boot.to_owned()),
        ("explained", format!("registers {}", words(&found["explained"]))),
        ("NOT proved", format!("registers {}", words(&found["unexplained"]))),
    ]);
    out.push('\n');
    let rows = events.iter().map(|event| {
        let proved = if event["proved"] == true { "yes" } else { "no" };
        let says = text(&event["says"]);
        vec![text(&event["register"]), text(&event["kind"]), proved.to_owned(), says]
    });
    out.push_str(&table(&["REGISTER", "EVENT", "PROVED", "WHAT"], rows));
    out
}

/// Who vouches for a TPM.
fn maker(certificate: &Value) -> String {
    match certificate["is"].as_str() {
        Some("checked") => {
            let (authority, tpm) = (text(&certificate["authority"]), text(&certificate["tpm"]));
            format!("{authority} vouches for it, {tpm}")
        }
        Some("missing") => "sent no certificate".to_owned(),
        Some(_) => format!("certificate REFUSED: {}", text(&certificate["reason"])),
        None => "not asked, no authority was named".to_owned(),
    }
}

/// What a gateway found of a node.
fn attestation(found: &Value) -> String {
    match (found["release"].as_str(), found["refused"].as_str()) {
        (Some(_), _) => {
            let (release, tpm) = (text(&found["release"]), text(&found["tpm"]));
            format!("{release} (TPM {tpm}; maker: {})", maker(&found["certificate"]))
        }
        (None, Some(_)) => format!("NOT PROVED: {}", text(&found["refused"])),
        (None, None) => "not asked".to_owned(),
    }
}

pub(super) fn events(events: &Value) -> String {
    let rows = list(&events["events"]).iter().map(|event| {
        let at = event["at_ms"].as_u64().unwrap_or(0);
        let seconds = format!("{}.{:03}", at / 1000, at % 1000);
        vec![text(&event["number"]), seconds, text(&event["kind"]), text(&event["detail"])]
    });
    table(&["NUMBER", "SECONDS", "EVENT", "DETAIL"], rows)
}

pub(super) fn counters(counters: &Value) -> String {
    let memory = &counters["memory"];
    let exits = list(&counters["vcpus"]).iter().filter_map(Value::as_object);
    let exits: u64 = exits.flat_map(|vcpu| vcpu.values()).filter_map(Value::as_u64).sum();
    let mut out = pairs(&[
        ("uptime", format!("{} ms", text(&counters["uptime_ms"]))),
        ("memory", format!("{} bytes", text(&memory["guest_bytes"]))),
        ("resident", format!("{} bytes", text(&memory["resident_bytes"]))),
        ("exits", exits.to_string()),
    ]);
    let rows = list(&counters["devices"]).iter().map(|device| {
        let fields = ["name", "requests", "read_bytes", "written_bytes", "errors", "interrupts"];
        fields.iter().map(|field| text(&device[*field])).collect()
    });
    out.push('\n');
    let titles = ["DEVICE", "REQUESTS", "READ", "WRITTEN", "ERRORS", "INTERRUPTS"];
    out.push_str(&table(&titles, rows));
    out
}

pub(super) fn content(stored: &Value, file: &std::path::Path) -> String {
    format!("{}  {} ({} bytes)\n", text(&stored["content"]), file.display(), text(&stored["bytes"]))
}

pub(super) fn machines(machines: &Value) -> String {
    let rows = list(machines).iter().map(|machine| {
        vec![
            text(&machine["id"]),
            text(&machine["state"]),
            text(&machine["node"]).chars().take(8).collect(),
            time(&machine["end"]),
            text(&machine["detail"]),
        ]
    });
    table(&["MACHINE", "STATE", "NODE", "END", "DETAIL"], rows)
}

pub(super) fn machine(machine: &Value) -> String {
    if !machine.is_object() {
        return "done\n".into();
    }
    let mut out = pairs(&[
        ("machine", text(&machine["id"])),
        ("state", text(&machine["state"])),
        ("detail", text(&machine["detail"])),
        ("node", text(&machine["node"])),
        ("serial", text(&machine["serial"])),
        ("start", time(&machine["start"])),
        ("end", time(&machine["end"])),
        ("addresses", words(&machine["addresses"])),
        ("devices", words(&machine["shape"]["devices"])),
    ]);
    out.push_str(&placement(&machine["placement"]));
    for event in list(&machine["events"]) {
        out.push_str(&format!("{}  {}\n", time(&event["at"]), text(&event["what"])));
    }
    out
}

/// Where a machine is; nothing before its first start.
fn placement(placement: &Value) -> String {
    if !placement.is_object() {
        return String::new();
    }
    let memory = list(&placement["memory"]).iter().map(|part| {
        let place = part["node"].as_u64().map_or("anywhere".into(), |node| format!("node {node}"));
        format!("{} MiB {} {place}", text(&part["memory_mib"]), text(&part["backing"]))
    });
    let cpus = words(&placement["cpus"]);
    let mut out = pairs(&[
        ("host CPUs", if cpus == "-" { "anywhere".into() } else { cpus }),
        ("memory", memory.collect::<Vec<_>>().join(", ")),
    ]);
    for note in list(&placement["notes"]) {
        out.push_str(&format!("note       {}\n", text(note)));
    }
    out
}

pub(super) fn attachments(all: &Value) -> String {
    let rows = list(&all["devices"]).iter().map(|attachment| {
        let device = &attachment["device"];
        vec![
            text(&attachment["id"]),
            text(&device["kind"]),
            text(&attachment["state"]),
            text(&device["size_mib"]),
            text(&device["model"]),
            text(&attachment["detail"]),
        ]
    });
    table(&["NAME", "KIND", "STATE", "MIB", "MODEL", "DETAIL"], rows)
}

pub(super) fn attachment(attachment: &Value) -> String {
    attachments(&serde_json::json!({ "devices": [attachment] }))
}

pub(super) fn lease(shown: &Value) -> String {
    let (lease, shape) = (&shown["lease"], &shown["lease"]["shape"]);
    let price = &lease["price"];
    pairs(&[
        ("lease", text(&lease["id"])),
        ("serial", text(&lease["serial"])),
        ("node", text(&lease["node"])),
        ("renter", text(&lease["renter"])),
        ("start", time(&lease["start"])),
        ("end", time(&lease["end"])),
        ("vcpus", text(&shape["vcpus"])),
        ("memory", format!("{} MiB", text(&shape["memory_mib"]))),
        ("disk", format!("{} MiB", text(&shape["disk_mib"]))),
        ("devices", words(&shape["devices"])),
        (
            "price",
            format!(
                "{} millionths of {} a second",
                text(&price["micro_per_second"]),
                text(&price["unit"])
            ),
        ),
        ("signed by", words(&shown["signatures"])),
    ])
}

/// What a gateway that was shown a lease answers.
pub(super) fn standing(lease: &Value) -> String {
    pairs(&[
        ("lease", text(&lease["id"])),
        ("serial", text(&lease["serial"])),
        ("end", time(&lease["end"])),
        ("content", format!("kept until {}", time(&lease["content_until"]))),
        (
            "quota",
            format!("{} of {} bytes", text(&lease["content_used"]), text(&lease["content_limit"])),
        ),
        ("at most", format!("{} bytes in one upload", text(&lease["content_max_bytes"]))),
    ])
}

pub(super) fn receipts(shown: &Value) -> String {
    let rows = list(&shown["receipts"]).iter().map(|signed| {
        let receipt = &signed["receipt"];
        vec![
            time(&receipt["from"]),
            time(&receipt["to"]),
            text(&receipt["serial"]),
            text(&receipt["running_s"]),
            text(&receipt["micro"]),
            text(&receipt["unit"]),
        ]
    });
    let head = ["FROM", "TO", "SERIAL", "RUNNING s", "MILLIONTHS OF", "UNIT"];
    let table = table(&head, rows);
    let totals = [("total", total(&shown["receipts"])), ("checked", text(&shown["checked"]))];
    format!("{table}{}", pairs(&totals))
}

/// What receipts come to in all, for each unit of price.
fn total(receipts: &Value) -> String {
    let mut sums = BTreeMap::new();
    for signed in list(receipts) {
        let receipt = &signed["receipt"];
        let number = |name: &str| u128::from(receipt[name].as_u64().unwrap_or_default());
        let (running, micro) = sums.entry(text(&receipt["unit"])).or_insert((0, 0));
        (*running, *micro) = (*running + number("running_s"), *micro + number("micro"));
    }
    let sums = sums.iter().map(|(unit, (running, micro)): (&String, &(u128, u128))| {
        let (whole, part) = (micro / 1_000_000, micro % 1_000_000);
        format!("{whole}.{part:06} {unit} for {running} s of running")
    });
    let sums: Vec<_> = sums.collect();
    if sums.is_empty() { "nothing yet".to_owned() } else { sums.join(", ") }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Marks of direction (Unicode Standard Annex #9 §2).
const DIRECTIONS: [RangeInclusive<char>; 4] = [
    '\u{61c}'..='\u{61c}',
    '\u{200e}'..='\u{200f}',
    '\u{202a}'..='\u{202e}',
    '\u{2066}'..='\u{2069}',
];

/// Returns a text without what a terminal takes as a command or turns lines around by: control characters, of
/// which those that part words become blanks, and marks of direction. Nodes name themselves, and say why they
/// refuse.
pub(super) fn harmless(text: &str) -> String {
    let turns = |c: &char| DIRECTIONS.iter().any(|marks| marks.contains(c));
    let parted = text.chars().map(|c| if matches!(c, '\n' | '\t') { ' ' } else { c });
    parted.filter(|c| !c.is_control() && !turns(c)).collect()
}

/// Returns a value as a word.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        Value::String(text) => harmless(text),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            harmless(&value.to_string())
        }
    }
}

fn words(value: &Value) -> String {
    let words: Vec<_> = list(value).iter().map(text).collect();
    if words.is_empty() { "-".into() } else { words.join(" ") }
}

fn hex(value: &Value, digits: usize) -> String {
    format!("{:0digits$x}", value.as_u64().unwrap_or_default())
}

fn time(value: &Value) -> String {
    let seconds = value.as_u64().and_then(|seconds| i64::try_from(seconds).ok());
    seconds
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .map_or_else(|| text(value), |time| time.to_string())
}

fn free_devices(node: &Value) -> String {
    let devices = list(&node["devices"]).iter();
    let free: Vec<_> =
        devices.filter(|d| d["state"]["is"] == "free").map(|d| text(&d["address"])).collect();
    if free.is_empty() { "-".into() } else { free.join(" ") }
}

fn pairs(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, value)| format!("{name:<10} {value}\n")).collect()
}

fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut all = vec![head.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    all.extend(rows);
    let width = |column: usize| {
        all.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..head.len()).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  "));
        format!("{}\n", cells.collect::<String>().trim_end())
    };
    all.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receipts_come_to_a_sum_for_each_unit() {
        let receipt = |unit: &str, micro: u64| serde_json::json!({"receipt": {"unit": unit, "micro": micro, "running_s": 60}});
        let all = [receipt("EUR", 1_500_000), receipt("EUR", 700_000), receipt("XYZ", u64::MAX)];
        let sum = total(&all.to_vec().into());
        let large = "18446744073709.551615 XYZ for 60 s of running";
        assert_eq!(sum, format!("2.200000 EUR for 120 s of running, {large}"));
        assert_eq!(total(&Value::Null), "nothing yet");
    }

    #[test]
    fn what_others_say_cannot_rule_the_terminal() {
        let hostile = "a\u{1b}[2Jb\u{9b}c\u{202e}d\u{2066}e\u{200f}f\r\ng\u{7f}";
        assert_eq!(harmless(hostile), "a[2Jbcdef g");
        assert_eq!(text(&hostile.into()), "a[2Jbcdef g");
        assert!(!text(&serde_json::json!([hostile])).contains('\u{202e}'));
        assert_eq!(harmless("Gr\u{fc}\u{df}e 1: 2"), "Gr\u{fc}\u{df}e 1: 2");
    }
}
