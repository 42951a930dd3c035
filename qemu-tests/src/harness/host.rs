//! The emulated host: a machine with AMD-V, an IOMMU with interrupt remapping, UEFI firmware and
//! PCI devices to rent.

use std::{
    fs::{self, File},
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{
    pace::{Pace, QEMUS_LOG},
    programs::free_tcp_port,
    qmp::Qmp,
    serial::{Echo, Serial},
};

/// What the host starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Medium {
    /// The ISO as a CD, through OVMF.
    IsoCd,
    /// The ISO written to a USB stick, through OVMF.
    IsoUsb,
    /// The ISO as a CD beside an NVMe disk at this path, serial number `INSTALL0`. Firmware's own
    /// boot entries decide which of them starts.
    IsoCdAndDisk(PathBuf),
    /// The ISO as a CD that comes first, and an NVMe disk at this path, serial number `INSTALL0`.
    IsoCdBeforeDisk(PathBuf),
    /// A copy of the raw disk image on an NVMe disk, through OVMF. The path is the copy.
    Disk(PathBuf),
    /// An NVMe disk at this path, and nothing else. Firmware's own boot entries decide which of its
    /// programs starts.
    InstalledDisk(PathBuf),
    /// Whatever OVMF's own PXE client gets over the uplink.
    Network,
    /// The same beside an NVMe disk at this path, serial number `INSTALL0`. Firmware's own boot entries
    /// decide which of them starts.
    NetworkAndDisk(PathBuf),
    /// Kernel and initramfs of the PXE set, loaded by QEMU, with these words added to the command
    /// line. Saves the firmware's time where firmware is not what is tested.
    Kernel(String),
    /// A kernel and initramfs that are not the image's, loaded by QEMU.
    Own {
        /// The kernel.
        kernel: PathBuf,
        /// The initramfs.
        initrd: PathBuf,
        /// The whole command line.
        cmdline: String,
    },
}

/// Which IOMMU the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Iommu {
    /// Intel's, with interrupt remapping.
    Intel,
    /// AMD's, with interrupt remapping.
    Amd,
    /// Intel's, without interrupt remapping.
    IntelNoRemapping,
    /// None.
    Absent,
}

/// Which firmware the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    /// Without Secure Boot.
    Plain,
    /// With Secure Boot, in its setup mode at first; the variables are behind system management mode.
    SecureBoot,
}

/// How the host is attached to a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uplink {
    /// QEMU's own NAT, with addresses of the internet; the test machine is [`TEST_MACHINE`].
    User,
    /// An existing tap interface.
    Tap(String),
    /// Two of them, each with a card of its own: the first has [`FIRST_CARD`], the second [`SECOND_CARD`].
    Taps([String; 2]),
    /// No network card.
    None,
}

/// Hardware addresses of the cards of [`Uplink::Taps`].
pub const FIRST_CARD: &str = "52:54:00:00:00:01";
/// The second one's.
pub const SECOND_CARD: &str = "52:54:00:00:00:02";

/// The network of [`Uplink::User`]. It is none that guests are kept from (RFC 5737).
pub const USER_NETWORK: &str = "203.0.113.0/24";
/// Where the test machine's loopback interface is for a host with [`Uplink::User`].
pub const TEST_MACHINE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);

/// A host to be started.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// What it boots.
    pub medium: Medium,
    /// Its firmware, where the medium is started by one.
    pub firmware: Firmware,
    /// Its IOMMU.
    pub iommu: Iommu,
    /// Its network.
    pub uplink: Uplink,
    /// Content of `holdfast.toml` on a FAT volume labelled `HOLDFAST`; no volume when `None`.
    pub config: Option<String>,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// `-device` arguments of further devices, each behind a root port of its own.
    pub devices: Vec<String>,
    /// Where each write to its disk is recorded, for media that are a disk.
    pub recorded: Option<PathBuf>,
    /// Further QEMU arguments.
    pub arguments: Vec<String>,
    /// How fast its clocks run.
    pub pace: Pace,
    /// Value of `-rtc`, as `base=2026-01-01T00:00:00`.
    pub rtc: Option<String>,
    /// Whether the console is shown.
    pub echo: Echo,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            medium: Medium::Kernel(String::new()),
            firmware: Firmware::Plain,
            iommu: Iommu::Intel,
            uplink: Uplink::User,
            config: None,
            memory_mib: 3072,
            devices: Vec::new(),
            recorded: None,
            arguments: Vec::new(),
            pace: Pace::Real,
            rtc: None,
            echo: Echo::Quiet,
        }
    }
}

/// A running host. Dropping it cuts its power.
pub struct Host {
    child: Child,
    /// Its serial console.
    pub serial: Serial,
    /// Its monitor.
    pub qmp: Qmp,
}

impl Host {
    /// Types a line at the serial console.
    pub fn type_line(&mut self, text: &str) -> Result<()> {
        let keyboard = self.child.stdin.as_mut().context("QEMU has no input")?;
        keyboard.write_all(format!("{text}\r").as_bytes())?;
        Ok(keyboard.flush()?)
    }

