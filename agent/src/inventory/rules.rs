//! Which devices can be rented, and why others cannot. Pure.

use std::collections::BTreeMap;

use types::{
    config::{Network, NodeSpec},
    node::{Bdf, DeviceState, PciDevice},
    uplinks::Uplink,
};

use super::{Function, HostUse, Interface, Inventory, Isolation, flaws::Flaw};

/// PCI base classes and subclasses that stay with the host unless the configuration names the
/// device: (class code shifted right by 8, mask, what it is). Source: PCI Code and ID Assignment.
const HOST_CLASSES: &[(u32, u32, &str)] = &[
    (0x0000, 0xff00, "of no class that is known"),
    (0x0100, 0xffff, "a SCSI controller"),
    (0x0101, 0xffff, "an IDE controller"),
    (0x0104, 0xffff, "a RAID controller, which the provider's disks may be behind"),
    (0x0106, 0xffff, "a SATA controller"),
    (0x0107, 0xffff, "a SAS controller, which the provider's disks may be behind"),
    (0x0500, 0xff00, "memory, or the controls of a PCI switch"),
    (OTHER_BRIDGE, 0xffff, "a part of the chipset"),
    (0x0700, 0xff00, "a serial port"),
    (0x0800, 0xff00, "a part of the chipset"),
    (0x0c03, 0xffff, "a USB controller, which keyboards and flash drives need"),
    (0x0c00, 0xff00, "a controller of a serial bus"),
    (0x1000, 0xff00, "an encryption controller, which the platform's security processor may be"),
    (0x1100, 0xff00, "a part of the chipset"),
    (0x1300, 0xff00, "a part of the chipset"),
    (0xff00, 0xff00, "of no class that is known"),
];

/// Base class of bridges, and the subclass of what is none of those that it names. NVIDIA's switches between
/// GPUs call themselves so, and are devices with a driver in the guest; parts of chipsets do, too.
const BRIDGES: u32 = 0x06;
const OTHER_BRIDGE: u32 = 0x0680;

/// Vendor of NVSwitch.
const NVIDIA: u16 = 0x10de;

/// Base class of displays, and the vendors (ASPEED, Matrox) of those that show a BMC's screen. ASPEED's reach
/// the memory of the BMC (CVE-2019-6260).
const DISPLAYS: u32 = 0x03;
const BMC_SCREENS: [u16; 2] = [0x1a03, 0x102b];

/// Base class of controllers of serial buses.
const SERIAL_BUSES: u32 = 0x0c;

/// What a ConnectX is that leads to NVSwitches.
const WAY_TO_SWITCHES: &str =
    "no network card but the way to the switches between all GPUs, which whoever has it rules over";

/// Class and subclass of the GPUs that NVSwitches connect.
const GPU_WITHOUT_SCREEN: u32 = 0x0302;

/// Why the console's screen stays.
const CONSOLE_SCREEN: &str = "the console's screen, listed or not; to rent it, make another display the first one in the firmware's setup";

/// Layouts of a configuration space's header that only bridges have: to PCI, and to CardBus. Source: PCI
/// Local Bus Specification 3.0 §6.2.1.
const BRIDGE_HEADERS: [u8; 2] = [1, 2];

/// Returns whether a function is a bridge, which is no member of a group as far as renting goes: by its
/// header, or by a class that names what it leads to. Source: PCI Code and ID Assignment 1.11 §1.7.
pub fn is_bridge(function: &Function) -> bool {
    let by_class = function.class >> 16 == BRIDGES && function.class >> 8 != OTHER_BRIDGE;
    by_class || BRIDGE_HEADERS.contains(&function.header)
}

