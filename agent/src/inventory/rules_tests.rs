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
        leads_to_switches: Some(false),
        is_virtual: false,
        below_card: None,
    }
}

fn interface(driver: &str) -> Interface {
    let (name, mac) = ("eth1".to_owned(), "02:00:00:00:00:01".to_owned());
    Interface { name, mac, driver: Some(driver.to_owned()) }
}

fn spec(machines: &str) -> NodeSpec {
    let key = "01".repeat(32);
    let text = format!("version = 1\n{machines}\n[authority]\nthreshold = 1\nkeys = [\"{key}\"]\n");
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
    assert!(matches!(&states[0], DeviceState::Refused { reason } if reason.contains("virtual")));
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
    let switch =
        |class, vendor, header| Function { vendor, header, ..function("0000:04:00.0", class, 6) };
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
    way.leads_to_switches = Some(true);
    let (default, listed) = by_default_and_listed(&[way.clone(), card.clone()]);
    assert!(default[0].contains(WAY_TO_SWITCHES), "{default:?}");
    assert_eq!((default[1].as_str(), listed), ("free", vec!["free".to_owned(); 2]));
    // One that does not tell is no such way where there is nothing to lead to.
    way.leads_to_switches = None;
    assert_eq!(by_default_and_listed(&[way.clone()]).0, ["free"]);
    let gpu =
        |device| Function { vendor: NVIDIA, device, ..function("0000:01:00.0", 0x03_0200, 1) };
    // An L40S has no NVLinks; an HGX H100's switches are PCI functions.
    assert_eq!(by_default_and_listed(&[gpu(0x26b9), way.clone()]).0, ["free"; 2]);
    let switch = Function { vendor: NVIDIA, ..function("0000:02:00.0", 0x06_8000, 2) };
    assert_eq!(by_default_and_listed(&[gpu(0x2901), switch, way.clone()]).0, ["free"; 3]);
    let (default, _) = by_default_and_listed(&[gpu(0x2901), way]);
    assert!(default[1].contains("vital product data"), "{default:?}");
    assert!(default[1].contains("with all GPUs in one lease"), "{default:?}");
}

/// From NVLink 5 on no switch is on a PCI bus.
#[test]
fn the_way_to_the_switches_goes_with_all_gpus() {
    let gpu = |address, group| Function { vendor: NVIDIA, ..function(address, 0x03_0200, group) };
    let way = Function { leads_to_switches: Some(true), ..function("0000:05:00.0", 0x02_0700, 3) };
    let board = inventory(vec![gpu("0000:01:00.0", 1), gpu("0000:02:00.0", 2), way]);
    let [one, two, way] = ["0000:01:00.0", "0000:02:00.0", "0000:05:00.0"].map(bdf);
    let all = "[machines]\ndevices = [\"0000:01:00.0\", \"0000:02:00.0\", \"0000:05:00.0\"]";
    let devices = devices(&board, Some(&spec(all)));
    let fabric = Err(DeviceError::Fabric { switch: way, other: two });
    assert_eq!(check_free(&devices, &[one, way]), fabric);
    assert_eq!(check_free(&devices, &[one, two, way]), Ok(()));
    let left = Err(DeviceError::Fabric { switch: way, other: one });
    assert_eq!(
        check_free(&devices, &[one]),
        left,
        "a reset of the way leaves the switches' routes"
    );
}

