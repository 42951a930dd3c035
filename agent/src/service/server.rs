//! What the agent reads of its server before it serves: devices, huge pages, the store, the floors.
//!
//! Each waits for something else (buses, a disk, another process, a TPM), so all go at once.

use std::{path::Path, process::Command, sync::Arc};

use tokio::task::{JoinHandle, spawn_blocking};
use types::{config::NodeSpec, node::PciDevice};

use super::{STATE, offered};
use crate::{
    events::Event,
    floors::{Floors, Keeper, Opener},
    init::boot::chain,
    machines::{closed, damage, init::Init, store::Store},
    time::build_time,
};

/// What was read.
pub(super) struct Server {
    /// The inventory; what may be rented is bound to vfio-pci.
    pub(super) devices: Vec<PciDevice>,
    /// Memory set aside in huge pages, in MiB.
    pub(super) huge_mib: u64,
    /// What machines there are, and what was asked about them.
    pub(super) store: Arc<Store>,
    /// The time and the release below which the server does not go.
    pub(super) floors: Keeper,
}

/// Reads everything. Fails with the reason, in words, when there is no store to serve from.
pub(super) async fn look_around(spec: &NodeSpec, init: &Init) -> Result<Server, String> {
    let (rules, machines, init) = (spec.clone(), spec.machines.clone(), init.clone());
    let devices = spawn_blocking(move || offered::prepare_devices(&rules));
    let huge_mib = spawn_blocking(move || offered::reserve_memory(&machines, &init));
    let store = spawn_blocking(|| open_store(&Path::new(STATE).join("agent.redb")));
    let floors = spawn_blocking(load_floors);
    Ok(Server {
        devices: done(devices).await,
        huge_mib: done(huge_mib).await,
        store: Arc::new(done(store).await?),
        floors: done(floors).await,
    })
}

async fn done<T>(work: JoinHandle<T>) -> T {
    work.await.expect("nothing in it panics, and nothing cancels it")
}

/// Opens the store, or a new one when it is damaged.
fn open_store(path: &Path) -> Result<Store, String> {
    if !closed::is_unchanged(path) {
        let mut process = Command::new("/proc/self/exe");
        let found = damage::look(process.arg(damage::WORD).arg(path), path).map_err(|error| {
            format!("{} is damaged and cannot be set aside: {error}", path.display())
        })?;
        if let Some(reason) = found.in_words(path) {
            eprintln!("{}", Event::Trouble { place: "state", reason });
        }
    }
    Store::open(path).map_err(|error| chain(&error))
}

/// Reads what this server does not go below; no time is before the one when what runs was built.
fn load_floors() -> Keeper {
    let least = Floors { time: build_time(), release: None };
    Keeper::load(Path::new(STATE), Opener::below(Path::new("/")), least)
}
