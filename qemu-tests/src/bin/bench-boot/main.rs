//! Measures the boot of the shipped image on an emulated host, phase by phase, and the memory that the
//! node then uses with no machine.
//!
//! Firmware and boot program are timed from outside, by what they write to the serial line; from the
//! kernel's start on, the node's own metrics count. Processor and clock are emulated: the ratios
//! within one run are the usable part. A disk is booted once before, because a node makes its keys and
//! stores only once; what that took is printed, too. `--from uml` boots the same root on User-Mode Linux, whose
//! code runs at the speed of this machine.

#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use image::{BuildOptions, Silent};
use qemu_tests::harness::{
    agent::exchange,
    host::{Host, HostOptions, Medium},
    lan::{self, Lan},
    scene::{Scene, image_folder},
    serial::Serial,
    uml::UmlHost,
};

/// Measures the boot of the shipped image.
#[derive(Parser)]
struct Arguments {
    /// Boots; the table shows medians.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// What the host starts from.
    #[arg(long, value_enum, default_value_t = Source::Disk)]
    from: Source,
    /// Memory of the host.
    #[arg(long, default_value_t = 512)]
    memory_mib: u32,
}

/// What a measured host starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Source {
    /// A disk with STATE and DATA that was booted before, as an installed node does.
    Disk,
    /// The ISO as a CD, with everything in memory. Then init waits a moment for disks to appear.
    Iso,
    /// The initramfs, with everything in memory, on User-Mode Linux.
    Uml,
}

/// From power-on to the overlay, on a busy machine that emulates everything.
const LIMIT: Duration = Duration::from_secs(240);
/// TCP port of the node's metrics.
const METRICS: u16 = 9187;
/// The firmware's last line before it starts a boot program.
const FIRMWARE_ENDS: &str = "BdsDxe: starting";
/// Init's first line: the earliest of its phases that speaks.
const INIT: &str = "init-first-line";
/// What the node may use without a machine, in MiB.
const MEMORY_TARGET_MIB: f64 = 96.0;

/// The timeline's steps: where each begins, where it ends, what it is, and its target in seconds.
const STEPS: &[(&str, &str, &str, Option<f64>)] = &[
    ("power-on", "firmware", "firmware", None),
    ("firmware", "kernel", "boot program, and the kernel's unpacking", None),
    ("kernel", INIT, "kernel, to init's first line", None),
    (INIT, "mounts-verified", "mounts", None),
    ("mounts-verified", "init-ready", "the rest of init", None),
    ("init-ready", "agent-started", "the agent's start", None),
    ("agent-started", "node", "the agent's identity", None),
    ("node", "config", "configuration", None),
    ("config", "online", "address (DHCP)", None),
    ("config", "agent-ready", "the agent's parts", None),
    ("agent-ready", "overlay-members", "overlay", None),
    (INIT, "agent-ready", "= init's first line to agent serving", Some(1.0)),
    (INIT, "overlay-members", "= init's first line to joined", Some(2.0)),
    ("power-on", "overlay-members", "= all of it", None),
];

/// When each phase was reached, in seconds since the power was switched on.
struct Timeline(BTreeMap<String, f64>);

