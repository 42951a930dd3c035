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
//! Receive queue N is queue 2 N and transmit queue N is 2 N + 1; the control queue follows the last pair,
//! or the first one if the driver did not take VIRTIO_NET_F_MQ, which is offered with several pairs. The
//! tap's further queues are detached until the driver turns their pairs on (`control`), so that the host
//! puts frames only where the driver looks.
//!
//! By the control queue the driver also switches off and on what it takes without checksums and
//! unsegmented: Linux' does for an XDP program. A tap with one queue and without such offloads has none.

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
const F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
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
const F_GUEST_USO4: u64 = 1 << 54;
const F_GUEST_USO6: u64 = 1 << 55;
const F_HOST_USO: u64 = 1 << 56;

/// What the tap does for the driver without being asked.
const HOST_OFFLOADS: u64 = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN;

/// Unsegmented TCP and UDP that the driver may take.
const GUEST_TSO: u64 = F_GUEST_TSO4 | F_GUEST_TSO6;
const GUEST_USO: u64 = F_GUEST_USO4 | F_GUEST_USO6;
/// All that the driver may take, and may switch off and on.
const GUEST_OFFLOADS: u64 = F_GUEST_CSUM | GUEST_TSO | F_GUEST_ECN | GUEST_USO;

/// TUN_F_* of linux/if_tun.h, each with the feature that lets the driver take such frames.
const TUN_OFFLOADS: [(u64, u32); 6] = [
    (F_GUEST_CSUM, 0x01),
    (F_GUEST_TSO4, 0x02),
    (F_GUEST_TSO6, 0x04),
    (F_GUEST_ECN, 0x08),
    (F_GUEST_USO4, 0x20),
    (F_GUEST_USO6, 0x40),
];

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
    /// How fast, at its resets: a guest can also want other offloads each time. The control queue has its own.
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
        }
        told.set_offloads(tap, offloads)
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

impl Told {
    fn set_offloads(&mut self, tap: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
        if self.offloads != offloads {
            set_tap_offload(tap, offloads)?;
            self.offloads = offloads;
        }
        Ok(())
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

    fn switch_offloads(&self, features: u64, offloads: u64) -> io::Result<u64> {
        let in_force = switched(features, offloads).ok_or(io::ErrorKind::InvalidInput)?;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.set_offloads(self.queue(0)?, tun_offloads(in_force))?;
        Ok(in_force)
    }

    fn steering(&self, features: u64) -> Steering {
        let more = if features & F_MQ == 0 { 0 } else { self.more() };
        let taken = features & F_CTRL_VQ != 0;
        Steering { more, control: taken.then_some((more + 1) * QUEUES_OF_A_PAIR) }
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
        let features = offer(offered, guest_offloads, pairs);
        let control = u16::from(features & F_CTRL_VQ != 0);
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

/// Returns what is offered with that many pairs of queues over a tap that can do these guest offloads, of
/// what the kernel's devices offer as well.
fn offer(kernels: u64, guest_offloads: u64, pairs: u16) -> u64 {
    // Taps learnt to hand out UDP unsegmented and to take it so together, in Linux 6.2.
    let udp = if guest_offloads & GUEST_USO == 0 { 0 } else { F_HOST_USO };
    let switching = if guest_offloads == 0 { 0 } else { F_CTRL_VQ | F_CTRL_GUEST_OFFLOADS };
    let steered = if pairs > 1 { F_CTRL_VQ | F_MQ } else { 0 };
    ring_features(kernels)
        | (kernels & F_MRG_RXBUF)
        | guest_offloads
        | HOST_OFFLOADS
        | udp
        | switching
        | steered
        | F_MAC
        | F_MTU
        | F_STATUS
}

/// Returns `features`, on which both sides agreed, as they are in force when of the guest offloads only
/// these are on. `None` if the driver may not have it so: it did not say before that it can take them, or that
/// it would switch any (virtio §5.1.6.5, "Offloads State Configuration").
fn switched(features: u64, offloads: u64) -> Option<u64> {
    let others = features & !GUEST_OFFLOADS;
    let agreed = offloads & !(features & GUEST_OFFLOADS) == 0;
    (agreed && features & F_CTRL_GUEST_OFFLOADS != 0).then_some(others | offloads)
}

/// Returns the guest offloads that this tap can do. Segmentation needs checksums, and ECN needs
/// segmentation (virtio §5.1.3.1).
fn probe_offloads(tap: BorrowedFd<'_>) -> u64 {
    let steps = [
        GUEST_OFFLOADS,
        F_GUEST_CSUM | GUEST_TSO | F_GUEST_ECN,
        F_GUEST_CSUM | GUEST_TSO,
        F_GUEST_CSUM,
    ];
    steps
        .into_iter()
        .find(|features| set_tap_offload(tap, tun_offloads(*features)).is_ok())
        .unwrap_or(0)
}

/// Returns what the tap is told. It refuses segmentation without checksums, ECN without segmentation, and UDP
/// over one version of IP only (drivers/net/tun.c, `set_offload`); a driver that wants such a part does without it.
fn tun_offloads(features: u64) -> u32 {
    let refused = if features & F_GUEST_CSUM == 0 {
        GUEST_OFFLOADS
    } else {
        let ecn = if features & GUEST_TSO == 0 { F_GUEST_ECN } else { 0 };
        let udp = if features & GUEST_USO == GUEST_USO { 0 } else { GUEST_USO };
        ecn | udp
    };
    TUN_OFFLOADS
        .iter()
        .filter(|(feature, _)| features & !refused & feature != 0)
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
        assert_eq!(tun_offloads(GUEST_TSO), 0);
        assert_eq!(tun_offloads(GUEST_OFFLOADS & !F_GUEST_CSUM), 0);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_TSO4), 0x03);
    }

