//! virtio-net over a tap and vhost-net, with as many pairs of queues as the tap has descriptors.
//! Source: virtio §5.1 "Network Device"; §5.1.2 "Virtqueues"; §5.1.4 "Device configuration layout".
//!
//! | Offset | Bytes | Field               | Value here            |
//! |--------|-------|---------------------|-----------------------|
//! | 0      | 6     | mac                 | from the machine      |
//! | 6      | 2     | status              | 1, the link is up     |
//! | 8      | 2     | max_virtqueue_pairs | pairs of queues       |
//! | 10     | 2     | mtu                 | from the machine      |
//!
//! With one pair there is neither VIRTIO_NET_F_MQ nor a control queue. With more, receive queue N is
//! queue 2 N and transmit queue N is 2 N + 1; the control queue follows the last pair, or the first one if
//! the driver did not take VIRTIO_NET_F_MQ. The tap's further queues are detached until the driver turns
//! their pairs on (`control`), so that the host puts frames only where the driver looks.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

use types::vm::MAX_QUEUE_PAIRS;

use super::{
    Activation, DeviceIdentity, Platform, VirtioDevice, VirtioError, VirtioPci,
    control::Pace,
    vhost::{Backend, Steering, Vhost, ring_features},
};
use crate::sys::io::{
    TapQueue, set_tap_header_size, set_tap_offload, set_tap_queue, set_vhost_net_backend,
};

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
const F_CTRL_VQ: u64 = 1 << 17;
const F_MQ: u64 = 1 << 22;

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

/// Receive and transmit.
const QUEUES_OF_A_PAIR: u16 = 2;

/// What one pair of queues is made of.
pub struct PairFiles {
    /// The tap, or one queue of it.
    pub tap: OwnedFd,
    /// `/dev/vhost-net`.
    pub vhost: OwnedFd,
}

/// The tap behind the device, by its queues.
struct Tap {
    queues: Vec<OwnedFd>,
    /// What the tap was told last. Each telling takes a lock that all of the host's network shares, so it is told
    /// only what is new: a guest can reset its card without end.
    told: Mutex<Told>,
}

struct Told {
    offloads: u32,
    /// How fast: a guest can also want other offloads each time. The control queue has its own.
    pace: Pace,
    /// Numbers of the queues after the first that take part.
    attached: BTreeSet<u16>,
}

impl Tap {
    /// Takes over a tap without offloads, of whose queues the first takes part.
    fn new(queues: Vec<OwnedFd>) -> Self {
        let told = Told { offloads: 0, pace: Pace::new(Instant::now()), attached: BTreeSet::new() };
        Self { queues, told: Mutex::new(told) }
    }

    fn set_offloads(&self, tap: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.offloads != offloads {
            let now = Instant::now();
            thread::sleep(told.pace.admit(now).saturating_duration_since(now));
            set_tap_offload(tap, offloads)?;
            told.offloads = offloads;
        }
        Ok(())
    }

    fn attach(&self, unit: u16) -> io::Result<()> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !told.attached.contains(&unit) {
            set_tap_queue(self.queue(unit)?, TapQueue::Attached)?;
            told.attached.insert(unit);
        }
        Ok(())
    }

    fn detach(&self, unit: u16) -> io::Result<()> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.attached.remove(&unit) {
            set_tap_queue(self.queue(unit)?, TapQueue::Detached)?;
        }
        Ok(())
    }

    fn queue(&self, unit: u16) -> io::Result<BorrowedFd<'_>> {
        let queue = self.queues.get(usize::from(unit)).ok_or(io::ErrorKind::NotFound)?;
        Ok(queue.as_fd())
    }

    /// Returns how many pairs of queues there are after the first.
    fn more(&self) -> u16 {
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX).saturating_sub(1)
    }
}

impl Backend for Tap {
    const QUEUES: u16 = QUEUES_OF_A_PAIR;
    const DEVICE: &'static str = "net";