/// Returns every function that is not a bridge, with what can be done with it.
pub fn devices(inventory: &Inventory, spec: Option<&NodeSpec>) -> Vec<PciDevice> {
    let functions: Vec<_> = inventory.functions.iter().filter(|f| !is_bridge(f)).collect();
    let mut needs: BTreeMap<Option<u32>, String> = BTreeMap::new();
    for function in &functions {
        if let Some(need) = spec.and_then(|spec| host_need(function, spec, &functions)) {
            needs.entry(function.group).or_insert(format!("{} is {need}", function.address));
        }
    }
    let state = |function: &Function| {
        let refused = |reason: String| DeviceState::Refused { reason };
        let Some(spec) = spec else { return refused("no configuration".to_owned()) };
        if let Some(need) = host_need(function, spec, &functions) {
            return refused(need);
        }
        match &inventory.isolation {
            Isolation::Complete => {}
            Isolation::Missing(reason) => return refused(reason.clone()),
            Isolation::Unknown => return refused("isolation was not checked".to_owned()),
        }
        let Some(group) = function.group else {
            return refused("it is behind no IOMMU".to_owned());
        };
        match needs.get(&Some(group)) {
            Some(need) => refused(format!("IOMMU group {group} stays with the host: {need}")),
            None => DeviceState::Free,
        }
    };
    functions
        .iter()
        .map(|function| PciDevice {
            address: function.address,
            vendor: function.vendor,
            device: function.device,
            class: function.class,
            iommu_group: function.group,
            numa_node: function.numa,
            state: state(function),
        })
        .collect()
}

/// Returns why the host needs a function, which is one of `all`; `None` when it does not.
fn host_need(function: &Function, spec: &NodeSpec, all: &[&Function]) -> Option<String> {
    for used in &function.uses {
        match used {
            HostUse::Disk(name) => return Some(format!("the disk of {name}, which the node uses")),
            HostUse::Interface(interface)
                if is_uplink(function.address, interface, &spec.network) =>
            {
                let advice = match spec.network.uplinks.is_empty() {
                    true => "name it in network.interface",
                    false => "name its card in network.uplinks by mac or path",
                };
                let name = &interface.name;
                return Some(format!("the uplink {name}; if the uplink is another one, {advice}"));
            }
            HostUse::Interface(..) | HostUse::Data(_) => {}
            HostUse::Screen => return Some(CONSOLE_SCREEN.to_owned()),
        }
    }
    // Whoever has the physical function rules over the virtual ones, which are other tenants'.
    if let count @ 1.. = function.virtual_functions {
        return Some(format!("what {count} virtual functions belong to, which are rented instead"));
    }
    if let Some(flaw) = function.flaws.first() {
        return Some(why_useless(*flaw));
    }
    match &spec.machines.devices {
        Some(listed) if listed.contains(&function.address) => None,
        Some(_) => Some("not listed in machines.devices".to_owned()),
        None => kept_unless_listed(function, all),
    }
}

/// Returns what a flaw means to whoever owns the server.
fn why_useless(flaw: Flaw) -> String {
    match flaw {
        Flaw::FirmwareMemory => "of no use to a guest: firmware lets it use memory of the server for good (RMRR or \
             IVMD), so the kernel gives it to nobody; turn off in the firmware's setup what it is used for, as \
             shared memory of its slot on HPE servers, or put it into another slot"
            .to_owned(),
        Flaw::NoAddress(bar) => format!(
            "of no use to a guest: its BAR {bar} has no address, as firmware leaves too little room for PCI \
             memory; turn on \"Above 4G Decoding\" in the firmware's setup, and where there is one raise the size \
             of high MMIO"
        ),
    }
}

/// Returns why a function, one of `all`, stays with the host as long as the configuration does not name it.
fn kept_unless_listed(function: &Function, all: &[&Function]) -> Option<String> {
    let class = function.class >> 8;
    let is_switch = class == OTHER_BRIDGE && function.vendor == NVIDIA;
    if is_switch || is_connector(function, all) {
        return None;
    }
    let is_bmcs = class >> 8 == DISPLAYS && BMC_SCREENS.contains(&function.vendor);
    let classes = HOST_CLASSES.iter().find(|(value, mask, _)| class & mask == *value);
    let way = function.leads_to_switches.then_some(WAY_TO_SWITCHES);
    let bmcs = is_bmcs.then_some("a BMC's screen");
    let kept = way.or(bmcs).or(classes.map(|(_, _, what)| *what));
    if let Some(what) = kept {
        return Some(format!("{what}; list it in machines.devices to rent it"));
    }
    let data = function.uses.iter().find_map(|used| match used {
        HostUse::Data(what) => Some(what),
        HostUse::Disk(_) | HostUse::Interface(..) | HostUse::Screen => None,
    });
    data.map(|what| {
        format!(
            "a drive that is in use: {what}; erase it, or list it in machines.devices to rent it with what is \
             on it"
        )
    })
}

