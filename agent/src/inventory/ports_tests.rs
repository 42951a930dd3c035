//! Trees of servers as their makers describe them in public.

use super::*;

fn bdf(text: &str) -> Bdf {
    text.parse().expect("an address")
}

/// Registers of a port whose link has a speed (1 to 6) and a width.
fn link(speed: u16, width: u16) -> PortRegisters {
    PortRegisters {
        link_capabilities: u32::from(speed | width << 4),
        link_status: speed | width << 4,
        ..PortRegisters::default()
    }
}

/// A server in the making.
#[derive(Default)]
struct Server(BTreeMap<Bdf, Ancestry>);

impl Server {
    /// Adds a device below ports, each told as `address speed width`: the first is the root port,
    /// then upstream and downstream ports take turns.
    fn device(&mut self, node: Option<u32>, address: &str, ports: &[(&str, u16, u16)]) -> Bdf {
        let kinds = [PortKind::Upstream, PortKind::Downstream].into_iter().cycle();
        let kinds = std::iter::once(PortKind::Root).chain(kinds);
        let ports = ports.iter().zip(kinds).map(|((address, speed, width), kind)| HostPort {
            address: bdf(address),
            kind,
            registers: link(*speed, *width),
        });
        self.0.insert(bdf(address), Ancestry { ports: ports.collect(), node });
        bdf(address)
    }
}

/// A tree in words: devices by index, switches as brackets, the width and speed of each port.
fn words(ports: &[Port]) -> String {
    let all = ports.iter().map(|port| {
        let status = port.registers.map_or(0, |registers| registers.link_status);
        let link = format!("g{}x{}", status & 0xf, status >> 4);
        match &port.below {
            Below::Device { index } => format!("{link}:{index}"),
            Below::Switch { ports, .. } => format!("{link}[{}]", words(ports)),
        }
    });
    all.collect::<Vec<_>>().join(" ")
}

/// An HGX H100 or H200 server: eight GPUs on two sockets; four Gen5 switches, each with two GPUs, two
/// 400 Gb/s cards and a disk below one x16 uplink; four NVSwitches on x2 links of a small switch.
fn hgx() -> (Server, Vec<Bdf>, Vec<Bdf>, Vec<Bdf>) {
    let mut server = Server::default();
    let (mut gpus, mut cards, mut fabric) = (Vec::new(), Vec::new(), Vec::new());
    for switch in 0..4u32 {
        let node = Some(switch / 2);
        let bus = 0x10 + 0x20 * switch;
        let root = format!("0000:{bus:02x}:01.0");
        let upstream = format!("0000:{:02x}:00.0", bus + 1);
        for port in 0..4u32 {
            let down = format!("0000:{:02x}:{port:02x}.0", bus + 2);
            let address = format!("0000:{:02x}:00.0", bus + 3 + port);
            let ports = [(root.as_str(), 5, 16), (&upstream, 5, 16), (&down, 5, 16)];
            let device = server.device(node, &address, &ports);
            if port < 2 { gpus.push(device) } else { cards.push(device) }
        }
    }
    for port in 0..4u32 {
        let (down, address) =
            (format!("0000:05:{port:02x}.0"), format!("0000:{:02x}:00.0", 6 + port));
        let ports = [("0000:03:01.0", 4, 4), ("0000:04:00.0", 4, 4), (&down, 3, 2)];
        fabric.push(server.device(Some(0), &address, &ports));
    }
    (server, gpus, cards, fabric)
}

#[test]
fn all_of_an_hgx_keeps_its_switches_and_sockets() {
    let (server, gpus, cards, fabric) = hgx();
    let devices: Vec<Bdf> = gpus.into_iter().chain(cards).chain(fabric).collect();
    let tree = topology(&server.0, &devices, &[0, 1]).expect("fits");
    assert_eq!(tree.roots.len(), 2);
    assert_eq!((tree.roots[0].node, tree.roots[1].node), (Some(0), Some(1)));
    // GPU 0 and 1 with cards 8 and 9, as on the board; NVSwitches 16 to 19 on their narrow links.
    assert_eq!(
        words(&tree.roots[0].ports),
        "g5x16[g5x16:0 g5x16:1 g5x16:8 g5x16:9] g5x16[g5x16:2 g5x16:3 g5x16:10 g5x16:11] \
         g4x4[g3x2:16 g3x2:17 g3x2:18 g3x2:19]"
    );
    assert_eq!(
        words(&tree.roots[1].ports),
        "g5x16[g5x16:4 g5x16:5 g5x16:12 g5x16:13] g5x16[g5x16:6 g5x16:7 g5x16:14 g5x16:15]"
    );
}

