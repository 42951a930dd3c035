//! Which addresses of the provider's network are a guest's. Pure.
//!
//! What the network says is believed, what the guest says is not:
//!
//! * IPv4: the address that a DHCP server of the network acknowledged to the guest's hardware address;
//!   until its lease ends, or the guest gives it up. Guests cannot send such messages. Servers go by the
//!   name that a client gives itself ([`Identity`]), where it gives one, so under the name of another
//!   station a guest gets the other's address. That of another's hardware address is not believed; an
//!   address under any other name is the guest's once nobody answered for it in [`TENTATIVE`], and no other
//!   guest has it: first come, first served, as for IPv6.
//! * IPv6: an address that the guest asked about, as it must before it uses one (RFC 4862 §5.4), and
//!   that nobody defended for [`TENTATIVE`]; first come, first served (RFC 6620). And the link-local
//!   address that its hardware address makes. A question counts only when whoever has the address must
//!   hear and answer it: it is well formed, and goes where they listen.
//!
//! A guest that has many addresses, as one with a new temporary address every day (RFC 8981), loses the
//! one that it used longest ago when it takes another ([`MAX_ADDRESSES`]).
//!
//! It reads the frames that pass a guest's tap, and is told the time. Which of the guest's frames are
//! let through is not known here, so what may be one counts against the guest.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use crate::net::{
    HardwareAddress, arp,
    dhcp::{self, Asked, Identity, acknowledged, asked, frame},
};

/// How long somebody has to defend an address: RFC 6620 §3.2.4, `TENT_LT`.
pub const TENTATIVE: Duration = Duration::from_millis(500);
/// IPv6 addresses that a guest may have at a time, beside the one of its hardware address: a link-local
/// one, and in each of three networks a stable one and the temporary ones of a week and a day (RFC 8981
/// §3.8). What it used longest ago goes when it asks for more, but never its only link-local one, without
/// which it has no router.
pub const MAX_ADDRESSES: usize = 32;
/// Addresses that a guest may ask about at a time.
const MAX_TENTATIVE: usize = 8;

/// Defences that are remembered, and for how long: the guest's question may be seen after its answer.
const MAX_DEFENDED: usize = 64;
const DEFENDED: Duration = Duration::from_secs(10);
/// Questions to DHCP servers that may wait for an answer.
const MAX_ASKED: usize = 8;
/// Questions whether somebody has an address, in equal pauses: one may be lost.
const MAX_PROBES: u32 = 2;

/// Most names of a guest in one start: those of its initramfs, of what configures it at first, and of its
/// system may differ, and so may those of the system that it installs and restarts with.
const MAX_NAMES: usize = 8;
/// No lease is believed for so long after the guest asked under another's name, or in a way that cannot
/// be read: longer than servers take to answer.
const DISTRUST: Duration = Duration::from_secs(10);

/// Ethernet header: destination, source, type.
const ETHERNET_HEADER: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// IPv6 header, RFC 8200 §3, and neighbour discovery, RFC 4861 §4.3, §4.4 and §4.6.1.
const IPV6_HEADER: usize = 40;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_LINK_LAYER: u8 = 1;
/// Nobody beyond a router can have sent what came with this hop limit.
const NEVER_FORWARDED: u8 = 255;

/// Which way a frame passed the tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The guest sent it.
    FromGuest,
    /// It came for the guest.
    ToGuest,
}

/// An IPv4 address and when its lease ends; never when `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leased {
    /// The address.
    pub address: Ipv4Addr,
    /// The end.
    pub until: Option<Instant>,
}

/// Why a guest does not get the IPv4 address that it asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It calls itself by another's hardware address.
    Foreign,
    /// Somebody else has the address that a server gave it: a station with this hardware address, or another
    /// guest of the node.
    InUse(Ipv4Addr, Option<HardwareAddress>),
    /// It had [`MAX_NAMES`] names since its start.
    Names,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str(
                "its DHCP client calls itself by another card's hardware address (option 61); have it use its own",
            ),
            Self::InUse(address, Some(hardware)) => write!(
                f,
                "the DHCP server gave it {address}, which {hardware} uses; take that station off the address, or the address out of the server's pool"
            ),
            Self::InUse(address, None) => write!(
                f,
                "the DHCP server gave it {address}, which another machine of this node has; their images have the same DHCP client identifier (machine-id or DUID), give each its own"
            ),
            Self::Names => write!(
                f,
                "its DHCP client had {MAX_NAMES} identifiers (option 61) since the machine was started; start it again"
            ),
        }
    }
}