/// Routes stay in switches that nobody reaches any more.
#[test]
fn a_way_that_a_renter_had_counts_when_it_is_not_listed_any_more() {
    let gpu = |address, group| Function { vendor: NVIDIA, ..function(address, 0x03_0200, group) };
    let way = Function { leads_to_switches: Some(true), ..function("0000:05:00.0", 0x02_0700, 3) };
    let other = function("0000:06:00.0", 0x03_0200, 4);
    let board = inventory(vec![gpu("0000:01:00.0", 1), gpu("0000:02:00.0", 2), way, other]);
    let [one, two, way, other] =
        ["0000:01:00.0", "0000:02:00.0", "0000:05:00.0", "0000:06:00.0"].map(bdf);
    let gpus = "[machines]\ndevices = [\"0000:01:00.0\", \"0000:02:00.0\", \"0000:06:00.0\"]";
    let devices = devices(&board, Some(&spec(gpus)));
    assert!(matches!(devices[2].state, DeviceState::Refused { .. }), "{devices:?}");
    assert_eq!(check_free(&devices, &[one]), Ok(()), "nobody ever had it");
    assert_eq!(check_routes(&devices, &BTreeSet::new(), &[one]), Ok(()));
    let routed = BTreeSet::from([way]);
    let left = |device| Err(DeviceError::Routed { switch: way, device });
    assert_eq!(check_routes(&devices, &routed, &[one]), left(one));
    assert_eq!(check_routes(&devices, &routed, &[two]), left(two));
    assert_eq!(check_routes(&devices, &routed, &[one, two]), left(one));
    assert_eq!(check_routes(&devices, &routed, &[other]), Ok(()));
    assert_eq!(check_routes(&devices, &routed, &[one, two, way]), Ok(()), "it sets them anew");
    assert_eq!(check_routes(&devices[..2], &routed, &[one]), left(one), "it fell off the bus");
}

#[test]
fn a_port_beside_the_uplink_stays_unless_it_is_listed() {
    let port = |address, group| function(address, 0x02_0000, group);
    let mut uplink = port("0000:05:00.0", 1);
    uplink.uses.push(HostUse::Interface(interface("ice")));
    let card = [uplink, port("0000:05:00.1", 2), port("0000:06:00.0", 3)];
    let (default, listed) = by_default_and_listed(&card);
    assert!(default[1].contains("0000:05:00.0 is of, too, the uplink eth1"), "{default:?}");
    assert_eq!((default[2].as_str(), listed[1].as_str()), ("free", "free"));
    // What is below the switch of a card is the card's.
    let below = |function| Function { below_card: Some(bdf("0000:04:00.0")), ..function };
    let mut disk = below(function("0000:07:00.0", 0x01_0802, 4));
    disk.uses.push(HostUse::Disk("nvme0n1".to_owned()));
    let (default, _) = by_default_and_listed(&[below(port("0000:06:00.0", 3)), disk]);
    assert!(default[0].contains("0000:07:00.0 is of, too, the node's disk nvme0n1"), "{default:?}");
    let mut parent = port("0000:05:00.0", 1);
    parent.virtual_functions = 2;
    let virtual_one = Function { is_virtual: true, ..port("0000:05:00.2", 3) };
    let (default, _) = by_default_and_listed(&[parent, port("0000:05:00.1", 2), virtual_one]);
    assert!(default[1].contains("others' virtual functions"), "{default:?}");
    assert_eq!(default[2], "free");
}

/// Half of an HGX H100, and a card of another maker.
#[test]
fn a_switch_goes_with_all_gpus_or_with_none_that_another_may_have() {
    let of = |address, class, group| Function { vendor: NVIDIA, ..function(address, class, group) };
    let board = inventory(vec![
        of("0000:01:00.0", 0x03_0200, 1),
        of("0000:02:00.0", 0x03_0200, 2),
        of("0000:03:00.0", 0x06_8000, 3),
        of("0000:04:00.0", 0x06_8000, 4),
        function("0000:05:00.0", 0x03_0200, 5),
    ]);
    let mut devices = devices(&board, Some(&spec("")));
    let [one, two, switch, other, foreign] =
        ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0", "0000:05:00.0"].map(bdf);
    let fabric = |switch, other| Err(DeviceError::Fabric { switch, other });
    assert_eq!(check_free(&devices, &[one, two, switch, other]), Ok(()));
    assert_eq!(check_free(&devices, &[one]), Ok(()), "without a switch it reaches nobody");
    assert_eq!(check_free(&devices, &[one, switch, other]), fabric(switch, two));
    assert_eq!(check_free(&devices, &[one, two, switch]), fabric(switch, other));
    devices[1].state = DeviceState::Quarantined { reason: "gone".to_owned(), since: None };
    let left = fabric(switch, two);
    assert_eq!(check_free(&devices, &[one, switch, other]), left, "its renter may still be on it");
    devices[1].state = DeviceState::Refused { reason: "not listed".to_owned() };
    assert_eq!(check_free(&devices, &[one, switch, other]), Ok(()), "nobody gets the other GPU");
    devices[2].state = DeviceState::Quarantined { reason: "gone".to_owned(), since: None };
    assert_eq!(check_free(&devices, &[one]), fabric(switch, one), "it may have a renter's routes");
    let machine = types::ids::MachineId::from_bytes([1; 16]);
    for at in [0, 2, 3] {
        devices[at].state = DeviceState::Leased { machine };
    }
    devices[1].state = DeviceState::Free;
    assert_eq!(check_free(&devices, &[two]), fabric(switch, two), "it came back too late");
    assert_eq!(check_free(&devices, &[foreign]), Ok(()));
}

