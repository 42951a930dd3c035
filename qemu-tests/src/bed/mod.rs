//! A bed for `holdfast-vmm` alone: an emulated host with the image's kernel whose PID 1
//! (`src/bin/bed.rs`) does what a test says. A test starts the VMM with a specification of its own
//! making, so that it reaches what the node's agent does not use, and sees every answer.
//!
//! The VMM is the one that cargo built beside the test, with its libraries.

pub mod firmware;
pub mod guest;
pub mod network;
pub mod plan;
pub mod protocol;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use image::cpio::{self, Entry, Kind};
use serde_json::Value;

pub use self::{
    plan::Plan,
    protocol::{Answer, Measured, Opened, Request, Subject},
};
use crate::harness::{
    host::{Host, HostOptions, Medium, Uplink},
    programs::program,
    scene,
};

/// How long the host may take to its PID 1.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// How long one answer may take; the longest are those of programs that are waited for.
const ANSWER_LIMIT: Duration = Duration::from_secs(600);
/// The host's command line. Its console is for people: the test speaks over a port of its own.
const CMDLINE: &str = "console=ttyS0 loglevel=4 no_timer_check iommu=force rdinit=/init panic=-1 \
                       watchdog_thresh=30";

/// What an answer to another question is taken for.
const MIXED: &str = "the host answered another question";

/// What the bed's host is made of.
#[derive(Debug, Clone, Default)]
pub struct BedOptions {
    /// Files of the host: path in it, without the leading slash, and where its content comes from.
    pub files: Vec<(String, PathBuf)>,
    /// Devices, arguments and memory; medium, uplink and configuration are the bed's own.
    pub host: HostOptions,
    /// Words added to the kernel's command line.
    pub words: String,
    /// The VMM, when it is not the one that cargo built beside the running program.
    pub vmm: Option<PathBuf>,
}

/// A running host with its remote hands.
pub struct Bed {
    /// The emulated machine.
    pub host: Host,
    answers: BufReader<UnixStream>,
    requests: UnixStream,
}

/// An answer of a VMM's API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAnswer {
    /// Status code.
    pub status: u16,
    /// Head, with the status line.
    pub head: String,
    /// Body.
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// Returns the body as JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body)
            .with_context(|| format!("no JSON: {}", String::from_utf8_lossy(&self.body)))
    }
}

