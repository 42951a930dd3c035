//! Which devices can be rented, and why others cannot. Pure.

use std::collections::{BTreeMap, BTreeSet};

use types::{
    config::{Network, NodeSpec},
    node::{Bdf, DeviceState, PciDevice},
    uplinks::Uplink,
};

use super::{
    Function, HostUse, Interface, Inventory, Isolation, NETWORK, flaws::Flaw, links::Links,
};

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
pub(super) const NVIDIA: u16 = 0x10de;

/// Base class of displays, and the vendors (ASPEED, Matrox) of those that show a BMC's screen. ASPEED's reach
/// the memory of the BMC (CVE-2019-6260).
const DISPLAYS: u32 = 0x03;
const BMC_SCREENS: [u16; 2] = [0x1a03, 0x102b];

/// Base class of controllers of serial buses.
const SERIAL_BUSES: u32 = 0x0c;

/// What a ConnectX is that leads to NVSwitches.
const WAY_TO_SWITCHES: &str =
    "no network card but the way to the switches between all GPUs, which whoever has it rules over";

/// What a ConnectX is that does not tell.
const MAYBE_WAY_TO_SWITCHES: &str = "a network card that does not tell its vital product data, so that it may be the way to the switches between all GPUs";

/// Class and subclass of the GPUs that NVSwitches connect.
const GPU_WITHOUT_SCREEN: u32 = 0x0302;

/// First device id of Blackwell, with which NVLink 5 began. Source: NVIDIA gpu-admin-tools, `gpu/devid_chips.py`.
const BLACKWELL: u16 = 0x2900;

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

/// Returns whether a function is a switch between GPUs.
pub(super) fn is_switch(function: &Function) -> bool {
    function.vendor == NVIDIA && function.class >> 8 == OTHER_BRIDGE
}

/// Returns whether a function is, or may be, the way to switches between GPUs that are among `all`: such GPUs have
/// NVLink 5 or later, and none of their switches is a PCI function.
fn may_lead(function: &Function, all: &[&Function]) -> bool {
    let is_led_to = |f: &&Function| {
        f.vendor == NVIDIA && f.class >> 8 == GPU_WITHOUT_SCREEN && f.device >= BLACKWELL
    };
    let has_switch = || all.iter().any(|other| is_switch(other));
    function.leads_to_switches.unwrap_or_else(|| all.iter().any(is_led_to) && !has_switch())
}

/// Returns whether a function is a port of a network card, which whoever has it can stop with all ports of its chip.
pub(super) fn is_network_port(function: &Function) -> bool {
    function.class >> 16 == NETWORK && !function.is_virtual
}