/// How much a question to DHCP servers is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worth {
    /// It was in the name of the guest's hardware address.
    Sure,
    /// It was under a name that somebody else may have.
    Doubtful,
}

/// An address that the guest was given under a name.
#[derive(Debug, Clone, Copy)]
struct Doubted {
    leased: Leased,
    /// Questions that were asked, and when something is to be done next.
    probes: u32,
    next: Instant,
}

/// A guest's addresses.
#[derive(Debug, Clone)]
pub struct Bindings {
    hardware: HardwareAddress,
    leased: Option<Leased>,
    /// What it used longest ago comes first.
    bound: Vec<Ipv6Addr>,
    tentative: Vec<(Ipv6Addr, Instant)>,
    /// What was defended lately, and until when that counts.
    defended: Vec<(Ipv6Addr, Instant)>,
    /// Transaction numbers of the latest requests for a lease under the guest's own names.
    asked: Vec<(u32, Worth)>,
    /// The names that the guest used first since it was started.
    names: Vec<Vec<u8>>,
    /// What a server gave it that somebody else may have.
    doubted: Option<Doubted>,
    /// Until when no lease is believed.
    distrusted: Option<Instant>,
    /// Why it got no address since it was started, one of a kind, and whether that is still to be told.
    refusals: Vec<(Refusal, Telling)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Telling {
    Due,
    Done,
}

impl Bindings {
    /// Returns those of a guest: what is known of it from before, or nothing. Of too many addresses the
    /// last ones count.
    pub fn new(
        hardware: HardwareAddress,
        leased: Option<Leased>,
        mut bound: Vec<Ipv6Addr>,
    ) -> Self {
        bound.drain(..bound.len().saturating_sub(MAX_ADDRESSES));
        Self {
            hardware,
            leased,
            bound,
            tentative: Vec::new(),
            defended: Vec::new(),
            asked: Vec::new(),
            names: Vec::new(),
            doubted: None,
            distrusted: None,
            refusals: Vec::new(),
        }
    }

    /// Takes a frame, from its Ethernet header on, that passed the tap. Anything is accepted.
    pub fn handle_frame(&mut self, now: Instant, way: Way, frame: &[u8]) {
        let Some((header, packet)) = frame.split_first_chunk::<ETHERNET_HEADER>() else { return };
        let [_, _, _, _, _, _, source @ .., high, low] = header;
        if way == Way::FromGuest && *source != self.hardware.0 {
            return;
        }
        match (way, [*high, *low]) {
            (Way::ToGuest, ETHERTYPE_IPV4) => self.handle_answer(now, packet),
            (Way::FromGuest, ETHERTYPE_IPV4) => self.handle_request(now, packet),
            (Way::ToGuest, arp::ETHERTYPE) => self.handle_arp(packet),
            (Way::ToGuest, ETHERTYPE_IPV6) => self.handle_defence(now, packet),
            (Way::FromGuest, ETHERTYPE_IPV6) => {
                if let Some(target) = claim(frame) {
                    self.handle_claim(now, target);
                }
            }
            (_, _) => {}
        }
    }

    /// Takes a frame, from its Ethernet header on, that the guest sent, and which shows what it uses: any
    /// message of neighbour discovery. Anything is accepted; it gives no address.
    pub fn handle_use(&mut self, frame: &[u8]) {
        if frame.get(6..12) != Some(&self.hardware.0) {
            return;
        }
        for address in used(frame).into_iter().flatten().flatten() {
            self.renew(address);
        }
    }

    /// Some frames were not seen. What they may have said counts against the guest, which has to ask
    /// anew.
    pub fn handle_loss(&mut self, now: Instant) {
        self.tentative.clear();
        self.asked.clear();
        self.distrusted = Some(now + DISTRUST);
        // An answer may have been lost; servers are not asked again until half of the lease is over.
        if let Some(doubted) = &mut self.doubted {
            (doubted.probes, doubted.next) = (0, now);
        }
    }

