//! What the server is made of, as sysfs tells it: PCI functions, IOMMU groups, what the host uses,
//! processors and memory. Reads and changes nothing; `assign` acts on it.
//!
//! Every function takes the root under which `sys` and `proc` are, so tests use directories.

pub mod facts;
pub mod flaws;
mod links;
pub mod ports;
pub mod rules;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use flaws::Flaw;
use types::node::Bdf;

use crate::{
    assign::{erase, lent},
    install::disks,
};

/// Where a function's configuration space says what it is, and the bits of that: the other one says that
/// there are more functions. Source: PCI Local Bus Specification 3.0 §6.1 and §6.2.1.
const HEADER_TYPE: usize = 0x0e;
const HEADER_LAYOUT: u8 = 0x7f;
/// Length of the header.
const HEADER: usize = 0x40;
/// Base class of network controllers, and class and subclass of those for InfiniBand.
const NETWORK: u32 = 0x02;
const INFINIBAND: u32 = 0x0207;
/// How long vital product data that cannot be read are left alone: longer than the kernel waits for each of their
/// words, which is 125 ms (Linux drivers/pci/vpd.c, `pci_vpd_wait`).
const AGAIN: Duration = Duration::from_millis(150);

/// One PCI function, with what matters for giving it away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Where it sits.
    pub address: Bdf,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// 24-bit class code.
    pub class: u32,
    /// Layout of its configuration space's header: 0 for a device, 1 for a bridge, 2 for one to CardBus.
    pub header: u8,
    /// IOMMU group.
    pub group: Option<u32>,
    /// NUMA node.
    pub numa: Option<u32>,
    /// Driver bound to it.
    pub driver: Option<String>,
    /// What the host does with it.
    pub uses: Vec<HostUse>,
    /// Its virtual functions (SR-IOV) that are switched on.
    pub virtual_functions: u32,
    /// What keeps it from working in any guest.
    pub flaws: Vec<Flaw>,
    /// Whether it is no network card but the way to the switches between all GPUs of the server; `None` when it does
    /// not tell.
    pub leads_to_switches: Option<bool>,
    /// Whether it is a virtual function (SR-IOV).
    pub is_virtual: bool,
    /// The switch that it hangs below and that is a part of a network card: its uppermost port.
    pub below_card: Option<Bdf>,
}

/// What the host does with a function.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostUse {
    /// Nothing, but somebody did: what is on a drive, and the drive's name.
    Data(String),
    /// A disk with a mounted file system, or one of the node's own partitions.
    Disk(String),
    /// A network interface.
    Interface(Interface),
    /// The screen that firmware used.
    Screen,
}

/// A network interface, as a card of the configuration's uplinks names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// Kernel name.
    pub name: String,
    /// Hardware address.
    pub mac: String,
    /// Its driver, which is another one than the function's where something is in between, as with virtio.
    pub driver: Option<String>,
}

/// Everything that decides what can be rented.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// PCI functions by address.
    pub functions: Vec<Function>,
    /// Whether interrupts of devices are remapped.
    pub isolation: Isolation,
}

/// Whether DMA and interrupts of a device can be confined.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Isolation {
    /// Both.
    Complete,
    /// Not, and why.
    Missing(String),
    /// Not looked at.
    #[default]
    Unknown,
}

/// Processors and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// Processors.
    pub vcpus: u32,
    /// Memory, in MiB.
    pub memory_mib: u64,
}

/// Reads the inventory below `root`.
pub fn read(root: &Path) -> Inventory {
    let sys = root.join("sys");
    let busy = busy_disks(root);
    let mut functions: Vec<_> = entries(&sys.join("bus/pci/devices"))
        .into_iter()
        .filter_map(|path| read_function(&path, root, &busy))
        .collect();
    functions.sort_by_key(|function| function.address);
    Inventory { functions, isolation: read_isolation(root) }
}

