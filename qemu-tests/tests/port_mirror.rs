//! The tree that a guest sees is the host's: a switch with a disk and a network card below a root
//! port, on a root complex near the guest's second NUMA node. Registers are compared one by one, and so is
//! what `lspci -vvv` says of both; what SMBIOS says of slots and caches is compared with them, as dmidecode
//! prints it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use qemu_tests::{
    bed::{Bed, BedOptions, Plan, guest},
    harness::{
        dmi::{self, Structure},
        host::HostOptions,
        lspci,
    },
};
use types::{
    topology::{AccessControl, Below, NumaNode, Port, PortRegisters, RootComplex, Topology},
    units::Mebibytes,
};

/// How long a guest may take to its first command, and how long a command may take.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
const SOON: Duration = Duration::from_secs(60);

/// Configuration space of functions by address.
struct Functions(BTreeMap<String, Vec<u8>>);

impl Functions {
    fn of_host(bed: &mut Bed) -> Self {
        let mut all = BTreeMap::new();
        for address in bed.list("/sys/bus/pci/devices").unwrap() {
            let config = bed.read(&format!("/sys/bus/pci/devices/{address}/config")).unwrap();
            all.insert(address, config);
        }
        Self(all)
    }

    /// Reads what a guest sees. Lines of a dump that are as the one before are left out in it.
    fn of_guest(bed: &mut Bed, machine: u32) -> Self {
        let command =
            "for d in /sys/bus/pci/devices/*; do echo ${d##*/}; hexdump -C $d/config; done";
        let said = bed.run(machine, command, SOON).unwrap();
        let mut all = BTreeMap::<String, Vec<u8>>::new();
        let (mut address, mut last) = (String::new(), Vec::new());
        for line in said.lines().filter(|line| *line != "*") {
            if line.contains(':') {
                line.clone_into(&mut address);
                continue;
            }
            let mut words = line.split('|').next().unwrap().split_whitespace();
            let at = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
            let config = all.entry(address.clone()).or_default();
            while config.len() < at {
                config.extend(&last);
            }
            last = words.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
            config.extend(&last);
        }
        Self(all)
    }

    /// Finds the function with a vendor and a device id.
    fn find(&self, vendor: u16, device: u16) -> &str {
        let ids = [vendor.to_le_bytes(), device.to_le_bytes()].concat();
        self.0.iter().find(|(_, config)| config[..4] == ids[..]).unwrap().0
    }

    /// Returns the bridges above a function, the uppermost first.
    fn above(&self, address: &str) -> Vec<String> {
        let bus = u8::from_str_radix(&address[5..7], 16).unwrap();
        let is_above =
            |(_, config): &(&String, &Vec<u8>)| config[0x0e] & 0x7f == 1 && config[0x19] == bus;
        match self.0.iter().find(is_above) {
            Some((bridge, _)) if bus != 0 => {
                let mut all = self.above(bridge);
                all.push(bridge.clone());
                all
            }
            Some(_) | None => Vec::new(),
        }
    }

    fn registers(&self, address: &str) -> PortRegisters {
        let config = &self.0[address];
        let at = express(config);
        let half = |offset| u16_at(config, at + offset);
        PortRegisters {
            device_capabilities: u32_at(config, at + 0x04),
            device_control: half(0x08),
            link_capabilities: u32_at(config, at + 0x0c),
            link_control: half(0x10),
            link_status: half(0x12),
            device_capabilities2: u32_at(config, at + 0x24),
            device_control2: half(0x28),
            link_capabilities2: u32_at(config, at + 0x2c),
            link_control2: half(0x30),
            link_status2: half(0x32),
            access_control: access_control(config),
        }
    }
}

fn u16_at(config: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([config[at], config[at + 1]])
}

fn u32_at(config: &[u8], at: usize) -> u32 {
    u32::from(u16_at(config, at)) | u32::from(u16_at(config, at + 2)) << 16
}

/// Where the capability with this id is.
fn capability(config: &[u8], id: u8) -> Option<usize> {
    let mut at = usize::from(config[0x34]);
    while at != 0 && config[at] != id {
        at = usize::from(config[at + 1]);
    }
    (at != 0).then_some(at)
}