    /// Binds what nobody defended, unless `taken` says that another guest of the node has it, and drops
    /// what ended.
    pub fn handle_timeout(&mut self, now: Instant, taken: impl Fn(IpAddr) -> bool) {
        if self.leased.and_then(|leased| leased.until).is_some_and(|until| until <= now) {
            self.leased = None;
        }
        if let Some(Doubted { leased, .. }) =
            self.doubted.take_if(|doubted| doubted.probes == MAX_PROBES && doubted.next <= now)
        {
            let address = leased.address;
            match taken(address.into()) {
                false => self.leased = Some(leased),
                true => self.refuse(Refusal::InUse(address, None)),
            }
        }
        let (due, waiting) = self.tentative.iter().partition::<Vec<_>, _>(|(_, at)| *at <= now);
        self.tentative = waiting;
        for (address, _) in due {
            if !taken(address.into()) {
                self.make_room();
                self.bound.push(address);
            }
        }
    }

    /// Returns when [`Self::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let lease = self.leased.and_then(|leased| leased.until);
        let doubted = self.doubted.map(|doubted| doubted.next);
        self.tentative.iter().map(|(_, at)| *at).chain(lease).chain(doubted).min()
    }

    /// Returns the frame to send to the network in the guest's name now, after any input: the question
    /// whether somebody has an address.
    pub fn poll_probe(&mut self, now: Instant) -> Option<Vec<u8>> {
        let due = |doubted: &&mut Doubted| doubted.probes < MAX_PROBES && doubted.next <= now;
        let doubted = self.doubted.as_mut().filter(due)?;
        doubted.probes += 1;
        doubted.next = now + TENTATIVE / MAX_PROBES;
        Some(arp::probe(self.hardware, doubted.leased.address))
    }

    /// Returns why the guest got no IPv4 address, each kind of reason once in a start.
    pub fn poll_refusal(&mut self) -> Option<Refusal> {
        let mut due = self.refusals.iter_mut().filter(|(_, telling)| *telling == Telling::Due);
        let (refusal, telling) = due.next()?;
        *telling = Telling::Done;
        Some(*refusal)
    }

    /// Returns the IPv4 address, if a server gave one.
    pub fn leased(&self) -> Option<Leased> {
        self.leased
    }

    /// Returns the IPv6 addresses that were asked for; what was used longest ago comes first.
    pub fn asked_for(&self) -> &[Ipv6Addr] {
        &self.bound
    }

    /// Returns all IPv6 addresses.
    pub fn ipv6(&self) -> Vec<Ipv6Addr> {
        [&[link_local(self.hardware)], &self.bound[..]].concat()
    }