/// Reads processors and memory below `root`.
pub fn capacity(root: &Path) -> Capacity {
    let meminfo = text(&root.join("proc/meminfo")).unwrap_or_default();
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let online = text(&root.join("sys/devices/system/cpu/online")).unwrap_or_default();
    Capacity { vcpus: count_list(&online), memory_mib: kib.unwrap_or(0) / 1024 }
}

/// Returns how many numbers a kernel list such as `0-3,8` names.
fn count_list(text: &str) -> u32 {
    let span = |part: &str| -> Option<u32> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    text.trim().split(',').filter_map(span).sum()
}

fn read_function(path: &Path, root: &Path, busy: &BTreeSet<PathBuf>) -> Option<Function> {
    let address: Bdf = path.file_name()?.to_str()?.parse().ok()?;
    let real = fs::canonicalize(path).ok()?;
    let mut uses: Vec<HostUse> = data(root, address).map(HostUse::Data).into_iter().collect();
    for disk in busy.iter().filter(|disk| owner(disk) == Some(address)) {
        let name = disk.file_name().map(|name| name.to_string_lossy().into_owned());
        uses.push(HostUse::Disk(name.unwrap_or_default()));
    }
    for interface in entries(&root.join("sys/class/net")) {
        let Ok(device) = fs::canonicalize(&interface) else { continue };
        if owner(&device) == Some(address) {
            let name = interface.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mac = text(&interface.join("address")).unwrap_or_default();
            let driver = link_name(&interface.join("device/driver"));
            uses.push(HostUse::Interface(Interface { name, mac, driver }));
        }
    }
    // Where firmware left no screen, the kernel names any display.
    let has_screen = text(&root.join("proc/fb")).is_some_and(|buffers| !buffers.is_empty());
    if has_screen && text(&real.join("boot_vga")).as_deref() == Some("1") {
        uses.push(HostUse::Screen);
    }
    let numa = text(&real.join("numa_node")).and_then(|value| value.parse::<i64>().ok());
    let vendor = hex(&real.join("vendor"))?.try_into().ok()?;
    let class = hex(&real.join("class"))?;
    let config = header(&real.join("config")).unwrap_or_default();
    let kind = config.get(HEADER_TYPE).map_or(0, |kind| kind & HEADER_LAYOUT);
    let flaws = if kind == 0 { flaws::read(&real, &config) } else { Vec::new() };
    let is_virtual = real.join("physfn").exists();
    let may_lead = vendor == flaws::MELLANOX && class >> 16 == NETWORK && !is_virtual;
    let leads_to_switches = match may_lead {
        true => leads_to_switches(root, address, class),
        false => Some(false),
    };
    Some(Function {
        address,
        vendor,
        device: hex(&real.join("device"))?.try_into().ok()?,
        class,
        header: kind,
        group: link_name(&real.join("iommu_group")).and_then(|name| name.parse().ok()),
        numa: numa.and_then(|value| u32::try_from(value).ok()),
        driver: link_name(&real.join("driver")),
        uses,
        virtual_functions: text(&real.join("sriov_numvfs"))
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0),
        flaws,
        leads_to_switches,
        is_virtual,
        below_card: below_card(&real),
    })
}

/// Returns whether a ConnectX is the way to switches; `None` when it cannot be read of one that can be, twice: what is
/// decided here lasts.
fn leads_to_switches(root: &Path, address: Bdf, class: u32) -> Option<bool> {
    let (vital, read) = twice(|| facts::vital_data(root, address), || thread::sleep(AGAIN));
    let leads = flaws::leads_to_switches(&vital);
    let may_lead = class >> 8 == INFINIBAND;
    (leads || read.is_ok() || !may_lead).then_some(leads)
}

/// Reads once more, after a pause, what could not be read: a device that was just reset, or wakes, answers later.
fn twice<T>(read: impl Fn() -> (T, io::Result<()>), pause: impl FnOnce()) -> (T, io::Result<()>) {
    match read() {
        (_, Err(_)) => {
            pause();
            read()
        }
        told => told,
    }
}