/// Where the PCI Express capability is.
fn express(config: &[u8]) -> usize {
    capability(config, 0x10).unwrap()
}

/// What access control is told, wherever it is in the list.
fn access_control(config: &[u8]) -> Option<AccessControl> {
    let mut at = 0x100;
    loop {
        let header = u32_at(config, at);
        if header & 0xffff == 0x0d {
            let (capabilities, control) = (u16_at(config, at + 4), u16_at(config, at + 6));
            return Some(AccessControl { capabilities, control });
        }
        at = usize::try_from(header >> 20).unwrap();
        if at == 0 {
            return None;
        }
    }
}

/// The parts of the registers that nobody changes while a guest runs: all but the controls, which
/// its kernel writes, what the data link layer reports (link capabilities 20, status 13), and the
/// function-level reset that QEMU's upstream port offers and no port of a guest carries out
/// (device capabilities 28).
fn told(registers: PortRegisters) -> PortRegisters {
    PortRegisters {
        device_capabilities: registers.device_capabilities & !(1 << 28),
        device_control: registers.device_control & 0x00e0,
        link_capabilities: registers.link_capabilities & !(1 << 20),
        link_control: 0,
        link_status: registers.link_status & 0x13ff,
        device_control2: 0,
        link_control2: registers.link_control2 & 0xf,
        ..registers
    }
}

/// Capabilities of a port that are the host's; its others, and its windows, are those of the machine.
const MIRRORED: [&str; 2] = ["Express", "Access Control Services"];

/// What lspci may say of a guest's function and not of the host's: capability, field, words (all where
/// there are none).
const FREE: &[(&str, &str, &[&str])] = &[
    // What the guest's kernel and drivers switch on, and where they put BARs.
    ("", "Control", &[]),
    ("", "Interrupt", &[]),
    ("", "Latency", &[]),
    ("MSI-X", "", &["Enable"]),
    ("Express", "RootCtl", &[]),
    // It stays in D0 whatever the guest puts it to, so that waking resets nothing.
    ("Power Management version 2", "Status", &["NoSoftRst"]),
    ("Power Management version 3", "Status", &["NoSoftRst"]),
    // Slots are the machine's, and their links are always up and say so.
    ("Express", "", &["Slot"]),
    ("Express", "SltCap", &[]),
    ("Express", "SltCtl", &[]),
    ("Express", "SltSta", &[]),
    ("Express", "LnkCap", &["LLActRep"]),
    ("Express", "LnkSta", &["DLActive"]),
];

/// The part of what lspci says of a function that is to be the same in the guest.
fn comparable(said: &lspci::Listing, is_port: bool) -> lspci::Listing {
    let mut all = lspci::Listing::new();
    for ((capability, field), text) in said {
        let is_free = |(of, name, _): &&(&str, &str, &[&str])| of == capability && name == field;
        let free = FREE.iter().find(is_free).map(|(_, _, words)| *words);
        if free == Some(&[]) || is_port && !MIRRORED.contains(&capability.as_str()) {
            continue;
        }
        // A region is shown with its address, and what has none or does not decode with a word for that.
        let is_region = field.starts_with("Region");
        let is_kept = |word: &&str| {
            let name = word.trim_matches(['(', ')', ',', '+', '-']);
            let is_place = u64::from_str_radix(name, 16).is_ok() || *word == "[disabled]";
            !(free.unwrap_or_default().contains(&name) || is_region && is_place)
        };
        let kept: Vec<&str> = text.split(' ').filter(is_kept).collect();
        all.insert((capability.clone(), field.clone()), kept.join(" "));
    }
    all
}