/// Whether a function, one of `all`, is a part of a GPU's USB-C connector: it is on the GPU's card, and in its
/// group, so that neither is rented without the other. Where a chipset has graphics, the server's own USB ports
/// may be beside it; they have groups of their own, or share one with what else stays.
fn is_connector(function: &Function, all: &[&Function]) -> bool {
    let gpu = Bdf { function: 0, ..function.address };
    let is_its = |other: &&Function| {
        other.address == gpu && other.class >> 16 == DISPLAYS && other.group == function.group
    };
    function.class >> 16 == SERIAL_BUSES && function.address != gpu && all.iter().any(is_its)
}

/// Whether the node uses, or may use, an interface to reach the network.
fn is_uplink(address: Bdf, interface: &Interface, network: &Network) -> bool {
    let Interface { name, mac, driver } = interface;
    if !network.uplinks.is_empty() {
        let bonded = |uplink: &Uplink| uplink.bond.iter().flat_map(|b| b.cards.clone()).collect();
        let cards = network.uplinks.iter().flat_map(|uplink| match &uplink.card {
            Some(card) => vec![card.clone()],
            None => bonded(uplink),
        });
        // A card that may be meant is kept, also when nothing tells its driver.
        return cards.into_iter().any(|card| {
            let named = card.name.is_none_or(|wanted| match wanted.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => wanted == *name,
            });
            let mac = card.mac.is_none_or(|wanted| wanted.eq_ignore_ascii_case(mac));
            let driven = match (&card.driver, driver) {
                (Some(wanted), Some(driver)) => wanted == driver,
                (None, _) | (_, None) => true,
            };
            named && mac && driven && card.path.is_none_or(|wanted| wanted == address)
        });
    }
    match &network.interface {
        None => true,
        Some(wanted) => wanted == name || wanted.eq_ignore_ascii_case(mac),
    }
}

/// Why devices cannot be leased together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DeviceError {
    #[error("this node has no device {device}")]
    Absent { device: Bdf },
    #[error("device {device} is named twice")]
    Twice { device: Bdf },
    #[error("device {device} is not free: {state}")]
    NotFree { device: Bdf, state: String },
    #[error("device {device} is not quarantined: it is {state}")]
    NotQuarantined { device: Bdf, state: String },
    #[error("device {device} shares IOMMU group {group} with {other}; a lease must name both")]
    SharedGroup { device: Bdf, group: u32, other: Bdf },
    #[error(
        "{switch} is a switch between all GPUs of this node: who has it reaches {other}; one lease names all GPUs \
         and switches, or each names GPUs only"
    )]
    Fabric { switch: Bdf, other: Bdf },
}

/// Checks that `wanted` are free and whole groups.
pub fn check_free(devices: &[PciDevice], wanted: &[Bdf]) -> Result<(), DeviceError> {
    let mut sorted = wanted.to_vec();
    sorted.sort();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(DeviceError::Twice { device: pair[0] });
    }
    for address in wanted.iter().copied() {
        let device = devices
            .iter()
            .find(|device| device.address == address)
            .ok_or(DeviceError::Absent { device: address })?;
        if device.state != DeviceState::Free {
            let state = describe(&device.state);
            return Err(DeviceError::NotFree { device: address, state });
        }
        let companion = devices.iter().find(|other| {
            other.iommu_group == device.iommu_group && !wanted.contains(&other.address)
        });
        if let (Some(other), Some(group)) = (companion, device.iommu_group) {
            let other = other.address;
            return Err(DeviceError::SharedGroup { device: address, group, other });
        }
    }
    check_fabric(devices, wanted)
}