    /// Starts a host; its files live in `folder`, the image's in `image`.
    pub fn start(image: &Path, folder: &Path, options: &HostOptions) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let monitor = folder.join("qmp.sock");
        fs::remove_file(&monitor).ok();
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-no-user-config", "-name", "holdfast"]);
        // One processor: several, with a guest inside, stop or panic every now and then; but for one
        // thread, or where there can be no second, QEMU leaves the fence out of `lock add`. A driver
        // and its virtio device, which is another thread, then miss each other's word once in some
        // million packets, and the card is silent from then on. Without ERMS kernels clear pages by
        // eight bytes a step; emulated byte by byte it takes a fifth of a boot.
        command.args(["-accel", "tcg,thread=multi", "-smp", "1,maxcpus=2", "-cpu", "max,-erms"]);
        options.pace.set(&mut command)?;
        command.args(["-m", &format!("{}", options.memory_mib), "-serial", "stdio"]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        iommu(&mut command, options.iommu);
        medium(&mut command, (image, folder), options)?;
        if let Some(config) = &options.config {
            let volume = folder.join("config.img");
            super::volume::write(&volume, config)?;
            command.args([
                "-drive",
                &format!("if=none,id=config,format=raw,file={}", volume.display()),
            ]);
            command.args(["-device", "virtio-blk-pci,drive=config"]);
        }
        uplink(&mut command, options);
        command.args(["-device", "virtio-rng-pci", "-device", "i6300esb"]);
        for (index, device) in options.devices.iter().enumerate() {
            let port = index + 1;
            command.args([
                "-device",
                &format!("pcie-root-port,id=rent{port},chassis={port},slot={port}"),
            ]);
            command.args(["-device", &format!("{device},bus=rent{port}")]);
        }
        if let Some(rtc) = &options.rtc {
            command.args(["-rtc", rtc]);
        }
        command.args(&options.arguments);
        let errors = File::create(folder.join(QEMUS_LOG))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("cannot start qemu-system-x86_64 (package qemu-system-x86)")?;
        let output = child.stdout.take().context("QEMU has no output")?;
        let serial = Serial::collect(output, &folder.join("serial.log"), options.echo)?;
        let qmp = Qmp::connect(&monitor, Duration::from_secs(20))
            .with_context(|| fs::read_to_string(folder.join(QEMUS_LOG)).unwrap_or_default());
        match qmp {
            Ok(qmp) => Ok(Self { child, serial, qmp }),
            Err(error) => {
                child.kill().ok();
                child.wait().ok();
                Err(error)
            }
        }
    }

    /// Takes the network cable out, or puts it back.
    pub fn set_link(&mut self, link: Link) -> Result<()> {
        let up = link == Link::Up;
        self.qmp.execute("set_link", json!({ "name": "uplink", "up": up })).map(drop)
    }

    /// Makes a TCP port of the host reachable from here; returns the port of 127.0.0.1.
    pub fn forward_tcp(&mut self, port: u16) -> Result<u16> {
        let here = free_tcp_port()?;
        let forward = format!("hostfwd_add net0 tcp:127.0.0.1:{here}-:{port}");
        let command = json!({ "command-line": forward });
        let said = self.qmp.execute("human-monitor-command", command)?;
        // QEMU's own words for a failure are the answer to a command that succeeded.
        match said.as_str().unwrap_or_default().trim() {
            "" => Ok(here),
            refusal => bail!("port {port} cannot be forwarded: {refusal}"),
        }
    }

    /// Presses the power button.
    pub fn press_power_button(&mut self) -> Result<()> {
        self.qmp.execute("system_powerdown", json!({})).map(drop)
    }

    /// Presses ctrl, alt and del on the host's keyboard.
    pub fn press_ctrl_alt_del(&mut self) -> Result<()> {
        let keys = ["ctrl", "alt", "delete"].map(|key| json!({ "type": "qcode", "data": key }));
        self.qmp.execute("send-key", json!({ "keys": keys })).map(drop)
    }

