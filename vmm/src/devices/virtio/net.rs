//! virtio-net over a tap and vhost-net, one pair of queues, no control queue.
//! Source: virtio §5.1 "Network Device"; §5.1.4 "Device configuration layout".
//!
//! | Offset | Bytes | Field               | Value here            |
//! |--------|-------|---------------------|-----------------------|
//! | 0      | 6     | mac                 | from the machine      |
//! | 6      | 2     | status              | 1, the link is up     |
//! | 8      | 2     | max_virtqueue_pairs | not offered, 0        |
//! | 10     | 2     | mtu                 | from the machine      |

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{
    Activation, DeviceIdentity, Platform, VirtioDevice, VirtioError, VirtioPci,
    vhost::{Backend, Vhost, ring_features},
};
use crate::sys::io::{set_tap_header_size, set_tap_offload, set_vhost_net_backend};

const F_CSUM: u64 = 1 << 0;
const F_GUEST_CSUM: u64 = 1 << 1;
const F_MTU: u64 = 1 << 3;
const F_MAC: u64 = 1 << 5;
const F_GUEST_TSO4: u64 = 1 << 7;
const F_GUEST_TSO6: u64 = 1 << 8;
const F_GUEST_ECN: u64 = 1 << 9;
const F_HOST_TSO4: u64 = 1 << 11;
const F_HOST_TSO6: u64 = 1 << 12;
const F_HOST_ECN: u64 = 1 << 13;
const F_MRG_RXBUF: u64 = 1 << 15;
const F_STATUS: u64 = 1 << 16;

/// What the tap does for the driver without being asked.
const HOST_OFFLOADS: u64 = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN;

/// TUN_F_* of linux/if_tun.h, each with the feature that lets the driver take such frames.
const TUN_OFFLOADS: [(u64, u32); 4] =
    [(F_GUEST_CSUM, 0x01), (F_GUEST_TSO4, 0x02), (F_GUEST_TSO6, 0x04), (F_GUEST_ECN, 0x08)];

/// Bytes of the header before each frame (virtio §5.1.6.1), with `num_buffers`.
const HEADER_SIZE: i32 = 12;
/// VIRTIO_NET_S_LINK_UP.
const LINK_UP: u16 = 1;
/// Smallest MTU that IPv6 works with.
const MIN_MTU: u16 = 1280;

const CONFIG_SIZE: usize = 12;

const IDENTITY: DeviceIdentity =
    DeviceIdentity { name: "net", virtio_id: 1, class: [0x02, 0x00, 0x00] };

/// The tap behind the device.
struct Tap {
    fd: OwnedFd,
}

impl Backend for Tap {
    const QUEUES: u16 = 2;
    const DEVICE: &'static str = "net";

    fn connect(&self, vhost: BorrowedFd<'_>, features: u64) -> io::Result<()> {
        set_tap_offload(self.fd.as_fd(), tun_offloads(features))?;
        set_vhost_net_backend(vhost, 0, Some(self.fd.as_fd()))?;
        set_vhost_net_backend(vhost, 1, Some(self.fd.as_fd()))
    }

    fn disconnect(&self, vhost: BorrowedFd<'_>) -> io::Result<()> {
        set_vhost_net_backend(vhost, 0, None)?;
        set_vhost_net_backend(vhost, 1, None)
    }
}

/// A network device.
pub struct Net {
    vhost: Vhost<Tap>,
    features: u64,
    config: [u8; CONFIG_SIZE],
}

/// Makes a network device over an open tap and `/dev/vhost-net`.
pub fn open(
    net: &types::vm::Net,
    tap: OwnedFd,
    vhost: OwnedFd,
    slot: u8,
    platform: &Platform,
) -> Result<VirtioPci, VirtioError> {
    let net = Net::new(net, tap, vhost, platform)?;
    VirtioPci::new(Box::new(net), slot, platform)
}

impl Net {
    /// Returns the device, not started.
    fn new(
        net: &types::vm::Net,
        tap: OwnedFd,
        vhost: OwnedFd,
        platform: &Platform,
    ) -> Result<Self, VirtioError> {
        let config = config(net)?;
        let host = |what| move |source| VirtioError::Host { device: IDENTITY.name, what, source };
        set_tap_header_size(tap.as_fd(), HEADER_SIZE)
            .map_err(host("the descriptor is no tap with IFF_VNET_HDR"))?;
        let guest_offloads = probe_offloads(tap.as_fd());
        set_tap_offload(tap.as_fd(), 0).map_err(host("cannot set up the tap"))?;
        let (vhost, offered) = Vhost::new(vhost, Tap { fd: tap }, &platform.ram)?;
        let features = ring_features(offered)
            | (offered & F_MRG_RXBUF)
            | guest_offloads
            | HOST_OFFLOADS
            | F_MAC
            | F_MTU
            | F_STATUS;
        Ok(Self { vhost, features, config })
    }
}

