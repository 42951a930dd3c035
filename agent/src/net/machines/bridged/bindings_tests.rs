use super::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);

fn bindings() -> Bindings {
    Bindings::new(MAC, None, Vec::new())
}

fn address(text: &str) -> Ipv6Addr {
    text.parse().expect("an address")
}

/// What is wrong with a question, and what makes it so: a place in the frame, and its bytes there.
struct Flaw(usize, &'static [u8]);

/// A solicitation or advertisement, RFC 4861 §4.3 and §4.4, with options, as the guest's card sends it.
fn discovery_with(kind: u8, source: &str, target: &str, options: &[u8]) -> Vec<u8> {
    let [.., a, b, c] = address(target).octets();
    let mut frame = vec![0x33, 0x33, 0xff, a, b, c];
    frame.extend(MAC.0);
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0]);
    frame.extend([u8::try_from(24 + options.len()).expect("short"), 58, 255]);
    frame.extend(address(source).octets());
    frame.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    frame.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(address(target).octets());
    frame.extend_from_slice(options);
    sign(&mut frame);
    frame
}

fn discovery(kind: u8, source: &str, target: &str) -> Vec<u8> {
    discovery_with(kind, source, target, &[])
}

/// Sets the checksum.
fn sign(frame: &mut [u8]) {
    frame[56..58].fill(0);
    let length = u32::try_from(frame.len() - 54).expect("short");
    let pseudo = frame::sum(length + 58, &frame[22..54]);
    let sum = !frame::sum(u32::from(pseudo), &frame[54..]);
    frame[56..58].copy_from_slice(&sum.to_be_bytes());
}

/// A message of DHCP in its headers, with transaction number 7.
fn dhcp(kind: u8, client: HardwareAddress, given: [u8; 4], options: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 240];
    let is_request = [1, 3, 4, 7, 8].contains(&kind);
    message[..3].copy_from_slice(&[if is_request { 1 } else { 2 }, 1, 6]);
    message[7] = 7;
    message[16..20].copy_from_slice(&given);
    message[28..34].copy_from_slice(&client.0);
    message[236..].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, kind]);
    message.extend_from_slice(options);
    message.push(255);
    let mut packet = frame::wrap(&message).expect("short");
    if !is_request {
        packet[20..24].copy_from_slice(&[0, 67, 0, 68]);
    }
    [&[0xff; 6], &MAC.0[..], &[8, 0], &packet].concat()
}

/// A guest that has asked under a name, option 61.
fn asking(now: Instant, name: &[u8]) -> Bindings {
    let mut guest = bindings();
    guest.handle_frame(now, Way::FromGuest, &dhcp(REQUEST, MAC, [0; 4], name));
    guest
}

const REQUEST: u8 = 3;
const DECLINE: u8 = 4;
const RELEASE: u8 = 7;
const ACK: u8 = 5;
const LEASE: [u8; 6] = [51, 4, 0, 0, 0, 60];

#[test]
fn an_acknowledged_address_is_the_guests_until_its_lease_ends() {
    let now = Instant::now();
    let mut guest = asking(now, &[]);
    guest.handle_frame(now, Way::ToGuest, &dhcp(ACK, MAC, [192, 0, 2, 7], &LEASE));
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
        let mut guest = asking(Instant::now(), &[]);
        guest.handle_frame(Instant::now(), way, &packet);
        assert_eq!(guest.leased(), None, "{way:?} {packet:02x?}");
    }
}

#[test]
fn an_address_is_bound_when_nobody_defends_it() {
    let (mut guest, now) = (bindings(), Instant::now());
    let wanted = "2001:db8::7";
    guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
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
        guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
        guest.handle_frame(now, Way::ToGuest, &discovery(kind, source, wanted));
        guest.handle_timeout(now + TENTATIVE, |_| false);
        assert!(guest.asked_for().is_empty());
    }
    let (mut guest, now) = (bindings(), Instant::now());
    guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    guest.handle_timeout(now + TENTATIVE, |address| {
        address == "fe80::1".parse::<IpAddr>().expect("one")
    });
    assert!(guest.asked_for().is_empty());
}

#[test]
fn what_only_says_that_it_has_an_address_gets_none() {
    let (mut guest, now) = (bindings(), Instant::now());
    let mut forwarded = discovery(SOLICITATION, "::", "2001:db8::7");
    forwarded[21] = 254;
    sign(&mut forwarded);
    for packet in [
        discovery(ADVERTISEMENT, "2001:db8::7", "2001:db8::7"),
        discovery(SOLICITATION, "2001:db8::7", "2001:db8::1"),
        discovery(SOLICITATION, "::", "ff02::1"),
        discovery(SOLICITATION, "::", "::"),
        discovery(SOLICITATION, "::", "2001:db8::7")[..74].to_vec(),
        forwarded,
    ] {
        guest.handle_frame(now, Way::FromGuest, &packet);
    }
    assert_eq!(guest.poll_timeout(), None);
}

