//! The table of flows: a guest that opens and ends connections as fast as it can takes no more of it than
//! its part. Its frames are raw ones, which no pump slows down.

use std::{fs::File, io::Write, net::Ipv4Addr, time::Duration, time::Instant};

use agent::net::ruleset::{FLOW_RATE, IN_TABLE_PER_GUEST};
use types::ids::MachineId;

use crate::{
    netns::PATIENCE,
    world::{NODE, SERVER, World},
};

const CONNECTIONS: u16 = 20_000;
/// Connections that are begun before they are ended, so that they are open by then.
const AT_A_TIME: usize = 200;

/// TCP flags, RFC 9293 §3.1.
const SYN: u8 = 0x02;
const RST: u8 = 0x04;

/// Every length here is even.
fn sum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

/// A TCP segment without options or data in an IPv4 packet.
fn segment(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), sequence: u32, flags: u8) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
    packet.extend(from.0.octets());
    packet.extend(to.0.octets());
    let checksum = sum(&[&packet]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(from.1.to_be_bytes());
    packet.extend(to.1.to_be_bytes());
    packet.extend(sequence.to_be_bytes());
    packet.extend([0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    let checksum = sum(&[&packet[12..], &[0, 6, 0, 20]]);
    packet[36..38].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// Sends packets of a guest to the node, which has this hardware address.
fn send(tap: &mut File, (node, guest): ([u8; 6], [u8; 6]), packet: &[u8]) {
    // An empty virtio-net header comes first.
    let frame = [&[0; 12][..], &node, &guest, &[8, 0], packet].concat();
    tap.write_all(&frame).unwrap();
}

fn hardware(world: &World, link: &str) -> [u8; 6] {
    let text = world.node.ip(&format!("-j link show {link}"));
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    let bytes = links[0]["address"].as_str().unwrap().split(':');
    let bytes: Vec<u8> = bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

fn flows(world: &World) -> u64 {
    let file = "/proc/sys/net/netfilter/nf_conntrack_count";
    world.node.enter(|| std::fs::read_to_string(file).unwrap()).trim().parse().unwrap()
}

#[test]
fn connections_that_ended_fill_the_table_for_nobody() {
    let Some(world) = World::new("connections that ended") else { return };
    let other = world.guest(2);
    let machine = MachineId::from_bytes([1; 16]);
    let runtime = world.runtime.as_ref().unwrap();
    let net = runtime.block_on(world.networks().create(machine, 1)).unwrap();
    let cards = (hardware(&world, &net.address.interface), net.address.mac.0);
    let mut tap = File::from(net.tap);
    let (host, port) = SERVER.split_once(':').unwrap();
    let server: (Ipv4Addr, u16) = (host.parse().unwrap(), port.parse().unwrap());

    let begun = Instant::now();
    let ports: Vec<u16> = (10_000..10_000 + CONNECTIONS).collect();
    for some in ports.chunks(AT_A_TIME) {
        for port in some {
            send(&mut tap, cards, &segment((net.address.ipv4, *port), server, 7, SYN));
        }
        std::thread::sleep(Duration::from_millis(2));
        for port in some {
            send(&mut tap, cards, &segment((net.address.ipv4, *port), server, 8, RST));
        }
    }
    let (found, seconds) = (flows(&world), begun.elapsed().as_secs() + 1);
    let most = u64::from(FLOW_RATE.burst) + FLOW_RATE.per_second * seconds;
    assert!(most < CONNECTIONS.into(), "too slow to tell: {seconds} s");
    assert!(most < IN_TABLE_PER_GUEST);
    // A few flows are of others.
    assert!(found < most + 100, "{found} flows after {seconds} s");
    assert!(found > u64::from(FLOW_RATE.burst) * 9 / 10, "the flood did not arrive: {found} flows");
    assert_eq!(other.space.ask_tcp(SERVER, PATIENCE).as_deref(), Some(NODE));
    assert!(world.node.ask_tcp(SERVER, PATIENCE).is_some());
}
