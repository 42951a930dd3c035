//! The server's side for one guest: every guest has a link, and so a server, of its own.
//!
//! It has one address to give and gives it to one hardware address. It keeps no state: what it
//! answers follows from the request and [`GuestLease`] alone. DHCPDECLINE and DHCPRELEASE change
//! nothing, since nobody else could get the address.
//! Source: RFC 2131 §4.3, RFC 6842.

use std::net::Ipv4Addr;

use super::message::{Delivery, Direction, Kind, Message, option};
use crate::net::{HardwareAddress, Ipv4Prefix};

/// Lease time in seconds: short enough that a guest notices new name servers within half an hour.
const LEASE_S: u32 = 3600;

/// What a guest is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestLease {
    /// Who is answered.
    pub hardware: HardwareAddress,
    /// Its address and network.
    pub address: Ipv4Prefix,
    /// Its gateway, which is also the server.
    pub gateway: Ipv4Addr,
    /// Name servers.
    pub dns: Vec<Ipv4Addr>,
    /// Largest frame payload, in bytes.
    pub mtu: u16,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Where to, port 68.
    pub to: Ipv4Addr,
    /// The DHCP message.
    pub message: Vec<u8>,
}

impl GuestLease {
    /// Returns the answer to a message from the guest; `None` when it deserves none.
    pub fn answer(&self, bytes: &[u8]) -> Option<Reply> {
        let request = Message::parse(bytes)?;
        let direct = request.direction == Direction::Request && request.giaddr.is_unspecified();
        if !direct || request.hardware != self.hardware {
            return None;
        }
        match request.kind()? {
            Kind::Discover => Some(self.grant(&request, Kind::Offer)),
            Kind::Request => self.answer_request(&request),
            Kind::Inform => Some(self.inform(&request)),
            Kind::Offer | Kind::Decline | Kind::Ack | Kind::Nak | Kind::Release => None,
        }
    }

    /// RFC 2131 §4.3.2: the address is in option 50 while it is not yet used, later in `ciaddr`.
    fn answer_request(&self, request: &Message) -> Option<Reply> {
        if request.address(option::SERVER).is_some_and(|server| server != self.gateway) {
            return None;
        }
        let wanted = request.address(option::REQUESTED_ADDRESS).unwrap_or(request.ciaddr);
        if wanted == self.address.address() {
            return Some(self.grant(request, Kind::Ack));
        }
        let refusal = self.begin(request, Kind::Nak);
        Some(Reply { to: Ipv4Addr::BROADCAST, message: refusal.to_bytes() })
    }

    /// RFC 2131 §4.3.5: the guest has its address already; it gets no lease time.
    fn inform(&self, request: &Message) -> Reply {
        let mut reply = self.begin(request, Kind::Ack);
        self.describe(&mut reply);
        Reply { to: self.address.address(), message: reply.to_bytes() }
    }

    fn grant(&self, request: &Message, kind: Kind) -> Reply {
        let mut reply = self.begin(request, kind);
        self.describe(&mut reply);
        reply.set(option::LEASE_TIME, LEASE_S.to_be_bytes());
        reply.yiaddr = self.address.address();
        reply.ciaddr = request.ciaddr;
        let to = match request.delivery {
            Delivery::Broadcast if request.ciaddr.is_unspecified() => Ipv4Addr::BROADCAST,
            Delivery::Broadcast | Delivery::Unicast => self.address.address(),
        };
        Reply { to, message: reply.to_bytes() }
    }

    fn begin(&self, request: &Message, kind: Kind) -> Message {
        let mut reply = Message::new(Direction::Reply, kind, self.hardware);
        reply.xid = request.xid;
        reply.delivery = request.delivery;
        reply.set(option::SERVER, self.gateway.octets());
        // RFC 6842 §3: as it came.
        if let Some(name) = request.bytes(option::CLIENT) {
            reply.set(option::CLIENT, name);
        }
        reply
    }

