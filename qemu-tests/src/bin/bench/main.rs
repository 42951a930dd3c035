//! Measures the VMM on an emulated host, beside a peer when one is given: how soon a guest runs, what
//! a device as large as a GPU costs, and how much memory the process holds besides its guest's.
//!
//! Times are taken on the host, whose clock and processor are emulated: ratios within one run are
//! the usable part.

#![forbid(unsafe_code)]

mod disk;
mod memory;
mod net;
mod payload;
mod peer;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Parser;
use peer::{Boot, Device, Peer};
use qemu_tests::{
    bed::{Bed, BedOptions, Measured, Plan},
    harness::{guest, host::HostOptions},
};
use types::units::Mebibytes;

/// Measures the VMM on an emulated host.
#[derive(Parser)]
struct Arguments {
    /// The VMM to be measured, as the image has it.
    #[arg(long)]
    vmm: PathBuf,
    /// A peer to measure in the same run: an alioth, cloud-hypervisor or qemu-system-x86_64 program.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Runs of each measurement; the table shows medians.
    #[arg(long, default_value_t = 10)]
    runs: u32,
    /// Measure this alone; repeat for several.
    #[arg(long, value_enum)]
    only: Vec<Part>,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// How soon a guest runs.
    Starts,
    /// What devices cost.
    Devices,
    /// What memory costs.
    Memory,
    /// What disks give.
    Disks,
    /// What network cards give.
    Nets,
}

/// How long one start may take.
const LIMIT: Duration = Duration::from_secs(180);
/// What the guest's init says.
const INIT: &str = "bench: init";
/// What a guest says before the name of a job and its result.
const RESULT: &str = "bench: result ";
/// Guest's command line.
const CMDLINE: &str = "console=ttyS0 quiet rdinit=/bench-init";
/// How our VMM serves its disk and its card.
const OWN_SETUP: &str =
    "disk: io_uring, page cache, one queue, a thread of its own; card: vhost-net, one queue";
/// A device with a BAR as large as a GPU's, and seven small ones.
const DEVICES: usize = 8;

/// The guest that is one instruction long.
const FIRST_BOOT: Boot<'static> = Boot {
    kernel: "/guest/first",
    initrd: None,
    cmdline: "",
    device: None,
    disk: None,
    tap: None,
    memory_mib: 256,
};
/// Debian's kernel up to its init.
const LINUX_BOOT: Boot<'static> =
    Boot { kernel: "/guest/kernel", initrd: Some("/guest/initrd"), cmdline: CMDLINE, ..FIRST_BOOT };

/// One line of the table.
struct Row {
    what: &'static str,
    unit: &'static str,
    ours: f64,
    peers: Option<f64>,
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
    let peer = arguments.peer.as_deref().map(Peer::new).transpose()?;
    let folder = tempfile::tempdir()?;
    let mut bed = start(folder.path(), &arguments.vmm, peer.as_ref())?;
    let mut paths = Vec::new();
    for number in 1..=DEVICES {
        let address = address(number);
        paths.push((address.clone(), bed.bind(&address)?));
    }
    let mut bench = Bench { bed, runs: arguments.runs, peer, paths };
    let mut rows = Vec::new();
    for part in [Part::Starts, Part::Devices, Part::Memory, Part::Disks, Part::Nets] {
        if arguments.only.is_empty() || arguments.only.contains(&part) {
            rows.extend(match part {
                Part::Starts => bench.starts()?,
                Part::Devices => bench.devices()?,
                Part::Memory => bench.memory()?,
                Part::Disks => bench.disks()?,
                Part::Nets => bench.nets()?,
            });
        }
    }
    let size = fs::metadata(&arguments.vmm)?.len();
    rows.push(Row { what: "program", unit: "MiB", ours: mebi(size), peers: None });
    print(&rows, bench.peer.as_ref());
    println!("\nAll guests have one processor; disks lie in the host's memory, without limits.");
    println!("holdfast: {OWN_SETUP}");
    if let Some(peer) = &bench.peer {
        println!("{}: {}", peer.name, peer.setup());
    }
    Ok(())
}

