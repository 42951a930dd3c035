//! What nobody waits for at the start, and what would only keep a server with few processors from serving:
//! reading the kernel's log, how the last boot ended, DATA's growth. It begins once the
//! node serves, or has found out that it cannot, or has tried for a moment.

use std::{fs, path::Path, time::Duration};

use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use types::evidence::Ended;

use super::{STATE, volumes};
use crate::{
    console::Page,
    events::Event,
    evidence::{self, Lasting},
    install::{runs_from_memory, session},
    logs::{self, Logs, Reader},
};

/// Longest time that a start keeps the chores waiting.
const PATIENCE: Duration = Duration::from_secs(2);

/// The chores of one run of the agent.
pub(super) struct Chores {
    begin: watch::Sender<bool>,
    looked_back: JoinHandle<()>,
    keeper: evidence::Keeper,
}

impl Chores {
    /// Gets them ready. `reader` fills `logs`, and `pages` get to know how the last boot ended.
    pub(super) fn new(logs: Logs, reader: Reader, pages: watch::Sender<Page>) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = boot.trim().to_owned();
        let keeper = evidence::Keeper::new(logs, Path::new(STATE), &boot);
        let (begin, mut begun) = watch::channel(false);
        let keeps = keeper.clone();
        let looked_back = tokio::spawn(async move {
            // An error says that nobody will say so any more.
            timeout(PATIENCE, begun.wait_for(|begun| *begun)).await.ok();
            reader.start(Path::new(logs::KMSG));
            let looked = spawn_blocking(move || look_back(&boot, &pages));
            looked.await.expect("nothing in it panics, and nothing cancels it");
            tokio::spawn(keeps.run());
            // The file system is in use meanwhile, and has room for a start.
            spawn_blocking(session::grow_data);
        });
        Self { begin, looked_back, keeper }
    }

    /// Says that nothing waits for the processor any more.
    pub(super) fn begin(&self) {
        self.begin.send_replace(true);
    }

    /// Says that the boot ends as it should, and gives the last files their names.
    pub(super) async fn end(self) {
        self.begin();
        // What the last boot left is put away before this one's end is written over it.
        self.looked_back.await.expect("nothing in it panics, and nothing cancels it");
        let keeper = self.keeper;
        let ended = spawn_blocking(move || {
            let ended = keeper.end();
            // After it, since a disk that hangs ends this here.
            volumes::keep_names();
            ended
        });
        let ended = ended.await;
        if let Err(error) = ended.expect("nothing in it panics, and nothing cancels it") {
            eprintln!("{}", Event::Trouble { place: "evidence", reason: error.to_string() });
        }
    }
}

/// Says how the last boot ended.
fn look_back(boot: &str, pages: &watch::Sender<Page>) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let lasting = if runs_from_memory(&mounts) { Lasting::Memory } else { Lasting::Disk };
    if let Err(error) = evidence::remember_crash(Path::new("/")) {
        let reason = format!("that the last boot crashed: {error}");
        eprintln!("{}", Event::Trouble { place: "evidence", reason });
    }
    let last = evidence::collect(Path::new(evidence::PSTORE), (Path::new(STATE), lasting), boot);
    if last.ended == Some(Ended::Abruptly) {
        let line = last.lines.last().cloned().unwrap_or_default();
        eprintln!("{}", Event::EndedAbruptly { last: line });
    }
    pages.send_modify(|page| page.last_boot = last);
}
