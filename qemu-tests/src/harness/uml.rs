//! The shipped image on User-Mode Linux: init, agent, and root are the image's own, and so are the
//! kernel's source and its options as far as that architecture has them; the kernel runs as a
//! process, at the speed of this machine's processors. It has no firmware, no PCI, no KVM and no
//! disk: a node in memory only.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use image::cpio::{self, Entry, Kind};

use super::serial::{Echo, Serial};

/// A running one.
pub struct UmlHost {
    process: Child,
    /// What its kernel prints, with times.
    pub serial: Serial,
}

impl UmlHost {
    /// Starts the image in `image` on `kernel`, a program, with the configuration `config`, and its
    /// first network interface on `tap`. Its files live in `folder`.
    ///
    /// # Errors
    /// When something cannot be written or started.
    pub fn start(
        kernel: &Path,
        image: &Path,
        folder: &Path,
        config: &str,
        tap: &str,
    ) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let initrd = folder.join("initrd");
        write_initrd(image, &initrd, config)?;
        let mut process = Command::new(kernel)
            .args(["mem=512M", "rootfstype=ramfs", "loglevel=5", "printk.time=1"])
            // The serial port is the console, as in the image: output only.
            .args(["con=null", "ssl=null", "ssl0=null,fd:1", "console=ttyS0"])
            .arg(format!("initrd={}", initrd.display()))
            .arg(format!("vec0:transport=tap,ifname={tap}"))
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

/// Writes the image's initramfs with the configuration behind it.
fn write_initrd(image: &Path, initrd: &Path, config: &str) -> Result<()> {
    let entries = [
        Entry { name: "customised".to_owned(), mode: 0o755, kind: Kind::Directory },
        Entry {
            name: "customised/holdfast.toml".to_owned(),
            mode: 0o644,
            kind: Kind::File(config.into()),
        },
    ];
    let mut whole = fs::read(image.join("pxe/initrd"))?;
    // Archives begin at multiples of four bytes.
    whole.resize(whole.len().next_multiple_of(4), 0);
    whole.extend(cpio::write(&entries)?);
    File::create(initrd)?.write_all(&whole).with_context(|| format!("{}", initrd.display()))
}