impl VirtioDevice for Net {
    fn identity(&self) -> DeviceIdentity {
        IDENTITY
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_count(&self) -> u16 {
        Tap::QUEUES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_fields(&self.config, offset, data);
    }

    fn start(&mut self) -> Result<(), VirtioError> {
        self.vhost.start()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), VirtioError> {
        self.vhost.activate(activation)
    }

    fn stop(&mut self) {
        self.vhost.stop();
    }

    fn stopped(&mut self) -> bool {
        self.vhost.stopped()
    }

    fn hold(&mut self) {
        self.vhost.hold();
    }

    fn is_held(&mut self) -> bool {
        self.vhost.is_held()
    }

    fn go_on(&mut self) {
        self.vhost.go_on();
    }
}

/// Returns the guest offloads that this tap can do. Segmentation needs checksums, and ECN needs
/// segmentation (virtio §5.1.3.1).
fn probe_offloads(tap: BorrowedFd<'_>) -> u64 {
    let steps = [
        F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN,
        F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6,
        F_GUEST_CSUM,
    ];
    steps
        .into_iter()
        .find(|features| set_tap_offload(tap, tun_offloads(*features)).is_ok())
        .unwrap_or(0)
}

fn tun_offloads(features: u64) -> u32 {
    // The kernel refuses segmentation without checksums, which no sound driver asks for.
    let features = if features & F_GUEST_CSUM == 0 { 0 } else { features };
    TUN_OFFLOADS
        .iter()
        .filter(|(feature, _)| features & feature != 0)
        .fold(0, |flags, (_, flag)| flags | flag)
}

fn config(net: &types::vm::Net) -> Result<[u8; CONFIG_SIZE], VirtioError> {
    let refused = |problem| VirtioError::Refused { device: IDENTITY.name, problem };
    let mac = parse_mac(&net.mac).ok_or_else(|| {
        refused(format!(
            "\"{}\" is no hardware address of one machine; expected one as 02:00:00:00:00:01",
            net.mac
        ))
    })?;
    if net.mtu < MIN_MTU {
        return Err(refused(format!("MTU {} is below {MIN_MTU}", net.mtu)));
    }
    let mut config = [0; CONFIG_SIZE];
    config[..6].copy_from_slice(&mac);
    config[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
    config[10..].copy_from_slice(&net.mtu.to_le_bytes());
    Ok(config)
}

/// Parses six hexadecimal pairs; group and zero addresses are no machine's.
fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next()?;
        if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    let [first, ..] = mac;
    (parts.next().is_none() && first & 1 == 0 && mac != [0; 6]).then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(mac: &str, mtu: u16) -> types::vm::Net {
        types::vm::Net { tap_fd: -1, vhost_fd: -1, mac: mac.to_owned(), mtu }
    }

    #[test]
    fn configuration_carries_address_link_and_mtu() {
        let bytes = config(&net("02:00:5e:10:00:ff", 1450)).ok();
        assert_eq!(bytes, Some([2, 0, 0x5e, 0x10, 0, 0xff, 1, 0, 0, 0, 0xaa, 0x05]));
    }

    #[test]
    fn senseless_addresses_are_refused() {
        let bad =
            ["", "02:00:00:00:00", "01:00:00:00:00:01", "00:00:00:00:00:00", "02:00:00:00:00:1"];
        assert_eq!(bad.map(|mac| config(&net(mac, 1500)).is_ok()), [false; 5]);
        let bad = ["02:00:00:00:00:01:02", "02-00-00-00-00-01", "02:00:00:00:00:+1"];
        assert_eq!(bad.map(|mac| config(&net(mac, 1500)).is_ok()), [false; 3]);
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_is_refused() {
        assert!(config(&net("02:00:00:00:00:01", 1279)).is_err());
    }

    #[test]
    fn segmentation_is_not_asked_of_the_tap_without_checksums() {
        assert_eq!(tun_offloads(F_GUEST_TSO4 | F_GUEST_TSO6), 0);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_TSO4), 0x03);
    }
}