    /// Returns whether an address is the guest's.
    pub fn has(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.leased.is_some_and(|leased| leased.address == address),
            IpAddr::V6(address) => {
                self.bound.contains(&address) || address == link_local(self.hardware)
            }
        }
    }

    /// Returns whether the addresses are the same as at another time.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.leased, &self.bound) == (other.leased, &other.bound)
    }

    /// Takes the IPv4 address away, which the network gave to somebody else.
    pub fn forget_lease(&mut self) {
        self.leased = None;
    }

    fn make_room(&mut self) {
        let is_local = |address: &Ipv6Addr| address.is_unicast_link_local();
        let locals = self.bound.iter().filter(|address| is_local(address)).count();
        if self.bound.len() >= MAX_ADDRESSES {
            let spare = |address: &Ipv6Addr| locals > 1 || !is_local(address);
            let oldest = self.bound.iter().position(spare);
            self.bound.remove(oldest.unwrap_or(0));
        }
    }

    /// The guest uses an address; if it is its own, others go first.
    fn renew(&mut self, address: Ipv6Addr) {
        if let Some(at) = self.bound.iter().position(|known| *known == address) {
            self.bound[at..].rotate_left(1);
        }
    }

    fn handle_request(&mut self, now: Instant, packet: &[u8]) {
        let message = frame::unwrap_request(packet).map(|(_, message)| message);
        match message.and_then(|message| asked(message, self.hardware)) {
            Some(Asked::GivesUp) => (self.leased, self.doubted) = (None, None),
            Some(Asked::Lease { xid, identity }) => match self.worth(identity) {
                Ok(worth) => self.handle_question(xid, worth),
                // What servers answer is for whom it names.
                Err(refusal) => {
                    self.distrusted = Some(now + DISTRUST);
                    self.refuse(refusal);
                }
            },
            None if may_reach_server(packet) => self.distrusted = Some(now + DISTRUST),
            None => {}
        }
    }

    /// The guest is started, maybe with another system: it may have other names than before.
    pub fn handle_start(&mut self) {
        self.names.clear();
        self.refusals.clear();
    }

    /// A name is the guest's own when it used few before.
    fn worth(&mut self, identity: Identity) -> Result<Worth, Refusal> {
        match identity {
            Identity::Hardware => Ok(Worth::Sure),
            Identity::Named(name) if self.names.contains(&name) => Ok(Worth::Doubtful),
            Identity::Named(_) if self.names.len() >= MAX_NAMES => Err(Refusal::Names),
            Identity::Named(name) => {
                self.names.push(name);
                Ok(Worth::Doubtful)
            }
            Identity::Foreign => Err(Refusal::Foreign),
        }
    }

    /// One transaction may have several questions; an answer may be to any of them.
    fn handle_question(&mut self, xid: u32, worth: Worth) {
        let before = self.asked.iter().position(|(asked, _)| *asked == xid);
        let before = before.map(|at| self.asked.remove(at).1);
        if self.asked.len() == MAX_ASKED {
            self.asked.remove(0);
        }
        let worth = before.filter(|before| *before == Worth::Doubtful).unwrap_or(worth);
        self.asked.push((xid, worth));
    }

    fn refuse(&mut self, refusal: Refusal) {
        let kind = std::mem::discriminant(&refusal);
        if self.refusals.iter().all(|(known, _)| std::mem::discriminant(known) != kind) {
            self.refusals.push((refusal, Telling::Due));
        }
    }

    fn handle_answer(&mut self, now: Instant, packet: &[u8]) {
        let Some((_, message)) = frame::unwrap(packet) else { return };
        let Some(given) = acknowledged(message, self.hardware) else { return };
        let asked = self.asked.iter().find(|(xid, _)| *xid == given.xid);
        let (Some((_, worth)), false) = (asked, self.distrusted.is_some_and(|until| now < until))
        else {
            return;
        };
        let until = given.seconds.map(|seconds| now + Duration::from_secs(seconds.into()));
        let leased = Leased { address: given.address, until };
        let is_renewed = self.leased.is_some_and(|known| known.address == given.address);
        match (*worth, &mut self.doubted) {
            (Worth::Doubtful, Some(doubted)) if doubted.leased.address == given.address => {
                doubted.leased = leased;
            }
            (Worth::Doubtful, _) if !is_renewed => {
                self.doubted = Some(Doubted { leased, probes: 0, next: now });
            }
            (Worth::Doubtful | Worth::Sure, _) => {
                (self.leased, self.doubted) = (Some(leased), None);
            }
        }
    }

    /// Somebody has an address.
    fn handle_arp(&mut self, packet: &[u8]) {
        let Some((hardware, address)) = arp::sender(packet) else { return };
        let is_other =
            |doubted: &mut Doubted| doubted.leased.address == address && hardware != self.hardware;
        if self.doubted.take_if(is_other).is_some() {
            self.refuse(Refusal::InUse(address, Some(hardware)));
        }
    }

    fn handle_claim(&mut self, now: Instant, target: Ipv6Addr) {
        self.renew(target);
        let known = self.bound.contains(&target)
            || self.tentative.iter().any(|(address, _)| *address == target)
            || self.defended.iter().any(|(address, until)| *address == target && now < *until);
        let own = target == link_local(self.hardware);
        if !known && !own && self.tentative.len() < MAX_TENTATIVE {
            self.tentative.push((target, now + TENTATIVE));
        }
    }

    /// Somebody has an address, or asks about it at the same time.
    fn handle_defence(&mut self, now: Instant, packet: &[u8]) {
        let Some(target) = defended(packet) else { return };
        self.tentative.retain(|(address, _)| *address != target);
        self.defended.retain(|(address, until)| *address != target && now < *until);
        if self.defended.len() == MAX_DEFENDED {
            self.defended.remove(0);
        }
        self.defended.push((target, now + DEFENDED));
    }
}

