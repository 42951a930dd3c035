//! Command lines of the VMMs that ours is compared with.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use qemu_tests::bed::{self, Subject};

/// Where the peer is on the host.
const PROGRAM: &str = "peer";
/// Where Debian's QEMU keeps its firmware.
const FIRMWARE: &str = "/usr/share/qemu";
/// What of it a microvm machine reads: its smallest firmware, and what loads a kernel.
const FIRMWARE_FILES: [&str; 3] = ["qboot.rom", "linuxboot_dma.bin", "pvh.bin"];

/// Peers that can be told apart by the name of their program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Alioth,
    CloudHypervisor,
    Qemu,
}

/// A peer and the files it needs on the host.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    kind: Kind,
    /// Name for the table.
    pub(crate) name: String,
    /// Files of the host.
    pub(crate) files: Vec<(String, PathBuf)>,
}

/// A device of the host that is bound to VFIO.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device<'a> {
    /// Its PCI address.
    pub(crate) address: &'a str,
    /// Its character device.
    pub(crate) path: &'a str,
}

/// What a peer is to boot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boot<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) initrd: Option<&'a str>,
    pub(crate) cmdline: &'a str,
    /// A device to pass through.
    pub(crate) device: Option<Device<'a>>,
    /// A raw file to be the first virtio disk.
    pub(crate) disk: Option<&'a str>,
    /// A tap with one queue to be the only network card.
    pub(crate) tap: Option<&'a str>,
    /// Guest memory, in MiB.
    pub(crate) memory_mib: u32,
}

impl Peer {
    /// Looks at the program at `path`.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let name = path.file_name().context("the peer is no file")?.to_string_lossy().into_owned();
        let kind = if name.starts_with("alioth") {
            Kind::Alioth
        } else if name.starts_with("cloud-hypervisor") {
            Kind::CloudHypervisor
        } else if name.starts_with("qemu-system") {
            Kind::Qemu
        } else {
            bail!("{name} is no known peer; known are alioth*, cloud-hypervisor* and qemu-system*");
        };
        let mut files = bed::with_libraries(PROGRAM, path)?;
        if kind == Kind::Qemu {
            let file = |name: &&str| (format!("firmware/{name}"), Path::new(FIRMWARE).join(name));
            files.extend(FIRMWARE_FILES.iter().map(file));
        }
        Ok(Self { kind, name, files })
    }

    /// Returns how the peer serves its disk and its card, for who reads the table.
    pub(crate) fn setup(&self) -> &'static str {
        match self.kind {
            Kind::Alioth => "disk: io_uring, page cache, one queue; card: io_uring, one queue",
            Kind::CloudHypervisor => "its own defaults for disk and card",
            Kind::Qemu => {
                "microvm with PCI; disk: io_uring, page cache, one queue, a thread of its own; card: vhost-net, one queue"
            }
        }
    }

    /// Returns what boots a machine of one processor whose serial port is standard output; `None`
    /// when the peer cannot.
    pub(crate) fn subject(&self, boot: Boot<'_>) -> Option<Subject> {
        let mut words = vec![format!("/{PROGRAM}")];
        words.extend(self.kind.machine(boot.memory_mib));
        words.extend(self.kind.payload(boot));
        words.extend(self.kind.disk(boot.disk));
        words.extend(self.kind.network(boot.tap));
        words.extend(self.kind.device(boot.device)?);
        Some(Subject::Program { words })
    }
}

