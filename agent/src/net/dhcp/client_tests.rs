use super::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OTHER_SERVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);

/// A client, the last thing it sent, and a clock that only moves when told.
struct Bench {
    client: Client,
    now: Instant,
    start: Instant,
}

impl Bench {
    fn new(previous: Option<Ipv4Addr>) -> Self {
        let now = Instant::now();
        Self { client: Client::new(MAC, previous, 1, now), now, start: now }
    }

    /// A bench that holds a lease of 1000 s.
    fn bound() -> Self {
        let mut bench = Self::new(None);
        bench.answer(Kind::Offer, |_| {});
        bench.answer(Kind::Ack, |_| {});
        assert!(matches!(bench.client.poll_event(), Some(Event::Leased(_))));
        bench
    }

    /// The message that is due, decoded.
    fn sent(&mut self) -> (Destination, Message) {
        let transmit = self.client.poll_transmit().expect("a message is due");
        (transmit.to, Message::parse(&transmit.message).expect("our own"))
    }

    /// Answers the last exchange.
    fn answer(&mut self, kind: Kind, change: impl FnOnce(&mut Message)) {
        let mut reply = Message::new(Direction::Reply, kind, MAC);
        reply.xid = self.client.xid;
        reply.yiaddr = ADDRESS;
        reply.set(option::SERVER, SERVER.octets());
        reply.set(option::SUBNET_MASK, [255, 255, 255, 0]);
        reply.set(option::ROUTER, SERVER.octets());
        reply.set(option::LEASE_TIME, 1000_u32.to_be_bytes());
        change(&mut reply);
        self.client.handle_message(self.now, &reply.to_bytes());
    }

    /// Lets time pass until the client wants to act.
    fn wait(&mut self) {
        self.now = self.client.poll_timeout().expect("a deadline");
        self.client.handle_timeout(self.now);
    }

    fn elapsed(&self) -> u64 {
        self.now.duration_since(self.start).as_secs()
    }
}

#[test]
fn discover_offer_request_ack_gives_a_lease() {
    let mut bench = Bench::new(None);
    let (to, discover) = bench.sent();
    assert_eq!((to, discover.kind()), (Destination::Broadcast, Some(Kind::Discover)));
    bench.answer(Kind::Offer, |_| {});
    let (to, request) = bench.sent();
    assert_eq!(to, Destination::Broadcast);
    assert_eq!(request.address(option::SERVER), Some(SERVER));
    assert_eq!(request.address(option::REQUESTED_ADDRESS), Some(ADDRESS));
    bench.answer(Kind::Ack, |_| {});
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.address.to_string(), "192.0.2.9/24");
    assert_eq!(lease.routes, [("0.0.0.0/0".parse().expect("a prefix"), SERVER)]);
    assert_eq!(lease.renew, Some(bench.now + Duration::from_secs(500)));
    assert_eq!(lease.rebind, Some(bench.now + Duration::from_secs(875)));
    assert_eq!(lease.expires, Some(bench.now + Duration::from_secs(1000)));
}

#[test]
fn servers_can_tell_nodes_and_name_their_configuration() {
    let mut bench = Bench::new(None);
    let (_, discover) = bench.sent();
    assert_eq!(discover.bytes(option::VENDOR_CLASS), Some(&b"holdfast"[..]));
    assert!(discover.bytes(option::PARAMETERS).is_some_and(|list| list.contains(&224)));
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Ack, |ack| ack.set(224, *b"http://192.0.2.1/x"));
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.document.as_deref(), Some(&b"http://192.0.2.1/x"[..]));
    bench.wait();
    bench.answer(Kind::Ack, |ack| ack.set(224, [b'x'; 1025]));
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no renewal") };
    assert_eq!(lease.document, None);
}

#[test]
fn the_search_is_repeated_with_growing_pauses() {
    let mut bench = Bench::new(None);
    let mut at = Vec::new();
    for _ in 0..7 {
        bench.sent();
        at.push(bench.elapsed());
        bench.wait();
    }
    let pauses: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let expected = [4, 8, 16, 32, 64, 64];
    let near = pauses.iter().zip(expected).all(|(pause, wanted)| pause.abs_diff(wanted) <= 2);
    assert!(near, "{pauses:?}");
}

