//! Starts the program as init does, with descriptors under known numbers, and asks its API.

use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use types::{
    ids::MachineId,
    units::Mebibytes,
    vm::{Boot, CoreScheduling, HyperV, MemoryBacking, SPEC_FD, SPEC_VERSION, VmSpec, exit},
};

use super::kvm;

/// User of the machines in these tests.
const UID: u32 = 64_001;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a question is asked whose answer comes after eight seconds at the latest, with news or without.
const ASKED: usize = 4;

/// A machine that runs.
pub(crate) struct Machine {
    process: Child,
    folder: tempfile::TempDir,
}

/// An answer of the API.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Returns a machine whose guest has said its first word, or says why there is none. `change`
/// makes its specification another one. Panics where the host's KVM runs guests, and this one did not.
pub(crate) fn start(vcpus: u32, change: impl FnOnce(&mut VmSpec)) -> Option<Machine> {
    let mut machine = launch(vcpus, change)?;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = machine.process.try_wait().unwrap() {
            assert_ne!(status.code(), Some(exit::REFUSED), "the specification was refused");
            return silent(&format!("the process ended with {status}"));
        }
        if machine.is_there() && !machine.get("/v1/console?wait_ms=100").body.is_empty() {
            return Some(machine);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    silent(&format!("{PATIENCE:?} were not enough"))
}

/// Judges a guest that has said nothing.
fn silent(how: &str) -> Option<Machine> {
    match kvm::runs_guests() {
        Ok(()) => panic!("this host's KVM runs guests, but ours said nothing: {how}"),
        Err(reason) => skip(reason),
    }
}

fn skip(reason: &str) -> Option<Machine> {
    println!("skipped: a machine's process: {reason}");
    None
}

/// Returns a machine whose process was started, or says why there is none.
pub(crate) fn launch(vcpus: u32, change: impl FnOnce(&mut VmSpec)) -> Option<Machine> {
    if !rustix::process::geteuid().is_root() {
        return skip("needs root");
    }
    let Ok(kvm) = File::options().read(true).write(true).open("/dev/kvm") else {
        return skip("there is no /dev/kvm");
    };
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("api")).unwrap();
    let mut kernel = File::from(memfd());
    kernel.write_all(&super::guest::image()).unwrap();
    kernel.rewind().unwrap();
    let path = folder.path().join("console");
    let kept = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let files: Vec<OwnedFd> =
        vec![kvm.into(), listener.into(), kernel.into(), kept.unwrap().into()];
    let mut spec = spec(vcpus);
    change(&mut spec);
    let process = spawn(&spec, files);
    Some(Machine { process, folder })
}

fn spec(vcpus: u32) -> VmSpec {
    VmSpec {
        version: SPEC_VERSION,
        machine: MachineId::from_bytes([3; 16]),
        uid: UID,
        vcpus,
        memory_mib: Mebibytes(16),
        memory_backing: MemoryBacking::Memfd,
        boot: Boot::Linux { kernel_fd: 6, initrd_fd: None, cmdline: String::new() },
        ignition_fd: None,
        disks: Vec::new(),
        disk_limit: None,
        nets: Vec::new(),
        vsock: None,
        passthrough: None,
        topology: None,
        spare_ports: Vec::new(),
        numa: Vec::new(),
        cpu_places: Vec::new(),
        host_memory: Vec::new(),
        kvm_fd: 4,
        api_fd: 5,
        console_fd: Some(7),
        cpu_affinity: Vec::new(),
        core_scheduling: CoreScheduling::Shared,
        hyperv: HyperV::Off,
        deadline: None,
        clock_ahead_s: 0,
    }
}

fn memfd() -> OwnedFd {
    rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::empty()).unwrap()
}

#[allow(unsafe_code, reason = "descriptors under the numbers that the specification names")]
fn spawn(spec: &VmSpec, files: Vec<OwnedFd>) -> Child {
    let mut document = File::from(memfd());
    document.write_all(&serde_json::to_vec(spec).unwrap()).unwrap();
    document.rewind().unwrap();
    let mut all = vec![OwnedFd::from(document)];
    all.extend(files);
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast-vmm"));
    // SAFETY: only system calls that may follow a fork; the sources lie above all targets.
    unsafe {
        command.pre_exec(move || {
            const ABOVE: i32 = 200;
            for (target, file) in (ABOVE..).zip(&all) {
                libc::dup2(file.as_raw_fd(), target);
            }
            for (target, number) in (SPEC_FD..).zip(0..).take(all.len()) {
                libc::dup2(ABOVE + number, target);
            }
            Ok(())
        });
    }
    command.spawn().unwrap()
}

impl Machine {
    fn is_there(&self) -> bool {
        UnixStream::connect(self.folder.path().join("api")).is_ok()
    }

    pub(crate) fn get(&self, target: &str) -> Answer {
        self.ask("GET", target, b"")
    }

    /// Returns the console's output once it has `length` bytes.
    pub(crate) fn output(&self, length: usize) -> Vec<u8> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.get("/v1/console").body;
            if output.len() >= length || Instant::now() > deadline {
                return output;
            }
        }
    }

    /// Returns the events from number `from` on, once there is one.
    pub(crate) fn events(&self, from: u64) -> serde_json::Value {
        let target = format!("/v1/events?from={from}&wait_ms=8000");
        let mut told = (0..ASKED).map(|_| self.get(&target).json());
        told.find(|told| told["events"][0].is_object()).unwrap()
    }

    pub(crate) fn post(&self, target: &str, body: &[u8]) -> Answer {
        self.ask("POST", target, body)
    }

    pub(crate) fn put(&self, target: &str, body: &[u8]) -> Answer {
        self.ask("PUT", target, body)
    }

    /// Returns a connection on which nothing was said.
    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("api")).unwrap()
    }

    /// Sends a request. Returns the connection, on which its answer comes.
    pub(crate) fn begin(&self, method: &str, target: &str, body: &[u8]) -> UnixStream {
        let mut stream = self.connect();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nhost: vmm\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        stream
    }

    fn ask(&self, method: &str, target: &str, body: &[u8]) -> Answer {
        let mut stream = self.begin(method, target, body);
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, body: answer.split_off(end + 4) }
    }

    pub(crate) fn console_file(&self) -> PathBuf {
        self.folder.path().join("console")
    }

    /// Ends the process without its help.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits for the process to end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }

    /// Names of the process's threads, each with the host CPUs it may use.
    pub(crate) fn threads(&self) -> Vec<(String, String)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        let read = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("status")).unwrap();
            let field = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                line.trim().to_owned()
            };
            (field("Name:"), field("Cpus_allowed_list:"))
        };
        tasks.map(|task| read(task.unwrap())).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