/// Returns the uppermost port above a function that is Mellanox': their network cards have switches.
fn below_card(real: &Path) -> Option<Bdf> {
    let above: Vec<_> = real.ancestors().skip(1).collect();
    above.into_iter().rev().find_map(|port| {
        let address = port.file_name()?.to_str()?.parse().ok()?;
        (hex(&port.join("vendor"))? == u32::from(flaws::MELLANOX)).then_some(address)
    })
}

/// Reads the header of a configuration space, or what there is of it.
fn header(config: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = u64::try_from(HEADER).ok()?;
    File::open(config).ok()?.take(length).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Returns what somebody made of an NVMe drive, if it can be told. A drive that is bound to vfio-pci shows
/// nothing, so this decides before the first time; what a renter made of one stays between renters.
fn data(root: &Path, address: Bdf) -> Option<String> {
    if !erase::is_drive(root, address) || lent::is_lent(root, address) {
        return None;
    }
    entries(&root.join("sys/class/block")).into_iter().find_map(|disk| {
        let real = fs::canonicalize(&disk).ok()?;
        if owner(&real) != Some(address) || real.join("partition").exists() {
            return None;
        }
        let name = disk.file_name()?.to_str()?;
        Some(format!("{} on {name}", disks::signature(root, name)?))
    })
}

/// Returns the PCI function that a device's path in `/sys/devices` hangs off: the last one on it.
fn owner(path: &Path) -> Option<Bdf> {
    path.iter().rev().find_map(|part| part.to_str()?.parse().ok())
}

/// Returns the block devices that the host uses: mounted, or named by the node's own partitions.
fn busy_disks(root: &Path) -> BTreeSet<PathBuf> {
    let mountinfo = text(&root.join("proc/self/mountinfo")).unwrap_or_default();
    let mounted: BTreeSet<_> =
        mountinfo.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    // Renters name partitions as they like.
    let is_renters = |path: &Path| {
        let drive = fs::canonicalize(path).ok().and_then(|real| owner(&real));
        drive.is_some_and(|drive| lent::is_lent(root, drive))
    };
    let is_busy = |path: &PathBuf| {
        let number = text(&path.join("dev")).unwrap_or_default();
        let uevent = text(&path.join("uevent")).unwrap_or_default();
        let named = uevent.lines().any(|line| line.starts_with("PARTNAME=holdfast"));
        let ours = named && !is_renters(path);
        let held = !entries(&path.join("holders")).is_empty();
        ours || held || mounted.contains(number.as_str())
    };
    let all = entries(&root.join("sys/class/block"));
    all.into_iter().filter(is_busy).filter_map(|path| fs::canonicalize(path).ok()).collect()
}

fn read_isolation(root: &Path) -> Isolation {
    if entries(&root.join("sys/class/iommu")).is_empty() {
        let reason = "no IOMMU is active: turn on VT-d or AMD-Vi in the firmware's setup";
        return Isolation::Missing(reason.to_owned());
    }
    let unsafe_interrupts = ["vfio_iommu_type1", "iommufd"].iter().any(|module| {
        let path = root.join(format!("sys/module/{module}/parameters/allow_unsafe_interrupts"));
        text(&path).as_deref() == Some("Y")
    });
    if unsafe_interrupts {
        return Isolation::Missing("allow_unsafe_interrupts is set; it must not be".to_owned());
    }
    // The kernel names the interrupt controllers of remapped interrupts "IR-…".
    let interrupts = text(&root.join("proc/interrupts")).unwrap_or_default();
    if interrupts.split_whitespace().any(|word| word.starts_with("IR-")) {
        Isolation::Complete
    } else {
        let reason = "interrupt remapping is off: a device could forge interrupts; turn on x2APIC \
                      and interrupt remapping in the firmware's setup";
        Isolation::Missing(reason.to_owned())
    }
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

fn hex(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Builds a server with one NVMe disk that holds the node's state and one GPU.
    fn server() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let make = |path: &str, value: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, value).expect("written");
        };
        let link = |path: &str, target: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            symlink(root.path().join(target), path).expect("linked");
        };
        let functions = [("0000:01:00.0", "0x010802", "7"), ("0000:02:00.0", "0x030200", "8")];
        for (address, class, group) in functions {
            let path = format!("sys/devices/pci0000:00/{address}");
            make(&format!("{path}/vendor"), "0x10de\n");
            make(&format!("{path}/device"), "0x2335\n");
            make(&format!("{path}/class"), &format!("{class}\n"));
            make(&format!("{path}/numa_node"), "-1\n");
            make(&format!("sys/kernel/iommu_groups/{group}/type"), "DMA\n");
            link(&format!("{path}/iommu_group"), &format!("sys/kernel/iommu_groups/{group}"));
            link(&format!("sys/bus/pci/devices/{address}"), &path);
        }
        let disk = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p2";
        make(&format!("{disk}/dev"), "259:2\n");
        make(&format!("{disk}/uevent"), "DEVNAME=nvme0n1p2\nPARTNAME=holdfast-state\n");
        link("sys/class/block/nvme0n1p2", disk);
        make("sys/class/iommu/ivhd0/name", "x");
        make("proc/interrupts", " 24:  0  0  IR-PCI-MSI-0000:01:00.0  0-edge  nvme0q0\n");
        make("proc/meminfo", "MemTotal:        2048000 kB\n");
        make("sys/devices/system/cpu/online", "0-3,8\n");
        root
    }

    #[test]
    fn a_server_is_read() {
        let root = server();
        let inventory = read(root.path());
        let [disk, gpu] = &inventory.functions[..] else { panic!("{inventory:?}") };
        assert_eq!(disk.uses, [HostUse::Disk("nvme0n1p2".into())]);
        assert_eq!(
            (gpu.vendor, gpu.class, gpu.group, gpu.numa),
            (0x10de, 0x03_0200, Some(8), None)
        );
        assert!(gpu.uses.is_empty());
        assert_eq!(inventory.isolation, Isolation::Complete);
        assert_eq!(capacity(root.path()), Capacity { vcpus: 5, memory_mib: 2000 });
    }

    /// A card with a switch, below it the card's own function and one of another maker's, and a virtual function beside.
    #[test]
    fn what_is_of_a_network_card_and_what_is_virtual_is_seen() {
        let root = server();
        let make = |path: &str, value: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, value).expect("written");
        };
        let card = "sys/devices/pci0000:00/0000:00:01.0/0000:41:00.0";
        let functions = [
            (card.to_owned(), "0x15b3", "0x060400"),
            (format!("{card}/0000:42:00.0"), "0x15b3", "0x060400"),
            (format!("{card}/0000:42:00.0/0000:43:00.0"), "0x15b3", "0x020700"),
            (format!("{card}/0000:42:01.0/0000:44:00.0"), "0x8086", "0x020700"),
            ("sys/devices/pci0000:00/0000:51:00.1".to_owned(), "0x15b3", "0x020700"),
        ];
        for (path, vendor, class) in &functions {
            make(&format!("{path}/vendor"), vendor);
            make(&format!("{path}/device"), "0x1023");
            make(&format!("{path}/class"), class);
            let name = path.rsplit('/').next().expect("a name");
            let link = root.path().join("sys/bus/pci/devices").join(name);
            symlink(root.path().join(path), link).expect("linked");
        }
        let [switch, _, card_port, other, beside] =
            functions.map(|(path, ..)| root.path().join(path));
        make("sys/devices/pci0000:00/0000:01:00.0/physfn/vendor", "0x8086");
        let told = || -> Vec<(u8, Option<String>, Option<bool>, bool)> {
            let below = |f: &Function| f.below_card.map(|port| port.to_string());
            let told = |f: &Function| (f.address.bus, below(f), f.leads_to_switches, f.is_virtual);
            read(root.path()).functions.iter().map(told).collect()
        };
        let top = || Some("0000:41:00.0".to_owned());
        let [no, unknown] = [Some(false), None];
        let expected = vec![
            (0x01, None, no, true),
            (0x02, None, no, false),
            (0x41, None, no, false),
            (0x42, top(), no, false),
            (0x43, top(), no, false),
            (0x44, top(), no, false),
            (0x51, None, no, false),
        ];
        assert_eq!(told(), expected);
        // One whose vital data cannot be read does not tell, if it can be the way; another maker's cannot, nor can
        // what is no network card.
        for function in [&card_port, &other] {
            fs::create_dir(function.join("vpd")).expect("made");
        }
        fs::write(switch.join("vpd"), "SMDL=SW_MNG").expect("written");
        let seen = told();
        assert_eq!([&seen[4], &seen[5], &seen[2]].map(|seen| seen.2), [unknown, no, no]);
        // A virtual function has its parent's to tell, and is no way.
        fs::create_dir(beside.join("vpd")).expect("made");
        assert_eq!(told()[6].2, unknown);
        fs::create_dir(beside.join("physfn")).expect("made");
        assert_eq!(told()[6].2, no);
    }

    #[test]
    fn what_cannot_be_read_is_read_once_more_after_a_pause() {
        let is_awake = std::cell::Cell::new(false);
        let read = || -> (u32, io::Result<()>) {
            if is_awake.get() { (1, Ok(())) } else { (0, Err(io::ErrorKind::TimedOut.into())) }
        };
        let (told, done) = twice(read, || is_awake.set(true));
        assert_eq!((told, done.is_ok()), (1, true));
        let (told, done) = twice(read, || panic!("it answers at once"));
        assert_eq!((told, done.is_ok()), (1, true));
    }

    #[test]
    fn what_is_on_a_drive_is_told_unless_a_renter_wrote_it() {
        let root = server();
        let drive: Bdf = "0000:01:00.0".parse().expect("an address");
        let make = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, bytes).expect("written");
        };
        let disk = "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1";
        make(&format!("{disk}/size"), b"8192\n");
        make(&format!("{disk}/nvme0n1p2/partition"), b"2\n");
        make("dev/nvme0n1", &vec![0; 4 << 20]);
        symlink(root.path().join(disk), root.path().join("sys/class/block/nvme0n1"))
            .expect("linked");
        let uses = || read(root.path()).functions[0].uses.clone();
        let data = "1 partitions (holdfast-state) on nvme0n1".to_owned();
        assert_eq!(uses(), [HostUse::Data(data), HostUse::Disk("nvme0n1p2".into())]);
        lent::remember(root.path(), drive).expect("noted");
        assert_eq!(uses(), []);
    }

    #[test]
    fn the_kind_of_header_is_read() {
        let root = server();
        let mut config = [0; 64];
        config[HEADER_TYPE] = 0x81;
        let path = root.path().join("sys/devices/pci0000:00/0000:02:00.0/config");
        fs::write(path, config).expect("written");
        let headers: Vec<u8> =
            read(root.path()).functions.iter().map(|function| function.header).collect();
        assert_eq!(headers, [0, 1]);
    }

    #[test]
    fn the_first_display_is_a_screen_where_there_is_a_frame_buffer() {
        let root = server();
        let gpu = root.path().join("sys/devices/pci0000:00/0000:02:00.0");
        fs::write(gpu.join("boot_vga"), "1\n").expect("written");
        let uses = || read(root.path()).functions[1].uses.clone();
        assert_eq!(uses(), []);
        fs::write(root.path().join("proc/fb"), "").expect("written");
        assert_eq!(uses(), []);
        fs::write(root.path().join("proc/fb"), "0 EFI VGA\n").expect("written");
        assert_eq!(uses(), [HostUse::Screen]);
    }

    #[test]
    fn missing_remapping_is_explained() {
        let root = server();
        fs::write(root.path().join("proc/interrupts"), "24: 0 PCI-MSI nvme0q0\n").expect("written");
        let Isolation::Missing(reason) = read(root.path()).isolation else { panic!("complete") };
        assert!(reason.contains("interrupt remapping is off"), "{reason}");
    }
}
