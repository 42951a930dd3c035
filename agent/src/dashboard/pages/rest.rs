//! Machines, other members, the log, and help.

use std::collections::VecDeque;

use ratatui::text::Span;
use types::{
    logs::LogLine,
    status::{MachineView, NodeStatus, RefusedReadings},
};

use super::{BAD, GOOD, HEAD, LOOK, PageLines, WORDS, level_style};
use crate::{
    dashboard::text::{bytes, span, time},
    gpu::show,
};

/// A lease that ends within this time is marked, in seconds.
const SOON_S: u64 = 600;

/// What the help says.
const HELP: [&str; 15] = [
    "This screen shows the node and changes nothing.",
    "",
    "tab, right, n      next page          left, p, shift+tab   page before",
    "1 to 7             that page          ?, h, F1             this page",
    "up, down, j, k     a line             page up, page down   ten lines",
    "home, end          back to the start, or to the newest line of the log",
    "l                  on the log: which lines are shown",
    "r                  draw everything anew",
    "",
    "alt+F2 shows the kernel's messages, alt+F1 comes back here.",
    "ctrl+alt+del restarts the server in order; the power button switches it off.",
    "",
    "The same is printed as plain text on the serial port, and told to programs by",
    "the gateway. To configure the node, put holdfast.toml on a FAT volume labelled",
    "HOLDFAST.",
];

pub(super) fn machines(page: &mut PageLines, status: &NodeStatus) {
    let count = status.machines.len();
    page.say(&format!("{count} machines"), HEAD);
    for machine in &status.machines {
        page.gap();
        one(page, status, machine);
    }
}

fn one(page: &mut PageLines, status: &NodeStatus, machine: &MachineView) {
    let address = machine.address.map_or("no address".to_owned(), |ip| ip.to_string());
    page.say(&format!("{}  {address}", machine.id), HEAD);
    let style = match machine.state.as_str() {
        "running" => GOOD,
        "starting" | "stopping" => LOOK,
        _ => WORDS,
    };
    page.row("  state", &machine.state, style);
    let shape = &machine.shape;
    let (memory, disk) = (shape.memory_mib.to_bytes(), shape.disk_mib.to_bytes());
    let size = format!(
        "{} CPUs, {} memory, {} disk, {} devices",
        shape.vcpus,
        bytes(memory.unwrap_or(u64::MAX)),
        bytes(disk.unwrap_or(u64::MAX)),
        shape.devices.len(),
    );
    page.row("  shape", &size, WORDS);
    let left = machine.end.since(status.time);
    let (left, style) = match left {
        0 => ("over".to_owned(), BAD),
        left if left < SOON_S => (format!("{} left", span(left)), LOOK),
        left => (format!("{} left", span(left)), WORDS),
    };
    page.row("  lease", &format!("until {} UTC, {left}", time(machine.end)), style);
    page.row("  renter", &machine.renter.to_string(), WORDS);
    for guest in status.guests.iter().filter(|guest| guest.machine == machine.id) {
        let age = span(guest.age_ms / 1000);
        page.row("  guest says", &format!("{age} ago, driver {}:", guest.reading.driver), WORDS);
        for line in show::lines(&guest.reading).into_iter().skip(1) {
            page.row("", &line, WORDS);
        }
    }
    for refused in status.refused_readings.iter().filter(|it| it.machine == machine.id) {
        let age = span(refused.age_ms / 1000);
        let RefusedReadings { count, reason, .. } = refused;
        let text = format!("{age} ago its reading of GPUs ({count} so far): {reason}");
        page.row("  refused", &text, LOOK);
    }
    if !machine.last_stop.is_empty() {
        page.row("  last stop", &machine.last_stop, LOOK);
    }
}

pub(super) fn overlay(page: &mut PageLines, status: &NodeStatus) {
    let overlay = &status.overlay;
    page.row("port", &format!("UDP {}", overlay.port), WORDS);
    page.row("members", &overlay.members.to_string(), WORDS);
    let traffic = format!(
        "{} sent, {} received, {} packets lost",
        bytes(overlay.sent_bytes),
        bytes(overlay.received_bytes),
        overlay.lost_packets,
    );
    page.row("traffic", &traffic, WORDS);
    page.gap();
    page.say("member    role      link       heard     round trip  address", HEAD);
    for member in &overlay.listed {
        let link = if member.neighbour { "neighbour" } else { "-" };
        let trip = member
            .round_trip_us
            .map_or("-".to_owned(), |us| format!("{}.{} ms", us / 1000, us % 1000 / 100));
        let heard = format!("{} ago", span(member.last_heard_ms / 1000));
        let address = member.addresses.first().map_or("-".to_owned(), ToString::to_string);
        let (short, role) = (member.node.short(), &member.role);
        let line = format!("{short:<9} {role:<9} {link:<10} {heard:<9} {trip:<11} {address}");
        page.say(&line, if member.neighbour { GOOD } else { WORDS });
    }
}

pub(super) fn log(page: &mut PageLines, lines: &VecDeque<LogLine>) {
    for line in lines {
        let (seconds, millis) = (line.at_ms / 1000, line.at_ms % 1000);
        let source = line.source.name();
        let style = level_style(line.level);
        let head = format!(" {seconds:>6}.{millis:03} {source:<9} ");
        page.flow(Span::styled(head, style), &line.text, style);
    }
    if lines.is_empty() {
        page.say("no lines that matter so much", WORDS);
    }
}

pub(super) fn help(page: &mut PageLines) {
    HELP.iter().for_each(|line| page.say(line, WORDS));
}