/// Compares `lspci -vvv` of the host and of the guest, field by field: the devices, and all ports above.
fn lspci_says_the_same(folder: &Path, (host, seen): (&Functions, &Functions), devices: [&str; 2]) {
    let [theirs, ours] = [host, seen].map(|all| lspci::decode(folder, &all.0).unwrap());
    for device in devices {
        let config = &host.0[device];
        let found = seen.find(u16_at(config, 0), u16_at(config, 2));
        let ports = host.above(device).into_iter().zip(seen.above(found));
        let ports = ports.map(|(theirs, ours)| (theirs, ours, true));
        for (name, ours_name, is_port) in
            ports.chain([(device.to_owned(), found.to_owned(), false)])
        {
            let expected = comparable(&theirs[&name], is_port);
            let told = comparable(&ours[&ours_name], is_port);
            assert_eq!(told, expected, "{ours_name} is not as {name}");
            for field in ["", "DevCap", "LnkCap", "LnkSta"] {
                let key = ("Express".to_owned(), field.to_owned());
                assert!(told.contains_key(&key), "no {field} in {told:?}");
            }
        }
    }
}

/// A host with a switch below a root port of its own, a disk and a network card below that.
fn bed(folder: &Path) -> Bed {
    let made = guest::make(folder).unwrap();
    let disk = folder.join("nvme.img");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let arguments = [
        "-device",
        "pcie-root-port,id=top,chassis=40,slot=40,x-speed=16,x-width=16",
        "-device",
        "x3130-upstream,id=up,bus=top",
        "-device",
        "xio3130-downstream,id=left,bus=up,chassis=41,slot=41",
        "-device",
        "xio3130-downstream,id=right,bus=up,chassis=42,slot=42",
        "-drive",
        &format!("if=none,id=nvme,format=raw,file={}", disk.display()),
        "-device",
        "nvme,bus=left,drive=nvme,serial=mirror",
        "-netdev",
        "user,id=card",
        "-device",
        "e1000e,bus=right,netdev=card,romfile=",
    ];
    let arguments = arguments.map(str::to_owned).to_vec();
    let host = HostOptions { arguments, ..HostOptions::default() };
    let files =
        vec![("guest/kernel".to_owned(), made.kernel), ("guest/initrd".to_owned(), made.initrd)];
    Bed::start(folder, BedOptions { files, host, ..BedOptions::default() }).unwrap()
}

/// The host's root port, switch and downstream ports as the machine's, on its second root complex.
fn mirrored(host: &Functions, devices: [&str; 2]) -> Topology {
    let above = host.above(devices[0]);
    let [top, up, _] = &above[..] else { panic!("{above:?}") };
    let device = |(index, address): (u32, &str)| Port {
        registers: Some(host.registers(host.above(address).last().unwrap())),
        below: Below::Device { index },
    };
    let switch = Below::Switch {
        upstream: Some(host.registers(up)),
        ports: (0..).zip(devices).map(device).collect(),
    };
    let port = Port { registers: Some(host.registers(top)), below: switch };
    Topology {
        roots: vec![
            RootComplex { node: Some(0), ports: Vec::new() },
            RootComplex { node: Some(1), ports: vec![port] },
        ],
    }
}

fn node(id: u32, vcpus: Vec<u32>, distances: Vec<u8>) -> NumaNode {
    NumaNode { id, vcpus, memory_mib: Mebibytes(128), distances }
}