#[test]
fn half_of_an_hgx_is_one_socket() {
    let (server, gpus, cards, _) = hgx();
    let devices = [gpus[4], gpus[5], gpus[6], gpus[7], cards[4], cards[6]];
    let tree = topology(&server.0, &devices, &[1]).expect("fits");
    assert_eq!((tree.roots.len(), tree.roots[0].node), (1, Some(1)));
    assert_eq!(
        words(&tree.roots[0].ports),
        "g5x16[g5x16:0 g5x16:1 g5x16:4] g5x16[g5x16:2 g5x16:3 g5x16:5]"
    );
    // A machine that knows no nodes has root complexes near none.
    assert_eq!(topology(&server.0, &devices, &[]).expect("fits").roots[0].node, None);
}

#[test]
fn one_gpu_and_its_card_keep_their_switch() {
    let (server, gpus, cards, _) = hgx();
    let tree = topology(&server.0, &[cards[1], gpus[0]], &[]).expect("fits");
    assert_eq!(words(&tree.roots[0].ports), "g5x16[g5x16:0 g5x16:1]");
}

/// A server with four GPUs, two on each socket, each behind a root port of its processor.
#[test]
fn four_gpus_without_switches_have_root_ports_of_their_sockets() {
    let mut server = Server::default();
    let mut gpu = |node, address, root| server.device(Some(node), address, &[(root, 4, 16)]);
    let devices = [
        gpu(0, "0000:17:00.0", "0000:16:01.0"),
        gpu(0, "0000:65:00.0", "0000:64:01.0"),
        gpu(1, "0000:98:00.0", "0000:97:01.0"),
        gpu(1, "0000:ca:00.0", "0000:c9:01.0"),
    ];
    let tree = topology(&server.0, &devices, &[0, 1]).expect("fits");
    assert_eq!(words(&tree.roots[0].ports), "g4x16:0 g4x16:1");
    assert_eq!(words(&tree.roots[1].ports), "g4x16:2 g4x16:3");
}

/// A server with eight PCIe GPUs of which four share a switch of 96 lanes, one switch a socket, and
/// a card on each switch that hangs on a second switch below the first.
#[test]
fn eight_gpus_on_two_switches_and_a_switch_below() {
    let mut server = Server::default();
    let mut devices = Vec::new();
    for socket in 0..2u32 {
        let bus = 0x20 + 0x60 * socket;
        let root = format!("0000:{bus:02x}:01.0");
        let (up, inside) = (format!("0000:{:02x}:00.0", bus + 1), bus + 2);
        for port in 0..4u32 {
            let down = format!("0000:{inside:02x}:{port:02x}.0");
            let address = format!("0000:{:02x}:00.0", inside + 1 + port);
            let ports = [(root.as_str(), 4, 16), (&up, 4, 16), (&down, 4, 16)];
            devices.push(server.device(Some(socket), &address, &ports));
        }
        let down = format!("0000:{inside:02x}:08.0");
        let (second, last) =
            (format!("0000:{:02x}:00.0", bus + 0x20), format!("0000:{:02x}:04.0", bus + 0x21));
        let ports =
            [(root.as_str(), 4, 16), (&up, 4, 16), (&down, 4, 8), (&second, 4, 8), (&last, 3, 8)];
        devices.push(server.device(Some(socket), &format!("0000:{:02x}:00.0", bus + 0x22), &ports));
    }
    let tree = topology(&server.0, &devices, &[]).expect("fits");
    assert_eq!(words(&tree.roots[0].ports), "g4x16[g4x16:0 g4x16:1 g4x16:2 g4x16:3 g4x8[g3x8:4]]");
    assert_eq!(words(&tree.roots[1].ports), "g4x16[g4x16:5 g4x16:6 g4x16:7 g4x16:8 g4x8[g3x8:9]]");
}

