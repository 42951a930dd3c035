//! A specification in the making, with the files that its descriptors stand for.

use types::{
    node::Bdf,
    units::Mebibytes,
    vm::{
        Boot, CoreScheduling, Disk, DiskModel, HyperV, MAX_DISK_QUEUES, MemoryBacking, Net,
        Passthrough, PassthroughDevice, PciWindows, QueuePair, SPEC_VERSION, VfioInterface, VmSpec,
        Vsock,
    },
};

use super::protocol::{FIRST_DESCRIPTOR, Opened};

/// User of the first machine; each has its own.
const FIRST_UID: u32 = 100_000;

/// One machine to be launched. `spec` is open to a test's every wish.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The specification.
    pub spec: VmSpec,
    files: Vec<Opened>,
}

impl Plan {
    /// A machine `number` with one virtual CPU and 256 MiB that boots the Linux kernel at `kernel`
    /// with the initramfs at `initrd`, both paths on the host.
    pub fn linux(number: u8, (kernel, initrd): (&str, &str), cmdline: &str) -> Self {
        let mut plan = Self::empty(number);
        let kernel_fd = plan.open(Opened::Read { path: kernel.to_owned() });
        let initrd_fd = Some(plan.open(Opened::Read { path: initrd.to_owned() }));
        plan.spec.boot = Boot::Linux { kernel_fd, initrd_fd, cmdline: cmdline.to_owned() };
        plan
    }

    /// The same without an initramfs.
    pub fn linux_alone(number: u8, kernel: &str, cmdline: &str) -> Self {
        let mut plan = Self::empty(number);
        let kernel_fd = plan.open(Opened::Read { path: kernel.to_owned() });
        plan.spec.boot = Boot::Linux { kernel_fd, initrd_fd: None, cmdline: cmdline.to_owned() };
        plan
    }

    /// A machine `number` with one virtual CPU and 512 MiB that starts UEFI firmware: its code and
    /// this machine's variables are paths on the host.
    pub fn uefi(number: u8, (code, variables): (&str, &str), pci_windows: PciWindows) -> Self {
        let mut plan = Self::empty(number);
        let firmware_fd = plan.open(Opened::Read { path: code.to_owned() });
        let variables_fd = plan.open(Opened::Write { path: variables.to_owned() });
        plan.spec.boot = Boot::Uefi { firmware_fd, variables_fd, pci_windows };
        plan.spec.memory_mib = Mebibytes(512);
        plan
    }

    fn empty(number: u8) -> Self {
        let files = vec![Opened::Write { path: "/dev/kvm".to_owned() }, Opened::Api];
        let spec = VmSpec {
            version: SPEC_VERSION,
            machine: format!("{number:032x}").parse().unwrap_or_else(|_| unreachable!("32 digits")),
            uid: FIRST_UID + u32::from(number),
            vcpus: 1,
            memory_mib: Mebibytes(256),
            memory_backing: MemoryBacking::Memfd,
            host_memory: Vec::new(),
            boot: Boot::Linux { kernel_fd: -1, initrd_fd: None, cmdline: String::new() },
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
            kvm_fd: FIRST_DESCRIPTOR,
            api_fd: FIRST_DESCRIPTOR + 1,
            console_fd: None,
            cpu_affinity: Vec::new(),
            core_scheduling: CoreScheduling::Shared,
            hyperv: HyperV::Off,
            deadline: None,
            clock_ahead_s: 0,
        };
        Self { spec, files }
    }

    /// Has a file opened for the VMM and returns its descriptor.
    pub fn open(&mut self, file: Opened) -> i32 {
        let descriptor = FIRST_DESCRIPTOR + i32::try_from(self.files.len()).unwrap_or(i32::MAX);
        self.files.push(file);
        descriptor
    }

    /// Adds a disk over the file or block device at `path` on the host.
    pub fn disk(&mut self, path: &str) -> &mut Disk {
        let mut open = || self.open(Opened::Write { path: path.to_owned() });
        let fd = open();
        let more_fds = (1..MAX_DISK_QUEUES).map(|_| open()).collect();
        let serial = format!("disk{}", self.spec.disks.len());
        self.spec.disks.push(Disk {
            fd,
            more_fds,
            read_only: false,
            serial,
            model: DiskModel::VirtioBlk,
            limit: None,
            key: None,
        });
        self.spec.disks.last_mut().unwrap_or_else(|| unreachable!("just pushed"))
    }

    /// Adds a network card over the tap `name`, which was made with as many queues.
    pub fn net(&mut self, name: &str, queues: u32) {
        let mut pair = |queue| {
            let tap = Opened::Tap { name: name.to_owned(), queues, queue };
            let vhost = Opened::Write { path: "/dev/vhost-net".to_owned() };
            QueuePair { tap_fd: self.open(tap), vhost_fd: self.open(vhost) }
        };
        let QueuePair { tap_fd, vhost_fd } = pair(0);
        let more_pairs = (1..queues).map(pair).collect();
        let mac = format!("02:00:00:00:00:{:02x}", 1 + self.spec.nets.len());
        self.spec.nets.push(Net { tap_fd, vhost_fd, more_pairs, mac, mtu: 1500 });
    }

    /// Adds a vsock.
    pub fn vsock(&mut self, cid: u32) {
        let vhost_fd = self.open(Opened::Write { path: "/dev/vhost-vsock".to_owned() });
        self.spec.vsock = Some(Vsock { cid, vhost_fd });
    }

    /// Passes the device at `address` through, whose character device is at `path`
    /// ([`super::Bed::bind`]).
    pub fn pass(&mut self, address: Bdf, path: &str) {
        let cdev_fd = self.open(Opened::Write { path: path.to_owned() });
        if self.spec.passthrough.is_none() {
            let iommu_fd = self.open(Opened::Write { path: "/dev/iommu".to_owned() });
            self.spec.passthrough = Some(Passthrough {
                interface: VfioInterface::Cdev,
                iommu_fd,
                peer_to_peer: false,
                devices: Vec::new(),
            });
        }
        if let Some(passthrough) = &mut self.spec.passthrough {
            passthrough.devices.push(PassthroughDevice { address, cdev_fd, p2p_clique: None });
        }
    }

    /// Returns the files, in the order of their descriptors.
    pub fn files(&self) -> &[Opened] {
        &self.files
    }
}
