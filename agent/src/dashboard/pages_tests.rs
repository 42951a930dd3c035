use ratatui::{Terminal, backend::TestBackend};

use super::*;
use crate::local::sample;

/// Draws a page and returns its rows.
fn rows(known: &Known, view: &mut View, size: (u16, u16)) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("a terminal");
    terminal.draw(|frame| draw(frame, known, view)).expect("drawn");
    let buffer = terminal.backend().buffer().clone();
    let row = |y: u16| -> String { (0..size.0).map(|x| buffer[(x, y)].symbol()).collect() };
    (0..size.1).map(row).collect()
}

fn page(tab: Tab, known: &Known) -> String {
    let mut view = View { tab, ..View::default() };
    rows(known, &mut view, (80, 25)).join("\n")
}

fn known() -> Known {
    let mut known = Known::default();
    known.handle_status(sample::status());
    known.handle_lines(
        (0..100).map(|n| sample::line(n, Level::Notice, &format!("line {n}"))).collect(),
    );
    known
}

/// Whether every cell holds one printable ASCII character.
fn harmless(rows: &[String], width: u16) -> bool {
    rows.iter().all(|row| {
        row.len() == usize::from(width) && row.bytes().all(|byte| (0x20..0x7f).contains(&byte))
    })
}

fn contains(text: &str, wanted: &[&str]) {
    for wanted in wanted {
        assert!(text.contains(wanted), "{wanted:?} is not in\n{text}");
    }
}

#[test]
fn a_seal_that_any_program_opens_is_not_shown_as_whole() {
    let shown = |secure_boot: bool| {
        let mut status = sample::status();
        (status.trust.secure_boot, status.trust.sealed) = (Some(secure_boot), true);
        let bound = types::volumes::Bound::Release;
        for volume in &mut status.volumes {
            volume.protection = types::volumes::Protection::Sealed { bound };
        }
        let mut known = Known::default();
        known.handle_status(status);
        page(Tab::Node, &known)
    };
    contains(&shown(true), &["Secure Boot on, lockdown integrity, TPM 2, sealed"]);
    contains(&shown(false), &["TPM 2, disks half sealed", "but whoever starts "]);
}

#[test]
fn the_node_is_shown() {
    let text = page(Tab::Node, &known());
    contains(
        &text,
        &[
            " Holdfast 0.1.0  rack 7",
            "up 1h 02m  2026-12-01 00:00:00 UTC",
            &"ab".repeat(32),
            "config       volume /dev/vda",
            "eth0 203.0.113.15/24",
            "2 members, 1 neighbours",
            "Secure Boot on, lockdown integrity, TPM 2, disks NOT sealed",
            "0.1.0, installed",
            "slot A: ready; waits for machines to end",
            "last: release 0.1.9 failed: no network",
            "56 of 64 CPUs, 390.6 GiB memory",
            "/state in memory (6.0 GiB free)",
            "iTCO_wdt 60 s",
            "trouble place=store",
        ],
    );
}

#[test]
fn a_node_without_a_configuration_says_what_to_do() {
    let mut known = known();
    let status = known.status.as_mut().expect("a status");
    status.serving = false;
    status.config = "none that can be used (nowhere)".to_owned();
    status.trouble = "configuration line 3, column 1: unknown field `nmae`".to_owned();
    contains(
        &page(Tab::Node, &known),
        &["nmae", "put holdfast.toml on a FAT volume labelled HOLDFAST"],
    );
}

#[test]
fn devices_machines_members_and_lines_are_shown() {
    let known = known();
    contains(
        &page(Tab::Devices, &known),
        &[
            "2 found, 1 expected and missing",
            "0000:09:00.0  MISSING",
            "0000:02:00.0 10de:2335 GPU (3D) H200",
            "leased to machine 5a5a",
            "2.5 GT/s x16 of 32.0 GT/s x16, errors: 3 repaired",
            "2: 256.0 GiB",
            "flr, bus",
            "1654022000000",
            "guest says 0 NVIDIA H200: 87 % busy",
        ],
    );
    contains(
        &page(Tab::Machines, &known),
        &[
            "10.77.0.2",
            "running",
            "8 CPUs, 64.0 GiB memory",
            "1h 53m left",
            "3s ago, driver 535",
            "(2 so far)",
        ],
    );
    contains(
        &page(Tab::Overlay, &known),
        &["01010101  gateway   neighbour", "23.4 ms", "UDP 4600"],
    );
    contains(&page(Tab::Help, &known), &["changes nothing", "alt+F2"]);
    let config = page(Tab::Config, &known);
    contains(
        &config,
        &["volume /dev/vda", "name = \"rack 7\"", "machines.grace_s = 10  (default)"],
    );
}