    /// Waits until QEMU has ended by itself, as it does when the host powers off.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<()> {
        let deadline = std::time::Instant::now() + limit;
        while self.child.try_wait()?.is_none() {
            if std::time::Instant::now() > deadline {
                bail!("the host is still on after {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Cuts the power.
    pub fn cut_power(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the host's last lines:\n{}", self.serial.tail(80));
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// State of the network cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Plugged in.
    Up,
    /// Pulled out.
    Down,
}

fn iommu(command: &mut Command, iommu: Iommu) {
    let split = "q35,kernel-irqchip=split";
    let (machine, device) = match iommu {
        Iommu::Intel => (split, Some("intel-iommu,intremap=on,aw-bits=48")),
        Iommu::IntelNoRemapping => (split, Some("intel-iommu,intremap=off,aw-bits=48")),
        Iommu::Amd => ("q35", Some("amd-iommu,intremap=on")),
        Iommu::Absent => ("q35", None),
    };
    command.args(["-machine", machine]);
    command.args(device.iter().flat_map(|device| ["-device", device]));
}

fn uplink(command: &mut Command, options: &HostOptions) {
    let tap = |id, name| format!("tap,id={id},ifname={name},script=no,downscript=no");
    let netdev = match &options.uplink {
        Uplink::User => format!("user,id=net0,net={USER_NETWORK}"),
        Uplink::Tap(name) => tap("net0", name),
        Uplink::Taps([first, second]) => {
            let cards =
                [("net0", "uplink", first, FIRST_CARD), ("net1", "second", second, SECOND_CARD)];
            for (net, id, name, mac) in cards {
                let card = format!("virtio-net-pci,id={id},netdev={net},mac={mac},romfile=");
                command.args(["-netdev", &tap(net, name), "-device", &card]);
            }
            return;
        }
        Uplink::None => return,
    };
    command.args(["-netdev", &netdev]);
    let order = if options.medium == Medium::Network { ",bootindex=1" } else { "" };
    command.args(["-device", &format!("virtio-net-pci,id=uplink,netdev=net0,romfile={order}")]);
}

fn medium(
    command: &mut Command,
    (image, folder): (&Path, &Path),
    options: &HostOptions,
) -> Result<()> {
    let iso = image.join("holdfast.iso");
    match &options.medium {
        Medium::Kernel(words) => {
            let cmdline = fs::read_to_string(image.join("pxe/cmdline")).with_context(|| {
                format!("no image in {}; run `cargo xtask image`", image.display())
            })?;
            command.arg("-kernel").arg(image.join("pxe/vmlinuz"));
            command.arg("-initrd").arg(image.join("pxe/initrd"));
            command.arg("-append").arg(format!("{} {words}", cmdline.trim()));
            return Ok(());
        }
        Medium::Own { kernel, initrd, cmdline } => {
            command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
            command.args(["-append", cmdline]);
            return Ok(());
        }
        Medium::IsoCd => {
            command
                .arg("-drive")
                .arg(format!("if=none,id=cd,media=cdrom,readonly=on,file={}", iso.display()));
            command.args(["-device", "ide-cd,drive=cd,bootindex=1"]);
        }
        Medium::IsoUsb => {
            command.args(["-device", "qemu-xhci"]);
            command
                .arg("-drive")
                .arg(format!("if=none,id=stick,format=raw,snapshot=on,file={}", iso.display()));
            command.args(["-device", "usb-storage,drive=stick,bootindex=1"]);
        }
        Medium::Disk(path) => {
            disk(command, path, options, "serial=HOLDFAST0,bootindex=1");
        }
        Medium::IsoCdAndDisk(path) | Medium::IsoCdBeforeDisk(path) => {
            let first = matches!(options.medium, Medium::IsoCdBeforeDisk(_));
            command
                .arg("-drive")
                .arg(format!("if=none,id=cd,media=cdrom,readonly=on,file={}", iso.display()));
            let order = if first { ",bootindex=1" } else { "" };
            command.args(["-device", &format!("ide-cd,drive=cd{order}")]);
            disk(command, path, options, "serial=INSTALL0");
        }
        Medium::InstalledDisk(path) | Medium::NetworkAndDisk(path) => {
            disk(command, path, options, "serial=INSTALL0");
        }
        Medium::Network => {}
    }
    firmware(command, folder, options.firmware)
}

/// The disk in the file at `path`: an NVMe disk, or one of SATA where its writes are recorded. QEMU
/// takes writes of NVMe that are durable at once for ordinary ones, and a record would call what comes
/// after a journal's commit too early. Nothing is kept through a power cut of the test machine itself.
fn disk(command: &mut Command, path: &Path, options: &HostOptions, properties: &str) {
    let path = path.display();
    let (kind, drive) = match &options.recorded {
        None => ("nvme", format!("if=none,id=disk,format=raw,cache=unsafe,file={path}")),
        Some(log) => (
            // The first bus may have the CD, and each has one place.
            "ide-hd,bus=ide.1",
            format!(
                "if=none,id=disk,driver=blklogwrites,log-sector-size=512,file.driver=file,\
             file.cache.no-flush=on,file.filename={path},log.driver=file,log.cache.no-flush=on,\
             log.filename={}",
                log.display()
            ),
        ),
    };
    command.args(["-drive", &drive, "-device", &format!("{kind},drive=disk,{properties}")]);
}

/// OVMF with a variable store of the host's own.
fn firmware(command: &mut Command, folder: &Path, firmware: Firmware) -> Result<()> {
    const VARS: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
    let code = match firmware {
        Firmware::Plain => "/usr/share/OVMF/OVMF_CODE_4M.fd",
        Firmware::SecureBoot => {
            command.args(["-machine", "smm=on"]);
            command.args(["-global", "driver=cfi.pflash01,property=secure,value=on"]);
            command.args(["-global", "ICH9-LPC.disable_s3=1"]);
            "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd"
        }
    };
    let variables = folder.join("vars.fd");
    if !variables.exists() {
        fs::copy(VARS, &variables).with_context(|| format!("{VARS} (package ovmf)"))?;
    }
    command.args(["-drive", &format!("if=pflash,format=raw,unit=0,readonly=on,file={code}")]);
    command.args(["-drive", &format!("if=pflash,format=raw,unit=1,file={}", variables.display())]);
    Ok(())
}