#[test]
fn a_renewal_goes_to_the_server_and_extends_the_lease() {
    let mut bench = Bench::bound();
    bench.wait();
    assert_eq!(bench.elapsed(), 500);
    let (to, request) = bench.sent();
    assert_eq!(to, Destination::Server { from: ADDRESS, server: SERVER });
    assert_eq!(request.ciaddr, ADDRESS);
    assert_eq!(request.address(option::REQUESTED_ADDRESS), None);
    assert_eq!(request.address(option::SERVER), None);
    bench.answer(Kind::Ack, |_| {});
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no renewal") };
    assert_eq!(lease.expires, Some(bench.start + Duration::from_secs(1500)));
}

#[test]
fn any_server_is_asked_when_the_first_stays_silent() {
    let mut bench = Bench::bound();
    while bench.elapsed() < 875 {
        bench.wait();
    }
    let (to, request) = bench.sent();
    assert_eq!((to, request.ciaddr), (Destination::Broadcast, ADDRESS));
    bench.answer(Kind::Ack, |ack| {
        ack.set(option::SERVER, OTHER_SERVER.octets());
    });
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no rebinding") };
    assert_eq!(lease.server, OTHER_SERVER);
}

#[test]
fn a_lease_that_nobody_renews_ends_on_time_and_the_search_starts() {
    let mut bench = Bench::bound();
    while bench.client.poll_event().is_none() {
        bench.wait();
    }
    assert_eq!(bench.elapsed(), 1000);
    let (_, discover) = bench.sent();
    assert_eq!(discover.kind(), Some(Kind::Discover));
}

#[test]
fn a_refused_renewal_loses_the_lease_and_starts_the_search_after_a_pause() {
    let mut bench = Bench::bound();
    bench.wait();
    bench.sent();
    bench.answer(Kind::Nak, |_| {});
    assert_eq!(bench.client.poll_event(), Some(Event::Lost(Loss::Refused)));
    assert_eq!(bench.client.poll_transmit(), None);
    bench.wait();
    let (_, discover) = bench.sent();
    assert_eq!((discover.kind(), bench.elapsed()), (Some(Kind::Discover), 501));
}

#[test]
fn an_address_that_another_host_has_is_declined_and_another_asked_for_after_a_pause() {
    let mut bench = Bench::bound();
    bench.client.handle_conflict(bench.now, OTHER_SERVER);
    assert_eq!(bench.client.poll_event(), None, "another address");
    bench.client.handle_conflict(bench.now, ADDRESS);
    assert_eq!(bench.client.poll_event(), Some(Event::Lost(Loss::Taken)));
    let (to, decline) = bench.sent();
    assert_eq!((to, decline.kind()), (Destination::Broadcast, Some(Kind::Decline)));
    assert_eq!(decline.address(option::REQUESTED_ADDRESS), Some(ADDRESS));
    assert_eq!(decline.address(option::SERVER), Some(SERVER));
    assert_eq!(decline.ciaddr, Ipv4Addr::UNSPECIFIED);
    assert!(decline.bytes(option::CLIENT).is_some());
    for forbidden in [option::PARAMETERS, option::MAX_SIZE, option::VENDOR_CLASS] {
        assert_eq!(decline.bytes(forbidden), None);
    }
    bench.client.handle_conflict(bench.now, ADDRESS);
    assert_eq!(bench.client.poll_event(), None, "told twice");
    bench.wait();
    assert_eq!(bench.elapsed(), 10);
    assert_eq!(bench.sent().1.kind(), Some(Kind::Discover));
}

#[test]
fn a_lease_that_is_searched_beside_is_declined_too() {
    let mut bench = moved();
    bench.client.handle_conflict(bench.now, ADDRESS);
    assert_eq!(bench.client.poll_event(), Some(Event::Lost(Loss::Taken)));
    assert_eq!(bench.sent().1.kind(), Some(Kind::Decline));
}

#[test]
fn an_address_from_before_is_asked_for_first() {
    let mut bench = Bench::new(Some(ADDRESS));
    let (_, request) = bench.sent();
    assert_eq!(request.kind(), Some(Kind::Request));
    assert_eq!(request.address(option::REQUESTED_ADDRESS), Some(ADDRESS));
    assert_eq!(request.address(option::SERVER), None);
    bench.answer(Kind::Nak, |_| {});
    assert_eq!(bench.client.poll_event(), Some(Event::Lost(Loss::Refused)));
}

