//! PID 1 of the bed's host: remote hands for a test. It mounts what programs expect, then answers
//! one request after the other, over the virtio port named `bed`.
//!
//! `bed launch NUMBER` starts one VMM: inside namespaces of its own, with the specification as
//! descriptor 3 and every other descriptor that PID 1 left open for it.

mod cores;
mod measure;
mod search;
#[allow(unsafe_code, reason = "memory can be called broken only by who maps it")]
mod sys;
mod tap;

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, IoSlice, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::ExitStatusExt,
        },
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use measure::Wanted;
use nix::sched::CloneFlags;
use nix::sys::socket::{
    self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, VsockAddr,
};
use qemu_tests::bed::protocol::{Answer, FIRST_DESCRIPTOR, Opened, Request, log_path};
use rustix::{
    fs::MemfdFlags,
    io::FdFlags,
    mount::MountFlags,
    process::{Resource, Rlimit},
};

use tap::Taps;

/// Longest time in which a VMM or a guest answers.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let outcome = match arguments.get(1).map(String::as_str) {
        Some("launch") => launch(arguments.get(2).map_or("", String::as_str)),
        _ => serve(),
    };
    match outcome {
        Ok(status) => std::process::exit(status),
        Err(error) => {
            eprintln!("bed: {error:#}");
            std::process::exit(1);
        }
    }
}

/// Answers requests until the test hangs up.
fn serve() -> Result<i32> {
    for (source, target) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")]
    {
        rustix::mount::mount(source, target, source, MountFlags::empty(), c"")
            .with_context(|| format!("cannot mount {target}"))?;
    }
    let port = port().context("there is no virtio port named bed")?;
    let mut port = OpenOptions::new().read(true).write(true).open(port)?;
    let mut requests = BufReader::new(port.try_clone()?);
    println!("bed: ready");
    let mut machines = Machines::default();
    let mut line = String::new();
    loop {
        line.clear();
        if requests.read_line(&mut line)? == 0 {
            // Nobody is at the other end at the moment.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        let answer = serde_json::from_str(&line)
            .context("the request cannot be read")
            .and_then(|request| machines.answer(request))
            .unwrap_or_else(|error| Answer::Failed { reason: format!("{error:#}") });
        let mut bytes = serde_json::to_vec(&answer)?;
        bytes.push(b'\n');
        port.write_all(&bytes)?;
    }
}

fn port() -> Result<String> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == "bed" {
            return Ok(format!("/dev/{}", entry.file_name().to_string_lossy()));
        }
    }
    bail!("no such port")
}

/// The VMMs that were started.
#[derive(Default)]
struct Machines {
    running: BTreeMap<u32, Child>,
    started: u32,
}

impl Machines {
    fn answer(&mut self, request: Request) -> Result<Answer> {
        match request {
            Request::Read { path } => {
                let bytes = fs::read(&path).with_context(|| path.clone())?;
                Ok(Answer::Bytes { base64: BASE64.encode(bytes) })
            }
            Request::Write { path, base64 } => {
                let mut file = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(!path.starts_with("/sys") && !path.starts_with("/dev"))
                    .open(&path)
                    .with_context(|| path.clone())?;
                file.write_all(&BASE64.decode(base64)?).with_context(|| path.clone())?;
                Ok(Answer::Done)
            }
            Request::Grow { path, bytes } => {
                let file = OpenOptions::new().write(true).open(&path);
                file.and_then(|file| file.set_len(bytes)).with_context(|| path.clone())?;
                Ok(Answer::Done)
            }
            Request::List { path } => {
                let entries = fs::read_dir(&path).with_context(|| path.clone())?;
                let names =
                    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
                let mut names = names.collect::<io::Result<Vec<_>>>()?;
                names.sort();
                Ok(Answer::Names { names })
            }
            Request::Launch { files, spec, uid } => {
                Ok(Answer::Launched { machine: self.launch(&files, &spec, uid)? })
            }
            Request::Call { machine, method, target, base64, files } => {
                let body = BASE64.decode(base64)?;
                let line = format!("{method} {target}");
                let (status, head, body) = http(machine, &line, &body, &files)?;
                Ok(Answer::Http { status, head, base64: BASE64.encode(body) })
            }
            Request::Wait { machine, limit_ms } => {
                self.wait(machine, Duration::from_millis(limit_ms))
            }
            Request::Measure { subject, marks, limit_ms } => {
                let limit = Duration::from_millis(limit_ms);
                measure::measure(self, subject, &Wanted { marks, limit })
            }
            Request::Run { words } => {
                let output = command(&words)?.stdin(Stdio::null()).output()?;
                let said = [output.stdout, output.stderr].concat();
                if !output.status.success() {
                    bail!(
                        "{words:?} ended with {}: {}",
                        output.status,
                        String::from_utf8_lossy(&said)
                    );
                }
                Ok(Answer::Bytes { base64: BASE64.encode(said) })
            }
            Request::Start { words } => {
                command(&words)?.stdin(Stdio::null()).spawn()?;
                Ok(Answer::Done)
            }
            Request::Search { needle } => search::search(&needle),
            Request::Break { needle } => search::break_pages(&needle),
            Request::Cores => cores::threads(),
            Request::Vsock { cid, port, base64 } => vsock(cid, port, &BASE64.decode(base64)?),
        }
    }

