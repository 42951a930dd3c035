//! The installer as a part of the agent's start: it runs beside the signs of life that init waits
//! for, shows what it does, and restarts the node when it is done.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::sync::watch;
use types::{config::NodeSpec, install::Install};

use super::{Elsewhere, InstallError, Installed, Keepsakes, grow::Grown, run, runs_from_memory};
use crate::{console::Page, events::Event, init::boot::chain, machines::init::Init, spawn::Action};

/// Time between two signs of life to init.
const ALIVE: Duration = Duration::from_secs(5);

/// Installs the node if that is asked for and possible, and restarts it then: in that case this
/// never returns. Otherwise the node goes on from memory, and the page says why.
pub async fn attempt(spec: &NodeSpec, document: &[u8], init: &Init, pages: &watch::Sender<Page>) {
    let Some(install) = &spec.install else { return };
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if !runs_from_memory(&mountinfo) {
        return;
    }
    // An agent that starts again beside running machines must not take the node down.
    match init.list().await {
        Ok(machines) if machines.is_empty() => {}
        Ok(_) | Err(_) => return,
    }
    let keepsakes = Keepsakes { document: document.to_vec(), state: PathBuf::from("/state") };
    let elsewhere =
        Elsewhere { network: spec.network.clone(), runtime: tokio::runtime::Handle::current() };
    match beside_signs_of_life(install.clone(), (keepsakes, elsewhere), init, pages).await {
        Ok(Installed { disk, entry, shown }) => {
            if let Err(reason) = entry {
                eprintln!("{}", Event::Trouble { place: "boot entry", reason });
            }
            pages.send_modify(|page| page.install = format!("installed on {disk}; restarting"));
            linger(shown, init).await;
            if let Err(error) = init.shutdown(Action::Reboot) {
                let reason = chain(&error);
                eprintln!("{}", Event::Trouble { place: "restart", reason });
                return;
            }
            std::future::pending::<()>().await;
        }
        Err(error) => {
            let reason = chain(&error);
            eprintln!("{}", Event::NotInstalled { reason: reason.clone() });
            pages.send_modify(|page| page.install = format!("not installed: {reason}"));
        }
    }
}

async fn beside_signs_of_life(
    install: Install,
    (keepsakes, elsewhere): (Keepsakes, Elsewhere),
    init: &Init,
    pages: &watch::Sender<Page>,
) -> Result<Installed, InstallError> {
    let pages = pages.clone();
    let mut work = tokio::task::spawn_blocking(move || {
        run(&install, &keepsakes, &elsewhere, &mut |line| {
            eprintln!("{}", Event::Installing { step: line.clone() });
            pages.send_modify(|page| page.install = line);
        })
    });
    let mut tick = tokio::time::interval(ALIVE);
    loop {
        tokio::select! {
            result = &mut work => match result {
                Ok(result) => return result,
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            },
            // Without init nobody can restart the node, nor this program.
            _ = tick.tick() => if init.alive(Vec::new()).is_err() { std::process::exit(1) },
        }
    }
}

/// Leaves the last page where it is for this time.
async fn linger(time: Duration, init: &Init) {
    let signs = async {
        let mut tick = tokio::time::interval(ALIVE);
        loop {
            tick.tick().await;
            if init.alive(Vec::new()).is_err() {
                std::process::exit(1);
            }
        }
    };
    tokio::select! {
        () = signs => {}
        () = tokio::time::sleep(time) => {}
    }
}

/// Grows DATA to its disk. What cannot be grown stays usable as it is.
pub fn grow_data() {
    let path = Path::new("/data");
    match super::grow::grow(path) {
        Ok(Some(Grown { bytes, unused, mended })) => {
            eprintln!("{}", Event::DataGrown { bytes: bytes - unused });
            if let Some(reason) = mended {
                eprintln!("{}", Event::Trouble { place: "data", reason });
            }
            if unused > 0 {
                let reason = format!(
                    "{unused} of DATA's {bytes} bytes stay unused: its file system was made by an earlier \
                     release, with more inodes than so long a disk has numbers for; install the node anew \
                     to use all of the disk"
                );
                eprintln!("{}", Event::Trouble { place: "data", reason });
            }
        }
        Ok(None) => {}
        Err(error) => {
            eprintln!("{}", Event::Trouble { place: "data", reason: chain(&error) });
        }
    }
}
