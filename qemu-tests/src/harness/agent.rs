//! A real agent without a virtual machine: in namespaces and a root of its own, with this program
//! as its init. It sees no PCI device, and cannot set the clock or restart the machine.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// What makes the root: the first argument is its folder, standard input is init's socket.
const SCRIPT: &str = r#"
set -e
for folder in usr lib lib64; do mkdir -p "$1/$folder"; mount --rbind "/$folder" "$1/$folder"; done
mkdir -p "$1/proc" "$1/sys" "$1/dev/net" "$1/run" "$1/state" "$1/data" "$1/etc" "$1/tmp"
mount -t proc proc "$1/proc"
mount --bind "$1/cmdline" "$1/proc/cmdline"
mount -t sysfs sysfs "$1/sys"
mount -t tmpfs tmpfs "$1/sys/bus"
for node in null zero urandom net/tun; do touch "$1/dev/$node"; mount --bind "/dev/$node" "$1/dev/$node"; done
ip link set lo up
exec 3<&0 </dev/null
exec setpriv --bounding-set=-sys_time,-sys_boot,-sys_module,-sys_rawio,-sys_admin chroot "$1" /agent
"#;

/// How long the agent may take for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running agent; it ends when this is dropped.
pub struct LoneAgent {
    root: PathBuf,
    child: Child,
    kmsg: File,
}

impl LoneAgent {
    /// Says why none can be started here.
    pub fn missing() -> Option<&'static str> {
        let node = |path: &str| Path::new(path).exists();
        if !rustix::process::geteuid().is_root() {
            Some("needs root for namespaces")
        } else if !node("/dev/net/tun") {
            Some("needs /dev/net/tun")
        } else if !node("/usr/bin/setpriv") {
            Some("needs setpriv")
        } else {
            None
        }
    }

    /// Starts `program` with a configuration, in an empty folder.
    pub fn start(program: &Path, folder: &Path, config: &str) -> Result<Self> {
        let root = folder.to_owned();
        fs::create_dir_all(root.join("dev"))?;
        // It becomes `/`, which everybody in there goes through.
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755))?;
        fs::copy(program, root.join("agent"))?;
        fs::write(root.join("cmdline"), format!("holdfast.config={}\n", STANDARD.encode(config)))?;
        let kmsg = root.join("dev/kmsg");
        nix::unistd::mkfifo(&kmsg, nix::sys::stat::Mode::from_bits_truncate(0o600))?;
        let kmsg = File::options().read(true).write(true).open(&kmsg)?;
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let child = Command::new("unshare")
            .args(["--mount", "--net", "--propagation", "private", "sh", "-c", SCRIPT, "sh"])
            .arg(&root)
            .stdin(Stdio::from(theirs))
            .stderr(File::create(root.join("stderr"))?)
            .spawn()
            .context("cannot start unshare")?;
        std::thread::spawn(move || be_init(&ours));
        let agent = Self { root, child, kmsg };
        let deadline = Instant::now() + PATIENCE;
        while !agent.said().contains("event=agent-ready") {
            if Instant::now() > deadline {
                bail!("the agent is not ready:\n{}", agent.said());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(agent)
    }

    /// Has it end in order, as when the node goes down.
    pub fn end(mut self) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into()?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "the agent does not end:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts `program` beside it, as user and group `id`, with a terminal as its standard input and
    /// output. Returns the process and the terminal's other end.
    pub fn beside(&self, program: &Path, id: u32) -> Result<(Child, File)> {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        fs::copy(program, self.root.join("beside"))?;
        let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&person)?;
        unlockpt(&person)?;
        let size = rustix::termios::Winsize { ws_row: 25, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&person, size)?;
        let name = ptsname(&person, Vec::new())?.into_string()?;
        let terminal = File::options().read(true).write(true).open(name)?;
        let id = id.to_string();
        let child = Command::new("nsenter")
            .args(["--target", &self.pid().to_string(), "--mount", "--root", "setsid", "setpriv"])
            .args(["--reuid", &id, "--regid", &id, "--clear-groups", "--no-new-privs", "/beside"])
            .stdin(terminal.try_clone()?)
            .stdout(terminal)
            .stderr(File::create(self.root.join("beside.log"))?)
            .spawn()
            .context("cannot start nsenter")?;
        Ok((child, person.into()))
    }

    /// Returns everything that it wrote.
    pub fn said(&self) -> String {
        fs::read_to_string(self.root.join("stderr")).unwrap_or_default()
    }

    /// Returns where its local interface is.
    pub fn socket(&self) -> PathBuf {
        self.root.join("run/holdfast/local.sock")
    }

    /// Writes a record of the kernel's log that it reads. Records must come one by one: the next
    /// one only after this one was seen.
    pub fn log(&mut self, record: &str) -> Result<()> {
        Ok(self.kmsg.write_all(record.as_bytes())?)
    }

    /// Asks the local interface. Returns the status and the body.
    pub fn ask(&self, method: &str, target: &str) -> Result<(u16, String)> {
        exchange(UnixStream::connect(self.socket())?, method, target)
    }
}

impl Drop for LoneAgent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let beside = fs::read_to_string(self.root.join("beside.log")).unwrap_or_default();
            println!("the agent said:\n{}\nthe program beside it:\n{beside}", self.said());
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Asks over a connection. Returns the status and the body.
pub fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    target: &str,
) -> Result<(u16, String)> {
    write!(stream, "{method} {target} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    ensure!(!head.to_ascii_lowercase().contains("chunked"), "{head}");
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
}

/// Answers that no machine runs, for ever.
fn be_init(socket: &OwnedFd) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok((length, _)) = rustix::net::recv(socket, &mut buffer, RecvFlags::empty()) {
        let asked = String::from_utf8_lossy(&buffer[..length]);
        if asked.is_empty() {
            return;
        }
        if asked.contains("\"ask\":\"list\"") {
            let answer = br#"{"tell":"machines","machines":[]}"#;
            if rustix::net::send(socket, answer, SendFlags::NOSIGNAL).is_err() {
                return;
            }
        }
    }
}
