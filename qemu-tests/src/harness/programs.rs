//! The programs of gateway and renter, run as their users run them.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::pace::Pace;

/// Exit status of a list that lacks what nodes have that do not answer.
const IN_PART: i32 = 4;

/// Returns the path of a program that this workspace builds, beside the running one.
pub fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let found =
        own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|p| p.is_file());
    found.with_context(|| {
        let packages = "--package agent --package gateway --package update --package vmm";
        format!("{name} is not built; run `cargo build {packages}` first")
    })
}

/// Returns a TCP port of the loopback interface that was free a moment ago.
pub fn free_tcp_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Returns a UDP port of the loopback interface that was free a moment ago.
pub fn free_udp_port() -> Result<u16> {
    Ok(UdpSocket::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// One way of calling `holdfast`: a gateway and a key.
#[derive(Debug, Clone)]
pub struct Cli {
    program: PathBuf,
    gateway: Option<String>,
    key: Option<PathBuf>,
    /// How fast the clocks of those it speaks to run, and since when.
    pace: (Pace, Instant),
}

impl Cli {
    /// Calls without gateway and key, as for making keys.
    pub fn new() -> Result<Self> {
        let pace = (Pace::Real, Instant::now());
        Ok(Self { program: program("holdfast")?, gateway: None, key: None, pace })
    }

    /// The same, with the clock of those that live at `pace` from now on.
    pub fn at(&self, pace: Pace) -> Self {
        Self { pace: (pace, Instant::now()), ..self.clone() }
    }

    /// The same, by way of the gateway at `url`.
    pub fn with_gateway(&self, url: &str) -> Self {
        Self { gateway: Some(url.to_owned()), ..self.clone() }
    }

    /// The same, signing with the key in the file at `path`.
    pub fn with_key(&self, path: &Path) -> Self {
        Self { key: Some(path.to_owned()), ..self.clone() }
    }

    /// Returns the command for `arguments`, to be run by the caller at once.
    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(&self.program);
        let (pace, since) = self.pace;
        pace.visit(&mut command, since)?;
        if let Some(gateway) = &self.gateway {
            command.args(["--gateway", gateway]);
        }
        if let Some(key) = &self.key {
            command.arg("--key").arg(key);
        }
        command.args(arguments);
        Ok(command)
    }

    /// Runs to the end and returns everything, whether it went well or not.
    pub fn output(&self, arguments: &[&str]) -> Result<Output> {
        self.command(arguments)?.stdin(Stdio::null()).output().context("cannot start holdfast")
    }

    /// Runs to the end; an error holds what it said on standard error.
    pub fn text(&self, arguments: &[&str]) -> Result<String> {
        self.text_of(arguments, &[0])
    }

    /// Runs with `--json` and returns what it printed.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.json_of(arguments, &[0])
    }

    fn json_of(&self, arguments: &[&str], statuses: &[i32]) -> Result<Value> {
        let mut all = vec!["--json"];
        all.extend_from_slice(arguments);
        let text = self.text_of(&all, statuses)?;
        serde_json::from_str(&text).with_context(|| format!("holdfast printed no JSON: {text}"))
    }

    fn text_of(&self, arguments: &[&str], statuses: &[i32]) -> Result<String> {
        let output = self.output(arguments)?;
        if !output.status.code().is_some_and(|status| statuses.contains(&status)) {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("holdfast {} failed ({}): {}", arguments.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs until its output satisfies `accept`, or the time is up; errors in between are part of
    /// waiting, and so are nodes that do not answer.
    pub fn wait(
        &self,
        arguments: &[&str],
        limit: Duration,
        accept: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + limit;
        loop {
            let last = self.json_of(arguments, &[0, IN_PART]);
            if let Ok(value) = &last
                && accept(value)
            {
                return last;
            }
            if Instant::now() > deadline {
                let last =
                    last.map_or_else(|error| format!("{error:#}"), |value| value.to_string());
                bail!("holdfast {}: not within {limit:?}; last: {last}", arguments.join(" "));
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

/// A running gateway. Dropping it ends it.
pub struct Gateway {
    child: Child,
    folder: PathBuf,
    flags: Vec<String>,
    pace: Pace,
    /// Where its HTTP API is.
    pub url: String,
    /// Where its overlay listens.
    pub overlay_port: u16,
    /// Its key.
    pub node: String,
}

impl Gateway {
    /// Starts a gateway that keeps its state in `folder`; its overlay listens at `address`, and
    /// `settings` are its file's other lines. Its doors open for leases that any one of the `authority`
    /// keys signed: it is laxer than the nodes, so that tests see them decide.
    pub fn start(
        folder: &Path,
        address: IpAddr,
        authority: &[&str],
        pace: Pace,
        settings: &str,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let (http, overlay_port) = (free_tcp_port()?, free_udp_port()?);
        let own = [
            ("--http", format!("127.0.0.1:{http}")),
            ("--overlay", SocketAddr::new(address, overlay_port).to_string()),
            ("--threshold", "1".to_owned()),
        ];
        let keys = authority.iter().map(|key| ("--authority", (*key).to_owned()));
        let flags = own.into_iter().chain(keys);
        let flags: Vec<String> = flags.flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let (child, node) = run_gateway((folder, settings), &flags, pace)?;
        let (folder, url) = (folder.to_owned(), format!("http://127.0.0.1:{http}"));
        Ok(Self { child, folder, flags, pace, url, overlay_port, node })
    }

    /// Has it do nothing, with its connections open, until [`Self::thaw`].
    pub fn freeze(&self) -> Result<()> {
        self.send(Signal::STOP)
    }

    /// Has it go on.
    pub fn thaw(&self) -> Result<()> {
        self.send(Signal::CONT)
    }

    fn send(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Ends it and starts it again with other settings.
    pub fn restart(&mut self, settings: &str) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        let (child, node) = run_gateway((&self.folder, settings), &self.flags, self.pace)?;
        (self.child, self.node) = (child, node);
        Ok(())
    }
}

/// Starts a gateway, and returns it with its key.
fn run_gateway(
    (folder, settings): (&Path, &str),
    flags: &[String],
    pace: Pace,
) -> Result<(Child, String)> {
    let config = folder.join("gateway.toml");
    std::fs::write(&config, settings)?;
    let errors = File::options().create(true).append(true).open(folder.join("gateway.log"))?;
    let mut command = Command::new(program("holdfast-gateway")?);
    pace.set(&mut command)?;
    let mut child = command
        .arg("--config")
        .arg(&config)
        .arg("--data-dir")
        .arg(folder.join("data"))
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .context("cannot start holdfast-gateway")?;
    let output = child.stdout.take().context("the gateway has no output")?;
    let node = announced_node(output).with_context(|| {
        let log = std::fs::read_to_string(folder.join("gateway.log")).unwrap_or_default();
        format!("the gateway did not say its key; its log:\n{log}")
    });
    match node {
        Ok(node) => Ok((child, node)),
        Err(error) => {
            child.kill().ok();
            child.wait().ok();
            Err(error)
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Reads the gateway's first lines up to the one that tells its key.
fn announced_node(output: std::process::ChildStdout) -> Result<String> {
    let mut lines = BufReader::new(output).lines();
    while let Some(line) = lines.next().transpose()? {
        if let Some(node) = line.split_whitespace().find_map(|word| word.strip_prefix("node=")) {
            // The rest is read so that the gateway never blocks on a full pipe.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(node.to_owned());
        }
    }
    bail!("it ended")
}
