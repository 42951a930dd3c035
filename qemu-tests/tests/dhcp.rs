//! The node on a wired network with a real DHCP server and router: it takes addresses of both
//! kinds, joins over them, renews, and learns who tells names and time; or it has the addresses that
//! its configuration says.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "../../agent/tests/scan/mod.rs"]
mod scan;

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    time::{Duration, Instant},
};

use qemu_tests::harness::{
    host::{Host, HostOptions},
    lan::{FURTHER, LEASE_S, Lan, NAME, PREFIX_V6, ROUTER},
    scene::Scene,
};
use scan::{Answer, Protocol, scan};

/// How long the node may take for what it does at once.
const SOON: Duration = Duration::from_secs(60);
/// Least length of a time request (RFC 4330 section 4).
const TIME_REQUEST: usize = 48;

/// Boots a node with `extra` in its configuration, and waits until it has joined.
fn join(lan: &Lan, folder: &Path, extra: &str) -> (Scene, Host, String) {
    let scene = Scene::start_at(folder, lan.gateway(), lan.gateway()).unwrap();
    let config = Some(scene.node_config("wired", extra));
    let options =
        HostOptions { config, memory_mib: 1024, uplink: lan.uplink(), ..HostOptions::default() };
    let (host, node) = scene.boot("wired", options).unwrap();
    (scene, host, node)
}

/// A time server that listens, and no more.
fn time_server(address: impl Into<IpAddr>) -> UdpSocket {
    let socket = UdpSocket::bind((address.into(), 123)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

#[test]
fn an_address_by_dhcp_is_renewed_in_time_and_slaac_gives_another() {
    let folder = tempfile::tempdir().unwrap();
    let advertise = format!("--dhcp-range={PREFIX_V6}:,ra-only");
    let time = format!("--dhcp-option=option:ntp-server,{FURTHER}");
    let options = ["--enable-ra", &advertise, &time];
    Lan::run("DHCP and SLAAC", folder.path(), &options, |lan| {
        let clock = time_server(FURTHER);
        let (scene, host, node) = join(lan, folder.path(), "");
        lan.log().wait("DHCPACK(up0) 203.0.113.", SOON).unwrap();
        let first = Instant::now();
        let renewal = lan.log().mark();
        host.serial.wait("event=online address=203.0.113.", SOON).unwrap();
        host.serial.wait(&format!("event=online address={PREFIX_V6}"), SOON).unwrap();
        assert_eq!(clock.recv(&mut [0; 512]).unwrap(), TIME_REQUEST, "the server of option 42");

        // Half of the time, and what a busy machine may be late.
        lan.log()
            .wait_from(renewal, "DHCPACK(up0)", Duration::from_secs(LEASE_S / 2 + 20))
            .unwrap();
        assert!(
            !lan.log().text()[renewal..].contains("DHCPDISCOVER"),
            "a renewal, not a new search"
        );
        let said = host.serial.text();
        for kind in ["203.0.113.", PREFIX_V6] {
            let address = said.split("event=online address=").find(|rest| rest.starts_with(kind));
            let address = address.unwrap().split_whitespace().next().unwrap();
            nothing_accepts(address.parse().unwrap());
        }
        let until_after_the_first_lease = Duration::from_secs(LEASE_S + 5);
        std::thread::sleep(until_after_the_first_lease.saturating_sub(first.elapsed()));
        let operator = scene.cli.with_key(&scene.operator.file);
        operator.text(&["node", "restart-agent", &node]).unwrap();
        assert!(!lan.log().text()[renewal..].contains("DHCPDISCOVER"), "the address was kept");
    });
}

/// No TCP port is open at the booted node, as `rootfs/ports.toml` says, and none takes part by saying
/// nothing: what is closed says so.
fn nothing_accepts(address: IpAddr) {
    let answers = scan(Protocol::Tcp, SocketAddr::new(address, 0), 1..=u16::MAX, SOON);
    let odd: Vec<_> =
        answers.iter().filter(|(_, answer)| **answer != Answer::Refused).take(20).collect();
    assert!(odd.is_empty(), "TCP of {address}: {odd:?}");
}

#[test]
fn names_are_asked_of_the_server_that_dhcp_tells() {
    let folder = tempfile::tempdir().unwrap();
    Lan::run("name servers by DHCP", folder.path(), &[], |lan| {
        let clock = time_server(FURTHER);
        let _node = join(lan, folder.path(), &format!("[time]\nntp = [\"{NAME}\"]\n"));
        lan.log().wait(&format!("query[A] {NAME} from 203.0.113."), SOON).unwrap();
        assert_eq!(clock.recv(&mut [0; 512]).unwrap(), TIME_REQUEST);
    });
}

#[test]
fn configured_addresses_are_used_and_nobody_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    Lan::run("static addresses", folder.path(), &[], |lan| {
        let clock = time_server(FURTHER);
        let network = format!(
            "[network]\nmode = \"static\"\naddresses = [\"203.0.113.7/24\", \"{PREFIX_V6}:7/64\"]\n\
             gateways = [\"{ROUTER}\"]\ndns = [\"{ROUTER}\"]\n\n[time]\nntp = [\"{NAME}\"]\n"
        );
        let (_scene, host, _node) = join(lan, folder.path(), &network);
        host.serial.wait("event=online address=203.0.113.7", SOON).unwrap();
        host.serial.wait(&format!("event=online address={PREFIX_V6}:7"), SOON).unwrap();
        lan.log().wait(&format!("query[A] {NAME} from 203.0.113.7"), SOON).unwrap();
        assert_eq!(clock.recv(&mut [0; 512]).unwrap(), TIME_REQUEST);
        assert!(!lan.log().text().contains("DHCPDISCOVER"));
    });
}