#[test]
fn a_guest_has_few_addresses_and_the_newest_ones() {
    let (mut guest, now) = (bindings(), Instant::now());
    let all: Vec<String> = (1..=40).map(|n| format!("2001:db8::{n:x}")).collect();
    for wanted in &all[..10] {
        guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    }
    guest.handle_timeout(now + TENTATIVE, |_| false);
    assert_eq!(guest.asked_for().len(), MAX_TENTATIVE, "at a time");
    take(&mut guest, &all);
    let expected: Vec<_> = (9..=40).map(|n| address(&format!("2001:db8::{n:x}"))).collect();
    assert_eq!(guest.asked_for(), expected);
}

/// The guest asks for addresses, one after the other.
fn take(guest: &mut Bindings, all: &[String]) {
    for wanted in all {
        let now = Instant::now();
        guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
        guest.handle_timeout(now + TENTATIVE, |_| false);
    }
}

/// As a station that takes a temporary address every day.
const LOCAL: &str = "fe80::7";
const STABLE: &str = "2001:db8::7";

fn temporary(days: std::ops::Range<u16>) -> Vec<String> {
    days.map(|day| format!("2001:db8::aa:{day:x}")).collect()
}

#[test]
fn a_guest_with_temporary_addresses_keeps_those_that_it_uses() {
    let mut guest = bindings();
    take(&mut guest, &[LOCAL.to_owned(), STABLE.to_owned()]);
    for day in 0..12 {
        take(&mut guest, &temporary(day..day + 1));
        guest.handle_use(&discovery(SOLICITATION, LOCAL, "fe80::1"));
    }
    assert_eq!(guest.asked_for().len(), 14, "all that are valid at a time");
    for day in 12..60 {
        take(&mut guest, &temporary(day..day + 1));
        // Asks from one and answers for the other.
        guest.handle_use(&discovery(SOLICITATION, LOCAL, "fe80::1"));
        guest.handle_use(&discovery(ADVERTISEMENT, LOCAL, STABLE));
    }
    let mut expected: Vec<_> = temporary(30..60).iter().map(|text| address(text)).collect();
    expected.extend([address(LOCAL), address(STABLE)]);
    assert_eq!(guest.asked_for(), expected);
}

#[test]
fn the_only_link_local_address_stays_and_of_two_the_one_in_use() {
    let mut guest = bindings();
    take(&mut guest, &[LOCAL.to_owned()]);
    take(&mut guest, &temporary(0..40));
    assert!(guest.asked_for().contains(&address(LOCAL)));
    take(&mut guest, &["fe80::8".to_owned()]);
    take(&mut guest, &temporary(40..41));
    let locals = guest.asked_for().iter().filter(|address| address.is_unicast_link_local());
    assert_eq!(locals.collect::<Vec<_>>(), [&address("fe80::8")]);
}

#[test]
fn what_shows_a_use_renews_what_is_bound_and_binds_nothing() {
    let mut guest = bindings();
    take(&mut guest, &temporary(0..3));
    let order = |guest: &Bindings| {
        guest.asked_for().iter().map(|address| address.octets()[15]).collect::<Vec<u8>>()
    };
    guest.handle_use(&discovery(SOLICITATION, "2001:db8::aa:0", "fe80::1"));
    assert_eq!(order(&guest), [1, 2, 0]);
    // It checks one anew.
    take(&mut guest, &temporary(1..2));
    assert_eq!(order(&guest), [2, 0, 1]);
    let mut forwarded = discovery(ADVERTISEMENT, LOCAL, "2001:db8::aa:2");
    forwarded[21] = 64;
    let mut other = discovery(ADVERTISEMENT, LOCAL, "2001:db8::aa:2");
    other[12..14].copy_from_slice(&ETHERTYPE_IPV4);
    let mut foreign = discovery(ADVERTISEMENT, LOCAL, "2001:db8::aa:2");
    foreign[11] ^= 1;
    for frame in [
        discovery(SOLICITATION, "2001:db8::aa:9", "2001:db8::aa:8"),
        discovery(133, "2001:db8::aa:2", "2001:db8::aa:2"),
        discovery(SOLICITATION, LOCAL, "2001:db8::aa:2"),
        forwarded,
        other,
        foreign,
        Vec::new(),
    ] {
        guest.handle_use(&frame);
    }
    assert_eq!(order(&guest), [2, 0, 1]);
    assert_eq!(guest.poll_timeout(), None);
}

#[test]
fn of_too_many_known_addresses_the_last_ones_count() {
    let all: Vec<_> = temporary(0..40).iter().map(|text| address(text)).collect();
    assert_eq!(Bindings::new(MAC, None, all.clone()).asked_for(), &all[8..]);
}