    fn connect(&self, unit: u16, vhost: BorrowedFd<'_>, features: u64) -> io::Result<()> {
        let tap = self.queue(unit)?;
        if unit == 0 {
            // Of the tap, not of its queue.
            self.set_offloads(tap, tun_offloads(features))?;
        } else {
            self.attach(unit)?;
        }
        set_vhost_net_backend(vhost, 0, Some(tap))?;
        set_vhost_net_backend(vhost, 1, Some(tap))
    }

    fn disconnect(&self, unit: u16, vhost: BorrowedFd<'_>) -> io::Result<()> {
        let outcomes =
            [set_vhost_net_backend(vhost, 0, None), set_vhost_net_backend(vhost, 1, None)];
        self.detach(unit)?;
        outcomes.into_iter().collect()
    }

    fn steering(&self, features: u64) -> Steering {
        let more = if features & F_MQ == 0 { 0 } else { self.more() };
        let offered = self.more() > 0 && features & F_CTRL_VQ != 0;
        Steering { more, control: offered.then_some((more + 1) * QUEUES_OF_A_PAIR) }
    }
}

/// A network device.
pub struct Net {
    vhost: Vhost<Tap>,
    features: u64,
    queues: u16,
    config: [u8; CONFIG_SIZE],
}

/// Makes a network device over an open tap and `/dev/vhost-net`, each opened once for each pair of queues.
pub fn open(
    net: &types::vm::Net,
    first: PairFiles,
    more: Vec<PairFiles>,
    slot: u8,
    platform: &Platform,
) -> Result<VirtioPci, VirtioError> {
    let net = Net::new(net, first, more, platform)?;
    VirtioPci::new(Box::new(net), slot, platform)
}

