use super::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);

fn bindings() -> Bindings {
    Bindings::new(MAC, None, Vec::new())
}

fn address(text: &str) -> Ipv6Addr {
    text.parse().expect("an address")
}

/// A solicitation or advertisement, RFC 4861 §4.3 and §4.4.
fn discovery(kind: u8, source: &str, target: &str) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, 24, 58, 255];
    packet.extend(address(source).octets());
    packet.extend(address("ff02::1").octets());
    packet.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
    packet.extend(address(target).octets());
    packet
}

/// A server's message, in its headers.
fn dhcp(kind: u8, client: HardwareAddress, given: [u8; 4], options: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[2, 1, 6]);
    message[16..20].copy_from_slice(&given);
    message[28..34].copy_from_slice(&client.0);
    message[236..].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, kind]);
    message.extend_from_slice(options);
    message.push(255);
    let mut packet = frame::wrap(&message).expect("short");
    packet[20..24].copy_from_slice(&[0, 67, 0, 68]);
    packet
}

const ACK: u8 = 5;
const LEASE: [u8; 6] = [51, 4, 0, 0, 0, 60];

#[test]
fn an_acknowledged_address_is_the_guests_until_its_lease_ends() {
    let (mut guest, now) = (bindings(), Instant::now());
    guest.handle_packet(now, Way::ToGuest, &dhcp(ACK, MAC, [192, 0, 2, 7], &LEASE));
    let until = now + Duration::from_secs(60);
    let leased = Leased { address: [192, 0, 2, 7].into(), until: Some(until) };
    assert_eq!(guest.leased(), Some(leased));
    assert_eq!(guest.poll_timeout(), Some(until));
    guest.handle_timeout(until, |_| false);
    assert_eq!(guest.leased(), None);
}

#[test]
fn nothing_else_gives_an_ipv4_address() {
    let other = HardwareAddress([2, 0, 0, 0, 0, 2]);
    let given = [192, 0, 2, 7];
    for (way, packet) in [
        (Way::FromGuest, dhcp(ACK, MAC, given, &LEASE)),
        (Way::ToGuest, dhcp(ACK, other, given, &LEASE)),
        (Way::ToGuest, dhcp(2, MAC, given, &LEASE)),
        (Way::ToGuest, dhcp(6, MAC, given, &[])),
        // The answer to an inquiry.
        (Way::ToGuest, dhcp(ACK, MAC, [0; 4], &[])),
        (Way::ToGuest, dhcp(ACK, MAC, [255; 4], &LEASE)),
        (Way::ToGuest, dhcp(ACK, MAC, [224, 0, 0, 1], &LEASE)),
        (Way::ToGuest, Vec::new()),
        (Way::ToGuest, vec![0x45]),
    ] {
        let mut guest = bindings();
        guest.handle_packet(Instant::now(), way, &packet);
        assert_eq!(guest.leased(), None, "{way:?} {packet:02x?}");
    }
}

#[test]
fn an_address_is_bound_when_nobody_defends_it() {
    let (mut guest, now) = (bindings(), Instant::now());
    let wanted = "2001:db8::7";
    guest.handle_packet(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    assert_eq!(guest.poll_timeout(), Some(now + TENTATIVE));
    guest.handle_timeout(now + TENTATIVE / 2, |_| false);
    assert!(guest.asked_for().is_empty());
    guest.handle_timeout(now + TENTATIVE, |_| false);
    assert_eq!(guest.asked_for(), [address(wanted)]);
    assert_eq!(guest.ipv6(), [address("fe80::ff:fe00:1"), address(wanted)]);
    assert_eq!(guest.poll_timeout(), None);
}

#[test]
fn an_address_that_somebody_has_or_wants_is_not_bound() {
    let wanted = "fe80::1";
    for (kind, source) in [(ADVERTISEMENT, wanted), (SOLICITATION, "::")] {
        let (mut guest, now) = (bindings(), Instant::now());
        guest.handle_packet(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
        guest.handle_packet(now, Way::ToGuest, &discovery(kind, source, wanted));
        guest.handle_timeout(now + TENTATIVE, |_| false);
        assert!(guest.asked_for().is_empty());
    }
    let (mut guest, now) = (bindings(), Instant::now());
    guest.handle_packet(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    guest.handle_timeout(now + TENTATIVE, |address| {
        address == "fe80::1".parse::<Ipv6Addr>().expect("one")
    });
    assert!(guest.asked_for().is_empty());
}

#[test]
fn what_only_says_that_it_has_an_address_gets_none() {
    let (mut guest, now) = (bindings(), Instant::now());
    let mut forwarded = discovery(SOLICITATION, "::", "2001:db8::7");
    forwarded[7] = 254;
    for packet in [
        discovery(ADVERTISEMENT, "2001:db8::7", "2001:db8::7"),
        discovery(SOLICITATION, "2001:db8::7", "2001:db8::1"),
        discovery(SOLICITATION, "::", "ff02::1"),
        discovery(SOLICITATION, "::", "::"),
        discovery(SOLICITATION, "::", "2001:db8::7")[..60].to_vec(),
        forwarded,
    ] {
        guest.handle_packet(now, Way::FromGuest, &packet);
    }
    assert_eq!(guest.poll_timeout(), None);
}

#[test]
fn a_guest_has_few_addresses_and_the_newest_ones() {
    let (mut guest, now) = (bindings(), Instant::now());
    let all: Vec<String> = (1..=20).map(|n| format!("2001:db8::{n:x}")).collect();
    for wanted in &all[..10] {
        guest.handle_packet(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    }
    guest.handle_timeout(now + TENTATIVE, |_| false);
    let expected: Vec<_> = (2..=8).map(|n| address(&format!("2001:db8::{n:x}"))).collect();
    assert_eq!(guest.asked_for(), expected);
}
