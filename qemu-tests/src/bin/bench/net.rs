//! What a virtio network card gives, over a tap between the guest and the host that the VMM runs on: iperf3's
//! streams of TCP, and round trips of a byte, each a request and its answer.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use qemu_tests::{
    bed::network::{self, PORT},
    harness::{guest, tools::Tool},
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

/// The port that iperf3 listens on.
const IPERF3_PORT: u16 = 5201;
/// Where the host has iperf3.
const FOLDER: &str = "iperf3.d";

/// One job.
struct Job {
    what: &'static str,
    name: &'static str,
    work: Work,
    unit: &'static str,
}

/// What a job does.
enum Work {
    /// iperf3, with these words more.
    Stream(&'static str),
    /// Round trips on that many connections.
    Trips(u32),
}

const JOBS: &[Job] = &[
    Job {
        what: "virtio-net, iperf3 from guest to host",
        name: "send",
        work: Work::Stream(""),
        unit: "kbit/s",
    },
    Job {
        what: "virtio-net, iperf3 from host to guest",
        name: "receive",
        work: Work::Stream("--reverse"),
        unit: "kbit/s",
    },
    Job {
        what: "virtio-net, round trips of a byte, 1 connection",
        name: "trips1",
        work: Work::Trips(1),
        unit: "1/s",
    },
    Job {
        what: "virtio-net, round trips of a byte, 16 connections",
        name: "trips16",
        work: Work::Trips(16),
        unit: "1/s",
    },
];

impl Work {
    /// Returns the words of the guest's shell that do it and print its result.
    fn command(&self, host: &str) -> String {
        match self {
            Self::Stream(more) => format!(
                "TMPDIR=/root iperf3 --client {host} --time {SECONDS} --format k {more} \
                 | busybox awk '$NF == \"receiver\" {{ print $(NF - 2) }}'"
            ),
            Self::Trips(connections) => {
                format!("wire trips {host}:{PORT} {SECONDS} {connections}")
            }
        }
    }
}

/// Returns the files of a host that is going to have such a network.
pub(crate) fn files() -> Result<Vec<(String, PathBuf)>> {
    let mut all = network::files()?;
    all.extend(Tool::iperf3()?.whole(FOLDER)?);
    Ok(all)
}

/// Makes the guest's initramfs in `folder`: it does all jobs and says what came out.
pub(crate) fn initrd(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let (_, host) = network::ends(NETWORK);
    let mut script = "#!/bin/sh\n".to_owned();
    for Job { name, work, .. } in JOBS {
        script.push_str(&format!("echo \"{RESULT}{name} $({})\"\n", work.command(&host)));
    }
    script.push_str(&format!("echo '{END}'\n"));
    let made = guest::make_with(&Tool::iperf3()?, folder, &script)?;
    Ok(network::with_wire(&made, folder)?.initrd)
}

impl Bench {
    /// Does all jobs.
    pub(crate) fn nets(&mut self) -> Result<Vec<Row>> {
        self.bed.network(NETWORK, 1)?;
        // It keeps what it sends in a file.
        let mut words = vec!["/bin/busybox".to_owned(), "env".to_owned(), "TMPDIR=/run".to_owned()];
        words.extend(Tool::iperf3()?.words(FOLDER));
        words.extend(["--server".to_owned(), "-4".to_owned()]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.bed.serve(&words, IPERF3_PORT)?;
        let (tap, _) = network::ends(NETWORK);
        let boot = Boot {
            kernel: "/guest/kernel",
            initrd: Some("/guest/wire"),
            cmdline: "console=ttyS0 quiet rdinit=/init",
            tap: Some(&tap),
            ..FIRST_BOOT
        };
        let (mut ours, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
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
