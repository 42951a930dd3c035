//! The first look for a configuration. Volumes are waited for, because USB is slow; a node that was told
//! nothing yet asks the network meanwhile, so that one that is told by DHCP loses no time.

use std::path::Path;

use tokio::sync::watch;
use types::config::Network;

use super::unconfigured::fetch;
use crate::{
    config::{self, Found, Source, provision::Provisioner},
    console::Page,
    net::Uplinks,
};

/// Returns the configuration to begin with, and the uplinks of a node that still has none.
pub(super) async fn settle(pages: &watch::Sender<Page>) -> (Found, Option<Uplinks>) {
    let root = Path::new("/");
    let asks = config::load(root).source == Source::Nowhere;
    let Some(uplinks) = asks.then(|| Uplinks::start(&Network::default()).ok()).flatten() else {
        return (config::settled(root).await, None);
    };
    let fetched = async {
        if let Some(provisioner) = Provisioner::new(root, &Source::Nowhere, &uplinks) {
            fetch(provisioner, &uplinks, pages).await;
        }
        // It is kept now, and found with everything else.
        std::future::pending::<Found>().await
    };
    let found = tokio::select! {
        found = config::settled(root) => found,
        found = fetched => found,
    };
    if found.source == Source::Nowhere {
        return (found, Some(uplinks));
    }
    // What was found says which uplinks there are.
    uplinks.stop().await;
    (found, None)
}
