//! The demo: boots the ISO, rents a machine with a passed-through device on it, logs in, lets a
//! lease run out. Ends with a table of what happened; exit status 0 only if all of it did.

#![forbid(unsafe_code)]

use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    process::{Child, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use qemu_tests::harness::{
    host::{Host, HostOptions, Medium},
    scene::{self, GUEST_LIMIT, LeaseRequest, PushedGuest, Scene},
    serial::Echo,
};

/// Boots the image in QEMU and rents a machine on it.
#[derive(Parser)]
struct Arguments {
    /// Leave everything running and print how to use it.
    #[arg(long)]
    keep: bool,
    /// Folder for keys, logs and disks; made anew.
    #[arg(long, default_value = "target/demo")]
    folder: PathBuf,
}

/// Content of the rented disk's first bytes: what the guest must read through the passed-through
/// device.
const MARKER: &str = "this block lies on the rented NVMe disk";
/// Length of the lease that is left to run out.
const SHORT_LEASE_S: u64 = 60;

/// What happened, and how long it took.
struct Steps {
    rows: Vec<(String, Duration, String)>,
}

impl Steps {
    /// Runs one step and keeps what it found.
    fn run<T>(&mut self, name: &str, act: impl FnOnce() -> Result<(T, String)>) -> Result<T> {
        println!("\n── {name}");
        let start = Instant::now();
        let (value, found) = act().with_context(|| name.to_owned())?;
        let took = start.elapsed();
        println!("   {found} ({:.1} s)", took.as_secs_f64());
        self.rows.push((name.to_owned(), took, found));
        Ok(value)
    }

    fn print(&self) {
        println!("\n{:<44} {:>8}  what happened", "step", "seconds");
        for (name, took, found) in &self.rows {
            println!("{name:<44} {:>8.1}  {found}", took.as_secs_f64());
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut steps = Steps { rows: Vec::new() };
    let outcome = demo(&arguments, &mut steps);
    steps.print();
    match outcome {
        Ok(()) => {
            println!("\nAll of it happened.");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("\nNot all of it happened: {error:#}");
            println!("Logs are in {}.", arguments.folder.display());
            ExitCode::FAILURE
        }
    }
}

fn demo(arguments: &Arguments, steps: &mut Steps) -> Result<()> {
    let folder = fresh_folder(&arguments.folder)?;
    let scene = steps.run("start a gateway, make keys", || {
        let scene = Scene::start(&folder)?;
        let found = format!("gateway {} at {}", short(&scene.gateway.node), scene.gateway.url);
        Ok((scene, found))
    })?;
    let (host, node) = steps.run("boot the ISO through OVMF, join", || boot(&scene))?;
    let device = steps.run("see what the node offers", || offered(&scene, &node))?;
    let lease = steps.run("lease signed by 2 of 3 authority keys", || {
        let request =
            LeaseRequest { name: "hour", node: &node, devices: &[&device], ..Default::default() };
        mint(&scene, &request)
    })?;
    let guest = steps.run("upload kernel and initramfs", || {
        let guest = scene.push_guest_under(&lease, None)?;
        let found = format!("Debian's kernel, content {}", short(&guest.kernel));
        Ok((guest, found))
    })?;
    let id = steps.run("rent: create the machine", || create(&scene, &lease, &guest))?;
    let mut console = follow_console(&scene, &id)?;
    let up = steps.run("guest up, console followed", || {
        scene.wait_for_console(&id, "guest: ready", GUEST_LIMIT)?;
        Ok(((), "the guest says it is ready".to_owned()))
    });
    console.kill().ok();
    console.wait().ok();
    up?;
    steps.run("ssh through gateway and overlay", || use_device(&scene, &id))?;
    steps.run("delete the machine", || delete(&scene, &node, &id, &device))?;
    steps.run("rent with a short lease, let it end", || {
        let request = LeaseRequest {
            name: "short",
            node: &node,
            seconds: SHORT_LEASE_S,
            devices: &[&device],
            ..Default::default()
        };
        expire(&scene, &request, &guest, &host)
    })?;
    if arguments.keep {
        keep(&scene, &node, &guest)?;
    }
    Ok(())
}

fn fresh_folder(path: &Path) -> Result<PathBuf> {
    if path.exists() {
        std::fs::remove_dir_all(path).with_context(|| format!("{}", path.display()))?;
    }
    std::fs::create_dir_all(path)?;
    Ok(path.canonicalize()?)
}

fn short(text: &str) -> &str {
    text.get(..8).unwrap_or(text)
}

fn boot(scene: &Scene) -> Result<((Host, String), String)> {
    let folder = scene.folder.join("rented");
    let options = scene::with_rented_nvme(&folder, Medium::IsoCd, MARKER)?;
    let options = HostOptions { echo: Echo::Lines("   node │ "), ..options };
    let (host, node) = scene.boot("demo-node", options)?;
    let found = format!("node {} is in the gateway's list", short(&node));
    Ok(((host, node), found))
}

fn offered(scene: &Scene, node: &str) -> Result<(String, String)> {
    let offers = |nodes: &serde_json::Value| scene::free_device(nodes, node).is_some();
    let nodes = scene.cli.wait(&["nodes"], Duration::from_secs(60), offers)?;
    let device = scene::free_device(&nodes, node).context("offered a moment ago")?;
    print!("{}", scene.cli.text(&["nodes"])?);
    let found = format!("PCI device {device} is free");
    Ok((device, found))
}

fn mint(scene: &Scene, request: &LeaseRequest<'_>) -> Result<(PathBuf, String)> {
    let (lease, id) = scene.lease(request)?;
    print!("{}", scene.cli.text(&["lease", "show", &lease.display().to_string()])?);
    Ok((lease, format!("lease {} for {} s", short(&id), request.seconds)))
}

fn create(scene: &Scene, lease: &Path, guest: &PushedGuest) -> Result<(String, String)> {
    let machine = scene.create(lease, guest)?;
    let id = machine["id"].as_str().context("a machine without id")?.to_owned();
    let found = format!("machine {} is {}", short(&id), machine["state"]);
    Ok((id, found))
}

fn follow_console(scene: &Scene, id: &str) -> Result<Child> {
    let child = scene
        .renter()
        .command(&["console", id, "--follow"])?
        .stdin(Stdio::null())
        .spawn()
        .context("cannot follow the console")?;
    Ok(child)
}

/// Shows that the guest's own NVMe driver drives the disk that the emulated host was given.
fn use_device(scene: &Scene, id: &str) -> Result<((), String)> {
    let command = "set -e; uname -r; ls -l /sys/class/nvme/nvme0/device/driver | sed 's/.*-> //'; \
                   head -c 39 /dev/nvme0n1; echo; echo written by the tenant > /tmp/w; \
                   dd if=/tmp/w of=/dev/nvme0n1 bs=512 seek=8 conv=sync,fsync 2>/dev/null; \
                   dd if=/dev/nvme0n1 bs=512 skip=8 count=1 2>/dev/null | head -n 1";
    let said = scene.ssh(id, command)?;
    print!("{}", indented(&said));
    if !said.contains(MARKER) || !said.contains("written by the tenant") {
        bail!("the guest did not read the rented disk; it said {said:?}");
    }
    Ok(((), "the guest's nvme driver reads and writes the rented disk".to_owned()))
}

fn delete(scene: &Scene, node: &str, id: &str, device: &str) -> Result<((), String)> {
    scene.renter().text(&["machines", "delete", id])?;
    wait_until_free(scene, node, device)?;
    Ok(((), "gone; the device was reset and erased, and is offered again".to_owned()))
}

fn wait_until_free(scene: &Scene, node: &str, device: &str) -> Result<()> {
    let free =
        |nodes: &serde_json::Value| scene::free_device(nodes, node).as_deref() == Some(device);
    scene.cli.wait(&["nodes"], Duration::from_secs(90), free).map(drop)
}

fn expire(
    scene: &Scene,
    request: &LeaseRequest<'_>,
    guest: &PushedGuest,
    host: &Host,
) -> Result<((), String)> {
    let mark = host.serial.mark();
    let (id, _) = create(scene, &mint(scene, request)?.0, guest)?;
    host.serial.wait_from(mark, "event=machine-started", GUEST_LIMIT)?;
    println!("   the machine runs; now the lease runs out by itself");
    let limit = Duration::from_secs(request.seconds + 120);
    host.serial.wait_from(mark, "event=machine-ended", limit)?;
    host.serial.wait_from(mark, "event=device-reset", limit)?;
    let device = request.devices.first().context("a lease with a device")?;
    println!("   one clock alone says that it is over: the drive is erased on its operator's word");
    let operator = scene.cli.with_key(&scene.operator.file);
    operator.text(&["node", "release-device", request.node, device])?;
    wait_until_free(scene, request.node, device)?;
    if scene.ssh(&id, "true").is_ok() {
        bail!("the machine still answers after its lease ended");
    }
    Ok(((), "the node stopped it; its operator has the device erased and offered".to_owned()))
}

/// Leaves everything running and prints a line of curl for each call, as often as wanted: a
/// signature counts once and for five minutes.
fn keep(scene: &Scene, node: &str, guest: &PushedGuest) -> Result<()> {
    let mut number = 0;
    loop {
        number += 1;
        let name = format!("kept-{number}");
        let request = LeaseRequest { name: &name, node, ..LeaseRequest::default() };
        let (lease, id) = scene.lease(&request)?;
        print_calls(scene, &lease, &id, guest)?;
        println!("\nEverything runs. Enter prints such lines for a new lease, Ctrl-D ends it.");
        let mut line = String::new();
        if std::io::stdin().read_line(&mut line)? > 0 {
            continue;
        }
        if std::io::stdin().is_terminal() {
            return Ok(());
        }
        println!("There is no terminal: it runs until it is interrupted.");
        loop {
            std::thread::park();
        }
    }
}

/// Prints how to use the gateway under a lease of the renter's.
fn print_calls(scene: &Scene, lease: &Path, id: &str, guest: &PushedGuest) -> Result<()> {
    let (url, lease) = (&scene.gateway.url, lease.to_str().context("a folder with a plain name")?);
    let key = scene.renter.file.display();
    println!("\nThe gateway is at {url} and describes itself at {url}/v1/openapi.json.");
    println!("Each line below counts once and for five minutes; lease {id} is for an hour.");
    let kernel = guest.kernel_file.to_str().context("a folder with a plain name")?;
    let create = [
        "machines",
        "create",
        "--lease",
        lease,
        "--kernel",
        &guest.kernel,
        "--initrd",
        &guest.initrd,
        "--cmdline",
        "console=ttyS0 quiet",
    ];
    let calls: [(&str, &[&str]); 11] = [
        ("the nodes", &["nodes"]),
        ("show a lease, upload content", &["content", "push", kernel, "--lease", lease]),
        ("create the machine", &create),
        ("list machines", &["machines", "list"]),
        ("show it", &["machines", "show", id]),
        ("its console", &["console", id]),
        ("its console as it comes", &["console", id, "--follow"]),
        ("stop it", &["machines", "stop", id]),
        ("start it", &["machines", "start", id]),
        ("restart it", &["machines", "restart", id]),
        ("delete it", &["machines", "delete", id]),
    ];
    for (what, call) in calls {
        let mut arguments = vec!["--curl"];
        arguments.extend_from_slice(call);
        print!("\n# {what}\n{}", scene.renter().text(&arguments)?);
    }
    println!("\n# the same by the command line; ssh needs it, for a tunnel is a WebSocket");
    println!("holdfast --gateway {url} --key {key} machines list");
    let identity = scene.ssh.private.display();
    println!("holdfast --gateway {url} --key {key} ssh {id} -- -i {identity} -l root");
    Ok(())
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("   guest │ {line}\n")).collect()
}
