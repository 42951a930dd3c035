//! The shipped image on User-Mode Linux: init, agent, and root are the image's own, and so are the
//! kernel's source and its options as far as that architecture has them; the kernel runs as a
//! process, at the speed of this machine's processors. It has no firmware, no PCI, no KVM and no
//! disk: a node in memory only.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::serial::{Echo, Serial};

/// A running one.
pub struct UmlHost {
    process: Child,
    /// What its kernel prints, with times.
    pub serial: Serial,
}

impl UmlHost {
    /// Starts the image in `image` on `kernel`, a program, with the configuration `config`. Its first
    /// network interface reads and writes `interface`. Its files live in `folder`.
    ///
    /// # Errors
    /// When something cannot be written or started.
    pub fn start(
        kernel: &Path,
        image: &Path,
        folder: &Path,
        config: &str,
        interface: &str,
    ) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let mut process = Command::new(kernel)
            .args(["mem=512M", "rootfstype=ramfs", "loglevel=5", "printk.time=1"])
            // The serial port is the console, as in the image: output only.
            .args(["con=null", "ssl=null", "ssl0=null,fd:1", "console=ttyS0"])
            .arg(format!("initrd={}", image.join("pxe/initrd").display()))
            .arg(format!("vec0:transport=raw,ifname={interface}"))
            .arg(format!("holdfast.config={}", BASE64_STANDARD.encode(config)))
            // Its sockets and memory go where they are removed.
            .env("TMPDIR", folder)
            .env("HOME", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", kernel.display()))?;
        let output = process.stdout.take().context("User-Mode Linux has no output")?;
        let serial = Serial::collect(output, &folder.join("serial.log"), Echo::Quiet)?;
        Ok(Self { process, serial })
    }
}

impl Drop for UmlHost {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