impl Bed {
    /// Boots a host in `folder`.
    pub fn start(folder: &Path, options: BedOptions) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let initrd = folder.join("bed-initrd");
        fs::write(&initrd, archive(options.vmm, &options.files)?)?;
        let socket = folder.join("bed.sock");
        let mut host = options.host;
        host.medium = Medium::Own {
            kernel: scene::image_folder()?.join("pxe/vmlinuz"),
            initrd,
            cmdline: format!("{CMDLINE} {}", options.words),
        };
        (host.uplink, host.config) = (Uplink::None, None);
        host.arguments.extend([
            "-device".to_owned(),
            "virtio-serial-pci".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id=bed,server=on,wait=off,path={}", socket.display()),
            "-device".to_owned(),
            "virtserialport,chardev=bed,name=bed".to_owned(),
        ]);
        let host = Host::start(folder, folder, &host)?;
        let requests = UnixStream::connect(&socket)
            .with_context(|| format!("cannot reach {}", socket.display()))?;
        requests.set_read_timeout(Some(ANSWER_LIMIT))?;
        let answers = BufReader::new(requests.try_clone()?);
        host.serial.wait("bed: ready", BOOT_LIMIT)?;
        Ok(Self { host, answers, requests })
    }

    /// Asks for one thing and returns the answer; an error holds what the host said was wrong.
    pub fn ask(&mut self, request: &Request) -> Result<Answer> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        self.requests.write_all(&line)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).context("the host does not answer")?;
        let answer =
            serde_json::from_str(&answer).with_context(|| format!("not an answer: {answer:?}"))?;
        if let Answer::Failed { reason } = answer {
            bail!("the host refused: {reason}");
        }
        Ok(answer)
    }

    /// Reads a file of the host.
    pub fn read(&mut self, path: &str) -> Result<Vec<u8>> {
        let Answer::Bytes { base64 } = self.ask(&Request::Read { path: path.to_owned() })? else {
            bail!(MIXED)
        };
        Ok(BASE64.decode(base64)?)
    }

    /// Reads a file of the host as text, without white space at its ends.
    pub fn text(&mut self, path: &str) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read(path)?).trim().to_owned())
    }

    /// Writes a file of the host.
    pub fn write(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let request = Request::Write { path: path.to_owned(), base64: BASE64.encode(content) };
        self.ask(&request).map(drop)
    }

    /// Makes a file of the host `bytes` long; what is new reads as zeroes.
    pub fn grow(&mut self, path: &str, bytes: u64) -> Result<()> {
        self.ask(&Request::Grow { path: path.to_owned(), bytes }).map(drop)
    }

    /// Lists the names in a folder of the host.
    pub fn list(&mut self, path: &str) -> Result<Vec<String>> {
        let Answer::Names { names } = self.ask(&Request::List { path: path.to_owned() })? else {
            bail!(MIXED)
        };
        Ok(names)
    }

    /// Gives a PCI device to vfio-pci and returns the path of its character device.
    pub fn bind(&mut self, address: &str) -> Result<String> {
        let device = format!("/sys/bus/pci/devices/{address}");
        self.write(&format!("{device}/driver_override"), b"vfio-pci")?;
        if self.list(&device)?.iter().any(|name| name == "driver") {
            self.write(&format!("{device}/driver/unbind"), address.as_bytes())?;
        }
        self.write("/sys/bus/pci/drivers_probe", address.as_bytes())?;
        let names = self.list(&format!("{device}/vfio-dev"))?;
        let name = names.first().with_context(|| format!("vfio-pci did not take {address}"))?;
        Ok(format!("/dev/vfio/devices/{name}"))
    }

    /// Runs a program of the host to its end and returns what it wrote; an error holds that, too.
    pub fn run_on_host(&mut self, words: &[&str]) -> Result<String> {
        let words = words.iter().map(|&word| word.to_owned()).collect();
        let Answer::Bytes { base64 } = self.ask(&Request::Run { words })? else { bail!(MIXED) };
        Ok(String::from_utf8_lossy(&BASE64.decode(base64)?).into_owned())
    }

    /// Starts a program of the host that goes on while the host lives.
    pub fn start_on_host(&mut self, words: &[&str]) -> Result<()> {
        let words = words.iter().map(|&word| word.to_owned()).collect();
        self.ask(&Request::Start { words }).map(drop)
    }

    /// Starts a VMM and returns its number.
    pub fn launch(&mut self, plan: &Plan) -> Result<u32> {
        let request = Request::Launch {
            files: plan.files().to_vec(),
            spec: serde_json::to_value(&plan.spec)?,
            uid: plan.spec.uid,
        };
        let Answer::Launched { machine } = self.ask(&request)? else { bail!(MIXED) };
        Ok(machine)
    }

    /// Calls a VMM's API; `files` travel with the request as descriptors.
    pub fn call_with(
        &mut self,
        machine: u32,
        (method, target): (&str, &str),
        body: &[u8],
        files: &[Opened],
    ) -> Result<HttpAnswer> {
        let request = Request::Call {
            machine,
            method: method.to_owned(),
            target: target.to_owned(),
            base64: BASE64.encode(body),
            files: files.to_vec(),
        };
        let Answer::Http { status, head, base64 } = self.ask(&request)? else { bail!(MIXED) };
        Ok(HttpAnswer { status, head, body: BASE64.decode(base64)? })
    }

    /// Calls a VMM's API.
    pub fn call(&mut self, machine: u32, call: (&str, &str), body: &str) -> Result<HttpAnswer> {
        self.call_with(machine, call, body.as_bytes(), &[])
    }

    /// Returns all console output of a guest that is still kept.
    pub fn console(&mut self, machine: u32) -> Result<String> {
        let answer = self.call(machine, ("GET", "/v1/console?from=0&wait_ms=0"), "")?;
        Ok(String::from_utf8_lossy(&answer.body).replace('\r', ""))
    }

    /// Types a line into a guest's console.
    pub fn type_line(&mut self, machine: u32, line: &str) -> Result<()> {
        let answer = self.call(machine, ("POST", "/v1/console"), &format!("{line}\n"))?;
        if answer.status != 200 {
            bail!("the console refused {line:?}: {}", String::from_utf8_lossy(&answer.body));
        }
        Ok(())
    }

    /// Waits until a guest's console holds `pattern`, and returns all of the console.
    pub fn wait_console(&mut self, machine: u32, pattern: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let text = self.console(machine).with_context(|| format!("no {pattern:?} yet"));
            let text = match text {
                Ok(text) => text,
                Err(error) => bail!("{error:#}; the VMM said {}", self.log(machine)?),
            };
            if text.contains(pattern) {
                return Ok(text);
            }
            if Instant::now() > deadline {
                bail!(
                    "no {pattern:?} within {limit:?}; the VMM said {}; console:\n{text}",
                    self.log(machine)?
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Runs a line of shell in a guest of [`guest::make`] and returns its output; an error holds
    /// the output when the command failed or was not done within `limit`.
    pub fn run(&mut self, machine: u32, command: &str, limit: Duration) -> Result<String> {
        let before = self.console(machine)?.matches(guest::END).count();
        self.type_line(machine, command)?;
        let deadline = Instant::now() + limit;
        loop {
            let text = self.console(machine)?;
            if let Some((output, status)) = guest::output(&text, before) {
                if status != "0" {
                    bail!("{command:?} ended with status {status}: {output}");
                }
                return Ok(output.to_owned());
            }
            if Instant::now() > deadline {
                bail!("{command:?} did not end within {limit:?}; console:\n{text}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns what a VMM wrote to its standard error so far.
    pub fn log(&mut self, machine: u32) -> Result<String> {
        self.text(&protocol::log_path(machine))
    }

    /// Waits for a VMM's end and returns its exit status and what it wrote to standard error.
    pub fn wait_exit(&mut self, machine: u32, limit: Duration) -> Result<(i32, String)> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let Answer::Exited { status } = self.ask(&Request::Wait { machine, limit_ms })? else {
            bail!(MIXED)
        };
        Ok((status, self.log(machine)?))
    }

    /// Looks from outside into the memory of all running guests. Returns at how many places, of those
    /// at multiples of 64 bytes, `needle` lies, and how many bytes there are.
    pub fn search(&mut self, needle: &str) -> Result<(u64, u64)> {
        let request = Request::Search { needle: needle.to_owned() };
        let Answer::Found { places, bytes } = self.ask(&request)? else { bail!(MIXED) };
        Ok((places, bytes))
    }

    /// Breaks the pages in the memory of running guests that hold `needle` at such a place: who touches one has
    /// a machine check. Returns how many places there were.
    pub fn break_pages(&mut self, needle: &str) -> Result<u64> {
        let request = Request::Break { needle: needle.to_owned() };
        let Answer::Found { places, .. } = self.ask(&request)? else { bail!(MIXED) };
        Ok(places)
    }

    /// Returns all threads of the host, with what each may share a core with.
    pub fn threads(&mut self) -> Result<Vec<protocol::Thread>> {
        let Answer::Threads { threads } = self.ask(&Request::Cores)? else { bail!(MIXED) };
        Ok(threads)
    }

    /// Measures a VMM of ours.
    pub fn measure(&mut self, plan: &Plan, marks: &[&str], limit: Duration) -> Result<Measured> {
        let subject = Subject::Vmm {
            files: plan.files().to_vec(),
            spec: serde_json::to_value(&plan.spec)?,
            uid: plan.spec.uid,
        };
        self.measure_subject(subject, marks, limit)
    }

    /// Measures any subject; its guest's memory must be shared memory.
    pub fn measure_subject(
        &mut self,
        subject: Subject,
        marks: &[&str],
        limit: Duration,
    ) -> Result<Measured> {
        let request = Request::Measure {
            subject,
            marks: marks.iter().map(|&mark| mark.to_owned()).collect(),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        let Answer::Measured(measured) = self.ask(&request)? else { bail!(MIXED) };
        Ok(measured)
    }

    /// Sends `bytes` to a port of a guest's vsock and returns what it answers until it closes.
    pub fn vsock(&mut self, cid: u32, port: u32, bytes: &[u8]) -> Result<Vec<u8>> {
        let Answer::Bytes { base64 } =
            self.ask(&Request::Vsock { cid, port, base64: BASE64.encode(bytes) })?
        else {
            bail!(MIXED)
        };
        Ok(BASE64.decode(base64)?)
    }
}

/// The host's initramfs: the remote hands as PID 1, the VMM, their libraries, and `files`.
fn archive(vmm: Option<PathBuf>, files: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let vmm = vmm.map_or_else(|| program("holdfast-vmm"), Ok)?;
    let programs = [("init", program("bed")?), ("holdfast-vmm", vmm)];
    let mut all = Vec::new();
    for (name, path) in programs {
        all.extend(with_libraries(name, &path)?);
    }
    all.extend_from_slice(files);
    all.sort();
    all.dedup_by(|left, right| left.0 == right.0);
    let mut entries = Vec::new();
    let mut folders =
        std::collections::BTreeSet::from(["dev", "proc", "sys", "run"].map(str::to_owned));
    for (name, _) in &all {
        let parents =
            Path::new(name).ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
        folders.extend(parents.map(|path| path.display().to_string()));
    }
    for name in folders {
        entries.push(Entry { name, mode: 0o755, kind: Kind::Directory });
    }
    for (name, path) in all {
        let content = fs::read(&path).with_context(|| format!("{}", path.display()))?;
        entries.push(Entry { name, mode: 0o755, kind: Kind::File(content) });
    }
    Ok(cpio::write(&entries)?)
}

/// Returns the program at `path` as the host's file `name`, and what the dynamic loader maps for it,
/// the loader included.
pub fn with_libraries(name: &str, path: &Path) -> Result<Vec<(String, PathBuf)>> {
    let output = Command::new("ldd").arg(path).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mapped = text.lines().filter_map(|line| {
        let path = line.split_whitespace().find(|word| word.starts_with('/'))?;
        Some((path.trim_start_matches('/').to_owned(), PathBuf::from(path)))
    });
    Ok([(name.to_owned(), path.to_owned())].into_iter().chain(mapped).collect())
}