/// Boots the host with everything that is measured.
fn start(folder: &Path, vmm: &Path, peer: Option<&Peer>) -> Result<Bed> {
    let first = folder.join("first");
    fs::write(&first, payload::elf())?;
    let made = guest::make_with_perl(folder, "")?;
    let init = format!(
        "#!/bin/busybox sh\n/bin/busybox echo '{INIT}' > /dev/console\n/bin/busybox sleep 1000\n"
    );
    let made =
        qemu_tests::harness::kernels::with_program(&made, folder, "bench-init", init.into_bytes())?;
    let mut files = vec![
        ("guest/first".to_owned(), first),
        ("guest/kernel".to_owned(), made.kernel),
        ("guest/initrd".to_owned(), made.initrd),
        ("guest/fio".to_owned(), disk::initrd(&folder.join("fio"))?),
        ("guest/wire".to_owned(), net::initrd(&folder.join("wire"))?),
    ];
    files.extend(net::files()?);
    files.extend(peer.into_iter().flat_map(|peer| peer.files.clone()));
    let mut devices = vec!["pci-testdev,membar=256G".to_owned()];
    devices.resize(DEVICES, "pci-testdev,membar=1M".to_owned());
    let host = HostOptions { devices, memory_mib: 6144, ..HostOptions::default() };
    Bed::start(
        folder,
        BedOptions { files, host, vmm: Some(vmm.to_owned()), ..BedOptions::default() },
    )
}

fn address(number: usize) -> String {
    format!("0000:{number:02x}:00.0")
}

struct Bench {
    bed: Bed,
    runs: u32,
    peer: Option<Peer>,
    paths: Vec<(String, String)>,
}

impl Bench {
    /// From the start to the first instruction, to the guest's init, and of it the guest's part.
    fn starts(&mut self) -> Result<Vec<Row>> {
        let (own_first, peer_first) = self.both(FIRST_BOOT, 0, payload::FIRST)?;
        let (own_init, peer_init) = self.both(LINUX_BOOT, 0, INIT)?;
        let row = |what, ours: f64, peers: Option<f64>| Row { what, unit: "s", ours, peers };
        let kernel = |init: &Medians, first: &Medians| init.seconds - first.seconds;
        let both = |act: &dyn Fn(&Medians, &Medians) -> f64| {
            Some(act(peer_init.as_ref()?, peer_first.as_ref()?))
        };
        let peer = |medians: &Option<Medians>| medians.as_ref().map(|medians| medians.seconds);
        Ok(vec![
            row("start to the first guest instruction", own_first.seconds, peer(&peer_first)),
            row("namespaces made for the process before its start", own_first.before_s, None),
            row("start to the guest's init", own_init.seconds, peer(&peer_init)),
            row("of it in the guest's kernel", kernel(&own_init, &own_first), both(&kernel)),
            memory("memory besides the guest's, no device", &own_init, peer_init.as_ref()),
        ])
    }

    /// What devices cost.
    fn devices(&mut self) -> Result<Vec<Row>> {
        let (address, path) = self.paths.first().cloned().context("no device")?;
        let device = Some(Device { address: &address, path: &path });
        let boot = Boot { device, ..FIRST_BOOT };
        let without = self.both(Boot { device: None, ..boot }, 0, payload::FIRST)?;
        let one = self.both(boot, 1, payload::FIRST)?;
        let small = self.small(payload::FIRST)?;
        let linux = Boot { device, ..LINUX_BOOT };
        let linux_one = self.both(linux, 1, INIT)?;
        let eight = self.ours(linux, DEVICES, INIT)?;
        let peers = one.1.as_ref().zip(without.1.as_ref());
        Ok(vec![
            Row {
                what: "a device costs, to the first instruction",
                unit: "s",
                ours: small.seconds - without.0.seconds,
                peers: None,
            },
            Row {
                what: "one with a BAR of 256 GiB costs",
                unit: "s",
                ours: one.0.seconds - without.0.seconds,
                peers: peers.map(|(one, without)| one.seconds - without.seconds),
            },
            memory("memory besides the guest's, one device", &linux_one.0, linux_one.1.as_ref()),
            memory("memory besides the guest's, eight devices", &eight, None),
        ])
    }

    fn both(
        &mut self,
        boot: Boot<'_>,
        devices: usize,
        mark: &str,
    ) -> Result<(Medians, Option<Medians>)> {
        let ours = self.ours(boot, devices, mark)?;
        let Some(subject) = self.peer.as_ref().and_then(|peer| peer.subject(boot)) else {
            return Ok((ours, None));
        };
        let mut all = Vec::new();
        for _ in 0..self.runs {
            all.push(self.bed.measure_subject(subject.clone(), &[mark], LIMIT)?);
        }
        Ok((ours, Some(Medians::of(&all)?)))
    }

