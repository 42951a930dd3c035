//! Devices, expected and found, and what the host can tell of them.

use ratatui::style::Style;
use types::{
    ids::MachineId,
    node::DeviceState,
    status::{DeviceFacts, DeviceView, NodeStatus},
};

use super::{BAD, GOOD, HEAD, LOOK, PageLines, WORDS};
use crate::{dashboard::text::bytes, gpu::show, inventory::rules};

pub(super) fn draw(page: &mut PageLines, status: &NodeStatus) {
    let missing = &status.missing_devices;
    let found = status.devices.len();
    page.say(&format!("{found} found, {} expected and missing", missing.len()), HEAD);
    for address in missing {
        page.say(&format!("{address}  MISSING: the configuration names it"), BAD);
    }
    for view in &status.devices {
        page.gap();
        device(page, view);
        if let DeviceState::Leased { machine } = view.device.state {
            guest(page, status, machine);
        }
    }
}

/// Shows what the guest sees beside what the host does. Its addresses are not the host's, so all
/// that it tells is shown with each of its devices.
fn guest(page: &mut PageLines, status: &NodeStatus, machine: MachineId) {
    let said = status.guests.iter().find(|guest| guest.machine == machine);
    for gpu in said.iter().flat_map(|guest| &guest.reading.gpus) {
        page.row("  guest says", &show::one(gpu), WORDS);
    }
}

fn device(page: &mut PageLines, view: &DeviceView) {
    let device = &view.device;
    let facts = &view.facts;
    let product = facts.product.as_deref().unwrap_or_default();
    let head = format!(
        "{} {:04x}:{:04x} {} {product}",
        device.address,
        device.vendor,
        device.device,
        class(device.class),
    );
    page.say(head.trim_end(), HEAD);
    page.row("  state", &rules::describe(&device.state), state_style(&device.state));
    let numa = device.numa_node.map_or("none".to_owned(), |node| node.to_string());
    let group = device.iommu_group.map_or("none".to_owned(), |group| group.to_string());
    let driver = facts.driver.as_deref().unwrap_or("none");
    let power = facts.power_state.as_deref().unwrap_or("?");
    let place = format!("NUMA node {numa}, IOMMU group {group}, driver {driver}, power {power}");
    page.row("  place", &place, WORDS);
    if !device.linked.is_empty() {
        let linked: Vec<_> = device.linked.iter().map(ToString::to_string).collect();
        page.row("  linked to", &linked.join(", "), WORDS);
    }
    if let Some((text, style)) = link(facts) {
        page.row("  link", &text, style);
    }
    let bars: Vec<_> = facts
        .bars
        .iter()
        .enumerate()
        .filter(|(_, size)| **size > 0)
        .map(|(number, size)| format!("{number}: {}", bytes(*size)))
        .collect();
    if !bars.is_empty() {
        page.row("  BARs", &bars.join(", "), WORDS);
    }
    if !facts.reset_methods.is_empty() {
        page.row("  reset", &facts.reset_methods.join(", "), WORDS);
    }
    if let Some(serial) = &facts.serial {
        page.row("  serial", serial, WORDS);
    }
}

fn link(facts: &DeviceFacts) -> Option<(String, Style)> {
    let speed = |mts: u32| format!("{}.{} GT/s", mts / 1000, mts % 1000 / 100);
    let (now, lanes) = (facts.link_mts?, facts.link_width?);
    let mut text = format!("{} x{lanes}", speed(now));
    let mut style = WORDS;
    if let (Some(most), Some(all)) = (facts.link_mts_max, facts.link_width_max)
        && (most, all) != (now, lanes)
    {
        text.push_str(&format!(" of {} x{all}", speed(most)));
        // Idle devices lower their speed by themselves; lanes that are missing do not come back.
        style = if lanes < all { LOOK } else { WORDS };
    }
    if let Some(errors) = facts.link_errors {
        let (repaired, lost, fatal) = (errors.correctable, errors.nonfatal, errors.fatal);
        text.push_str(&format!(", errors: {repaired} repaired, {lost} lost, {fatal} fatal"));
        style = if lost + fatal > 0 { BAD } else { style };
    }
    Some((text, style))
}

fn state_style(state: &DeviceState) -> Style {
    match state {
        DeviceState::Free | DeviceState::Leased { .. } => GOOD,
        DeviceState::Resetting => LOOK,
        DeviceState::Quarantined { .. } => BAD,
        DeviceState::Refused { .. } => WORDS,
    }
}

/// Returns what a device is by its class (PCI Code and ID Assignment Specification 1.11).
fn class(class: u32) -> &'static str {
    match (class >> 16, class >> 8 & 0xff) {
        (0x01, 0x08) => "NVMe disk",
        (0x01, _) => "storage",
        (0x02, 0x07) => "InfiniBand",
        (0x02, _) => "network",
        (0x03, 0x02) => "GPU (3D)",
        (0x03, _) => "GPU",
        (0x04, _) => "audio",
        (0x06, _) => "bridge",
        (0x0c, 0x03) => "USB",
        (0x12, _) => "accelerator",
        _ => "device",
    }
}
