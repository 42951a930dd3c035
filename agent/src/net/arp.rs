//! ARP messages between Ethernet stations: a question whether somebody has an IPv4 address, and who says so.
//! Source: RFC 826, RFC 5227 §2.1.1.
//!
//! | Offset | Size | Field                                       |
//! |--------|------|---------------------------------------------|
//! | 0      | 2    | hardware type, 1 for Ethernet               |
//! | 2      | 2    | protocol, 0x0800 for IPv4                   |
//! | 4      | 2    | lengths of addresses, 6 and 4               |
//! | 6      | 2    | 1 request, 2 reply                          |
//! | 8      | 6    | the sender's hardware address               |
//! | 14     | 4    | the sender's address; none while it asks for itself |
//! | 18     | 6    | the target's hardware address               |
//! | 24     | 4    | the target's address                        |

use std::net::Ipv4Addr;

use super::HardwareAddress;

/// The Ethernet type of ARP.
pub(super) const ETHERTYPE: [u8; 2] = [0x08, 0x06];
/// Ethernet, IPv4, and the lengths of their addresses.
const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: [u8; 2] = [0, 1];

/// Returns the frame in which a station that has no address asks all others for one, before it uses it.
pub(super) fn probe(from: HardwareAddress, target: Ipv4Addr) -> Vec<u8> {
    request(from, Ipv4Addr::UNSPECIFIED, target)
}

/// Returns the frame in which a station tells all others that an address is its own (RFC 5227 §2.3).
pub(super) fn announcement(from: HardwareAddress, address: Ipv4Addr) -> Vec<u8> {
    request(from, address, address)
}

fn request(from: HardwareAddress, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(from.0);
    frame.extend(ETHERTYPE);
    frame.extend(KIND);
    frame.extend(REQUEST);
    frame.extend(from.0);
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// Returns who says that it has which address, whether it asks or answers; `None` when a packet is no ARP,
/// or its sender has no address.
pub(super) fn sender(packet: &[u8]) -> Option<(HardwareAddress, Ipv4Addr)> {
    let rest = packet.strip_prefix(&KIND)?;
    let (hardware, rest) = rest.get(2..)?.split_first_chunk::<6>()?;
    let address = Ipv4Addr::from(*rest.first_chunk::<4>()?);
    (!address.is_unspecified()).then_some((HardwareAddress(*hardware), address))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

    #[test]
    fn a_probe_is_one_of_rfc_5227_and_claims_nothing() {
        let frame = probe(MAC, ADDRESS);
        let expected = [
            &[0xff; 6][..],
            &MAC.0,
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
            &MAC.0,
            &[0; 10],
            &[192, 0, 2, 7],
        ];
        assert_eq!(frame, expected.concat());
        assert_eq!(sender(&frame[14..]), None);
    }

    #[test]
    fn an_announcement_claims_the_address_for_its_sender() {
        let frame = announcement(MAC, ADDRESS);
        assert_eq!(sender(&frame[14..]), Some((MAC, ADDRESS)));
        assert_eq!((&frame[..6], &frame[38..]), (&[0xff; 6][..], &[192, 0, 2, 7][..]));
    }

    #[test]
    fn who_has_an_address_is_read_from_questions_and_answers() {
        for operation in [1, 2] {
            let mut packet = probe(HardwareAddress([9; 6]), ADDRESS)[14..].to_vec();
            packet[7] = operation;
            packet[8..14].copy_from_slice(&MAC.0);
            packet[14..18].copy_from_slice(&ADDRESS.octets());
            assert_eq!(sender(&packet), Some((MAC, ADDRESS)));
            assert_eq!(sender(&packet[..17]), None, "cut");
            packet[5] = 16;
            assert_eq!(sender(&packet), None, "of another protocol");
        }
    }
}