    fn ours(&mut self, boot: Boot<'_>, devices: usize, mark: &str) -> Result<Medians> {
        let mut all = Vec::new();
        for _ in 0..self.runs {
            let plan = self.own_plan(boot, devices)?;
            all.push(self.bed.measure(&plan, &[mark], LIMIT)?);
        }
        Medians::of(&all)
    }

    /// Starts a machine with a device whose BARs are small.
    fn small(&mut self, mark: &str) -> Result<Medians> {
        let mut all = Vec::new();
        for _ in 0..self.runs {
            let mut plan = self.own_plan(FIRST_BOOT, 0)?;
            let (address, path) = self.paths.get(1).context("one device only")?;
            plan.pass(address.parse().context("a PCI address")?, path);
            all.push(self.bed.measure(&plan, &[mark], LIMIT)?);
        }
        Medians::of(&all)
    }

    fn own_plan(&self, boot: Boot<'_>, devices: usize) -> Result<Plan> {
        let mut plan = match boot.initrd {
            Some(initrd) => Plan::linux(1, (boot.kernel, initrd), boot.cmdline),
            None => Plan::linux_alone(1, boot.kernel, boot.cmdline),
        };
        plan.spec.memory_mib = Mebibytes(boot.memory_mib.into());
        for (address, path) in self.paths.iter().take(devices) {
            plan.pass(address.parse().context("a PCI address")?, path);
        }
        if let Some(disk) = boot.disk {
            plan.disk(disk);
        }
        if let Some(tap) = boot.tap {
            plan.net(tap, 1);
        }
        Ok(plan)
    }
}

/// Medians of several runs.
struct Medians {
    seconds: f64,
    before_s: f64,
    resident_mib: f64,
}

impl Medians {
    fn of(all: &[Measured]) -> Result<Self> {
        let mut times: Vec<u64> = all.iter().filter_map(|m| m.marks_us.last().copied()).collect();
        let mut before: Vec<u64> = all.iter().map(|m| m.before_us).collect();
        let mut memory: Vec<u64> = all.iter().map(|m| m.resident_kib).collect();
        Ok(Self {
            seconds: Duration::from_micros(median(&mut times)?).as_secs_f64(),
            before_s: Duration::from_micros(median(&mut before)?).as_secs_f64(),
            resident_mib: mebi(median(&mut memory)? * 1024),
        })
    }
}

fn median(values: &mut [u64]) -> Result<u64> {
    values.sort_unstable();
    values.get(values.len() / 2).copied().context("no runs")
}

/// Tells what a guest said as soon as it did: the peer's may take long, or fail.
fn told(who: &str, output: Option<&String>) {
    for line in output.into_iter().flat_map(|output| output.lines()) {
        if let Some(result) = line.trim().strip_prefix(RESULT) {
            eprintln!("{who}: {result}");
        }
    }
}

/// Returns the median of what guests said of the job `name`, without fractions.
fn result(name: &str, outputs: &[String]) -> Result<f64> {
    let prefix = format!("{RESULT}{name} ");
    let one = |output: &String| {
        let line = output.lines().find_map(|line| line.trim().strip_prefix(&prefix));
        let value = line.with_context(|| format!("no result of {name}: {output}"))?;
        let whole = value.trim().split('.').next().unwrap_or_default();
        whole.parse::<u64>().with_context(|| format!("{name}: {value:?}"))
    };
    let mut values = outputs.iter().map(one).collect::<Result<Vec<u64>>>()?;
    Ok(median(&mut values)? as f64)
}

fn memory(what: &'static str, ours: &Medians, peers: Option<&Medians>) -> Row {
    Row { what, unit: "MiB", ours: ours.resident_mib, peers: peers.map(|peer| peer.resident_mib) }
}

fn mebi(bytes: u64) -> f64 {
    // Exact for all that fits into memory: 53 bits.
    bytes as f64 / f64::from(1 << 20)
}

fn print(rows: &[Row], peer: Option<&Peer>) {
    let name = peer.map_or("(no peer)", |peer| &peer.name);
    println!("\n{:<52} {:>10} {:>20} {:>12}", "median", "holdfast", name, "ours : peer");
    for Row { what, unit, ours, peers } in rows {
        let ours_text = format!("{ours:.3} {unit}");
        let peers_text = peers.map_or("-".to_owned(), |peer| format!("{peer:.3} {unit}"));
        let ratio = peers.map_or("-".to_owned(), |peer| format!("{:.2}", ours / peer));
        println!("{what:<52} {ours_text:>10} {peers_text:>20} {ratio:>12}");
    }
}
