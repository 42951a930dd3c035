//! A record of everything that was written to a host's disk, beside what was acknowledged when. At
//! the end, `cuts` (an example of `agent`) judges the disk at many places where the power might have
//! been cut.
//!
//! A record is of one QEMU process: what a killed one wrote last may be on the disk and not in its log.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    num::NonZero,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use image::disk::{gpt::ALIGNMENT, layout};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use types::hex;

use super::{
    host::{Host, HostOptions},
    programs::program,
    scene::image_folder,
};

/// Variable that says how many cuts a test judges.
const POINTS: &str = "HOLDFAST_CUT_POINTS";
/// Cuts that are judged without it.
const FEW: &str = "60";
/// Variable that says how many cuts a test boots; none without it.
const BOOTS: &str = "HOLDFAST_CUT_BOOTS";
/// From power-on to a node that serves, an installation in between included.
const UP: Duration = Duration::from_secs(400);
/// Variable that names a folder in which records are kept.
const KEPT: &str = "HOLDFAST_RECORDS";
/// Bytes of a log's sector.
const SECTOR: u64 = 512;
/// Flag of an entry that makes all earlier ones durable.
const FLUSH: u64 = 1;
/// Flag of an entry that gives bytes up, and holds none.
const DISCARD: u64 = 4;

/// A record.
pub struct Recording {
    folder: PathBuf,
    base: Option<PathBuf>,
    length: u64,
    /// Where the log was read up to, and how many entries came before.
    seen: (u64, usize),
    /// Bytes that were written to the EFI system partition up to there.
    boot: u64,
}

