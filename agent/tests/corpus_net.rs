//! Replays the fuzz corpora of the network parsers, and mutations of them.

#![allow(clippy::unwrap_used, reason = "a corpus that cannot be read fails the test")]

use std::{net::Ipv6Addr, path::PathBuf, time::Instant};

use agent::{
    net::{
        HardwareAddress, Ipv4Prefix,
        conflict::{Claim, Claims, Finding, Guard},
        dhcp::{
            client::{Client, Event},
            frame,
            server::GuestLease,
        },
        dhcp6::client::{Client as Client6, Event as Event6, Wanted},
        machines::bridged::bindings::{Bindings, Way},
        rdnss::NameServers,
    },
    time::{
        nts::{extension, records},
        sntp::{Exchange, Refusal, Sample, UnixNanos, parse},
    },
};
use proptest::prelude::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);

fn folder(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(folder(target)).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = files
        .map(|file| {
            let name = file.file_name().into_string().unwrap();
            (name, std::fs::read(file.path()).unwrap())
        })
        .collect();
    files.sort();
    assert!(!files.is_empty(), "the corpus of {target} is empty");
    files
}

/// Names of the files that `accepts` takes.
fn accepted(target: &str, accepts: impl Fn(&[u8]) -> bool) -> Vec<String> {
    let files = corpus(target).into_iter().filter(|(_, bytes)| accepts(bytes));
    files.map(|(name, _)| name).collect()
}

/// As the fuzz target `dhcp_guest`.
fn guest(bytes: &[u8]) -> bool {
    let lease = GuestLease {
        hardware: MAC,
        address: Ipv4Prefix::new([10, 77, 0, 2].into(), 16).unwrap(),
        gateway: [10, 77, 0, 1].into(),
        dns: vec![[192, 0, 2, 53].into()],
        mtu: 1500,
    };
    lease.answer(bytes).is_some()
}

/// As the fuzz target `dhcp_reply`.
fn reply(packet: &[u8]) -> bool {
    let Some((_, message)) = frame::unwrap(packet) else { return false };
    let now = Instant::now();
    let mut client = Client::new(MAC, None, 1, now);
    let mut message = message.to_vec();
    let mut requested = false;
    for _ in 0..2 {
        let request = client.poll_transmit().map(|transmit| transmit.message);
        if let (Some(request), Some(xid)) = (request, message.get_mut(4..8)) {
            xid.copy_from_slice(&request[4..8]);
        }
        client.handle_message(now, &message);
        requested |= client.poll_transmit().is_some();
    }
    assert!(!matches!(client.poll_event(), Some(Event::Leased(_))), "a lease without an offer");
    requested
}

/// What a client wants that wants all there is.
const BOTH: Wanted = Wanted { address: true, prefix: true };

/// Like the fuzz target `dhcp6_reply`, with one message. Returns whether the client took it.
fn reply6(wanted: Wanted, message: &[u8]) -> bool {
    let now = Instant::now();
    let mut client = Client6::new(MAC, wanted, 1, now);
    let request = client.poll_transmit().unwrap();
    if let Some((kind, options)) = message.split_first() {
        client.handle_message(now, &[&[*kind], &request[1..18], options].concat());
    }
    let event = client.poll_event();
    if let Some(Event6::Leased(lease)) = &event {
        let nothing = lease.addresses.is_empty() && lease.prefixes.is_empty();
        assert!(!nothing, "a lease of nothing");
        // One that never ends may be renewed at any time.
        let in_time = |at| lease.expires.is_none() || at <= lease.expires;
        assert!(in_time(lease.renew) && in_time(lease.rebind), "{lease:?}");
    }
    let before = client.poll_timeout();
    client.handle_timeout(before.unwrap_or(now));
    // What was offered is asked for.
    event.is_some() || client.poll_transmit().is_some_and(|request| request[0] == 3)
}

/// As the fuzz target `sntp`.
fn time(answer: &[u8]) -> Result<Sample, Refusal> {
    let sent = UnixNanos(1_796_083_200_000_000_000);
    parse(answer, &Exchange { nonce: 7, sent, received: UnixNanos(sent.0 + 1_000_000) })
}

