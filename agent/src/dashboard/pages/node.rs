//! Who and where the node is, and how far it can be trusted.

use ratatui::text::Span;
use types::{
    status::{NodeStatus, Setting, Slot, Trust, VolumeView},
    updates::UpdatesView,
    volumes::Starts,
};

use super::{BAD, GOOD, LOOK, PageLines, WORDS};
use crate::{
    console::last_boot,
    dashboard::text::{bytes, span},
};

/// Errors that fit below the rest.
const ERRORS: usize = 3;

pub(super) fn draw(page: &mut PageLines, status: &NodeStatus) {
    page.row("node", &status.node.to_string(), WORDS);
    let style = if status.serving { WORDS } else { BAD };
    page.row("config", &status.config, style);
    if let Some(last) = last_boot(&status.last_boot) {
        page.row("last boot", &last, LOOK);
    }
    if !status.install.is_empty() {
        page.row("install", &status.install, LOOK);
    }
    if !status.trouble.is_empty() {
        page.row("trouble", &status.trouble, BAD);
    }
    if !status.serving {
        let help = "put holdfast.toml on a FAT volume labelled HOLDFAST and plug it in, or name \
                    its URL in DHCP's option 224; it is found while the node runs";
        page.row("what to do", help, LOOK);
    }
    if !status.claim.is_empty() {
        let help = "on another computer: holdfast node claim ADDRESS --config holdfast.toml --code";
        page.row("or", help, LOOK);
        page.row("claim code", &status.claim, LOOK);
    }
    addresses(page, status);
    let clock = &status.clock;
    let (text, style) = match clock.sources {
        0 => ("no time source agrees yet; the time may be wrong".to_owned(), LOOK),
        count => (format!("{count} time sources agree, was {} ms off", clock.offset_ms), GOOD),
    };
    page.row("clock", &text, style);
    let overlay = &status.overlay;
    let neighbours = overlay.listed.iter().filter(|member| member.neighbour).count();
    let style = if overlay.members == 0 { LOOK } else { GOOD };
    page.row("overlay", &format!("{} members, {neighbours} neighbours", overlay.members), style);
    let (text, style) = trust(&status.trust);
    page.row("trust", &text, style);
    page.row("release", &format!("{}, {}", status.release, slot(&status.slot)), WORDS);
    updates(page, &status.updates);
    resources(page, status);
    page.gap();
    if status.errors.is_empty() {
        page.row("last errors", "none", GOOD);
    }
    let now = status.uptime_ms;
    for (index, line) in status.errors.iter().take(ERRORS).enumerate() {
        let name = if index == 0 { "last errors" } else { "" };
        let age = span(now.saturating_sub(line.at_ms) / 1000);
        let text = line.text.strip_prefix(crate::events::PREFIX).unwrap_or(&line.text);
        page.row(name, &format!("{age} ago: {text}"), BAD);
    }
}

/// The configuration, value by value.
pub(super) fn settings(page: &mut PageLines, status: &NodeStatus) {
    page.row("config", &status.config, WORDS);
    page.gap();
    for setting in &status.settings {
        let Setting { key, value, source } = setting;
        let (text, style) = match source == &status.config {
            true => (format!("{key} = {value}"), GOOD),
            false => (format!("{key} = {value}  ({source})"), WORDS),
        };
        page.flow(Span::raw(" "), &text, style);
    }
    if status.settings.is_empty() {
        page.say("no configuration that can be used", LOOK);
    }
}

fn updates(page: &mut PageLines, updates: &UpdatesView) {
    let slot = match updates.slot.as_str() {
        "" => String::new(),
        slot => format!("slot {slot}: "),
    };
    let style = if updates.trouble.is_empty() && !updates.trial { WORDS } else { LOOK };
    if !updates.state.is_empty() {
        page.row("updates", &format!("{slot}{}", updates.state), style);
    }
    if updates.held {
        page.row("", "held: stays on this release until an operator says `resume`", LOOK);
    }
    if !updates.last.is_empty() {
        page.row("", &format!("last: {}", updates.last), WORDS);
    }
    if !updates.trouble.is_empty() {
        page.row("", &updates.trouble, BAD);
    }
}