#[test]
fn a_question_that_its_owner_would_not_answer_gives_no_address() {
    let good = discovery(SOLICITATION, "::", "2001:db8::7");
    let asks = |frame: &[u8]| {
        let mut guest = bindings();
        guest.handle_frame(Instant::now(), Way::FromGuest, frame);
        guest.poll_timeout().is_some()
    };
    assert!(asks(&good));
    // A nonce, RFC 7527.
    assert!(asks(&discovery_with(SOLICITATION, "::", "2001:db8::7", &[14, 1, 1, 2, 3, 4, 5, 6])));
    let flaws = [
        Flaw(5, &[8]),                // another group's hardware address
        Flaw(0, &[2, 0, 0, 0, 0, 9]), // one station's
        Flaw(11, &[9]),               // from another card
        Flaw(14, &[0x40]),            // another version
        Flaw(20, &[17]),              // another protocol
        Flaw(53, &[8]),               // another group
        Flaw(55, &[1]),               // a code
    ];
    for Flaw(at, bytes) in flaws {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        sign(&mut frame);
        assert!(!asks(&frame), "{at} {bytes:02x?}");
    }
    let mut unsound = good.clone();
    unsound[57] ^= 1;
    assert!(!asks(&unsound), "a wrong checksum");
    for options in
        [&[1, 1, 2, 0, 0, 0, 0, 1][..], &[14, 0, 0, 0, 0, 0, 0, 0], &[14, 2, 0, 0, 0, 0, 0, 0]]
    {
        assert!(!asks(&discovery_with(SOLICITATION, "::", "2001:db8::7", options)), "{options:?}");
    }
}