#[test]
fn the_log_ends_with_the_newest_line_and_scrolls_back() {
    let known = known();
    let mut view = View { tab: Tab::Log, ..View::default() };
    let drawn = rows(&known, &mut view, (80, 25));
    assert!(drawn[23].contains("line 99"), "{}", drawn[23]);
    view.scroll = 7;
    let drawn = rows(&known, &mut view, (80, 25));
    assert!(drawn[23].contains("line 92"), "{}", drawn[23]);
    view.scroll = u16::MAX;
    let drawn = rows(&known, &mut view, (80, 25));
    assert!(drawn[2].contains("line 0"), "{}", drawn[2]);
    assert_eq!(view.scroll, 78);
}

/// A refusal as it is told, with what would be right at its end.
fn refusal() -> String {
    format!("start: {} what would be right", "the reason is told at length, ".repeat(20))
}

#[test]
fn long_values_and_lines_of_the_log_go_on_in_the_next_lines() {
    let mut known = known();
    known.status.as_mut().expect("a status").trouble = refusal();
    known.handle_lines(vec![sample::line(100, Level::Error, &refusal())]);
    for tab in [Tab::Node, Tab::Log] {
        let mut view = View { tab, ..View::default() };
        let drawn = rows(&known, &mut view, (80, 60)).join(" ");
        let words: Vec<_> = drawn.split_whitespace().collect();
        contains(&words.join(" "), &["the reason is told at length, what would be right"]);
    }
}

#[test]
fn an_agent_that_does_not_answer_is_noticed_and_what_it_said_stays() {
    let mut known = known();
    known.handle_silence("Connection refused".to_owned());
    let text = page(Tab::Node, &known);
    contains(&text, &["does not answer: Connection refused", "rack 7"]);
    contains(&page(Tab::Node, &Known::default()), &["waiting for the agent"]);
}

#[test]
fn nothing_that_others_say_reaches_the_terminal_as_it_is() {
    let mut known = known();
    let hostile = || sample::HOSTILE.to_owned();
    let status = known.status.as_mut().expect("a status");
    status.name = hostile();
    status.release = hostile();
    status.config = hostile();
    status.trouble = hostile();
    status.trust.lockdown = Some(hostile());
    status.trust.tpm = Some(hostile());
    status.network.error = hostile();
    status.network.interfaces[0].name = hostile();
    status.network.interfaces[0].addresses = vec![hostile()];
    status.host.watchdogs[0].name = hostile();
    status.host.volumes[0].path = hostile();
    status.overlay.listed[0].role = hostile();
    status.devices[0].facts.product = Some(hostile());
    status.devices[0].facts.serial = Some(hostile());
    status.devices[0].facts.driver = Some(hostile());
    status.devices[0].facts.power_state = Some(hostile());
    status.devices[0].facts.reset_methods = vec![hostile()];
    status.machines[0].state = hostile();
    status.machines[0].last_stop = hostile();
    status.guests[0].reading.gpus[0].name = hostile();
    status.guests[0].reading.driver = hostile();
    status.refused_readings[0].reason = hostile();
    status.guests[0].reading.xids[0].gpu = hostile();
    status.errors = vec![sample::line(1, Level::Error, sample::HOSTILE)];
    known.lines = [sample::line(1, Level::Error, sample::HOSTILE)].into();
    known.silent = Some(hostile());
    for tab in Tab::ALL {
        let mut view = View { tab, ..View::default() };
        let drawn = rows(&known, &mut view, (80, 25));
        assert!(harmless(&drawn, 80), "{tab:?}: {drawn:?}");
    }
}

#[test]
fn every_page_fits_every_screen() {
    let known = known();
    for tab in Tab::ALL {
        for size in [(1, 1), (3, 2), (20, 5), (40, 12), (80, 25), (240, 67)] {
            let mut view = View { tab, scroll: 9, ..View::default() };
            let drawn = rows(&known, &mut view, size);
            assert!(harmless(&drawn, size.0), "{tab:?} {size:?}: {drawn:?}");
        }
    }
}