#[test]
fn a_lease_survives_a_replugged_cable_and_a_silent_server() {
    let mut bench = Bench::bound();
    bench.client.handle_carrier(bench.now);
    let mut asked = Vec::new();
    while let Some(transmit) = bench.client.poll_transmit() {
        asked.push(Message::parse(&transmit.message).expect("our own").kind().expect("a kind"));
        bench.wait();
    }
    let (request, discover) = (Kind::Request, Kind::Discover);
    assert_eq!(asked, [request, request, discover, discover, discover]);
    assert_eq!(bench.client.poll_event(), None);
    assert_eq!(bench.client.poll_timeout(), Some(bench.start + Duration::from_secs(500)));
}

/// A bench whose cable is back, perhaps elsewhere, and whose lease nobody confirmed.
fn moved() -> Bench {
    let mut bench = Bench::bound();
    bench.client.handle_carrier(bench.now);
    bench.wait();
    bench.wait();
    let (_, discover) = bench.sent();
    assert_eq!((discover.kind(), bench.client.poll_event()), (Some(Kind::Discover), None));
    bench
}

#[test]
fn a_lease_that_nobody_confirms_is_replaced_by_one_of_the_network_that_is_there() {
    let mut bench = moved();
    let there = |reply: &mut Message| {
        reply.set(option::SERVER, OTHER_SERVER.octets());
        reply.yiaddr = Ipv4Addr::new(198, 51, 100, 7);
    };
    bench.answer(Kind::Offer, there);
    let (_, request) = bench.sent();
    assert_eq!(request.address(option::SERVER), Some(OTHER_SERVER));
    bench.answer(Kind::Ack, there);
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.address.to_string(), "198.51.100.7/24");
}

#[test]
fn a_lease_is_kept_when_the_network_that_is_there_refuses_or_forgets_its_offer() {
    let renewal = |bench: &Bench| Some(bench.start + Duration::from_secs(500));
    let mut bench = moved();
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Nak, |_| {});
    assert_eq!((bench.client.poll_event(), bench.client.poll_timeout()), (None, renewal(&bench)));
    let mut bench = moved();
    bench.answer(Kind::Offer, |_| {});
    bench.wait();
    bench.wait();
    bench.wait();
    assert_eq!((bench.client.poll_event(), bench.client.poll_timeout()), (None, renewal(&bench)));
}

#[test]
fn a_lease_that_ends_while_another_is_searched_is_lost_on_time() {
    let mut bench = Bench::new(None);
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Ack, |ack| ack.set(option::LEASE_TIME, 30_u32.to_be_bytes()));
    bench.client.poll_event();
    bench.client.handle_carrier(bench.now);
    while bench.client.poll_event().is_none() {
        bench.wait();
    }
    assert_eq!(bench.elapsed(), 30);
    assert_eq!(bench.sent().1.kind(), Some(Kind::Discover));
    bench.client.handle_carrier(bench.now);
    assert_eq!(bench.sent().1.kind(), Some(Kind::Discover), "the lease that ended is forgotten");
}

#[test]
fn answers_to_others_are_ignored() {
    let mut bench = Bench::new(None);
    bench.sent();
    bench.answer(Kind::Offer, |offer| {
        offer.xid ^= 1;
    });
    bench.answer(Kind::Offer, |offer| {
        offer.hardware = HardwareAddress([2, 0, 0, 0, 0, 2]);
    });
    bench.answer(Kind::Offer, |offer| {
        offer.yiaddr = Ipv4Addr::LOCALHOST;
    });
    bench.answer(Kind::Ack, |_| {});
    assert_eq!((bench.client.poll_transmit(), bench.client.poll_event()), (None, None));
}

#[test]
fn a_lease_without_end_needs_no_timer() {
    let mut bench = Bench::new(None);
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Ack, |ack| {
        ack.set(option::LEASE_TIME, [255; 4]);
    });
    assert_eq!(bench.client.poll_timeout(), None);
}