const KEYS: records::Keys = records::Keys { to_server: [1; 32], to_client: [2; 32] };

/// As the fuzz target `nts_records`.
fn keys(answer: &[u8]) -> bool {
    let session = records::parse(answer, KEYS);
    assert!(session.as_ref().is_ok_and(|s| s.is_usable()) || session.is_err());
    session.is_ok()
}

/// As the fuzz target `nts_answer`.
fn signed(answer: &[u8]) -> Result<(), extension::Forged> {
    let agreed = corpus("nts_records").into_iter().find(|(name, _)| name == "answer").unwrap();
    let mut session = records::parse(&agreed.1, KEYS).unwrap();
    let random = extension::Randomness { nonce: 7, unique: [5; 32], cipher: [6; 16] };
    extension::request(&mut session, &random).unwrap();
    extension::open(&mut session, &random, answer)
}

/// As the fuzz target `rdnss`.
fn name_servers(messages: &[u8]) -> bool {
    let mut servers = NameServers::default();
    servers.handle_messages(Instant::now(), messages);
    servers.on(2).next().is_some()
}

/// As the fuzz target `bridged_port`, with one frame each way, of a guest that has asked for a lease.
/// Returns whether it bound an address.
fn binds(way: Way, frame: &[u8]) -> bool {
    let mut bindings = Bindings::new(MAC, None, Vec::new());
    let request = std::fs::read(folder("bridged_port").join("request")).unwrap();
    bindings.handle_frame(Instant::now(), Way::FromGuest, &request);
    bindings.handle_frame(Instant::now(), way, frame);
    let leased = bindings.leased();
    assert!(leased.is_none_or(|leased| !leased.address.is_multicast()));
    if leased.is_none()
        && let Some(due) = bindings.poll_timeout()
    {
        bindings.handle_timeout(due, |_| false);
    }
    let known = bindings.asked_for();
    assert!(known.iter().all(|address| !address.is_multicast() && !address.is_unspecified()));
    leased.is_some() || !known.is_empty()
}

#[test]
fn what_passes_a_bridged_guests_tap() {
    let to = accepted("bridged_port", |bytes| binds(Way::ToGuest, bytes));
    assert_eq!(to, ["ack", "ack-for-ever", "ack-time-cut", "ack-without-time"]);
    assert_eq!(accepted("bridged_port", |bytes| binds(Way::FromGuest, bytes)), ["claim"]);
}

