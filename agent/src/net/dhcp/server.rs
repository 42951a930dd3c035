//! The server's side for one guest: every guest has a link, and so a server, of its own.
//!
//! It has one address to give and gives it to one hardware address. It keeps no state: what it
//! answers follows from the request and [`GuestLease`] alone. DHCPDECLINE and DHCPRELEASE change
//! nothing, since nobody else could get the address.
//! Source: RFC 2131 §4.3.

use std::net::Ipv4Addr;

use dhcproto::v4::{DhcpOption, Message, MessageType, Opcode};

use super::message;
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
        let request = message::parse(bytes)?;
        let direct = request.opcode() == Opcode::BootRequest && request.giaddr().is_unspecified();
        if !direct || message::hardware(&request) != Some(self.hardware) {
            return None;
        }
        #[allow(clippy::wildcard_enum_match_arm, reason = "most kinds deserve no answer")]
        match message::kind(&request)? {
            MessageType::Discover => Some(self.reply(&request, MessageType::Offer)),
            MessageType::Request => self.answer_request(&request),
            MessageType::Inform => Some(self.reply(&request, MessageType::Ack)),
            _ => None,
        }
    }

    /// RFC 2131 §4.3.2: the address is in option 50 while it is not yet used, later in `ciaddr`.
    fn answer_request(&self, request: &Message) -> Option<Reply> {
        if message::server(request).is_some_and(|server| server != self.gateway) {
            return None;
        }
        let wanted = message::requested(request).unwrap_or(request.ciaddr());
        let kind =
            if wanted == self.address.address() { MessageType::Ack } else { MessageType::Nak };
        Some(self.reply(request, kind))
    }

    fn reply(&self, request: &Message, kind: MessageType) -> Reply {
        let mut reply = Message::default();
        reply.set_opcode(Opcode::BootReply);
        reply.set_xid(request.xid()).set_chaddr(&self.hardware.0).set_flags(request.flags());
        let options = reply.opts_mut();
        options.insert(DhcpOption::MessageType(kind));
        options.insert(DhcpOption::ServerIdentifier(self.gateway));
        if kind == MessageType::Nak {
            return Reply { to: Ipv4Addr::BROADCAST, message: message::encode(&reply) };
        }
        options.insert(DhcpOption::SubnetMask(self.address.mask()));
        options.insert(DhcpOption::Router(vec![self.gateway]));
        options.insert(DhcpOption::InterfaceMtu(self.mtu));
        if !self.dns.is_empty() {
            options.insert(DhcpOption::DomainNameServer(self.dns.clone()));
        }
        reply.set_siaddr(self.gateway);
        if message::kind(request) == Some(MessageType::Inform) {
            // RFC 2131 §4.3.5: no address and no lease time.
            return Reply { to: self.address.address(), message: message::encode(&reply) };
        }
        reply.opts_mut().insert(DhcpOption::AddressLeaseTime(LEASE_S));
        reply.set_yiaddr(self.address.address()).set_ciaddr(request.ciaddr());
        let broadcast = request.ciaddr().is_unspecified() && request.flags().broadcast();
        let to = if broadcast { Ipv4Addr::BROADCAST } else { self.address.address() };
        Reply { to, message: message::encode(&reply) }
    }
}

#[cfg(test)]
mod tests {
    use dhcproto::v4::{Flags, OptionCode};

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

    fn request(kind: MessageType) -> Message {
        let mut message = Message::default();
        message.set_opcode(Opcode::BootRequest);
        message.set_xid(7).set_chaddr(&MAC.0);
        message.opts_mut().insert(DhcpOption::MessageType(kind));
        message
    }

    fn answer(message: &Message) -> Option<(Ipv4Addr, Message)> {
        let reply = lease().answer(&message::encode(message))?;
        Some((reply.to, message::parse(&reply.message).expect("our own")))
    }

    #[test]
    fn discover_is_offered_address_gateway_dns_and_mtu() {
        let (to, offer) = answer(&request(MessageType::Discover)).expect("an offer");
        assert_eq!(to, ADDRESS);
        assert_eq!((offer.yiaddr(), offer.xid()), (ADDRESS, 7));
        assert_eq!(message::kind(&offer), Some(MessageType::Offer));
        let options = offer.opts();
        assert_eq!(options.get(OptionCode::Router), Some(&DhcpOption::Router(vec![GATEWAY])));
        assert_eq!(options.get(OptionCode::InterfaceMtu), Some(&DhcpOption::InterfaceMtu(1400)));
        assert_eq!(
            options.get(OptionCode::SubnetMask),
            Some(&DhcpOption::SubnetMask(Ipv4Addr::new(255, 255, 0, 0)))
        );
        assert_eq!(
            options.get(OptionCode::DomainNameServer),
            Some(&DhcpOption::DomainNameServer(lease().dns))
        );
    }

    #[test]
    fn a_client_that_cannot_take_unicast_is_answered_by_broadcast() {
        let mut discover = request(MessageType::Discover);
        discover.set_flags(Flags::default().set_broadcast());
        assert_eq!(answer(&discover).expect("an offer").0, Ipv4Addr::BROADCAST);
    }

    #[test]
    fn the_right_address_is_acknowledged() {
        let mut renewal = request(MessageType::Request);
        renewal.set_ciaddr(ADDRESS);
        let (to, ack) = answer(&renewal).expect("an answer");
        assert_eq!((to, message::kind(&ack)), (ADDRESS, Some(MessageType::Ack)));
    }

    #[test]
    fn another_address_is_refused() {
        let mut wrong = request(MessageType::Request);
        wrong.opts_mut().insert(DhcpOption::RequestedIpAddress(Ipv4Addr::new(10, 0, 0, 1)));
        let (to, nak) = answer(&wrong).expect("an answer");
        assert_eq!((to, message::kind(&nak)), (Ipv4Addr::BROADCAST, Some(MessageType::Nak)));
        assert_eq!(nak.yiaddr(), Ipv4Addr::UNSPECIFIED);
    }

    #[test]
    fn strangers_relays_and_other_servers_requests_get_no_answer() {
        let mut stranger = request(MessageType::Discover);
        stranger.set_chaddr(&[2, 0, 0, 0, 0, 2]);
        assert_eq!(answer(&stranger), None);
        let mut relayed = request(MessageType::Discover);
        relayed.set_giaddr(Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(answer(&relayed), None);
        let mut elsewhere = request(MessageType::Request);
        elsewhere.opts_mut().insert(DhcpOption::ServerIdentifier(Ipv4Addr::new(10, 0, 0, 9)));
        assert_eq!(answer(&elsewhere), None);
        assert_eq!(answer(&request(MessageType::Release)), None);
    }

    #[test]
    fn a_hardware_length_beyond_the_field_is_refused() {
        let mut bytes = message::encode(&request(MessageType::Discover));
        bytes[2] = 255;
        assert_eq!(lease().answer(&bytes), None);
    }
}