#[test]
fn senseless_times_are_replaced() {
    let mut bench = Bench::new(None);
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Ack, |ack| {
        ack.set(option::RENEWAL_TIME, 5000_u32.to_be_bytes());
        ack.set(option::REBINDING_TIME, [0; 4]);
    });
    assert_eq!(bench.client.poll_timeout(), Some(bench.now + Duration::from_secs(500)));
}

#[test]
fn classless_routes_replace_the_router() {
    let mut bench = Bench::new(None);
    bench.answer(Kind::Offer, |_| {});
    bench.answer(Kind::Ack, |ack| {
        ack.set(option::CLASSLESS_ROUTES, [24, 198, 51, 100, 192, 0, 2, 2]);
    });
    let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.routes, [("198.51.100.0/24".parse().expect("a prefix"), OTHER_SERVER)]);
}

#[test]
fn routes_of_classes_count_beside_the_router_where_there_are_no_others() {
    let hosts = [192, 0, 2, 99, 192, 0, 2, 2, 172, 20, 0, 0, 192, 0, 2, 2];
    let senseless = [0, 0, 0, 0, 192, 0, 2, 2, 10, 0, 0, 0, 0, 0, 0, 0];
    for with_classless in [false, true] {
        let mut bench = Bench::new(None);
        bench.answer(Kind::Offer, |_| {});
        bench.answer(Kind::Ack, |ack| {
            ack.set(option::STATIC_ROUTES, [hosts, senseless].concat());
            if with_classless {
                ack.set(option::CLASSLESS_ROUTES, [0, 192, 0, 2, 1]);
            }
        });
        let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
        let routes: Vec<String> = lease.routes.iter().map(|(to, _)| to.to_string()).collect();
        match with_classless {
            false => assert_eq!(routes, ["192.0.2.99/32", "172.20.0.0/16", "0.0.0.0/0"]),
            true => assert_eq!(routes, ["0.0.0.0/0"]),
        }
    }
}

#[test]
fn routes_are_many_and_the_default_route_is_always_among_them() {
    let routes = |count: u8| {
        let mut bench = Bench::new(None);
        bench.answer(Kind::Offer, |_| {});
        bench.answer(Kind::Ack, |ack| {
            let others = (0..count).flat_map(|n| [8, n, 192, 0, 2, 2]);
            let last = [0, 192, 0, 2, 1];
            ack.set(option::CLASSLESS_ROUTES, others.chain(last).collect::<Vec<u8>>());
        });
        let Some(Event::Leased(lease)) = bench.client.poll_event() else { panic!("no lease") };
        lease.routes.iter().map(|(to, _)| to.to_string()).collect::<Vec<_>>()
    };
    let few = routes(20);
    assert_eq!((few.len(), &few[0][..], &few[20][..]), (21, "0.0.0.0/8", "0.0.0.0/0"));
    let many = routes(180);
    assert_eq!((many.len(), &many[126][..], &many[127][..]), (128, "126.0.0.0/8", "0.0.0.0/0"));
}

proptest::proptest! {
    /// Whatever a server does, the client asks on, and never keeps a lease past its end.
    #[test]
    fn no_server_stops_the_client(
        answers in proptest::collection::vec((0_u8..6, 0_u32..100_000, 0_u32..100_000), 1..60)
    ) {
        let mut bench = Bench::new(None);
        let mut expires: Option<Instant> = None;
        for (kind, seconds, renew) in answers {
            match kind {
                0 => bench.answer(Kind::Offer, |_| {}),
                1 | 2 => bench.answer(Kind::Ack, |ack| {
                    ack.set(option::LEASE_TIME, seconds.to_be_bytes());
                    ack.set(option::RENEWAL_TIME, renew.to_be_bytes());
                }),
                3 => bench.answer(Kind::Nak, |_| {}),
                4 => bench.client.handle_carrier(bench.now),
                _ => bench.wait(),
            }
            match bench.client.poll_event() {
                Some(Event::Leased(lease)) => expires = lease.expires,
                Some(Event::Lost(_)) => expires = None,
                None => {}
            }
            proptest::prop_assert!(bench.client.poll_timeout().is_some());
            proptest::prop_assert!(expires.is_none_or(|end| bench.now <= end));
        }
    }
}