impl Recording {
    /// Begins a record in `folder` of a disk in the file at `disk`, which holds the same as `base`.
    pub fn begin(folder: &Path, disk: &Path, base: Option<&Path>) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let (folder, base) = (folder.to_owned(), base.map(Path::to_owned));
        let length = fs::metadata(disk)?.len();
        let recording = Self { folder, base, length, seen: (SECTOR, 0), boot: 0 };
        // QEMU opens the log and does not make it.
        File::create(recording.log())?;
        File::create(recording.facts())?;
        Ok(recording)
    }

    /// Returns the log's file, for [`super::host::HostOptions::recorded`].
    pub fn log(&self) -> PathBuf {
        self.folder.join("disk.log")
    }

    fn facts(&self) -> PathBuf {
        self.folder.join("facts.jsonl")
    }

    /// Notes that from now on `place` (`a`, `b` or `fallback`) holds one of these programs, or anything
    /// when there is none.
    pub fn program(&mut self, place: &str, programs: &[&[u8]]) -> Result<()> {
        let digest = |program: &&[u8]| hex::encode(&Sha256::digest(program));
        let sha256: Vec<String> = programs.iter().map(digest).collect();
        self.note(&json!({ "program": { "place": place, "sha256": sha256 } }))
    }

    /// Notes that the disk is one that firmware starts.
    pub fn installed(&mut self) -> Result<()> {
        self.note(&json!("installed"))
    }

    /// Notes the node's name.
    pub fn node(&mut self, id: &str) -> Result<()> {
        self.note(&json!({ "node": id }))
    }

    /// Notes that a machine was acknowledged under this serial.
    pub fn machine(&mut self, id: &str, serial: u64) -> Result<()> {
        self.note(&json!({ "machine": { "id": id, "serial": serial } }))
    }

    /// Notes that the end of a machine's lease was acknowledged.
    pub fn expired(&mut self, id: &str) -> Result<()> {
        self.note(&json!({ "expired": id }))
    }

    /// Notes that a machine is about to be deleted.
    pub fn leaving(&mut self, id: &str) -> Result<()> {
        self.note(&json!({ "leaving": id }))
    }

    /// Notes that the deletion of a machine was acknowledged.
    pub fn deleted(&mut self, id: &str) -> Result<()> {
        self.note(&json!({ "deleted": id }))
    }

    fn note(&mut self, fact: &Value) -> Result<()> {
        let line = json!({ "after": self.entries()?, "fact": fact });
        let mut file = OpenOptions::new().append(true).open(self.facts())?;
        Ok(writeln!(file, "{line}")?)
    }

    /// Returns how many bytes were written to the EFI system partition by now.
    pub fn boot_bytes(&mut self) -> Result<u64> {
        self.entries()?;
        Ok(self.boot)
    }

    /// Counts the entries that the log has by now. What was acknowledged was flushed before, so it is
    /// in them. Format: the kernel's Documentation/admin-guide/device-mapper/log-writes.rst.
    fn entries(&mut self) -> Result<usize> {
        let log = File::open(self.log())?;
        let end = log.metadata()?.len();
        let (mut at, mut count) = self.seen;
        while at + SECTOR <= end {
            let mut words = [0; 3];
            for (word, place) in words.iter_mut().zip([at, at + 8, at + 16]) {
                let mut bytes = [0; 8];
                log.read_exact_at(&mut bytes, place)?;
                *word = u64::from_le_bytes(bytes);
            }
            let [first, sectors, flags] = words;
            let bytes = if flags & DISCARD != 0 { 0 } else { sectors * SECTOR };
            if words == [0; 3] || at + SECTOR + bytes > end {
                break;
            }
            let partition = ALIGNMENT..ALIGNMENT + layout::ESP_BYTES;
            self.boot += if partition.contains(&(first * SECTOR)) { bytes } else { 0 };
            at += SECTOR + bytes;
            count += 1 + usize::from(flags & FLUSH != 0 && bytes > 0);
        }
        self.seen = (at, count);
        Ok(count)
    }

    /// Judges as many cuts as this run is to, spread over the whole record.
    pub fn judge(self) -> Result<()> {
        let begin = Instant::now();
        let points = std::env::var(POINTS).unwrap_or_else(|_| FEW.to_owned());
        let mut command = self.cuts()?;
        command.args(["check", "--points", &points, "--facts"]).arg(self.facts());
        let output = command.output()?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        println!("{}in {} s", said.replace('\n', "; "), begin.elapsed().as_secs());
        self.keep()?;
        if !output.status.success() {
            bail!("{command:?}: {said}");
        }
        Ok(())
    }

    /// Boots as many cuts as this run is to, spread over the whole record, each on a host with the
    /// `options` for its disk and with firmware that has forgotten everything, and waits until the node
    /// serves from that disk. Every processor boots one at a time.
    pub fn boot(&self, options: impl Fn(PathBuf) -> HostOptions + Sync) -> Result<()> {
        let points = std::env::var(BOOTS).unwrap_or_else(|_| "0".to_owned());
        let listed = self.cuts()?.args(["list", "--points", &points]).output()?;
        let cuts = String::from_utf8(listed.stdout)?;
        let (cuts, next): (Vec<&str>, _) = (cuts.lines().collect(), AtomicUsize::new(0));
        let work = |worker: usize| -> Result<()> {
            let folder = self.folder.join(format!("cut-{worker}"));
            while let Some(cut) = cuts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let begin = Instant::now();
                self.boot_one(cut, &folder, &options)
                    .with_context(|| format!("after cut {cut}"))?;
                println!(
                    "booted cut {cut} in {} s, one of {}",
                    begin.elapsed().as_secs(),
                    cuts.len()
                );
            }
            Ok(())
        };
        let work = &work;
        thread::scope(|scope| {
            let workers = thread::available_parallelism().map_or(1, NonZero::get);
            let workers: Vec<_> =
                (0..workers).map(|worker| scope.spawn(move || work(worker))).collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Boots the disk that one cut leaves, with its files in `folder`, which is made anew.
    fn boot_one(
        &self,
        cut: &str,
        folder: &Path,
        options: &impl Fn(PathBuf) -> HostOptions,
    ) -> Result<()> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        fs::create_dir_all(folder)?;
        let disk = folder.join("cut.img");
        let mut command = self.cuts()?;
        if !command.args(["write", "--cut", cut, "--out"]).arg(&disk).status()?.success() {
            bail!("{command:?} failed");
        }
        come_up(&folder.join("host"), &HostOptions { recorded: None, ..options(disk) })
    }

    fn cuts(&self) -> Result<Command> {
        let mut command = Command::new(program("examples/cuts")?);
        command.arg("--log").arg(self.log()).args(["--length", &self.length.to_string()]);
        if let Some(base) = &self.base {
            command.arg("--base").arg(base);
        }
        Ok(command)
    }

    fn keep(&self) -> Result<()> {
        let Some(kept) = std::env::var_os(KEPT) else { return Ok(()) };
        let name = thread::current().name().unwrap_or("record").replace("::", "-");
        let folder = Path::new(&kept).join(name);
        fs::create_dir_all(&folder)?;
        for file in [self.log(), self.facts()] {
            let name = file.file_name().context("files have names")?;
            fs::copy(&file, folder.join(name))?;
        }
        Ok(())
    }
}

/// Boots a host with its files in `folder`, and waits until its node serves from its disk.
fn come_up(folder: &Path, options: &HostOptions) -> Result<()> {
    let host = Host::start(&image_folder()?, folder, options)?;
    let deadline = Instant::now() + UP;
    loop {
        let text = host.serial.text();
        // One that was not installed yet is, and starts again.
        let last = text.rsplit_once("event=watchdog-armed").map_or("", |(_, last)| last);
        if last.contains("event=agent-ready") && !last.contains("event=ram-mode") {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the node does not come up; its last lines:\n{}", host.serial.tail(60));
        }
        thread::sleep(Duration::from_millis(200));
    }
}