    fn launch(&mut self, files: &[Opened], spec: &serde_json::Value, uid: u32) -> Result<u32> {
        let machine = self.started;
        self.started += 1;
        fs::write(spec_path(machine), serde_json::to_vec(spec)?)?;
        let mut kept = Vec::new();
        let mut taps = Taps::default();
        for (number, file) in (FIRST_DESCRIPTOR..).zip(files) {
            let opened = match file {
                Opened::Tap { name, queues, queue } => taps.queue(name, *queues, *queue)?,
                Opened::Read { .. }
                | Opened::Write { .. }
                | Opened::Memory { .. }
                | Opened::Api => open(file, machine, uid)?,
            };
            let at = rustix::io::fcntl_dupfd_cloexec(&opened, number)?;
            if at.as_raw_fd() != number {
                bail!("descriptor {number} is taken");
            }
            rustix::io::fcntl_setfd(&at, FdFlags::empty())?;
            kept.push(at);
        }
        let log = File::create(log_path(machine))?;
        let child = Command::new("/init")
            .args(["launch", &machine.to_string()])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the launcher")?;
        self.running.insert(machine, child);
        Ok(machine)
    }

    fn wait(&mut self, machine: u32, limit: Duration) -> Result<Answer> {
        let child = self.running.get_mut(&machine).context("no such machine")?;
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Answer::Exited { status: code(status) });
            }
            if Instant::now() > deadline {
                bail!("machine {machine} still runs after {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn command(words: &[String]) -> Result<Command> {
    let (name, arguments) = words.split_first().context("which program?")?;
    let mut command = Command::new(name);
    command.args(arguments);
    Ok(command)
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}

/// Where the launcher says when it started the VMM: what [`now_us`] was then.
fn begun_path(machine: u32) -> String {
    format!("/run/vmm-{machine}.begun")
}

/// Returns the time since the host's start, in microseconds.
fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let part = |number: i64| u64::try_from(number).unwrap_or_default();
    part(now.tv_sec) * 1_000_000 + part(now.tv_nsec) / 1000
}

fn spec_path(machine: u32) -> String {
    format!("/run/vmm-{machine}.json")
}

fn socket_path(machine: u32) -> String {
    format!("/run/vmm-{machine}.sock")
}

fn open(file: &Opened, machine: u32, uid: u32) -> Result<OwnedFd> {
    Ok(match file {
        Opened::Read { path } => File::open(path).with_context(|| path.clone())?.into(),
        Opened::Write { path } => {
            let file = OpenOptions::new().read(true).write(true).open(path);
            file.with_context(|| path.clone())?.into()
        }
        Opened::Memory { base64 } => {
            let memory = File::from(rustix::fs::memfd_create("bed", MemfdFlags::CLOEXEC)?);
            (&memory).write_all(&BASE64.decode(base64)?)?;
            memory.into()
        }
        Opened::Tap { name, .. } => bail!("{name} is for machines that are launched"),
        Opened::Api => {
            let path = socket_path(machine);
            fs::remove_file(&path).ok();
            let listener = UnixListener::bind(&path)?;
            std::os::unix::fs::chown(&path, Some(uid), Some(uid))?;
            listener.into()
        }
    })
}

/// Becomes the parent of one VMM and returns its exit status.
fn launch(number: &str) -> Result<i32> {
    let machine: u32 = number.parse().context("which machine?")?;
    let spec = File::open(spec_path(machine))?;
    if spec.as_raw_fd() != 3 {
        bail!("the specification is descriptor {}, not 3", spec.as_raw_fd());
    }
    rustix::io::fcntl_setfd(&spec, FdFlags::empty())?;
    let unlimited = Rlimit { current: None, maximum: None };
    rustix::process::setrlimit(Resource::Memlock, unlimited)?;
    nix::sched::unshare(
        CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS,
    )?;
    fs::write(begun_path(machine), now_us().to_string())?;
    let status = Command::new("/holdfast-vmm").stdin(Stdio::null()).status();
    Ok(code(status.context("cannot start the VMM")?))
}

/// One request of HTTP over the VMM's socket; `files` go with its first byte.
/// Returns status, head and body of the answer.
fn http(machine: u32, line: &str, body: &[u8], files: &[Opened]) -> Result<(u16, String, Vec<u8>)> {
    let mut stream = UnixStream::connect(socket_path(machine)).context("the VMM is not there")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // All but what is typed is a document.
    let media =
        if line == "POST /v1/console" { "application/octet-stream" } else { "application/json" };
    let head = format!(
        "{line} HTTP/1.1\r\nhost: vmm\r\nconnection: close\r\ncontent-type: {media}\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let opened = files.iter().map(|file| open(file, machine, 0)).collect::<Result<Vec<_>>>()?;
    let raw: Vec<i32> = opened.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &[][..] } else { &rights[..] };
    let bytes = [head.as_bytes(), body].concat();
    let sent = socket::sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&bytes)],
        rights,
        MsgFlags::empty(),
        None,
    )?;
    stream.write_all(&bytes[sent..])?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).context("the VMM stopped in the middle of its answer")?;
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").context("no HTTP")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no status")?;
    Ok((status, head, answer.split_off(end + 4)))
}

/// Connects to a guest's port, sends, closes its half, and reads to the end.
fn vsock(cid: u32, port: u32, bytes: &[u8]) -> Result<Answer> {
    let socket =
        socket::socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    socket::connect(socket.as_raw_fd(), &VsockAddr::new(cid, port))
        .with_context(|| format!("cannot connect to {cid}:{port}"))?;
    let mut writer = File::from(socket);
    let reader = writer.try_clone()?;
    let received = std::thread::spawn(move || {
        let mut all = Vec::new();
        BufReader::new(reader).read_to_end(&mut all).map(|_| all)
    });
    writer.write_all(bytes)?;
    rustix::net::shutdown(writer.as_fd(), rustix::net::Shutdown::Write)?;
    let all = received.join().map_err(|_| anyhow::anyhow!("the reader died"))??;
    Ok(Answer::Bytes { base64: BASE64.encode(all) })
}