    fn describe(&self, reply: &mut Message) {
        reply.siaddr = self.gateway;
        reply.set(option::SUBNET_MASK, self.address.mask().octets());
        reply.set(option::ROUTER, self.gateway.octets());
        reply.set(option::MTU, self.mtu.to_be_bytes());
        if !self.dns.is_empty() {
            reply.set_addresses(option::NAME_SERVER, &self.dns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 1, 2);
    const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

    fn lease() -> GuestLease {
        GuestLease {
            hardware: MAC,
            address: Ipv4Prefix::new(ADDRESS, 16).expect("a length"),
            gateway: GATEWAY,
            dns: vec![Ipv4Addr::new(192, 0, 2, 53)],
            mtu: 1400,
        }
    }

    fn request(kind: Kind) -> Message {
        let mut message = Message::new(Direction::Request, kind, MAC);
        message.xid = 7;
        message
    }

    fn answer(message: &Message) -> Option<(Ipv4Addr, Message)> {
        let reply = lease().answer(&message.to_bytes())?;
        Some((reply.to, Message::parse(&reply.message).expect("our own")))
    }

    #[test]
    fn discover_is_offered_address_gateway_dns_and_mtu() {
        let (to, offer) = answer(&request(Kind::Discover)).expect("an offer");
        assert_eq!(to, ADDRESS);
        assert_eq!((offer.yiaddr, offer.xid), (ADDRESS, 7));
        assert_eq!(offer.kind(), Some(Kind::Offer));
        assert_eq!(offer.addresses(option::ROUTER), [GATEWAY]);
        assert_eq!(offer.short(option::MTU), Some(1400));
        assert_eq!(offer.address(option::SUBNET_MASK), Some(Ipv4Addr::new(255, 255, 0, 0)));
        assert_eq!(offer.addresses(option::NAME_SERVER), lease().dns);
        assert_eq!(offer.number(option::LEASE_TIME), Some(LEASE_S));
    }

    #[test]
    fn a_clients_name_is_repeated_in_every_answer() {
        for (kind, wanted) in [(Kind::Discover, ADDRESS), (Kind::Request, GATEWAY)] {
            let mut named = request(kind);
            named.set(option::CLIENT, [255, 1, 2, 3]);
            named.set(option::REQUESTED_ADDRESS, wanted.octets());
            let (_, reply) = answer(&named).expect("an answer");
            assert_eq!(reply.bytes(option::CLIENT), Some(&[255, 1, 2, 3][..]), "{kind:?}");
        }
        let (_, reply) = answer(&request(Kind::Discover)).expect("an offer");
        assert_eq!(reply.bytes(option::CLIENT), None);
    }

    #[test]
    fn a_client_that_cannot_take_unicast_is_answered_by_broadcast() {
        let mut discover = request(Kind::Discover);
        discover.delivery = Delivery::Broadcast;
        assert_eq!(answer(&discover).expect("an offer").0, Ipv4Addr::BROADCAST);
    }

    #[test]
    fn the_right_address_is_acknowledged() {
        let mut renewal = request(Kind::Request);
        renewal.ciaddr = ADDRESS;
        let (to, ack) = answer(&renewal).expect("an answer");
        assert_eq!((to, ack.kind()), (ADDRESS, Some(Kind::Ack)));
    }

    #[test]
    fn another_address_is_refused() {
        let mut wrong = request(Kind::Request);
        wrong.set(option::REQUESTED_ADDRESS, [10, 0, 0, 1]);
        let (to, nak) = answer(&wrong).expect("an answer");
        assert_eq!((to, nak.kind()), (Ipv4Addr::BROADCAST, Some(Kind::Nak)));
        assert_eq!(nak.yiaddr, Ipv4Addr::UNSPECIFIED);
    }

    #[test]
    fn strangers_relays_and_other_servers_requests_get_no_answer() {
        let mut stranger = request(Kind::Discover);
        stranger.hardware = HardwareAddress([2, 0, 0, 0, 0, 2]);
        assert_eq!(answer(&stranger), None);
        let mut relayed = request(Kind::Discover);
        relayed.giaddr = Ipv4Addr::new(10, 0, 0, 1);
        assert_eq!(answer(&relayed), None);
        let mut elsewhere = request(Kind::Request);
        elsewhere.set(option::SERVER, [10, 0, 0, 9]);
        assert_eq!(answer(&elsewhere), None);
        assert_eq!(answer(&request(Kind::Release)), None);
    }

    #[test]
    fn a_hardware_length_beyond_the_field_is_refused() {
        let mut bytes = request(Kind::Discover).to_bytes();
        bytes[2] = 255;
        assert_eq!(lease().answer(&bytes), None);
    }
}