/// Returns every function that is not a bridge, with what can be done with it.
pub fn devices(inventory: &Inventory, spec: Option<&NodeSpec>) -> Vec<PciDevice> {
    let functions: Vec<_> = inventory.functions.iter().filter(|f| !is_bridge(f)).collect();
    let links = Links::of(&functions, spec);
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
            linked: links.with(function.address),
            fabric: is_switch(function) || may_lead(function, &functions),
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
        None => kept_unless_listed(function, &spec.network, all),
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
fn kept_unless_listed(function: &Function, network: &Network, all: &[&Function]) -> Option<String> {
    let class = function.class >> 8;
    if is_switch(function) || is_connector(function, all) {
        return None;
    }
    let is_bmcs = class >> 8 == DISPLAYS && BMC_SCREENS.contains(&function.vendor);
    let classes = HOST_CLASSES.iter().find(|(value, mask, _)| class & mask == *value);
    let told = match function.leads_to_switches {
        Some(_) => WAY_TO_SWITCHES,
        None => MAYBE_WAY_TO_SWITCHES,
    };
    if may_lead(function, all) {
        return Some(format!(
            "{told}; list it in machines.devices to rent it, with all GPUs in one lease"
        ));
    }
    let bmcs = is_bmcs.then_some("a BMC's screen");
    let kept = bmcs.or(classes.map(|(_, _, what)| *what));
    if let Some(what) = kept {
        return Some(format!("{what}; list it in machines.devices to rent it"));
    }
    if let Some(why) = chip_need(function, network, all) {
        return Some(format!("{why}; list it in machines.devices to rent it all the same"));
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

/// Returns why a port of a network card stays with another port of its chip: each can reset all of them, as Intel's by
/// `GLGEN_RTRIG`, and most can write the firmware that they share, which also rules over what is below a switch in the
/// card. Source: Linux drivers/net/ethernet/intel/ice, `ice_reset`.
fn chip_need(function: &Function, network: &Network, all: &[&Function]) -> Option<String> {
    let is_beside = |other: &&&Function| {
        let slot = Bdf { function: 0, ..function.address };
        let is_port = Bdf { function: 0, ..other.address } == slot && is_network_port(other);
        let is_below = other.below_card.is_some() && other.below_card == function.below_card;
        other.address != function.address && (is_port || is_below)
    };
    let mut beside = all.iter().filter(is_beside).filter(|_| is_network_port(function));
    beside.find_map(|other| {
        let address = other.address;
        let used = other.uses.iter().find_map(|used| match used {
            HostUse::Interface(interface) if is_uplink(address, interface, network) => {
                Some(format!("the uplink {}", interface.name))
            }
            HostUse::Disk(name) => Some(format!("the node's disk {name}")),
            HostUse::Interface(_) | HostUse::Data(_) | HostUse::Screen => None,
        });
        let whose = match (used, other.virtual_functions) {
            (Some(used), _) => used,
            (None, 1..) => "others' virtual functions".to_owned(),
            (None, 0) => return None,
        };
        Some(format!(
            "a port of a card that {address} is of, too, {whose}: whoever has one can stop both"
        ))
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
        "hardware.plugged_later names {device}, which shares IOMMU group {group} with {other}: this machine's devices \
         are given by groups, each once, so leave out all devices of that group, which are there from the start then"
    )]
    SharedLater { device: Bdf, group: u32, other: Bdf },
    #[error(
        "{switch} is a switch between all GPUs of this node, or the way to those: who has it reaches {other}; one lease \
         names all GPUs and switches, or, where all switches are PCI devices, each names GPUs only. What is broken the \
         provider leaves out of machines.devices"
    )]
    Fabric { switch: Bdf, other: Bdf },
    #[error(
        "{device} is not rented without {switch}, which a renter had: what routes that left may be in the switches \
         between GPUs; the provider lists {switch} in machines.devices, and one lease names it with all GPUs, or switches the \
         server's power off and on and has an operator say so (`holdfast node release-device NODE {switch}`)"
    )]
    Routed { switch: Bdf, device: Bdf },
    #[error(
        "{device} reaches {other} past the IOMMU, by a direct link or in one chip; a lease must name both, or the \
         provider leaves one out of machines.devices"
    )]
    Linked { device: Bdf, other: Bdf },
    #[error(
        "{device} reaches {other} past the IOMMU, by a direct link or in one chip, and that is {state}. What is broken \
         the provider leaves out of machines.devices"
    )]
    LinkedTaken { device: Bdf, other: Bdf, state: String },
}

/// Checks that `wanted` are free, whole groups, and linked to nothing that another has or may get.
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
    check_fabric(devices, wanted)?;
    check_linked(devices, wanted)
}

/// Checks that nobody gets what leads past the IOMMU to what another has, had or may get: one whose reset failed holds
/// what its renter left, and may still run it.
fn check_linked(devices: &[PciDevice], wanted: &[Bdf]) -> Result<(), DeviceError> {
    let is_ours = |device: &&PciDevice| wanted.contains(&device.address);
    for PciDevice { address: device, linked, .. } in devices.iter().filter(is_ours) {
        let is_apart = |other: &&PciDevice| {
            linked.contains(&other.address) && !is_ours(other) && is_given(&other.state)
        };
        let Some(other) = devices.iter().find(is_apart) else { continue };
        let (device, state, other) = (*device, &other.state, other.address);
        return Err(if *state == DeviceState::Free {
            DeviceError::Linked { device, other }
        } else {
            DeviceError::LinkedTaken { device, other, state: describe(state) }
        });
    }
    Ok(())
}