fn addresses(page: &mut PageLines, status: &NodeStatus) {
    let interfaces = &status.network.interfaces;
    if interfaces.is_empty() {
        page.row("addresses", "none yet", LOOK);
    }
    for interface in interfaces {
        let (addresses, style) = match (interface.carrier, &interface.addresses[..]) {
            (false, _) => ("no cable".to_owned(), LOOK),
            (true, []) => ("no address yet".to_owned(), LOOK),
            (true, addresses) => (addresses.join(" "), WORDS),
        };
        page.row("addresses", &format!("{} {addresses}", interface.name), style);
    }
    if !status.network.error.is_empty() {
        page.row("network", &status.network.error, BAD);
    }
}

fn trust(trust: &Trust) -> (String, ratatui::style::Style) {
    let said = |value: Option<bool>, yes: &str, no: &str, none: &str| {
        value.map_or(none, |value| if value { yes } else { no }).to_owned()
    };
    let parts = [
        said(trust.secure_boot, "Secure Boot on", "Secure Boot OFF", "no Secure Boot"),
        said(trust.setup_mode, "firmware in setup mode", "", ""),
        trust
            .lockdown
            .as_ref()
            .map_or("lockdown unknown".to_owned(), |mode| format!("lockdown {mode}")),
        trust.tpm.as_ref().map_or("no TPM".to_owned(), |version| format!("TPM {version}")),
        match (trust.sealed, trust.starts()) {
            (false, _) => "disks NOT sealed",
            (true, Starts::Signed) => "sealed",
            // The volumes' rows say from whom not.
            (true, Starts::Anything) => "disks half sealed",
        }
        .to_owned(),
    ];
    let good = trust.sealed && trust.secure_boot == Some(true);
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    (parts.join(", "), if good { GOOD } else { LOOK })
}

fn slot(slot: &Slot) -> &'static str {
    match slot {
        Slot::Installed => "installed",
        Slot::DiskWithoutSlots => "started from a disk without update slots",
        Slot::NotInstalled => "not installed: everything is in memory and gone at power off",
    }
}

fn resources(page: &mut PageLines, status: &NodeStatus) {
    let host = &status.host;
    let free = &host.free;
    let rentable = format!(
        "{} of {} CPUs, {} memory, {} disk free",
        free.vcpus,
        host.cpus,
        bytes(free.memory_mib.saturating_mul(1 << 20)),
        bytes(free.disk_mib.saturating_mul(1 << 20)),
    );
    page.row("to rent", &rentable, WORDS);
    let (available, all) = (bytes(host.memory_available_bytes), bytes(host.memory_bytes));
    let load = format!("{}.{:02}", host.load_milli / 1000, host.load_milli % 1000 / 10);
    page.row("server", &format!("{available} of {all} memory available, load {load}"), WORDS);
    let volumes: Vec<_> = host.volumes.iter().map(volume).collect();
    page.row("storage", &volumes.join(", "), WORDS);
    for volume in &status.volumes {
        let notice = volume.protection.notice(status.trust.starts());
        if !notice.is_empty() {
            page.row("disk", &format!("{}: {notice}", volume.name), LOOK);
        }
    }
    let armed: Vec<_> = host
        .watchdogs
        .iter()
        .filter(|watchdog| watchdog.armed)
        .map(|watchdog| format!("{} {} s", watchdog.name, watchdog.timeout_s))
        .collect();
    let style = if armed.is_empty() { LOOK } else { WORDS };
    let text = if armed.is_empty() { "none counts".to_owned() } else { armed.join(", ") };
    page.row("watchdogs", &text, style);
}

fn volume(volume: &VolumeView) -> String {
    let kind = if volume.kind == "tmpfs" { "in memory" } else { "on disk" };
    format!("{} {kind} ({} free)", volume.path, bytes(volume.free_bytes))
}
