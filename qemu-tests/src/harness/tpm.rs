//! A TPM 2.0 for an emulated host: swtpm, Debian's software TPM.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How long it may take to listen.
const LIMIT: Duration = Duration::from_secs(20);

/// A TPM for one start of a host. What it keeps lies in its folder, for the next one.
pub struct Tpm {
    process: Child,
    socket: PathBuf,
}

impl Tpm {
    /// Starts one over `folder`, which is made the first time: a new TPM then.
    pub fn start(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let socket = folder.join("control.sock");
        std::fs::remove_file(&socket).ok();
        let process = Command::new("swtpm")
            .args(["socket", "--tpm2", "--tpmstate", &format!("dir={}", folder.display())])
            .args(["--ctrl", &format!("type=unixio,path={}", socket.display())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start swtpm (package swtpm)")?;
        let tpm = Self { process, socket };
        let begin = Instant::now();
        while !tpm.socket.exists() {
            if begin.elapsed() > LIMIT {
                bail!("swtpm does not listen on {}", tpm.socket.display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(tpm)
    }

    /// QEMU's arguments for a host that has it.
    pub fn arguments(&self) -> Vec<String> {
        [
            "-chardev",
            &format!("socket,id=tpm,path={}", self.socket.display()),
            "-tpmdev",
            "emulator,id=tpm0,chardev=tpm",
            "-device",
            "tpm-crb,tpmdev=tpm0",
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