impl Kind {
    /// Returns the words for a machine of one processor whose serial port is standard output.
    fn machine(self, memory_mib: u32) -> Vec<String> {
        let words = match self {
            Self::Alioth => {
                format!("boot --cpu count=1 --memory size={memory_mib}M,backend=memfd,shared=true")
            }
            Self::CloudHypervisor => format!(
                "--cpus boot=1 --memory size={memory_mib}M,shared=on --serial tty --console off"
            ),
            // Its smallest platform, with PCI: a guest is at its init in a quarter of q35's time. A
            // deadline that its guest writes comes minutes late in an emulated host, so that a guest
            // that sleeps hangs; it has the timer of the local APIC that counts down.
            Self::Qemu => format!(
                "-L /firmware -machine microvm,acpi=on,pcie=on,accel=kvm,memory-backend=ram \
                 -bios qboot.rom -object memory-backend-memfd,id=ram,size={memory_mib}M,share=on \
                 -cpu host,-tsc-deadline -m {memory_mib} -nodefaults -no-user-config \
                 -display none -serial stdio"
            ),
        };
        words.split_whitespace().map(str::to_owned).collect()
    }

    /// Returns the words for what is booted.
    fn payload(self, boot: Boot<'_>) -> Vec<String> {
        let [kernel, cmdline, initrd] = match self {
            // It is told which protocol the file is for; what is one instruction long is an ELF file.
            Self::Alioth if boot.initrd.is_none() => ["--pvh", "--cmdline", "--initramfs"],
            Self::Alioth | Self::CloudHypervisor => ["--kernel", "--cmdline", "--initramfs"],
            Self::Qemu => ["-kernel", "-append", "-initrd"],
        };
        let said = match self {
            // See `machine`: it has no words that take the deadline timer from its guest.
            Self::Alioth => format!("{} lapic=notscdeadline", boot.cmdline),
            Self::CloudHypervisor | Self::Qemu => boot.cmdline.to_owned(),
        };
        let mut words = vec![kernel, boot.kernel, cmdline, &said];
        if let Some(file) = boot.initrd {
            words.extend([initrd, file]);
        }
        words.into_iter().map(str::to_owned).collect()
    }

    /// Returns the words for a device that is passed through; `None` when the peer cannot.
    fn device(self, device: Option<Device<'_>>) -> Option<Vec<String>> {
        let Some(Device { address, path }) = device else { return Some(Vec::new()) };
        let [option, value] = match self {
            Self::Alioth => ["--vfio-cdev".to_owned(), format!("path={path}")],
            Self::CloudHypervisor => {
                ["--device".to_owned(), format!("path=/sys/bus/pci/devices/{address}")]
            }
            // QEMU 7.2 knows only the legacy groups, which the image's kernel may lack.
            Self::Qemu => return None,
        };
        Some(vec![option, value])
    }

    /// Returns the words for a virtio disk over a raw file.
    fn disk(self, disk: Option<&str>) -> Vec<String> {
        match (disk, self) {
            (None, _) => Vec::new(),
            (Some(disk), Self::Alioth) => {
                vec!["--blk".to_owned(), format!("file,path={disk},api=iouring")]
            }
            (Some(disk), Self::CloudHypervisor) => {
                vec!["--disk".to_owned(), format!("path={disk}")]
            }
            (Some(disk), Self::Qemu) => vec![
                "-object".to_owned(),
                "iothread,id=disk-thread".to_owned(),
                "-drive".to_owned(),
                format!("if=none,id=disk,format=raw,cache=writeback,aio=io_uring,file={disk}"),
                "-device".to_owned(),
                "virtio-blk-pci,drive=disk,num-queues=1,iothread=disk-thread".to_owned(),
            ],
        }
    }

    /// Returns the words for a virtio network card over a tap.
    fn network(self, tap: Option<&str>) -> Vec<String> {
        match (tap, self) {
            (None, _) => Vec::new(),
            (Some(tap), Self::Alioth) => vec![
                "--net".to_owned(),
                format!("tap,if={tap},mac=52:54:00:00:00:01,mtu=1500,qp=1,api=iouring"),
            ],
            (Some(tap), Self::CloudHypervisor) => vec!["--net".to_owned(), format!("tap={tap}")],
            (Some(tap), Self::Qemu) => vec![
                "-netdev".to_owned(),
                format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=on"),
                "-device".to_owned(),
                "virtio-net-pci,netdev=net,romfile=".to_owned(),
            ],
        }
    }
}
