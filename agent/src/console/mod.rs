//! The status page: what somebody in front of the server wants to know, as plain text on the serial
//! port, one block per change. The screen has `crate::dashboard`.
//!
//! `Page::render` is pure; `run` writes.

use std::time::Duration;

use tokio::sync::watch;
use types::{
    evidence::{Crash, Ended, LastBoot},
    node::PciDevice,
    status::Setting,
    updates::UpdatesView,
};

use crate::{inventory::rules, machines::keeper::View};

/// Changes within this time are written once.
const PAUSE: Duration = Duration::from_secs(2);

/// Most devices and machines that are listed.
const MAX_ROWS: usize = 16;

/// What the page shows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// The node's key, in full: providers copy it into gateways' configuration.
    pub node: String,
    /// Name the provider gave it.
    pub name: String,
    /// Release.
    pub release: String,
    /// Where the configuration came from, or why there is none.
    pub config: String,
    /// The code with which the node can be claimed; empty when it cannot. It is for the screen, and not in
    /// the lines, which are in the log.
    pub claim: String,
    /// Its values, each with its source.
    pub settings: Vec<Setting>,
    /// What the installer does or did; empty when none was asked for.
    pub install: String,
    /// How the boot before this one ended, and what crashes left behind.
    pub last_boot: LastBoot,
    /// How updates are.
    pub updates: UpdatesView,
    /// Addresses of the uplinks.
    pub addresses: Vec<String>,
    /// What is special about the network: problems with its configuration, a trial of a new one.
    pub network: Vec<String>,
    /// Its uplinks, each with its values and their sources.
    pub uplinks: Vec<String>,
    /// How many other members of the overlay are known.
    pub members: usize,
    /// Devices.
    pub devices: Vec<PciDevice>,
    /// Machines.
    pub machines: Vec<View>,
    /// The last error.
    pub error: String,
}

impl Page {
    /// Returns the page's lines.
    pub fn render(&self) -> Vec<String> {
        let name = if self.name.is_empty() { "(no name)" } else { &self.name };
        let addresses = match &self.addresses[..] {
            [] => "none yet".to_owned(),
            addresses => addresses.join(", "),
        };
        let mut lines = vec![
            format!("Holdfast {}  {name}", self.release),
            format!("node       {}", self.node),
            format!("config     {}", self.config),
            format!("addresses  {addresses}"),
            format!("overlay    {} other members", self.members),
        ];
        let network = self.network.iter().chain(&self.uplinks);
        lines.extend(network.map(|text| format!("network    {text}")));
        if !self.install.is_empty() {
            lines.push(format!("install    {}", self.install));
        }
        lines.extend(last_boot(&self.last_boot).map(|text| format!("last boot  {text}")));
        if !self.updates.state.is_empty() {
            lines.push(format!("updates    {}", self.updates.state));
        }
        for device in self.devices.iter().take(MAX_ROWS) {
            lines.push(format!(
                "device     {} {:04x}:{:04x} {}",
                device.address,
                device.vendor,
                device.device,
                rules::describe(&device.state)
            ));
        }
        for view in self.machines.iter().take(MAX_ROWS) {
            let lease = &view.record.lease;
            let address = view.address.map_or("no address".to_owned(), |ip| ip.to_string());
            let (state, end) = (view.state.name(), view.record.end().0);
            lines.push(format!("machine    {} {state} {address} until {end}", lease.id));
        }
        let hidden = self.devices.len().saturating_sub(MAX_ROWS)
            + self.machines.len().saturating_sub(MAX_ROWS);
        if hidden > 0 {
            lines.push(format!("           and {hidden} more"));
        }
        if self.machines.is_empty() {
            lines.push("machines   none".to_owned());
        }
        let error = if self.error.is_empty() { "none" } else { &self.error };
        lines.push(format!("last error {error}"));
        lines
    }
}

/// Says how the boot before this one ended; `None` when there is nothing to say.
pub fn last_boot(last: &LastBoot) -> Option<String> {
    let crash = last.crashes.first().map(|crash| {
        let (count, Crash { reason, name, .. }) = (last.crashes.len(), crash);
        format!("last crash of {count} kept: {reason} ({name})")
    });
    let abruptly = last.ended == Some(Ended::Abruptly);
    let ended = abruptly.then(|| "did not end as it should".to_owned());
    let parts: Vec<String> = ended.into_iter().chain(crash).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Writes the page whenever it changes.
pub async fn run(mut pages: watch::Receiver<Page>) {
    let mut printed = Vec::new();
    loop {
        let lines = pages.borrow_and_update().render();
        if lines != printed {
            lines.iter().for_each(|line| eprintln!("status| {line}"));
            printed = lines;
        }
        tokio::time::sleep(PAUSE).await;
        if pages.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_page_says_what_is_missing() {
        let page = Page { node: "ab".into(), release: "1".into(), ..Page::default() };
        let lines = page.render();
        assert_eq!(lines[0], "Holdfast 1  (no name)");
        assert!(lines.contains(&"addresses  none yet".to_owned()), "{lines:?}");
        assert!(lines.contains(&"machines   none".to_owned()), "{lines:?}");
        assert!(lines.contains(&"last error none".to_owned()), "{lines:?}");
    }
}
