//! The filter of the thread that attaches devices allows all that a disk takes: its rings, its
//! threads, and their own filters. The attempt is a process of its own, since a filter kills it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "common/virtio.rs"]
mod common;

use std::{
    env, fs,
    os::fd::OwnedFd,
    process::{Command, exit},
    sync::{Arc, Mutex},
    thread,
};

use common::{FakeDoorbells, FakeInterrupts};
use types::vm::{Disk, DiskModel};
use vmm::{
    devices::{
        nvme::Nvme,
        virtio::{Platform, blk, blk::engine::EngineChoice},
    },
    pci::function::PciFunction,
    sandbox::{ThreadKind, apply_thread_filter},
};

/// Names the model that the child attaches; absent in the parent.
const MODEL: &str = "PLUG_FILTER_MODEL";

#[test]
fn disks_are_attached_behind_the_filter() {
    if let Ok(model) = env::var(MODEL) {
        let work = thread::spawn(move || attach(&model));
        exit(if work.join().is_ok() { 0 } else { 1 });
    }
    for model in ["virtio-blk", "nvme"] {
        let own = env::current_exe().unwrap();
        let mut child = Command::new(own);
        child.args(["--exact", "disks_are_attached_behind_the_filter", "--nocapture"]);
        let output = child.env(MODEL, model).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{model}: {}: {said}", output.status);
    }
}

fn attach(model: &str) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8 << 20).unwrap();
    let platform = Platform {
        ram: common::ram(),
        doorbells: Arc::new(FakeDoorbells(Mutex::default())),
        interrupts: Arc::new(FakeInterrupts::default()),
        activity: Default::default(),
        events: Default::default(),
        limits: Default::default(),
    };
    let model = if model == "nvme" { DiskModel::Nvme } else { DiskModel::VirtioBlk };
    let serial = "late".to_owned();
    let (read_only, more_fds) = (false, Vec::new());
    let disk = Disk { fd: -1, more_fds, read_only, serial, model, limit: None, key: None };
    let file = OwnedFd::from(file);
    assert!(fs::exists("/").unwrap());
    apply_thread_filter(ThreadKind::Plug).unwrap();
    let mut function: Box<dyn PciFunction> = match model {
        DiskModel::VirtioBlk => {
            let mut function = blk::open(&disk, (file, Vec::new()), 2, 3, &platform).unwrap();
            function.start().unwrap();
            Box::new(function)
        }
        DiskModel::Nvme => {
            let choice = EngineChoice::Best;
            let mut function = Nvme::open(&disk, file, (3, 2), choice, &platform).unwrap();
            function.start().unwrap();
            Box::new(function)
        }
    };
    let mut identity = [0; 4];
    function.read_config(0, &mut identity);
    assert_ne!(identity, [0xff; 4]);
    function.reset();
    drop(function);
    // The threads end behind their filters.
    thread::sleep(std::time::Duration::from_millis(50));
}