#[test]
fn linked_gpus_are_one_lease_s() {
    let list = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"];
    let board: Vec<_> = (1..).zip(list).map(|(n, a)| function(a, 0x03_0200, n)).collect();
    let [one, two, three, four] = list.map(bdf);
    let said = "[machines]\nlinked = [[\"0000:01:00.0\", \"0000:02:00.0\"], [\"0000:02:00.0\", \"0000:03:00.0\"]]";
    let mut devices = devices(&inventory(board), Some(&spec(said)));
    assert_eq!(devices[1].linked, [one, three]);
    let linked = |device, other| Err(DeviceError::Linked { device, other });
    let taken = |device, other, state: &str| {
        Err(DeviceError::LinkedTaken { device, other, state: state.to_owned() })
    };
    assert_eq!(check_free(&devices, &[one]), linked(one, two));
    assert_eq!(check_free(&devices, &[one, two]), linked(two, three), "what a set leads to counts");
    assert_eq!(check_free(&devices, &[three, two, one]), Ok(()));
    assert_eq!(check_free(&devices, &[four]), Ok(()));
    devices[1].state = DeviceState::Quarantined { reason: "gone".to_owned(), since: None };
    let left = taken(one, two, "quarantined: gone");
    assert_eq!(check_free(&devices, &[one]), left, "its renter may still be on it");
    let seen = |devices: &[PciDevice]| offered(devices).into_iter().map(|d| d.linked).collect();
    let said: Vec<Vec<Bdf>> = seen(&devices);
    assert_eq!(said, [vec![two], vec![one, three], vec![two], vec![]]);
    devices[1].state = DeviceState::Refused { reason: "not listed".to_owned() };
    assert_eq!(check_free(&devices, &[one]), Ok(()), "nobody gets the other GPU");
    let said: Vec<Vec<Bdf>> = seen(&devices);
    assert_eq!(said, vec![Vec::<Bdf>::new(); 4], "no lease can name it");
    devices[0].state = DeviceState::Leased { machine: types::ids::MachineId::from_bytes([1; 16]) };
    devices[1].state = DeviceState::Free;
    let machine = format!("leased to machine {}", types::ids::MachineId::from_bytes([1; 16]));
    let late = taken(two, one, &machine);
    assert_eq!(check_free(&devices, &[two, three]), late, "it came back too late");
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
    // What comes later has a group to itself, whether the other is there from the start or not.
    let later = DeviceError::SharedLater { device: audio, group: 4, other: gpu };
    assert_eq!(check_later(&devices, &[audio]), Err(later));
    assert!(check_later(&devices, &[gpu, audio]).is_err());
    assert_eq!(check_later(&devices, &[]), Ok(()));
    assert_eq!(check_later(&devices[..1], &[gpu]), Ok(()));
    let absent = bdf("0000:09:00.0");
    assert_eq!(check_free(&devices, &[absent]), Err(DeviceError::Absent { device: absent }));
}