/// Returns devices as those see them who ask for some: linked to what a lease has to name with them, which is nothing
/// that stays with the host.
pub fn offered(devices: &[PciDevice]) -> Vec<PciDevice> {
    let given: BTreeSet<Bdf> =
        devices.iter().filter(|device| is_given(&device.state)).map(|d| d.address).collect();
    let offered = |device: &PciDevice| {
        let mut device = device.clone();
        let is_given = given.contains(&device.address);
        device.linked.retain(|other| is_given && given.contains(other));
        device
    };
    devices.iter().map(offered).collect()
}

/// Whether somebody has a device, had it, or may get it.
pub fn is_given(state: &DeviceState) -> bool {
    match state {
        DeviceState::Free
        | DeviceState::Leased { .. }
        | DeviceState::Resetting
        | DeviceState::Quarantined { .. } => true,
        DeviceState::Refused { .. } => false,
    }
}

/// Checks that each device of a lease that comes `later` has its IOMMU group to itself: where devices are given by
/// groups, one that is in the machine is not opened once more for another.
pub fn check_later(devices: &[PciDevice], later: &[Bdf]) -> Result<(), DeviceError> {
    for device in devices.iter().filter(|device| later.contains(&device.address)) {
        let (address, group) = (device.address, device.iommu_group);
        let other =
            devices.iter().find(|other| other.iommu_group == group && other.address != address);
        if let (Some(other), Some(group)) = (other, group) {
            let other = other.address;
            return Err(DeviceError::SharedLater { device: address, group, other });
        }
    }
    Ok(())
}

/// Checks that nobody gets a switch between GPUs while another has, had or may get what it connects, and that nobody
/// gets a GPU while a switch is not as a reset leaves it: without routes. What only leads to switches is reset without
/// them. Which GPUs a switch leads to only its driver knows, so it counts for all of the node. What the node never gives
/// does not count.
/// Source: NVIDIA Fabric Manager User Guide, "Full Passthrough Virtualization Model".
fn check_fabric(devices: &[PciDevice], wanted: &[Bdf]) -> Result<(), DeviceError> {
    let (ours, others): (Vec<&PciDevice>, Vec<&PciDevice>) = devices
        .iter()
        .filter(|device| device.fabric || is_gpu(device))
        .partition(|device| wanted.contains(&device.address));
    let given = |device: &&&PciDevice| is_given(&device.state);
    let is_clean = |device: &PciDevice| loses_routes(device) && device.state == DeviceState::Free;
    let routes = |device: &&&PciDevice| device.fabric && given(device) && !is_clean(device);
    let pair = match ours.iter().find(|device| device.fabric) {
        Some(switch) => others.iter().find(given).map(|other| (switch, other)),
        None => others.iter().find(routes).zip(ours.first()),
    };
    match pair {
        Some((switch, other)) => {
            Err(DeviceError::Fabric { switch: switch.address, other: other.address })
        }
        None => Ok(()),
    }
}

/// Checks that nobody gets a GPU alone while routes may be in the switches that an earlier renter of what is `routed`
/// left, whatever became of that: the provider may have taken it off the list. Who has a switch, or the way to those,
/// has all GPUs, and sets them anew.
pub fn check_routes(
    devices: &[PciDevice],
    routed: &BTreeSet<Bdf>,
    wanted: &[Bdf],
) -> Result<(), DeviceError> {
    let ours: Vec<&PciDevice> =
        devices.iter().filter(|device| wanted.contains(&device.address)).collect();
    if ours.iter().any(|device| device.fabric) {
        return Ok(());
    }
    let gpu = ours.iter().find(|device| is_gpu(device));
    match routed.first().zip(gpu) {
        Some((switch, gpu)) => Err(DeviceError::Routed { switch: *switch, device: gpu.address }),
        None => Ok(()),
    }
}

/// Returns whether a device loses the routes of its last renter when it is reset: a switch does, and what only leads to
/// switches does not.
pub fn loses_routes(device: &PciDevice) -> bool {
    device.vendor == NVIDIA
}

/// Whether switches may connect a device to others.
pub fn is_gpu(device: &PciDevice) -> bool {
    device.vendor == NVIDIA && device.class >> 8 == GPU_WITHOUT_SCREEN
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
#[path = "rules_tests.rs"]
mod tests;