impl Timeline {
    /// Seconds from one phase to another; `None` when one of them was not reached.
    fn span(&self, from: &str, to: &str) -> Option<f64> {
        Some(self.0.get(to)? - self.0.get(from)?)
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let folder = tempfile::tempdir()?;
    if arguments.from != Source::Uml {
        let scene = Scene::start(folder.path())?;
        let medium = medium(folder.path(), arguments.from)?;
        if arguments.from == Source::Disk {
            let (first, _) = boot(&scene, &medium, arguments)?;
            let span = |to| first.span(INIT, to).context("never joined");
            let (serving, joined) = (span("agent-ready")?, span("overlay-members")?);
            println!(
                "the disk's first boot: from init {serving:.2} s to serving, {joined:.2} s to joined"
            );
        }
        return measure(arguments.runs, |_| boot(&scene, &medium, arguments));
    }
    let mut outcome = None;
    let kernel = uml_kernel()?;
    Lan::run_cabled("bench boot --from uml", folder.path(), |lan| {
        let scene = Scene::start_at(folder.path(), lan.gateway(), lan.gateway());
        outcome =
            Some(scene.and_then(|scene| {
                measure(arguments.runs, |run| boot_uml(&kernel, &scene, run, lan))
            }));
    });
    outcome.context("there was no network to measure on")?
}

/// Boots `runs` times by `boot`, and prints medians.
fn measure(runs: u32, boot: impl Fn(u32) -> Result<(Timeline, f64)>) -> Result<()> {
    let (mut timelines, mut memory) = (Vec::new(), Vec::new());
    for run in 0..runs {
        let (timeline, used) = boot(run)?;
        let joined = timeline.span("power-on", "overlay-members").context("never joined")?;
        println!("run {}: joined {joined:.2} s after power-on", run + 1);
        timelines.push(timeline);
        memory.push(used);
    }
    print(&timelines);
    let used = median(&mut memory).context("no runs")?;
    println!(
        "{:<42} {used:>9.1} MiB   target {MEMORY_TARGET_MIB:.0} MiB",
        "memory used, no machine"
    );
    for (name, file) in [("UKI", "holdfast.efi"), ("ISO", "holdfast.iso")] {
        let bytes = fs::metadata(image_folder()?.join(file))?.len();
        println!("{name:<42} {:>9.1} MiB", mebi(bytes as f64));
    }
    Ok(())
}

/// Boots once, and returns the timeline with the memory used, in MiB, when the host is down again.
fn boot(scene: &Scene, medium: &Medium, arguments: &Arguments) -> Result<(Timeline, f64)> {
    let folder = scene.folder.join("host");
    let options = HostOptions {
        medium: medium.clone(),
        memory_mib: arguments.memory_mib,
        config: Some(scene.node_config("measured", &listening())),
        // A server's memory is there. An emulator's would be cleared by this machine's kernel as the node
        // touches it, which took a tenth of what is measured.
        arguments: vec!["-mem-prealloc".to_owned()],
        ..HostOptions::default()
    };
    let begin = Instant::now();
    let mut host = Host::start(&image_folder()?, &folder, &options)?;
    host.serial.wait(FIRMWARE_ENDS, LIMIT)?;
    let firmware = begin.elapsed().as_secs_f64();
    let port = host.forward_tcp(METRICS)?;
    let connect = || Ok(TcpStream::connect(("127.0.0.1", port))?);
    let measured = read(&host.serial, begin, Some(firmware), connect)?;
    host.press_power_button()?;
    host.wait_for_end(LIMIT)?;
    Ok(measured)
}

fn medium(folder: &Path, from: Source) -> Result<Medium> {
    if from == Source::Iso {
        return Ok(Medium::IsoCd);
    }
    let copy = folder.join("disk.img");
    fs::copy(image_folder()?.join("holdfast.img"), &copy)?;
    Ok(Medium::Disk(copy))
}

/// The kernel as a program; building it takes some ten minutes, once.
fn uml_kernel() -> Result<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    println!("the kernel as a program: from the cache, or built now (some ten minutes)");
    Ok(image::build_user_mode_kernel(&BuildOptions::new(&workspace), &Silent)?)
}

/// The same on User-Mode Linux.
fn boot_uml(kernel: &Path, scene: &Scene, run: u32, lan: &Lan) -> Result<(Timeline, f64)> {
    let folder = scene.folder.join(format!("run-{run}"));
    let config = scene.node_config("measured", &listening());
    let (given, begin) = (lan.log().mark(), Instant::now());
    let host = UmlHost::start(kernel, &image_folder()?, &folder, &config, lan::FAR)?;
    read(&host.serial, begin, None, || {
        let line = lan.log().wait_from(given, "DHCPACK(", LIMIT)?;
        let address = line.split_whitespace().find_map(|word| word.parse::<Ipv4Addr>().ok());
        Ok(TcpStream::connect((address.context("no address in dnsmasq's line")?, METRICS))?)
    })
    .with_context(|| format!("the host's last lines:\n{}", host.serial.tail(30)))
}

