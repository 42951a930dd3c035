//! How far the server's start can be trusted: said at the start, and made better where that is wanted.

use std::path::Path;

use types::{config::NodeSpec, secure_boot::Enrol};

use crate::{enrol, events::Event, init::boot::chain, local::host};

/// Says how far firmware and kernel are locked, and gives firmware our keys where that is wanted.
pub(super) async fn settle(spec: &NodeSpec) {
    let trust = host::trust(Path::new("/"));
    let secure_boot = enrol::secure_boot_word(&trust);
    let lockdown = trust.lockdown.unwrap_or_else(|| "unknown".to_owned());
    let measured = trust.measured.unwrap_or_else(|| "nothing: no TPM".to_owned());
    eprintln!("{}", Event::Trust { secure_boot, lockdown, measured });
    if let Some(reason) = host::additions(Path::new("/")) {
        eprintln!("{}", Event::Trouble { place: "secure-boot", reason });
    }
    if spec.secure_boot.enrol != Enrol::SetupMode {
        return;
    }
    let option_roms = spec.secure_boot.option_roms;
    let work = move || enrol::enrol(Path::new("/"), option_roms);
    let work = tokio::task::spawn_blocking(work).await;
    match work.expect("nothing in it panics, and nothing cancels it") {
        Ok(Some(enrolled)) => {
            eprintln!("{}", Event::KeysEnrolled { from: enrolled.from });
            if let Some(reason) = enrolled.unknown {
                eprintln!("{}", Event::Trouble { place: "secure-boot", reason });
            }
        }
        Ok(None) => {}
        Err(error) => eprintln!("{}", Event::KeysNotEnrolled { reason: chain(&error) }),
    }
}
