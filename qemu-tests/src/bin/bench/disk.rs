//! What a virtio disk gives: fio in the guest, over a file in the host's memory, so that the VMM is
//! what is measured.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use qemu_tests::harness::{guest, tools::Tool};

use super::{Bench, Boot, FIRST_BOOT, RESULT, Row, result, told};

/// The disk on the host.
const DISK: &str = "/run/bench-disk";
/// Its size, in MiB.
const DISK_MIB: u32 = 256;
/// What the guest says at its end.
const END: &str = "bench: end of fio";
/// How long a guest may take to start and run all jobs.
const FIO_LIMIT: Duration = Duration::from_secs(550);
/// Seconds of each job.
const SECONDS: u32 = 3;

/// One job of fio.
struct Job {
    what: &'static str,
    name: &'static str,
    pattern: &'static str,
    block: &'static str,
    depth: u32,
    /// Field of fio's terse output (version 3) that counts: operations a second, or KiB a second.
    field: usize,
    unit: &'static str,
}

/// Fields of fio's terse output, counted from 1 (fio documentation, "Terse output").
const READ_IOPS: usize = 8;
const WRITE_IOPS: usize = 49;
const READ_KIB: usize = 7;
const WRITE_KIB: usize = 48;

const fn job(
    (what, name): (&'static str, &'static str),
    pattern: &'static str,
    depth: u32,
    field: usize,
) -> Job {
    let random = matches!(field, READ_IOPS | WRITE_IOPS);
    let (block, unit) = if random { ("4k", "1/s") } else { ("128k", "KiB/s") };
    Job { what, name, pattern, block, depth, field, unit }
}

const JOBS: &[Job] = &[
    job(("virtio-blk, 4 KiB random reads, depth 1", "rr1"), "randread", 1, READ_IOPS),
    job(("virtio-blk, 4 KiB random reads, depth 32", "rr32"), "randread", 32, READ_IOPS),
    job(("virtio-blk, 4 KiB random writes, depth 1", "rw1"), "randwrite", 1, WRITE_IOPS),
    job(("virtio-blk, 4 KiB random writes, depth 32", "rw32"), "randwrite", 32, WRITE_IOPS),
    job(("virtio-blk, 128 KiB reads in order, depth 1", "sr1"), "read", 1, READ_KIB),
    job(("virtio-blk, 128 KiB reads in order, depth 32", "sr32"), "read", 32, READ_KIB),
    job(("virtio-blk, 128 KiB writes in order, depth 1", "sw1"), "write", 1, WRITE_KIB),
    job(("virtio-blk, 128 KiB writes in order, depth 32", "sw32"), "write", 32, WRITE_KIB),
];

/// How long the guest rests before the first job, in seconds.
const REST_S: u32 = 10;

/// Makes the guest's initramfs in `folder`: it runs all jobs and says what came out.
pub(crate) fn initrd(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    // A guest that has just started has work of its own left, which the first job would be measured beside; of whom
    // that is sooner, it is more.
    let mut script = format!("#!/bin/sh\nsleep {REST_S}\n");
    for job in JOBS {
        let Job { name, pattern, block, depth, field, .. } = job;
        script.push_str(&format!(
            "echo \"{RESULT}{name} $(fio --minimal --name={name} --filename=/dev/vda --direct=1 \
             --ioengine=libaio --rw={pattern} --bs={block} --iodepth={depth} --time_based \
             --runtime={SECONDS} | cut -d';' -f{field})\"\n"
        ));
    }
    script.push_str(&format!("echo '{END}'\n"));
    Ok(guest::make_with(&Tool::fio()?, folder, &script)?.initrd)
}

impl Bench {
    /// Runs all jobs.
    pub(crate) fn disks(&mut self) -> Result<Vec<Row>> {
        // Every page is there before the first run: who writes a page first pays for it.
        let (to, count) = (format!("of={DISK}"), format!("count={DISK_MIB}"));
        self.bed.run_on_host(&["/bin/busybox", "dd", "if=/dev/zero", &to, "bs=1M", &count])?;
        let boot = Boot {
            kernel: "/guest/kernel",
            initrd: Some("/guest/fio"),
            cmdline: "console=ttyS0 quiet rdinit=/init",
            disk: Some(DISK),
            memory_mib: 768,
            ..FIRST_BOOT
        };
        let (mut ours, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
            let plan = self.own_plan(boot, 0)?;
            ours.push(self.bed.measure(&plan, &[END], FIO_LIMIT)?.output);
            told("holdfast", ours.last());
            if let Some(subject) = self.peer.as_ref().and_then(|peer| peer.subject(boot)) {
                peers.push(self.bed.measure_subject(subject, &[END], FIO_LIMIT)?.output);
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