#[test]
fn the_guest_sees_the_ports_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let mut bed = bed(folder.path());
    let host = Functions::of_host(&mut bed);
    let (disk, card) = (host.find(0x1b36, 0x0010).to_owned(), host.find(0x8086, 0x10d3).to_owned());
    let mut plan = Plan::linux(1, ("/guest/kernel", "/guest/initrd"), "console=ttyS0 quiet");
    for address in [&disk, &card] {
        let path = bed.bind(address).unwrap();
        plan.pass(address.parse().unwrap(), &path);
    }
    plan.spec.topology = Some(mirrored(&host, [&disk, &card]));
    plan.spec.numa = vec![node(0, vec![0], vec![10, 25]), node(1, vec![], vec![25, 10])];
    let machine = bed.launch(&plan).unwrap();
    bed.wait_console(machine, guest::READY, GUEST_LIMIT).unwrap();
    let seen = Functions::of_guest(&mut bed, machine);

    for (vendor, device, name) in [(0x1b36, 0x0010, &disk), (0x8086, 0x10d3, &card)] {
        let found = seen.find(vendor, device).to_owned();
        let (theirs, ours) = (host.above(name), seen.above(&found));
        assert_eq!(ours.len(), 3, "{ours:?}: root port, upstream and downstream port");
        for (theirs, ours) in theirs.iter().zip(&ours) {
            let expected = told(host.registers(theirs));
            assert_eq!(told(seen.registers(ours)), expected, "{ours} is not as {theirs}");
        }
        let (theirs, ours) = (express(&host.0[name]), express(&seen.0[&found]));
        let link = |config: &[u8], at| (u32_at(config, at + 0x0c), u16_at(config, at + 0x12));
        assert_eq!(link(&seen.0[&found], ours), link(&host.0[name], theirs), "{found}");
    }
    lspci_says_the_same(folder.path(), (&host, &seen), [&disk, &card]);
    let ports: Vec<&Vec<u8>> = seen.0.values().filter(|config| config[0x0e] & 0x7f == 1).collect();
    // Each slot has a number and a chassis of its own (PCI-to-PCI Bridge Architecture
    // Specification 1.2 §13, capability 4).
    let slots = ports.iter().filter_map(|config| {
        let at = express(config);
        let has_slot = u16_at(config, at + 2) & 1 << 8 != 0;
        has_slot.then(|| {
            let chassis = capability(config, 4).map(|at| config[at + 3]);
            (u32_at(config, at + 0x14) >> 19, chassis)
        })
    });
    assert_eq!((ports.len(), slots.collect::<Vec<_>>()), (4, vec![(1, Some(1)), (2, Some(2))]));

    let found = seen.find(0x8086, 0x10d3).to_owned();
    assert_eq!(&found[5..7], "84", "the fourth bus of the second half");
    let near = format!(
        "cat /sys/bus/pci/devices/{found}/numa_node /sys/devices/system/node/online \
         /sys/devices/system/node/node1/distance; echo /sys/devices/pci*"
    );
    let said = bed.run(machine, &near, SOON).unwrap();
    assert_eq!(said, "1\n0-1\n25 10\n/sys/devices/pci0000:00 /sys/devices/pci0000:80\n");

    let disk = seen.find(0x1b36, 0x0010).to_owned();
    let tables = tables(&mut bed, machine, folder.path());
    slots_are_told_as_they_are(&tables, &seen, [&disk, &found]);
    caches_are_told_as_they_are(&tables, &mut bed, machine);
    let port = seen.above(&disk).pop().unwrap();
    a_secondary_bus_reset_reaches_the_disk(&mut bed, machine, (&disk, &port));
}

/// Reads the guest's SMBIOS tables.
fn tables(bed: &mut Bed, machine: u32, folder: &Path) -> Vec<Structure> {
    let mut read = |name: &str| {
        let command = format!("base64 /sys/firmware/dmi/tables/{name} | tr -d '\\n'; echo");
        BASE64.decode(bed.run(machine, &command, SOON).unwrap().trim()).unwrap()
    };
    let (entry_point, structures) = (read("smbios_entry_point"), read("DMI"));
    dmi::decode(folder, &entry_point, &structures).unwrap()
}

/// Compares type 9 (DSP0134 §7.10) with the ports above `devices`.
fn slots_are_told_as_they_are(tables: &[Structure], seen: &Functions, devices: [&str; 2]) {
    let told: Vec<&Structure> = tables.iter().filter(|table| table.kind == 9).collect();
    assert_eq!(told.len(), devices.len(), "{tables:#?}");
    for (slot, device) in told.iter().zip(devices) {
        let config = &seen.0[seen.above(device).last().unwrap()];
        let at = express(config);
        let link = u32_at(config, at + 0x0c);
        let (speed, width) = (link & 0xf, link >> 4 & 0x3f);
        let number = u32_at(config, at + 0x14) >> 19;
        // QEMU's switch says nothing of its links, and so nothing is known of them.
        let (lanes, generation) = match (width, speed) {
            (0, 0) => (String::new(), String::new()),
            _ => (format!("x{width} "), speed.to_string()),
        };
        let physical = if lanes.is_empty() { "Unknown" } else { lanes.trim_end() };
        let expected = [
            ("Designation", format!("Slot {number}")),
            ("Type", format!("{lanes}PCI Express")),
            ("Current Usage", "In Use".to_owned()),
            ("ID", number.to_string()),
            ("Characteristics", "3.3 V is provided".to_owned()),
            ("Bus Address", device.to_owned()),
            ("Data Bus Width", width.to_string()),
            ("Peer Devices", "0".to_owned()),
            ("PCI Express Generation", generation),
            ("Slot Physical Width", physical.to_owned()),
            ("Height", "Not applicable".to_owned()),
        ];
        for (field, expected) in expected {
            assert_eq!(slot.says(field), expected, "{field} of {slot:#?}");
        }
    }
}