#[test]
fn functions_of_one_device_have_a_port_each() {
    let mut server = Server::default();
    let ports = [("0000:00:01.0", 4, 16)];
    let devices = [
        server.device(None, "0000:01:00.0", &ports),
        server.device(None, "0000:01:00.1", &ports),
        server.device(None, "0000:00:1f.2", &[]),
    ];
    let tree = topology(&server.0, &devices, &[]).expect("fits");
    assert_eq!((tree.roots.len(), tree.roots[0].node), (1, None));
    assert_eq!(words(&tree.roots[0].ports), "g4x16:0 g4x16:1 g0x0:2");
}

#[test]
fn more_root_ports_than_there_can_be_are_told() {
    let mut server = Server::default();
    let mut devices = Vec::new();
    for bus in 1..16u8 {
        let root = format!("0000:00:{bus:02x}.0");
        devices.push(server.device(None, &format!("0000:{bus:02x}:00.0"), &[(&root, 3, 4)]));
    }
    assert_eq!(topology(&server.0, &devices, &[]), None);
    assert!(topology(&server.0, &devices[..14], &[]).is_some());
}

/// Configuration space of a downstream port with access control, its lists out of order.
fn downstream() -> Vec<u8> {
    let mut config = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x34, &[0x90]);
    put(0x90, &[0x05, 0x68]);
    put(0x68, &[0x10, 0x00, 0x62, 0x01]);
    put(0x6c, &0x0000_8022u32.to_le_bytes());
    put(0x74, &0x0b7a_dd05u32.to_le_bytes());
    put(0x7a, &0x7105u16.to_le_bytes());
    put(0x8c, &0x0001_0860u32.to_le_bytes());
    put(0x94, &0x0180_003eu32.to_le_bytes());
    put(0x100, &0x1f0u32.wrapping_shl(20).wrapping_add(0x0001_0001).to_le_bytes());
    put(0x1f0, &0x0001_000du32.to_le_bytes());
    put(0x1f4, &[0x7f, 0x00, 0x1d, 0x00]);
    config
}

#[test]
fn ports_are_read_from_their_configuration_space() {
    let (kind, registers) = port(&downstream()).expect("a port");
    assert_eq!(kind, PortKind::Downstream);
    assert_eq!(registers.device_capabilities, 0x8022);
    assert_eq!((registers.link_capabilities, registers.link_status), (0x0b7a_dd05, 0x7105));
    assert_eq!(registers.device_capabilities2, 0x0001_0860);
    assert_eq!(registers.link_capabilities2, 0x0180_003e);
    let acs = AccessControl { capabilities: 0x7f, control: 0x1d };
    assert_eq!(registers.access_control, Some(acs));
}

#[test]
fn spaces_that_are_cut_short_or_run_in_circles_are_no_ports() {
    let mut config = downstream();
    assert_eq!(port(&config[..64]), None, "what an unprivileged reader gets");
    assert_eq!(port(&config[..256]).expect("a port").1.access_control, None);
    config[0x102] = 0x01;
    config[0x103] = 0x10;
    assert_eq!(port(&config).expect("a port").1.access_control, None, "a circle");
    config[0x91] = 0x90;
    assert_eq!(port(&config), None, "a circle");
    assert_eq!(port(&[0xff; 4096]), None);
}

#[test]
fn the_tree_is_read_from_sysfs() {
    let folder = tempfile::tempdir().expect("a directory");
    let sys = folder.path().join("sys");
    let device = "sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0";
    let path = folder.path().join(device);
    fs::create_dir_all(&path).expect("made");
    fs::write(path.join("numa_node"), "1\n").expect("written");
    let mut config = downstream();
    config[0x6a] = 0x42;
    fs::write(path.parent().expect("a port").join("config"), config).expect("written");
    fs::create_dir_all(sys.join("bus/pci/devices")).expect("made");
    std::os::unix::fs::symlink(&path, sys.join("bus/pci/devices/0000:17:00.0")).expect("linked");
    let host = read(folder.path(), &[bdf("0000:17:00.0"), bdf("0000:99:00.0")]);
    let found = &host[&bdf("0000:17:00.0")];
    assert_eq!((found.node, found.ports.len()), (Some(1), 1));
    assert_eq!(
        (found.ports[0].address, found.ports[0].kind),
        (bdf("0000:16:01.0"), PortKind::Root)
    );
    assert_eq!(host[&bdf("0000:99:00.0")], Ancestry::default());
}