/// Checks that nobody gets a switch between GPUs while another has, or may get, what it connects. Which GPUs a
/// switch leads to only its driver knows, so it counts for all of the node. A GPU that is given to nobody does
/// not count.
/// Source: NVIDIA Fabric Manager User Guide, "Full Passthrough Virtualization Model".
fn check_fabric(devices: &[PciDevice], wanted: &[Bdf]) -> Result<(), DeviceError> {
    let is_switch =
        |device: &PciDevice| device.vendor == NVIDIA && device.class >> 8 == OTHER_BRIDGE;
    let is_gpu =
        |device: &PciDevice| device.vendor == NVIDIA && device.class >> 8 == GPU_WITHOUT_SCREEN;
    let (ours, others): (Vec<&PciDevice>, Vec<&PciDevice>) = devices
        .iter()
        .filter(|device| is_switch(device) || is_gpu(device))
        .partition(|device| wanted.contains(&device.address));
    let given = |device: &&&PciDevice| match device.state {
        DeviceState::Free | DeviceState::Leased { .. } | DeviceState::Resetting => true,
        DeviceState::Quarantined { .. } | DeviceState::Refused { .. } => false,
    };
    let leased = |device: &&&PciDevice| matches!(device.state, DeviceState::Leased { .. });
    let pair = match ours.iter().find(|device| is_switch(device)) {
        Some(switch) => others.iter().find(given).map(|other| (switch, other)),
        None => {
            let switch = others.iter().filter(|other| is_switch(other)).find(leased);
            switch.zip(ours.first())
        }
    };
    match pair {
        Some((switch, other)) => {
            Err(DeviceError::Fabric { switch: switch.address, other: other.address })
        }
        None => Ok(()),
    }
}

