//! What a virtio network card gives: TCP between the guest and the host that the VMM runs on, over a tap.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use qemu_tests::{
    bed::network::{self, PORT},
    harness::guest,
};

use super::{Bench, Boot, FIRST_BOOT, RESULT, Row, result, told};

/// Number of the network.
const NETWORK: u8 = 1;
/// What the guest says at its end.
const END: &str = "bench: end of wire";
/// How long a guest may take to start and do all jobs.
const WIRE_LIMIT: Duration = Duration::from_secs(300);
/// Seconds of each job.
const SECONDS: u32 = 5;

/// One job of `wire`.
struct Job {
    what: &'static str,
    name: &'static str,
    command: &'static str,
    connections: u32,
    unit: &'static str,
}

const fn job(
    (what, name): (&'static str, &'static str),
    command: &'static str,
    connections: u32,
    unit: &'static str,
) -> Job {
    Job { what, name, command, connections, unit }
}

const JOBS: &[Job] = &[
    job(("virtio-net, TCP from guest to host", "send"), "stream", 1, "KiB/s"),
    job(("virtio-net, TCP from host to guest", "receive"), "fetch", 1, "KiB/s"),
    job(("virtio-net, round trips of a byte, 1 connection", "trips1"), "trips", 1, "1/s"),
    job(("virtio-net, round trips of a byte, 16 connections", "trips16"), "trips", 16, "1/s"),
];

/// Makes the guest's initramfs in `folder`: it does all jobs and says what came out.
pub(crate) fn initrd(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let (_, host) = network::ends(NETWORK);
    let mut script = "#!/bin/sh\n".to_owned();
    for Job { name, command, connections, .. } in JOBS {
        script.push_str(&format!(
            "echo \"{RESULT}{name} $(wire {command} {host}:{PORT} {SECONDS} {connections})\"\n"
        ));
    }
    script.push_str(&format!("echo '{END}'\n"));
    let made = guest::make(folder, "", Some(&script))?;
    Ok(network::with_wire(&made, folder)?.initrd)
}

impl Bench {
    /// Does all jobs, with a third of the runs: each run holds many thousand packets.
    pub(crate) fn nets(&mut self) -> Result<Vec<Row>> {
        self.bed.network(NETWORK, 1)?;
        let (tap, _) = network::ends(NETWORK);
        let boot = Boot {
            kernel: "/guest/kernel",
            initrd: Some("/guest/wire"),
            cmdline: "console=ttyS0 quiet rdinit=/init",
            tap: Some(&tap),
            ..FIRST_BOOT
        };
        let (mut ours, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..self.runs.div_ceil(3) {
            let plan = self.own_plan(boot, 0)?;
            ours.push(self.bed.measure(&plan, &[END], WIRE_LIMIT)?.output);
            told("holdfast", ours.last());
            if let Some(subject) = self.peer.as_ref().and_then(|peer| peer.subject(boot)) {
                peers.push(self.bed.measure_subject(subject, &[END], WIRE_LIMIT)?.output);
                told("peer", peers.last());
            }
        }
        let row = |job: &Job| {
            let peers = if peers.is_empty() { None } else { Some(result(job.name, &peers)?) };
            Ok(Row { what: job.what, unit: job.unit, ours: result(job.name, &ours)?, peers })
        };
        JOBS.iter().map(row).collect()
    }
}