/// Compares type 7 (DSP0134 §7.8) with what the guest's kernel finds by CPUID: level, KiB, ways.
fn caches_are_told_as_they_are(tables: &[Structure], bed: &mut Bed, machine: u32) {
    let command = "cd /sys/devices/system/cpu/cpu0/cache; for c in index*; do echo $(cat $c/level \
                   $c/size $c/ways_of_associativity); done";
    let found = bed.run(machine, command, SOON).unwrap();
    let mut levels = BTreeMap::<&str, (u32, u32)>::new();
    for line in found.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [level, size, ways] = words[..] else { panic!("{found}") };
        let (kib, most) = levels.entry(level).or_default();
        *kib += size.trim_end_matches('K').parse::<u32>().unwrap();
        *most = (*most).max(ways.parse().unwrap());
    }
    assert!(!levels.is_empty(), "{found}");
    let told = tables.iter().filter(|table| table.kind == 7).map(|table| {
        let configuration = table.says("Configuration").to_owned();
        (
            configuration,
            table.says("Installed Size").to_owned(),
            table.says("Associativity").to_owned(),
        )
    });
    let size = |kib: u32| match kib {
        0..1024 => format!("{kib} kB"),
        _ => format!("{} MB", kib / 1024),
    };
    let expected = levels.iter().map(|(level, (kib, ways))| {
        let configuration = format!("Enabled, Not Socketed, Level {level}");
        (configuration, size(*kib), format!("{ways}-way Set-associative"))
    });
    assert_eq!(told.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{found}");
    let processor = tables.iter().find(|table| table.kind == 4).unwrap();
    for level in levels.keys() {
        assert_eq!(processor.says(&format!("L{level} Cache Handle")), format!("0x700{level}"));
    }
}

/// What the guest writes to the disk.
const MARKER: &str = "before the reset";

/// Resets the bus below `port` as the guest's kernel does it around a driver, and then by hand.
fn a_secondary_bus_reset_reaches_the_disk(bed: &mut Bed, machine: u32, (disk, port): (&str, &str)) {
    let mut run = |command: &str| bed.run(machine, command, SOON).unwrap();
    let read =
        format!("echo 3 > /proc/sys/vm/drop_caches; head -c {} /dev/nvme0n1; echo", MARKER.len());
    run(&format!("cd /sys/bus/pci/devices; printf '{MARKER}' | dd of=/dev/nvme0n1 conv=fsync"));
    run(&format!("echo bus > {disk}/reset_method && echo 1 > {disk}/reset"));
    assert_eq!(run(&read), format!("{MARKER}\n"), "after a reset by the kernel");

    // Without a driver nothing puts the registers back.
    run(&format!("echo {disk} > {disk}/driver/unbind; echo 1 > {disk}/enable"));
    let command = format!("dd if={disk}/config bs=1 skip=4 count=1 2>/dev/null | od -An -tx1");
    assert_ne!(run(&command).trim(), "00", "nothing decodes, so nothing can be reset");
    // Bridge control, bit 6.
    let control = |byte: &str| {
        format!("printf '{byte}' | dd of={port}/config bs=1 seek=62 conv=notrunc 2>/dev/null")
    };
    run(&format!("{}; sleep 1; {}; sleep 1", control("\\100"), control("\\000")));
    assert_eq!(run(&command).trim(), "00", "the reset did not reach the device");
    run(&format!("echo 1 > {disk}/remove; echo 1 > /sys/bus/pci/rescan"));
    run("while [ ! -b /dev/nvme0n1 ]; do sleep 1; done");
    assert_eq!(run(&read), format!("{MARKER}\n"), "after a reset by hand");
}