/// Returns a device's state in words.
pub fn describe(state: &DeviceState) -> String {
    match state {
        DeviceState::Free => "free".to_owned(),
        DeviceState::Leased { machine } => format!("leased to machine {machine}"),
        DeviceState::Resetting => "being reset".to_owned(),
        DeviceState::Quarantined { reason, since: None } => format!("quarantined: {reason}"),
        DeviceState::Quarantined { reason, since: Some(since) } => {
            format!("quarantined since {} (Unix seconds): {reason}", since.0)
        }
        DeviceState::Refused { reason } => format!("refused: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bdf(text: &str) -> Bdf {
        text.parse().expect("an address")
    }

    fn function(address: &str, class: u32, group: u32) -> Function {
        Function {
            address: bdf(address),
            vendor: 1,
            device: 2,
            class,
            header: 0,
            group: Some(group),
            numa: None,
            driver: None,
            uses: Vec::new(),
            virtual_functions: 0,
            flaws: Vec::new(),
            leads_to_switches: false,
        }
    }

    fn interface(driver: &str) -> Interface {
        let (name, mac) = ("eth1".to_owned(), "02:00:00:00:00:01".to_owned());
        Interface { name, mac, driver: Some(driver.to_owned()) }
    }

    fn spec(machines: &str) -> NodeSpec {
        let key = "01".repeat(32);
        let text =
            format!("version = 1\n{machines}\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
        NodeSpec::parse(text.as_bytes()).expect("valid")
    }

    fn inventory(functions: Vec<Function>) -> Inventory {
        Inventory { functions, isolation: Isolation::Complete }
    }

    #[test]
    fn virtual_functions_are_rented_and_what_they_belong_to_is_not() {
        let mut physical = function("0000:01:00.0", 0x03_02_00, 1);
        physical.virtual_functions = 2;
        let list = [physical, function("0000:01:00.1", 0x03_02_00, 2)];
        let states: Vec<_> = devices(&inventory(list.into()), Some(&spec("")))
            .into_iter()
            .map(|device| device.state)
            .collect();
        assert!(
            matches!(&states[0], DeviceState::Refused { reason } if reason.contains("virtual"))
        );
        assert_eq!(states[1], DeviceState::Free);
    }

    #[test]
    fn a_group_stays_with_the_host_when_one_member_does() {
        let mut disk = function("0000:01:00.1", 0x01_0802, 4);
        disk.uses.push(HostUse::Disk("nvme0n1p2".into()));
        let bridge = function("0000:00:02.0", 0x06_0400, 4);
        let gpu = function("0000:01:00.0", 0x03_0200, 4);
        let devices = devices(&inventory(vec![bridge, gpu, disk]), Some(&spec("")));
        let reasons: Vec<_> = devices.iter().map(|device| describe(&device.state)).collect();
        assert_eq!(
            reasons,
            [
                "refused: IOMMU group 4 stays with the host: 0000:01:00.1 is the disk of \
                 nvme0n1p2, which the node uses",
                "refused: the disk of nvme0n1p2, which the node uses",
            ]
        );
    }

    #[test]
    fn uplinks_stay_unless_another_interface_is_named() {
        let mut nic = function("0000:03:00.0", 0x02_0000, 5);
        nic.uses.push(HostUse::Interface(interface("virtio_net")));
        let state =
            |text: &str| devices(&inventory(vec![nic.clone()]), Some(&spec(text)))[0].state.clone();
        assert!(matches!(state(""), DeviceState::Refused { .. }));
        assert_eq!(state("[network]\ninterface = \"eth0\""), DeviceState::Free);
    }

    #[test]
    fn cards_that_fit_an_uplink_stay_and_the_advice_is_one_that_the_configuration_takes() {
        let mut nic = function("0000:03:00.0", 0x02_0000, 5);
        // The driver of the function, below which the interface has one of its own.
        nic.driver = Some("virtio-pci".to_owned());
        nic.uses.push(HostUse::Interface(interface("virtio_net")));
        let state = |nic: &Function, card: &str| {
            let text = format!("[[network.uplinks]]\nname = \"up\"\ncard = {{ {card} }}");
            describe(&devices(&inventory(vec![nic.clone()]), Some(&spec(&text)))[0].state)
        };
        assert_eq!(state(&nic, "driver = \"igb\""), "free");
        assert_eq!(state(&nic, "name = \"eth0\""), "free");
        for card in ["driver = \"virtio_net\"", "carrier = true", "name = \"eth*\""] {
            let kept = state(&nic, card);
            assert!(kept.contains("network.uplinks by mac or path"), "{kept}");
        }
        let unknown = Interface { driver: None, ..interface("") };
        nic.uses = vec![HostUse::Interface(unknown)];
        assert_ne!(state(&nic, "driver = \"igb\""), "free");
    }

    #[test]
    fn an_explicit_list_overrides_classes_only() {
        let usb = function("0000:04:00.0", 0x0c_0330, 6);
        let list = "[machines]\ndevices = [\"0000:04:00.0\"]";
        assert_eq!(
            devices(&inventory(vec![usb.clone()]), Some(&spec(list)))[0].state,
            DeviceState::Free
        );
        let state = &devices(&inventory(vec![usb]), Some(&spec("")))[0].state;
        assert!(describe(state).contains("USB"), "{state:?}");
    }

    #[test]
    fn what_may_hold_the_providers_disks_stays_unless_it_is_listed() {
        let list = "[machines]\ndevices = [\"0000:04:00.0\"]";
        let state = |function: &Function, text| {
            describe(&devices(&inventory(vec![function.clone()]), Some(&spec(text)))[0].state)
        };
        let raid = function("0000:04:00.0", 0x01_0400, 6);
        assert!(state(&raid, "").contains("a RAID controller"));
        assert_eq!(state(&raid, list), "free");
        let sas = function("0000:04:00.0", 0x01_0700, 6);
        assert!(state(&sas, "").contains("a SAS controller"));
        assert_eq!(state(&sas, list), "free");
        let mut drive = function("0000:04:00.0", 0x01_0802, 6);
        assert_eq!(state(&drive, ""), "free");
        drive.uses.push(HostUse::Data("a file system (XFS) on nvme0n1".to_owned()));
        assert!(state(&drive, "").contains("a file system (XFS) on nvme0n1; erase it"));
        assert_eq!(state(&drive, list), "free");
    }

    #[test]
    fn switches_between_gpus_are_devices_and_chipsets_are_not_rented() {
        let switch = |class, vendor, header| Function {
            vendor,
            header,
            ..function("0000:04:00.0", class, 6)
        };
        let state = |function: Function| {
            let all = devices(&inventory(vec![function]), Some(&spec("")));
            all.first().map(|device| describe(&device.state))
        };
        assert_eq!(state(switch(0x06_8000, NVIDIA, 0)).as_deref(), Some("free"));
        let chipset = state(switch(0x06_8000, 0x8086, 0)).expect("a device");
        assert!(chipset.contains("a part of the chipset"), "{chipset}");
        // PCI to PCI, host, ISA, and one whose class is as good as none.
        for (class, header) in [(0x06_0400, 1), (0x06_0000, 0), (0x06_0100, 0), (0x06_8000, 1)] {
            assert_eq!(state(switch(class, NVIDIA, header)), None, "{class:#x}");
        }
        let list = "[machines]\ndevices = [\"0000:04:00.0\"]";
        let listed = devices(&inventory(vec![switch(0x06_8000, 0x8086, 0)]), Some(&spec(list)));
        assert_eq!(listed[0].state, DeviceState::Free);
    }

    /// How the functions are described without a list, and then with all of them in one.
    fn by_default_and_listed(functions: &[Function]) -> (Vec<String>, Vec<String>) {
        let all: Vec<_> = functions.iter().map(|f| format!("\"{}\"", f.address)).collect();
        let list = format!("[machines]\ndevices = [{}]", all.join(", "));
        let states = |text: &str| {
            let devices = devices(&inventory(functions.to_vec()), Some(&spec(text)));
            devices.iter().map(|device| describe(&device.state)).collect()
        };
        (states(""), states(&list))
    }

    #[test]
    fn what_controls_the_platform_stays_unless_it_is_listed() {
        // Memory over CXL, a PCI switch's controls, SPI flash, IPMI, AMD's security processor and its dummies.
        let classes = [0x05_0210, 0x05_8000, 0x0c_8000, 0x0c_0701, 0x10_8000, 0x13_0000];
        let functions: Vec<_> = (1u32..)
            .zip(classes)
            .map(|(number, class)| function(&format!("0000:{number:02x}:00.0"), class, number))
            .collect();
        let (default, listed) = by_default_and_listed(&functions);
        let stays = |state: &&String| state.contains("list it in machines.devices");
        assert_eq!(default.iter().filter(stays).count(), classes.len(), "{default:?}");
        assert_eq!(listed, ["free"; 6]);
    }

    #[test]
    fn a_bmcs_screen_stays_unless_it_is_listed() {
        let screen = |vendor, bus: u32| Function {
            vendor,
            ..function(&format!("0000:{bus:02x}:00.0"), 0x03_0000, bus)
        };
        let functions = [screen(0x1a03, 1), screen(0x102b, 2), screen(NVIDIA, 3)];
        let (default, listed) = by_default_and_listed(&functions);
        let kept = "refused: a BMC's screen; list it in machines.devices to rent it";
        assert_eq!(default, [kept, kept, "free"]);
        assert_eq!(listed, ["free"; 3]);
    }

    #[test]
    fn a_gpus_usb_c_connector_goes_with_it() {
        let mut card = [
            function("0000:41:00.0", 0x03_0000, 9),
            function("0000:41:00.1", 0x04_0300, 9),
            function("0000:41:00.2", 0x0c_0330, 9),
            function("0000:41:00.3", 0x0c_8000, 9),
        ];
        assert_eq!(by_default_and_listed(&card).0, ["free"; 4]);
        card[2].uses.push(HostUse::Disk("sda1".into()));
        let (default, _) = by_default_and_listed(&card);
        assert_eq!(default[2], "refused: the disk of sda1, which the node uses");
        assert!(default[0].contains("0000:41:00.2 is the disk of sda1"), "{default:?}");
    }

    #[test]
    fn a_servers_own_usb_ports_stay_beside_graphics_in_the_chipset() {
        let chipset = |groups: [u32; 3]| {
            [
                function("0000:c4:00.0", 0x03_0000, groups[0]),
                function("0000:c4:00.2", 0x10_8000, groups[1]),
                function("0000:c4:00.3", 0x0c_0330, groups[2]),
            ]
        };
        let (apart, _) = by_default_and_listed(&chipset([1, 2, 3]));
        assert_eq!(apart[0], "free");
        assert!(apart[2].contains("a USB controller"), "{apart:?}");
        let (together, _) = by_default_and_listed(&chipset([1, 1, 1]));
        assert!(together[2].contains("0000:c4:00.2 is an encryption controller"), "{together:?}");
    }

    #[test]
    fn a_list_does_not_free_the_consoles_screen() {
        let mut gpu = function("0000:41:00.0", 0x03_0000, 9);
        gpu.uses.push(HostUse::Screen);
        let kept = format!("refused: {CONSOLE_SCREEN}");
        let kept = vec![kept];
        assert_eq!(by_default_and_listed(&[gpu]), (kept.clone(), kept));
    }

    #[test]
    fn what_works_in_no_guest_stays_listed_or_not_with_its_group() {
        let pair = |flaw| {
            let mut gpu = function("0000:41:00.0", 0x03_0000, 9);
            gpu.flaws.push(flaw);
            by_default_and_listed(&[gpu, function("0000:41:00.1", 0x04_0300, 9)])
        };
        let (default, listed) = pair(Flaw::NoAddress(1));
        assert!(default[0].contains("its BAR 1 has no address"), "{default:?}");
        assert!(default[1].contains("IOMMU group 9 stays with the host"), "{default:?}");
        assert_eq!(default, listed);
        let (default, listed) = pair(Flaw::FirmwareMemory);
        assert!(default[0].contains("RMRR"), "{default:?}");
        assert_eq!(default, listed);
    }

    #[test]
    fn the_way_to_the_switches_between_gpus_stays_unless_it_is_listed() {
        let mut way = function("0000:05:00.0", 0x02_0700, 3);
        let card = function("0000:06:00.0", 0x02_0700, 4);
        way.leads_to_switches = true;
        let (default, listed) = by_default_and_listed(&[way, card]);
        assert!(default[0].contains(WAY_TO_SWITCHES), "{default:?}");
        assert_eq!((default[1].as_str(), listed), ("free", vec!["free".to_owned(); 2]));
    }

    /// Half of an HGX H100, and a card of another maker.
    #[test]
    fn a_switch_goes_with_all_gpus_or_with_none_that_another_may_have() {
        let of =
            |address, class, group| Function { vendor: NVIDIA, ..function(address, class, group) };
        let board = inventory(vec![
            of("0000:01:00.0", 0x03_0200, 1),
            of("0000:02:00.0", 0x03_0200, 2),
            of("0000:03:00.0", 0x06_8000, 3),
            of("0000:04:00.0", 0x06_8000, 4),
            function("0000:05:00.0", 0x03_0200, 5),
        ]);
        let mut devices = devices(&board, Some(&spec("")));
        let [one, two, switch, other, foreign] =
            ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0", "0000:05:00.0"]
                .map(bdf);
        let fabric = |switch, other| Err(DeviceError::Fabric { switch, other });
        assert_eq!(check_free(&devices, &[one, two, switch, other]), Ok(()));
        assert_eq!(check_free(&devices, &[one]), Ok(()), "without a switch it reaches nobody");
        assert_eq!(check_free(&devices, &[one, switch, other]), fabric(switch, two));
        assert_eq!(check_free(&devices, &[one, two, switch]), fabric(switch, other));
        devices[1].state = DeviceState::Quarantined { reason: "gone".to_owned(), since: None };
        assert_eq!(
            check_free(&devices, &[one, switch, other]),
            Ok(()),
            "nobody gets the other GPU"
        );
        let machine = types::ids::MachineId::from_bytes([1; 16]);
        for at in [0, 2, 3] {
            devices[at].state = DeviceState::Leased { machine };
        }
        devices[1].state = DeviceState::Free;
        assert_eq!(check_free(&devices, &[two]), fabric(switch, two), "it came back too late");
        assert_eq!(check_free(&devices, &[foreign]), Ok(()));
    }

    #[test]
    fn leases_name_whole_groups_of_free_devices() {
        let pair = inventory(vec![
            function("0000:01:00.0", 0x03_0200, 4),
            function("0000:01:00.1", 0x04_0300, 4),
        ]);
        let devices = devices(&pair, Some(&spec("")));
        let (gpu, audio) = (bdf("0000:01:00.0"), bdf("0000:01:00.1"));
        assert_eq!(check_free(&devices, &[gpu, audio]), Ok(()));
        let shared = DeviceError::SharedGroup { device: gpu, group: 4, other: audio };
        assert_eq!(check_free(&devices, &[gpu]), Err(shared));
        assert_eq!(check_free(&devices, &[gpu, gpu]), Err(DeviceError::Twice { device: gpu }));
        let absent = bdf("0000:09:00.0");
        assert_eq!(check_free(&devices, &[absent]), Err(DeviceError::Absent { device: absent }));
    }
}