/// A configuration's part that has the node tell its metrics.
fn listening() -> String {
    format!("[metrics]\nlisten = \"0.0.0.0:{METRICS}\"\n")
}

/// Waits until a host that was started at `begin` has joined, and reads its timeline and the memory
/// that it uses. `connect` opens a connection to its metrics.
fn read(
    serial: &Serial,
    begin: Instant,
    firmware: Option<f64>,
    connect: impl Fn() -> Result<TcpStream>,
) -> Result<(Timeline, f64)> {
    let line = serial.wait("holdfast: event=", LIMIT)?;
    let seen = begin.elapsed().as_secs_f64();
    let first = stamp(&line).with_context(|| format!("no time in {line:?}"))?;
    let kernel = seen - first;
    serial.wait("event=overlay-members", LIMIT)?;
    let metrics = metrics(connect)?;
    let mut timeline = BTreeMap::from([
        ("power-on".to_owned(), 0.0),
        ("kernel".to_owned(), kernel),
        (INIT.to_owned(), seen),
    ]);
    timeline.extend(firmware.map(|at| ("firmware".to_owned(), at)));
    for (name, at) in phases(&metrics) {
        timeline.insert(name.to_owned(), kernel + at);
    }
    let bytes = |name: &str| value(&metrics, name).with_context(|| format!("no metric {name}"));
    let used =
        bytes("holdfast_host_memory_bytes")? - bytes("holdfast_host_memory_available_bytes")?;
    Ok((Timeline(timeline), mebi(used)))
}

/// The kernel's time in front of a line: `[    1.234567] …`.
fn stamp(line: &str) -> Option<f64> {
    let (_, rest) = line.split_once('[')?;
    rest.split_once(']')?.0.trim().parse().ok()
}

/// Reads the node's metrics, once its port is open.
fn metrics(connect: impl Fn() -> Result<TcpStream>) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match connect().and_then(|stream| exchange(stream, "GET", "/metrics")) {
            Ok((200, text)) if phases(&text).any(|(name, _)| name == "overlay-members") => {
                return Ok(text);
            }
            Ok((status, _)) if Instant::now() > deadline => bail!("metrics answer {status}"),
            Err(error) if Instant::now() > deadline => return Err(error),
            Ok(_) | Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// The phases that the node counts, in seconds since its kernel started.
fn phases(metrics: &str) -> impl Iterator<Item = (&str, f64)> {
    metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix("holdfast_boot_phase_seconds{phase=\"")?;
        let (name, seconds) = rest.split_once("\"} ")?;
        Some((name, seconds.parse().ok()?))
    })
}

fn value(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn print(timelines: &[Timeline]) {
    println!("\n{:<42} {:>11}", "step (median)", "seconds");
    for (from, to, what, target) in STEPS {
        let mut spans: Vec<f64> =
            timelines.iter().filter_map(|timeline| timeline.span(from, to)).collect();
        let seconds = median(&mut spans).map_or("-".to_owned(), |seconds| format!("{seconds:.2}"));
        let target = target.map(|target| format!("   target {target:.1} s")).unwrap_or_default();
        println!("{what:<42} {seconds:>11}{target}");
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn mebi(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_metrics_are_read() {
        assert_eq!(stamp("[    1.250000] holdfast: event=x"), Some(1.25));
        assert_eq!(stamp("holdfast: event=x"), None);
        let text =
            "holdfast_boot_phase_seconds{phase=\"node\"} 2.5\nholdfast_host_memory_bytes 7\n";
        assert_eq!(phases(text).collect::<Vec<_>>(), [("node", 2.5)]);
        assert_eq!(value(text, "holdfast_host_memory_bytes"), Some(7.0));
        assert_eq!(value(text, "holdfast_host"), None);
    }

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut []), None);
    }
}