/// As the same target, of a guest that has an address and takes another: whether the frame shows that it
/// uses the first one.
fn shows_use(frame: &[u8]) -> bool {
    let bound = [7, 8].map(|last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    let mut bindings = Bindings::new(MAC, None, bound.to_vec());
    bindings.handle_use(frame);
    assert_eq!(bindings.asked_for().len(), 2);
    bindings.asked_for()[1] == bound[0]
}

#[test]
fn what_a_bridged_guest_shows_that_it_uses() {
    assert_eq!(accepted("bridged_port", shows_use), ["advertisement"]);
}

/// As the fuzz target `conflict`, with one packet. Returns whether it shows that an address is another host's.
fn conflict(packet: &[u8]) -> bool {
    let own = vec![HardwareAddress([2, 0, 0, 0, 0, 2])];
    let address = [192, 0, 2, 7].into();
    let claims = Claims { hardware: MAC, own, addresses: [(address, Claim::Given)].into() };
    let now = Instant::now();
    let mut guard = Guard::new(claims, now);
    guard.handle_packet(now, packet);
    let found = guard.poll_finding();
    guard.handle_timeout(guard.poll_timeout().unwrap());
    found.is_some_and(|found| matches!(found, (known, Finding::Lost(_)) if known == address))
}

#[test]
fn who_has_the_nodes_addresses() {
    let expected = ["announcement", "answer", "answer-padded", "question"];
    assert_eq!(accepted("conflict", conflict), expected);
}

#[test]
fn what_routers_advertise() {
    assert_eq!(accepted("rdnss", name_servers), ["two-messages", "two-servers"]);
}

#[test]
fn what_guests_send() {
    let expected = [
        "discover",
        "discover-broadcast",
        "domain-loop",
        "inform",
        "option-too-long",
        "option-wrong-size",
        "relay-agent",
        "request-other-address",
        "request-renewing",
        "request-selecting",
        "routes-overlong-prefix",
    ];
    assert_eq!(accepted("dhcp_guest", guest), expected);
}

#[test]
fn what_dhcp_servers_send() {
    let expected =
        ["classless-routes", "infinite", "mask-with-hole", "offer", "offer-with-ip-options"];
    assert_eq!(accepted("dhcp_reply", reply), expected);
}

#[test]
fn what_dhcpv6_servers_send() {
    let expected =
        ["advertise", "advertise-preferred", "reply-ever", "reply-list-odd", "reply-rapid"];
    let takes = |wanted: Wanted| accepted("dhcp6_reply", move |bytes| reply6(wanted, bytes));
    assert_eq!(takes(Wanted::ADDRESS), expected);
    assert_eq!(takes(Wanted::PREFIX), ["prefix"]);
    assert_eq!(takes(BOTH).len(), expected.len() + 1);
}

#[test]
fn what_time_servers_send() {
    assert_eq!(
        accepted("sntp", |bytes| time(bytes).is_ok()),
        ["answer", "largest-times", "with-extension"]
    );
}

#[test]
fn what_servers_of_authenticated_time_send() {
    let agreed = ["answer", "eight-cookies", "name-with-blank", "server-and-port", "unknown"];
    assert_eq!(accepted("nts_records", keys), agreed);
    assert_eq!(accepted("nts_answer", |bytes| signed(bytes).is_ok()), [""; 0]);
    let forgotten = |bytes: &[u8]| signed(bytes) == Err(extension::Forged::Forgotten);
    assert_eq!(accepted("nts_answer", forgotten), ["kiss"]);
}

/// A file of a corpus with some bytes changed, cut or repeated.
fn mutated(target: &'static str) -> impl Strategy<Value = Vec<u8>> {
    let files: Vec<Vec<u8>> = corpus(target).into_iter().map(|(_, bytes)| bytes).collect();
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0_u8..4);
    let changes = prop::collection::vec(change, 0..12);
    (prop::sample::select(files), changes).prop_map(|(mut bytes, changes)| {
        for (index, value, kind) in changes {
            if bytes.is_empty() {
                break;
            }
            // Options, at the end, are where the parsers branch.
            let position = index.index(bytes.len());
            match kind {
                0 => bytes[position] = value,
                1 => bytes.insert(position, value),
                2 => bytes.truncate(position),
                _ => bytes.extend_from_within(position..),
            }
            bytes.truncate(2048);
        }
        bytes
    })
}

proptest! {
    #[test]
    fn no_guest_stops_its_server(bytes in mutated("dhcp_guest")) {
        guest(&bytes);
    }

    #[test]
    fn no_server_stops_the_client(bytes in mutated("dhcp_reply")) {
        reply(&bytes);
    }

    #[test]
    fn no_server_stops_the_dhcpv6_client(bytes in mutated("dhcp6_reply")) {
        reply6(Wanted::ADDRESS, &bytes);
        reply6(BOTH, &bytes);
    }

    #[test]
    fn no_answer_about_keys_stops_the_clock(bytes in mutated("nts_records")) {
        keys(&bytes);
    }

    #[test]
    fn nothing_unsigned_is_believed(bytes in mutated("nts_answer")) {
        prop_assert!(signed(&bytes).is_err());
    }

    #[test]
    fn nothing_that_passes_a_tap_stops_its_watch(bytes in mutated("bridged_port")) {
        binds(Way::ToGuest, &bytes);
        binds(Way::FromGuest, &bytes);
    }

    #[test]
    fn no_host_stops_the_guard_of_addresses(bytes in mutated("conflict")) {
        conflict(&bytes);
    }

    #[test]
    fn no_router_stops_the_uplinks(bytes in mutated("rdnss")) {
        name_servers(&bytes);
    }

    #[test]
    fn no_time_server_is_believed_beyond_its_error(bytes in mutated("sntp")) {
        if let Ok(sample) = time(&bytes) {
            prop_assert!(sample.error_ns > 0 && sample.error_ns <= 16_000_000_000);
        }
    }
}
