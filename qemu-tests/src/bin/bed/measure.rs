//! Starting something and reading the clock at each mark that its guest writes.

use std::{
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use qemu_tests::bed::protocol::{Answer, Measured, Opened, Subject, log_path};

use super::{Machines, begun_path, http, now_us};

/// Name of our VMM's process.
const VMM: &str = "holdfast-vmm";
/// How long our VMM may hold an answer back, in milliseconds.
const POLL_MS: u32 = 1000;
/// How long an ended program may take to go.
const END_LIMIT: Duration = Duration::from_secs(60);

/// What is waited for, and for how long.
pub(super) struct Wanted {
    pub(super) marks: Vec<String>,
    pub(super) limit: Duration,
}

/// Starts `subject`, reads it to its last mark, ends it, and tells what was measured.
pub(super) fn measure(
    machines: &mut Machines,
    subject: Subject,
    wanted: &Wanted,
) -> Result<Answer> {
    match subject {
        Subject::Vmm { files, spec, uid } => own(machines, (&files, &spec, uid), wanted),
        Subject::Program { words } => program(&words, wanted),
    }
}

fn own(
    machines: &mut Machines,
    (files, spec, uid): (&[Opened], &serde_json::Value, u32),
    wanted: &Wanted,
) -> Result<Answer> {
    let (start, start_us) = (Instant::now(), now_us());
    let machine = machines.launch(files, spec, uid)?;
    let mut from = 0;
    let read = |output: &mut String| {
        let target = format!("GET /v1/console?from={from}&wait_ms={POLL_MS}");
        let (_, _, bytes) = http(machine, &target, &[], &[])?;
        from += bytes.len();
        output.push_str(&String::from_utf8_lossy(&bytes));
        Ok(())
    };
    let found = marks(start, wanted, read).with_context(|| {
        let log = fs::read_to_string(log_path(machine)).unwrap_or_default();
        format!("the VMM said {:?}", log.trim())
    });
    let resident = process_named(VMM).and_then(resident_kib);
    http(machine, "POST /v1/power", br#"{"action":"stop"}"#, &[]).ok();
    machines.wait(machine, END_LIMIT)?;
    let begun: u64 = fs::read_to_string(begun_path(machine))?.parse()?;
    answer(found?, resident?, begun.saturating_sub(start_us))
}

fn program(words: &[String], wanted: &Wanted) -> Result<Answer> {
    let (name, arguments) = words.split_first().context("which program?")?;
    // Some VMMs start only with a terminal for their guest's serial port.
    let terminal = fs::File::open("/dev/console")?;
    let start = Instant::now();
    let mut child = Command::new(name)
        .args(arguments)
        .stdin(terminal)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let output = reader(&mut child)?;
    let read = |text: &mut String| {
        match output.recv_timeout(Duration::from_millis(POLL_MS.into())) {
            Ok(bytes) => text.push_str(&String::from_utf8_lossy(&bytes)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("it ended"),
        }
        Ok(())
    };
    let found = marks(start, wanted, read);
    let resident = resident_kib(child.id());
    child.kill().ok();
    child.wait()?;
    answer(found?, resident?, 0)
}

fn answer(
    (mut marks_us, output): (Vec<u64>, String),
    resident_kib: u64,
    before_us: u64,
) -> Result<Answer> {
    marks_us.iter_mut().for_each(|mark| *mark = mark.saturating_sub(before_us));
    Ok(Answer::Measured(Measured { marks_us, before_us, resident_kib, output }))
}

/// Reads until all marks were there, each after the one before.
fn marks(
    start: Instant,
    wanted: &Wanted,
    mut read: impl FnMut(&mut String) -> Result<()>,
) -> Result<(Vec<u64>, String)> {
    let (mut output, mut times, mut at) = (String::new(), Vec::new(), 0);
    for mark in &wanted.marks {
        loop {
            if let Some(found) = output[at..].find(mark.as_str()) {
                at += found + mark.len();
                times.push(u64::try_from(start.elapsed().as_micros())?);
                break;
            }
            if start.elapsed() > wanted.limit {
                bail!("no {mark:?} within {:?}: {output}", wanted.limit);
            }
            read(&mut output).with_context(|| format!("no {mark:?} yet: {output}"))?;
        }
    }
    Ok((times, output))
}

fn reader(child: &mut Child) -> Result<Receiver<Vec<u8>>> {
    let mut output = child.stdout.take().context("no output")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut buffer) {
            if sender.send(buffer[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

fn process_named(name: &str) -> Result<u32> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        // The launcher is a process of another name.
        if let Ok(pid) = entry.file_name().to_string_lossy().parse()
            && comm.trim() == name
        {
            return Ok(pid);
        }
    }
    bail!("no process {name}")
}

/// Returns what is resident, shared memory apart: that is the guest's.
/// Source: Linux Documentation/filesystems/proc.rst, "/proc/PID/status".
fn resident_kib(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let kib = |name| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let parts = [kib("RssAnon:"), kib("RssFile:")];
    parts.into_iter().sum::<Option<u64>>().with_context(|| format!("{path} tells no memory"))
}
