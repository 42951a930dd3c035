//! A TPM 2.0 for a host: Debian's swtpm, its state in a folder of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How long it may take to listen.
const LIMIT: Duration = Duration::from_secs(20);

/// A running TPM. It ends with the host that uses it, or when it is dropped.
pub struct Tpm {
    child: Child,
    socket: PathBuf,
}

impl Tpm {
    /// Starts one; what it remembers is in `folder`.
    pub fn start(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let socket = folder.join("tpm.sock");
        fs::remove_file(&socket).ok();
        let child = Command::new("swtpm")
            .args(["socket", "--tpm2", "--tpmstate"])
            .arg(format!("dir={}", folder.display()))
            .arg("--ctrl")
            .arg(format!("type=unixio,path={}", socket.display()))
            .args(["--flags", "startup-clear"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start swtpm (package swtpm)")?;
        let tpm = Self { child, socket };
        let deadline = Instant::now() + LIMIT;
        while !tpm.socket.exists() {
            if Instant::now() > deadline {
                bail!("swtpm does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(tpm)
    }

    /// Returns QEMU's arguments for a host with this TPM.
    pub fn arguments(&self) -> Vec<String> {
        let socket = format!("socket,id=tpm,path={}", self.socket.display());
        let words = ["-chardev", &socket, "-tpmdev", "emulator,id=tpm0,chardev=tpm"];
        let device = ["-device", "tpm-tis,tpmdev=tpm0"];
        words.into_iter().chain(device).map(str::to_owned).collect()
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