/// Whether a packet that is no readable request may be one all the same, for whoever puts it together
/// or looks at less: UDP to the servers' port, or the first part of something that was cut in pieces.
fn may_reach_server(packet: &[u8]) -> bool {
    const UDP: u8 = 17;
    let header = packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
    let is_udp = packet.get(9) == Some(&UDP);
    let to = packet.get(header + 2..header + 4);
    is_udp && to.is_none_or(|to| *to == dhcp::SERVER_PORT.to_be_bytes())
}

/// Reads whom an advertisement or a solicitation is about, as leniently as hosts may; `None` when it is
/// anything else.
fn defended(packet: &[u8]) -> Option<Ipv6Addr> {
    let (header, body) = packet.split_first_chunk::<IPV6_HEADER>()?;
    let [SOLICITATION | ADVERTISEMENT, 0, _, _, _, _, _, _, rest @ ..] = body else { return None };
    let ours = header[6] == ICMPV6 && header[7] == NEVER_FORWARDED;
    ours.then_some((*rest.first_chunk::<16>()?).into())
}

/// Reads which addresses a guest shows that it uses, when it asks or answers: the source, and the target,
/// which is its own when it answers.
fn used(frame: &[u8]) -> Option<[Option<Ipv6Addr>; 2]> {
    let (link, packet) = frame.split_first_chunk::<ETHERNET_HEADER>()?;
    let target = defended(packet).filter(|_| link[12..] == ETHERTYPE_IPV6)?;
    let source: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
    let answers = packet.get(IPV6_HEADER) == Some(&ADVERTISEMENT);
    Some([Some(source.into()), answers.then_some(target)])
}

/// Reads which address a frame asks about that somebody wants to use. `None` when it is anything else,
/// or a host that has the address would not see it or not answer: RFC 4861 §7.1.1, RFC 4862 §5.4.2 and
/// §5.4.3, RFC 2464 §7.
fn claim(frame: &[u8]) -> Option<Ipv6Addr> {
    let (link, packet) = frame.split_first_chunk::<ETHERNET_HEADER>()?;
    let (header, rest) = packet.split_first_chunk::<IPV6_HEADER>()?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let body = rest.get(..length)?;
    let [SOLICITATION, 0, _, _, _, _, _, _, message @ ..] = body else { return None };
    let (target, options) = message.split_first_chunk::<16>()?;
    let target = Ipv6Addr::from(*target);
    let [.., a, b, c] = target.octets();
    let group =
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    let unusable = target.is_multicast() || target.is_unspecified() || target.is_loopback();
    let sound = header[0] >> 4 == 6
        && header[6] == ICMPV6
        && header[7] == NEVER_FORWARDED
        && header[8..24] == Ipv6Addr::UNSPECIFIED.octets()
        && header[24..40] == group.octets()
        && link[..6] == [0x33, 0x33, 0xff, a, b, c]
        && is_unsigned_by_source(options);
    // The addresses, and the pseudo header's length and next header.
    let pseudo = frame::sum(u32::try_from(length).ok()? + u32::from(ICMPV6), &header[8..40]);
    let summed = frame::sum(u32::from(pseudo), body) == u16::MAX;
    (sound && summed && !unusable).then_some(target)
}

/// Whether options are well formed and none is the sender's link-layer address, with which a question
/// from no address is discarded.
fn is_unsigned_by_source(mut options: &[u8]) -> bool {
    while let [kind, units, ..] = options {
        let rest = options.get(usize::from(*units) * 8..);
        let (Some(rest), 1.., true) = (rest, *units, *kind != SOURCE_LINK_LAYER) else {
            return false;
        };
        options = rest;
    }
    options.is_empty()
}

/// RFC 4291 appendix A: the address that a hardware address makes.
pub(super) fn link_local(hardware: HardwareAddress) -> Ipv6Addr {
    let HardwareAddress([a, b, c, d, e, f]) = hardware;
    let words = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
    Ipv6Addr::new(0xfe80, 0, 0, 0, words[0], words[1], words[2], words[3])
}

#[cfg(test)]
#[path = "bindings_tests.rs"]
mod tests;