#[test]
fn a_defence_that_is_seen_before_its_question_counts() {
    let (mut guest, now) = (bindings(), Instant::now());
    let wanted = "2001:db8::7";
    guest.handle_frame(now, Way::ToGuest, &discovery(ADVERTISEMENT, wanted, wanted));
    guest.handle_frame(now, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    assert_eq!(guest.poll_timeout(), None);
    let later = now + DEFENDED;
    guest.handle_frame(later, Way::FromGuest, &discovery(SOLICITATION, "::", wanted));
    assert_eq!(guest.poll_timeout(), Some(later + TENTATIVE));
    guest.handle_loss(later);
    assert_eq!(guest.poll_timeout(), None, "a defence may have been lost");
}

const GIVEN: [u8; 4] = [192, 0, 2, 7];
/// Option 61: a DUID, RFC 4361.
const NAME: [u8; 6] = [61, 4, 255, 1, 2, 3];

fn given(guest: &mut Bindings, now: Instant) {
    guest.handle_frame(now, Way::ToGuest, &dhcp(ACK, MAC, GIVEN, &LEASE));
}

/// Lets time pass while nobody says anything; returns how often the network was asked.
fn wait(guest: &mut Bindings, mut now: Instant, taken: impl Fn(IpAddr) -> bool + Copy) -> u32 {
    let mut probes = 0;
    loop {
        probes += u32::from(guest.poll_probe(now).is_some());
        match guest.doubted {
            Some(doubted) => now = doubted.next,
            None => return probes,
        }
        guest.handle_timeout(now, taken);
    }
}

/// Another station says that it has an address.
fn answer(address: [u8; 4]) -> Vec<u8> {
    let mut frame = arp::probe(HardwareAddress([2, 0, 0, 0, 0, 9]), address.into());
    frame[21] = 2;
    frame[28..32].copy_from_slice(&address);
    frame
}

#[test]
fn a_lease_in_the_name_of_the_hardware_address_counts_at_once() {
    for name in [&[][..], &[61, 7, 1, 2, 0, 0, 0, 0, 1]] {
        let now = Instant::now();
        let mut guest = asking(now, name);
        given(&mut guest, now);
        assert!(guest.leased().is_some() && guest.poll_probe(now).is_none(), "{name:?}");
    }
    let mut silent = bindings();
    given(&mut silent, Instant::now());
    assert_eq!(silent.leased(), None, "it asked nothing");
}

#[test]
fn a_lease_under_any_other_name_counts_when_nobody_has_the_address() {
    let text = [&[61, 6][..], b"\0web-1"].concat();
    let plain = [&[61, 5][..], b"web-1"].concat();
    let uuid = [&[61, 17, 0][..], &[7; 16]].concat();
    let other_kind = [61, 7, 6, 2, 0, 0, 0, 0, 2];
    for name in [&NAME[..], &text, &plain, &uuid, &other_kind, &[61, 1, 9]] {
        let now = Instant::now();
        let mut guest = asking(now, name);
        given(&mut guest, now);
        assert_eq!(guest.leased(), None, "{name:?}");
        assert_eq!(guest.poll_probe(now), Some(arp::probe(MAC, GIVEN.into())));
        // The answer to a question that was asked twice.
        given(&mut guest, now);
        assert_eq!(wait(&mut guest, now, |_| false), MAX_PROBES - 1);
        assert!(guest.leased().is_some(), "{name:?}");
        let later = now + Duration::from_secs(30);
        guest.handle_frame(later, Way::FromGuest, &dhcp(REQUEST, MAC, [0; 4], name));
        given(&mut guest, later);
        let until = guest.leased().and_then(|leased| leased.until);
        assert_eq!(until, Some(later + Duration::from_secs(60)), "renewed");
        assert_eq!(guest.poll_probe(later), None);
    }
}

#[test]
fn the_address_of_a_station_that_is_there_is_not_the_guests_whatever_it_calls_itself() {
    let now = Instant::now();
    let mut guest = asking(now, &NAME);
    given(&mut guest, now);
    let own = [&[0xff; 6], &MAC.0[..], &answer(GIVEN)[12..22], &MAC.0, &GIVEN, &[0; 10]].concat();
    for nothing in [answer([192, 0, 2, 8]), own, arp::probe(HardwareAddress([9; 6]), GIVEN.into())]
    {
        guest.handle_frame(now, Way::ToGuest, &nothing);
    }
    guest.handle_frame(now, Way::FromGuest, &answer(GIVEN));
    assert!(guest.poll_probe(now).is_some(), "none of these has it");
    guest.handle_frame(now, Way::ToGuest, &answer(GIVEN));
    assert_eq!((wait(&mut guest, now, |_| false), guest.leased()), (0, None));
    let by = HardwareAddress([2, 0, 0, 0, 0, 9]);
    assert_eq!(guest.poll_refusal(), Some(Refusal::InUse(GIVEN.into(), Some(by))));
    assert_eq!(guest.poll_refusal(), None, "told once");
    // Of another guest of the node.
    let mut guest = asking(now, &NAME);
    given(&mut guest, now);
    wait(&mut guest, now, |address| address == IpAddr::from(GIVEN));
    assert_eq!(guest.leased(), None);
    assert_eq!(guest.poll_refusal(), Some(Refusal::InUse(GIVEN.into(), None)));
}

#[test]
fn answers_that_were_not_seen_are_waited_for_again() {
    let now = Instant::now();
    let mut guest = asking(now, &NAME);
    given(&mut guest, now);
    while let Some(_probe) = guest.poll_probe(now) {
        guest.handle_timeout(now, |_| false);
    }
    guest.handle_loss(now);
    assert_eq!(wait(&mut guest, now, |_| false), MAX_PROBES);
    assert!(guest.leased().is_some());
}

#[test]
fn a_question_as_another_or_under_too_many_names_gives_nothing() {
    let now = Instant::now();
    let other = [61, 7, 1, 2, 0, 0, 0, 0, 2];
    let mut guest = asking(now, &NAME);
    guest.handle_frame(now, Way::FromGuest, &dhcp(REQUEST, MAC, [0; 4], &other));
    given(&mut guest, now);
    assert_eq!((wait(&mut guest, now, |_| false), guest.leased()), (0, None));
    assert_eq!(guest.poll_refusal(), Some(Refusal::Foreign));
    // Doubtful is doubtful, whatever else was asked in the same transaction.
    for names in [[&NAME[..], &[]], [&[], &NAME]] {
        let mut guest = asking(now, names[0]);
        guest.handle_frame(now, Way::FromGuest, &dhcp(REQUEST, MAC, [0; 4], names[1]));
        given(&mut guest, now);
        assert!(guest.leased().is_none() && guest.poll_probe(now).is_some());
    }
    let mut guest = bindings();
    let ask = |guest: &mut Bindings, number: u8| {
        let name = [61, 4, 255, number, 2, 3];
        guest.handle_frame(now, Way::FromGuest, &dhcp(REQUEST, MAC, [0; 4], &name));
        given(guest, now);
        guest.doubted.take().is_some()
    };
    assert!((1..=8).all(|number| ask(&mut guest, number)), "one system after another");
    assert!(!ask(&mut guest, 9));
    assert_eq!(guest.poll_refusal(), Some(Refusal::Names));
    // Another system is started.
    guest.handle_start();
    guest.distrusted = None;
    assert!(ask(&mut guest, 9));
}

#[test]
fn an_address_that_is_given_up_is_the_guests_no_more() {
    for kind in [RELEASE, DECLINE] {
        let now = Instant::now();
        let mut guest = asking(now, &[]);
        guest.handle_frame(now, Way::ToGuest, &dhcp(ACK, MAC, [192, 0, 2, 7], &LEASE));
        assert!(guest.leased().is_some());
        guest.handle_frame(now, Way::FromGuest, &dhcp(kind, MAC, [0; 4], &[]));
        assert_eq!(guest.leased(), None);
    }
}
