//! A node without a configuration that it can use: it says so, stays on the network and alive, can be claimed,
//! and waits for a document.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::{mpsc, watch};
use types::{ids::NodeId, units::UnixSeconds};

use super::{STATE, Views};
use crate::{
    claim::{self, Waiting},
    config::{self, Found, provision::Provisioner},
    console::Page,
    events::Event,
    init::boot::chain,
    inventory::{self, rules},
    machines::init::{Init, Notice},
    net::Uplinks,
    time::{Clock, ClockConfig},
};

/// Shows what is wrong, and keeps the node on the network and alive. Returns its uplinks.
pub(super) fn show(
    (node, source): (NodeId, &config::Source),
    error: &config::LoadError,
    init: &Init,
    mut notices: mpsc::Receiver<Notice>,
    Views { pages, local }: &Views,
) -> Option<Arc<Uplinks>> {
    let reason = chain(error);
    eprintln!("{}", Event::ConfigBad { source: source.to_string(), reason: reason.clone() });
    pages.send_modify(|page| {
        page.config = format!("none that can be used ({source})");
        page.error = reason;
        page.devices = rules::devices(&inventory::read(Path::new("/")), None);
    });
    let init = init.clone();
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(std::time::Duration::from_secs(5));
        loop {
            tokio::select! {
                _ = tick.tick() => if init.alive(Vec::new()).is_err() { std::process::exit(1) },
                notice = notices.recv() => {
                    if matches!(notice, None | Some(Notice::Lost(_))) {
                        std::process::exit(1);
                    }
                }
            }
        }
    });
    // A document that is wrong is its owner's to mend; only a node without any waits for a claim.
    if matches!(error, config::LoadError::Absent) {
        tokio::spawn(wait_for_claim(node, pages.clone()));
    }
    let uplinks = Arc::new(Uplinks::start(&types::config::Network::default()).ok()?);
    local.tell_network(uplinks.status());
    tokio::spawn(show_addresses(Arc::clone(&uplinks), pages.clone()));
    Some(uplinks)
}

/// Lets somebody with the code on the consoles give the node its configuration. Whoever waits for another
/// document finds it then.
async fn wait_for_claim(node: NodeId, pages: watch::Sender<Page>) {
    let trouble = |error: &io::Error| {
        eprintln!("{}", Event::Trouble { place: "claim", reason: chain(error) });
    };
    let waiting = match Waiting::new(node, PathBuf::from(STATE)) {
        Ok(waiting) => Arc::new(waiting),
        Err(error) => return trouble(&error),
    };
    let listener = match claim::listen().await {
        Ok(listener) => listener,
        Err(error) => return trouble(&error),
    };
    pages.send_modify(|page| page.claim = waiting.code());
    let shown = pages.subscribe();
    let addresses = || shown.borrow().addresses.clone();
    tokio::join!(Arc::clone(&waiting).serve(listener), waiting.show(Path::new("/"), addresses));
}

/// Keeps the addresses on the page of a node that has nothing else to do.
async fn show_addresses(uplinks: Arc<Uplinks>, pages: watch::Sender<Page>) {
    let mut network = uplinks.status();
    loop {
        let addresses: Vec<_> = network.borrow_and_update().addresses().collect();
        pages.send_if_modified(|page| {
            let now: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            let changed = page.addresses != now;
            page.addresses = now;
            changed
        });
        if network.changed().await.is_err() {
            return;
        }
    }
}

/// Waits for a document that can be used: somebody plugs one in, or it is fetched. Then init starts the
/// agent again, which reads it.
pub(super) async fn find_another(
    found: Found,
    uplinks: Option<Arc<Uplinks>>,
    pages: watch::Sender<Page>,
) {
    let root = Path::new("/");
    let provisioner =
        uplinks.as_ref().and_then(|uplinks| Provisioner::new(root, &found.source, uplinks));
    let fetched = async {
        let Some((provisioner, uplinks)) = provisioner.zip(uplinks) else {
            return std::future::pending().await;
        };
        // Certificates have a time, and a server without a battery does not know it.
        let _clock = Clock::start(ClockConfig {
            seen: UnixSeconds(0),
            confirmed: UnixSeconds(0),
            agreed: UnixSeconds(0),
            servers: Vec::new(),
            nts: None,
            network: uplinks.status(),
            resolver: uplinks.resolver(),
        });
        provisioner.run(&pages).await;
    };
    tokio::select! {
        () = config::changed(root, &found) => {}
        () = fetched => {}
    }
    std::process::exit(0)
}