    /// linux/if_tun.h; what drivers/net/tun.c refuses, the tap is not told.
    #[test]
    fn a_tap_is_told_what_it_takes() {
        assert_eq!(tun_offloads(GUEST_OFFLOADS | F_MAC | F_HOST_USO), 0x6f);
        assert_eq!(tun_offloads(F_GUEST_CSUM | GUEST_USO), 0x61);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_USO4), 0x01);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_TSO6 | F_GUEST_USO6), 0x05);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_TSO6 | F_GUEST_ECN), 0x0d);
        assert_eq!(tun_offloads(F_GUEST_CSUM | F_GUEST_ECN), 0x01);
    }

    /// virtio §5.1.3: 2, 17 and 22 are the control queue's, 54 to 56 are for UDP.
    #[test]
    fn what_the_tap_can_do_and_how_often_it_is_there_says_what_is_offered() {
        let offered = |guest_offloads, pairs| {
            let features = offer(u64::MAX, guest_offloads, pairs);
            [2, 17, 22, 54, 55, 56].map(|bit| features >> bit & 1)
        };
        assert_eq!(offered(GUEST_OFFLOADS, 4), [1, 1, 1, 1, 1, 1]);
        assert_eq!(offered(GUEST_OFFLOADS, 1), [1, 1, 0, 1, 1, 1]);
        assert_eq!(offered(F_GUEST_CSUM | GUEST_TSO, 1), [1, 1, 0, 0, 0, 0]);
        assert_eq!(offered(0, 4), [0, 1, 1, 0, 0, 0]);
        assert_eq!(offered(0, 1), [0; 6]);
        let without_merging = offer(!F_MRG_RXBUF, GUEST_OFFLOADS, 1);
        assert_eq!(without_merging & (F_MRG_RXBUF | GUEST_OFFLOADS), GUEST_OFFLOADS);
    }

    #[test]
    fn a_driver_switches_what_it_said_that_it_takes_and_nothing_else() {
        let others = F_CTRL_GUEST_OFFLOADS | F_CTRL_VQ | F_MAC | F_CSUM;
        let features = others | F_GUEST_CSUM | GUEST_TSO;
        assert_eq!(switched(features, 0), Some(others));
        assert_eq!(switched(features, F_GUEST_CSUM), Some(others | F_GUEST_CSUM));
        assert_eq!(switched(features, F_GUEST_CSUM | GUEST_TSO), Some(features));
        assert_eq!(switched(features, F_GUEST_CSUM | GUEST_USO), None);
        assert_eq!(switched(features, F_MAC), None, "no offload");
        assert_eq!(switched(features, 1 << 63), None);
        assert_eq!(switched(features & !F_CTRL_GUEST_OFFLOADS, 0), None);
    }

    /// This tap has no offloads and cannot be told any.
    #[test]
    fn a_switch_that_the_tap_refuses_changes_nothing() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").expect("there"));
        let tap = Tap::new(vec![file]);
        let features = F_CTRL_GUEST_OFFLOADS | F_GUEST_CSUM;
        let switch = |offloads| tap.switch_offloads(features, offloads).ok();
        let wanted = [0, F_GUEST_CSUM, F_GUEST_TSO4, 0];
        let in_force = Some(F_CTRL_GUEST_OFFLOADS);
        assert_eq!(wanted.map(switch), [in_force, None, None, in_force]);
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
        assert_eq!(tap(1).steering(F_CTRL_VQ), steering(0, Some(2)));
        assert_eq!(tap(1).steering(0), steering(0, None));
    }
}