impl Net {
    /// Returns the device, not started.
    fn new(
        net: &types::vm::Net,
        first: PairFiles,
        more: Vec<PairFiles>,
        platform: &Platform,
    ) -> Result<Self, VirtioError> {
        let pairs = u16::try_from(more.len() + 1).unwrap_or(u16::MAX);
        let config = config(net, pairs)?;
        let host = |what| move |source| VirtioError::Host { device: IDENTITY.name, what, source };
        let PairFiles { tap, vhost } = first;
        set_tap_header_size(tap.as_fd(), HEADER_SIZE)
            .map_err(host("the descriptor is no tap with IFF_VNET_HDR"))?;
        let guest_offloads = probe_offloads(tap.as_fd());
        set_tap_offload(tap.as_fd(), 0).map_err(host("cannot set up the tap"))?;
        let (mut queues, mut further) = (vec![tap], Vec::new());
        for PairFiles { tap, vhost } in more {
            set_tap_queue(tap.as_fd(), TapQueue::Detached).map_err(host(
                "the descriptor is no attached queue of a tap with IFF_MULTI_QUEUE",
            ))?;
            queues.push(tap);
            further.push(vhost);
        }
        let (vhost, offered) = Vhost::new(vhost, further, Tap::new(queues), &platform.ram)?;
        let steered = if pairs > 1 { F_MQ | F_CTRL_VQ } else { 0 };
        let features = ring_features(offered)
            | (offered & F_MRG_RXBUF)
            | guest_offloads
            | HOST_OFFLOADS
            | steered
            | F_MAC
            | F_MTU
            | F_STATUS;
        let control = u16::from(pairs > 1);
        Ok(Self { vhost, features, queues: pairs * QUEUES_OF_A_PAIR + control, config })
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
        self.queues
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

    fn signals_changed(&mut self) {
        self.vhost.look();
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

fn config(net: &types::vm::Net, pairs: u16) -> Result<[u8; CONFIG_SIZE], VirtioError> {
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
    if u32::from(pairs) > MAX_QUEUE_PAIRS {
        return Err(refused(format!("{pairs} pairs of queues are more than {MAX_QUEUE_PAIRS}")));
    }
    let mut config = [0; CONFIG_SIZE];
    config[..6].copy_from_slice(&mac);
    config[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
    config[8..10].copy_from_slice(&pairs.to_le_bytes());
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
    use std::time::Duration;

    use super::*;

    fn net(mac: &str, mtu: u16) -> types::vm::Net {
        types::vm::Net {
            tap_fd: -1,
            vhost_fd: -1,
            more_pairs: Vec::new(),
            mac: mac.to_owned(),
            mtu,
        }
    }

    #[test]
    fn configuration_carries_address_link_pairs_and_mtu() {
        let bytes = config(&net("02:00:5e:10:00:ff", 1450), 3).ok();
        assert_eq!(bytes, Some([2, 0, 0x5e, 0x10, 0, 0xff, 1, 0, 3, 0, 0xaa, 0x05]));
    }

    #[test]
    fn senseless_addresses_are_refused() {
        let bad =
            ["", "02:00:00:00:00", "01:00:00:00:00:01", "00:00:00:00:00:00", "02:00:00:00:00:1"];
        assert_eq!(bad.map(|mac| config(&net(mac, 1500), 1).is_ok()), [false; 5]);
        let bad = ["02:00:00:00:00:01:02", "02-00-00-00-00-01", "02:00:00:00:00:+1"];
        assert_eq!(bad.map(|mac| config(&net(mac, 1500), 1).is_ok()), [false; 3]);
    }

    #[test]
    fn an_mtu_too_small_for_ipv6_is_refused() {
        assert!(config(&net("02:00:00:00:00:01", 1279), 1).is_err());
    }

    #[test]
    fn segmentation_is_not_asked_of_the_tap_without_checksums() {
        assert_eq!(tun_offloads(F_GUEST_TSO4 | F_GUEST_TSO6), 0);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_TSO4), 0x03);
    }

    /// A tap is told only what is new: this one cannot be told anything.
    #[test]
    fn a_tap_that_knows_already_is_left_alone() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let tap = Tap::new(vec![file(), file()]);
        let first = tap.queue(0).expect("there");
        assert!(tap.set_offloads(first, 0).is_ok() && tap.detach(1).is_ok());
        assert!(tap.set_offloads(first, 1).is_err() && tap.attach(1).is_err());
        // What failed is tried again.
        assert!(tap.set_offloads(first, 1).is_err() && tap.detach(1).is_ok());
    }

    /// Of 24 changes, 16 go at once and the others a tenth of a second apart.
    #[test]
    fn a_tap_is_told_new_offloads_at_a_pace() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let tap = Tap::new(vec![file]);
        let first = tap.queue(0).expect("there");
        let start = Instant::now();
        assert!((0..24).all(|_| tap.set_offloads(first, 1).is_err()));
        assert!(start.elapsed() >= Duration::from_millis(700), "{:?}", start.elapsed());
    }

    #[test]
    fn more_pairs_than_the_limit_are_refused() {
        assert!(config(&net("02:00:00:00:00:01", 1500), 8).is_ok());
        assert!(config(&net("02:00:00:00:00:01", 1500), 9).is_err());
    }

    /// virtio §5.1.2: the control queue is behind the pairs, of which there is one without MQ.
    #[test]
    fn the_control_queue_is_where_the_features_put_it() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let tap = |queues: usize| Tap::new((0..queues).map(|_| file()).collect());
        let steering = |more, control| Steering { more, control };
        assert_eq!(tap(4).steering(F_MQ | F_CTRL_VQ), steering(3, Some(8)));
        assert_eq!(tap(4).steering(F_CTRL_VQ), steering(0, Some(2)));
        // MQ needs CTRL_VQ (§5.1.3.1); a driver that forgot it can turn nothing on.
        assert_eq!(tap(4).steering(F_MQ), steering(3, None));
        assert_eq!(tap(1).steering(F_MQ | F_CTRL_VQ), steering(0, None));
    }
}
