use super::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
const ID: u32 = 1;
const ADDRESS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 5);
const DNS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);

struct World {
    now: Instant,
    client: Client,
}

impl World {
    fn new(wanted: Wanted) -> Self {
        let now = Instant::now();
        Self { now, client: Client::new(MAC, wanted, 7, now) }
    }

    /// The message that the client sends now.
    fn sent(&mut self) -> (u8, Options) {
        let bytes = self.client.poll_transmit().expect("a message");
        let kind = bytes[0];
        // Options parse alike whoever sent them.
        let reply = [&[7], &bytes[1..]].concat();
        (kind, Message::parse(&reply).expect("it is well formed").options)
    }

    fn answer(&mut self, kind: Kind, edit: impl FnOnce(&mut Options)) {
        self.answer_as([9, 9], kind, edit);
    }

    fn answer_as(&mut self, server: [u8; 2], kind: Kind, edit: impl FnOnce(&mut Options)) {
        let mut options = Options::default();
        options.push(option::CLIENT, self.client.duid.clone());
        options.push(option::SERVER, server);
        edit(&mut options);
        let message = Message { kind, xid: self.client.xid, options };
        self.client.handle_message(self.now, &message.to_bytes());
    }

    fn grant(&mut self, kind: Kind, times: (u32, u32)) {
        self.answer(kind, |options| {
            options.push(option::ASSOCIATION, association(times));
            options.push(option::NAME_SERVERS, DNS.octets());
        });
    }

    fn wait(&mut self) {
        self.now = self.client.poll_timeout().expect("it waits for something");
        self.client.handle_timeout(self.now);
    }

    fn bound() -> Self {
        let mut world = Self::new(Wanted::ADDRESS);
        world.sent();
        world.grant(Kind::Advertise, (60, 120));
        world.wait();
        world.sent();
        world.grant(Kind::Reply, (60, 120));
        world.client.poll_event().expect("leased");
        world
    }
}

fn association((preferred, valid): (u32, u32)) -> Vec<u8> {
    let mut bytes = Association::request(ID, &[(ADDRESS, 128)]);
    let end = bytes.len();
    bytes[end - 8..end - 4].copy_from_slice(&preferred.to_be_bytes());
    bytes[end - 4..].copy_from_slice(&valid.to_be_bytes());
    bytes
}

fn status(code: u8) -> Vec<u8> {
    let mut inner = Options::default();
    inner.push(option::STATUS, [0, code]);
    [&ID.to_be_bytes()[..], &[0; 8], &inner.to_bytes()].concat()
}

impl Options {
    fn has(&self, code: u16) -> bool {
        self.get(code).is_some()
    }
}

#[test]
fn solicit_advertise_request_reply() {
    let mut world = World::new(Wanted::ADDRESS);
    let (kind, options) = world.sent();
    assert_eq!((kind, options.has(option::RAPID_COMMIT)), (1, true));
    assert_eq!(options.get(option::CLIENT), Some(&[0, 3, 0, 1, 2, 0, 0, 0, 0, 1][..]));
    world.grant(Kind::Advertise, (60, 120));
    assert_eq!(world.client.poll_transmit(), None, "others may offer more");
    world.wait();
    let (kind, options) = world.sent();
    assert_eq!((kind, options.get(option::SERVER)), (3, Some(&[9, 9][..])));
    world.grant(Kind::Reply, (60, 120));
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert_eq!((lease.plain(), lease.dns), (vec![(ADDRESS, 128)], vec![DNS]));
    assert_eq!(lease.renew, Some(world.now + Duration::from_secs(30)));
    assert_eq!(lease.rebind, Some(world.now + Duration::from_secs(48)));
    assert_eq!(lease.expires, Some(world.now + Duration::from_secs(120)));
}

#[test]
fn a_server_that_commits_rapidly_needs_no_request() {
    let mut world = World::new(Wanted::ADDRESS);
    world.sent();
    world.grant(Kind::Reply, (60, 120));
    assert_eq!(world.client.poll_event(), None, "a reply without the option is none");
    world.answer(Kind::Reply, |options| {
        options.push(option::RAPID_COMMIT, []);
        options.push(option::ASSOCIATION, association((60, 120)));
    });
    assert!(matches!(world.client.poll_event(), Some(Event::Leased(_))));
}

#[test]
fn the_best_offer_wins_and_the_best_possible_at_once() {
    let mut world = World::new(Wanted::ADDRESS);
    world.sent();
    world.grant(Kind::Advertise, (60, 120));
    world.answer(Kind::Advertise, |options| {
        options.push(option::PREFERENCE, [255]);
        options.push(option::ASSOCIATION, association((60, 120)));
    });
    assert_eq!(world.sent().0, 3);
}

#[test]
fn a_lease_is_renewed_rebound_and_lost() {
    let mut world = World::bound();
    world.wait();
    let (kind, options) = world.sent();
    assert_eq!((kind, options.has(option::SERVER)), (5, true));
    let kinds: Vec<u8> = std::iter::repeat_with(|| {
        world.wait();
        world.sent().0
    })
    .take_while(|kind| *kind != 1)
    .collect();
    assert!(kinds.starts_with(&[5]) && kinds.ends_with(&[6]), "{kinds:?}");
    assert_eq!(world.client.poll_event(), Some(Event::Lost));
}

#[test]
fn a_renewal_that_is_answered_extends() {
    let mut world = World::bound();
    world.wait();
    world.sent();
    world.grant(Kind::Reply, (60, 120));
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.expires, Some(world.now + Duration::from_secs(120)));
}

#[test]
fn a_server_that_forgot_is_asked_anew_and_one_that_refuses_is_left() {
    let mut world = World::bound();
    world.wait();
    world.sent();
    world.answer(Kind::Reply, |options| options.push(option::ASSOCIATION, status(3)));
    assert_eq!(world.sent().0, 3);
    world.answer(Kind::Reply, |options| options.push(option::ASSOCIATION, status(4)));
    assert_eq!(world.client.poll_event(), Some(Event::Lost));
    world.wait();
    assert_eq!(world.sent().0, 1);
}

impl World {
    /// Asks, and accepts what this server offers with the highest preference. Returns how long that took.
    fn request(&mut self, server: [u8; 2]) -> u64 {
        let before = self.now;
        while self.sent().0 != 3 {
            self.answer_as(server, Kind::Advertise, |options| {
                options.push(option::PREFERENCE, [255]);
                options.push(option::ASSOCIATION, association((60, 120)));
            });
            if self.client.transmit.is_none() {
                self.wait();
            }
        }
        self.now.duration_since(before).as_secs()
    }
}

#[test]
fn a_server_that_takes_its_offer_back_is_asked_less_and_less_often() {
    for refusal in [[0, 2], [0, 3], [0, 4], [0, 6]] {
        let mut world = World::new(Wanted::ADDRESS);
        assert_eq!(world.request([9, 9]), 0);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let in_message = pauses.len() % 2 == 0;
            world.answer(Kind::Reply, |options| match in_message {
                true => options.push(option::STATUS, refusal),
                false => options.push(option::ASSOCIATION, status(refusal[1])),
            });
            assert_eq!(world.client.poll_event(), Some(Event::Lost));
            let refused = world.now;
            assert_eq!(world.client.poll_transmit(), None, "asked at once");
            world.wait();
            pauses.push(world.now.duration_since(refused).as_secs());
            // Others have a second to offer something.
            assert_eq!(world.request([9, 9]), 1, "chosen before the others");
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64], "{refusal:?}");
    }
}

#[test]
fn another_server_is_preferred_to_one_that_took_its_offer_back() {
    let mut world = World::new(Wanted::ADDRESS);
    world.request([9, 9]);
    world.answer(Kind::Reply, |options| options.push(option::ASSOCIATION, status(2)));
    world.wait();
    world.sent();
    for (server, preference) in [([9, 9], 255), ([8, 8], 0)] {
        world.answer_as(server, Kind::Advertise, |options| {
            options.push(option::PREFERENCE, [preference]);
            options.push(option::ASSOCIATION, association((60, 120)));
        });
    }
    world.wait();
    let (kind, options) = world.sent();
    assert_eq!((kind, options.get(option::SERVER)), (3, Some(&[8, 8][..])));
    world.answer_as([8, 8], Kind::Reply, |options| {
        options.push(option::ASSOCIATION, association((60, 120)));
    });
    world.client.poll_event().expect("leased");
    assert_eq!((world.client.refusals, &world.client.refused), (0, &None));
}

#[test]
fn a_lease_stays_until_its_end_when_its_server_has_none_left_or_fails() {
    // Failure, none left, and the wish to be asked by multicast, as it was.
    for code in [1, 2, 5] {
        let mut world = World::bound();
        world.wait();
        world.sent();
        world.answer(Kind::Reply, |options| options.push(option::ASSOCIATION, status(code)));
        world.answer(Kind::Reply, |options| options.push(option::STATUS, [0, code]));
        assert_eq!((world.client.poll_event(), world.client.poll_transmit()), (None, None));
        world.wait();
        assert_eq!(world.sent().0, 5, "asked again");
    }
}

#[test]
fn a_replugged_cable_is_confirmed() {
    let mut world = World::bound();
    world.client.handle_carrier(world.now);
    let (kind, options) = world.sent();
    assert_eq!((kind, options.has(option::ASSOCIATION)), (4, true));
    world.answer(Kind::Reply, |_| {});
    assert_eq!((world.client.poll_event(), world.client.poll_transmit()), (None, None));
    world.client.handle_carrier(world.now);
    world.sent();
    world.answer(Kind::Reply, |options| options.push(option::STATUS, [0, 4]));
    assert_eq!((world.client.poll_event(), world.sent().0), (Some(Event::Lost), 1));
}

#[test]
fn configuration_alone_is_refreshed() {
    let mut world = World::new(Wanted::CONFIGURATION);
    let (kind, options) = world.sent();
    assert_eq!((kind, options.has(option::ASSOCIATION)), (11, false));
    world.answer(Kind::Reply, |options| {
        options.push(option::NAME_SERVERS, DNS.octets());
        options.push(option::REFRESH, 1_u32.to_be_bytes());
        let server = [&[0, 1, 0, 16][..], &DNS.octets()].concat();
        options.push(option::NTP_SERVER, server);
    });
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no answer") };
    assert_eq!((lease.dns, lease.ntp, lease.addresses), (vec![DNS], vec![DNS], Vec::new()));
    assert_eq!(lease.renew, Some(world.now + LEAST_REFRESH));
    world.wait();
    assert_eq!(world.sent().0, 11);
}

#[test]
fn what_is_meant_for_others_or_makes_no_sense_is_ignored() {
    let mut world = World::new(Wanted::ADDRESS);
    world.sent();
    let own = world.client.xid;
    world.client.xid = [0; 3];
    let options = Options::default();
    let stray = Message { kind: Kind::Advertise, xid: own, options };
    world.client.handle_message(world.now, &stray.to_bytes());
    world.client.xid = own;
    world.client.handle_message(world.now, &[2, 0, 0, 0]);
    // Preferred for longer than valid; valid for no time.
    world.grant(Kind::Advertise, (121, 120));
    world.answer(Kind::Advertise, |options| options.push(option::ASSOCIATION, status(2)));
    world.wait();
    assert_eq!(world.sent().0, 1, "there was no offer that can be used");
}

#[test]
fn addresses_without_end_need_no_renewal() {
    let mut world = World::new(Wanted::ADDRESS);
    world.sent();
    world.answer(Kind::Reply, |options| {
        options.push(option::RAPID_COMMIT, []);
        options.push(option::ASSOCIATION, association((u32::MAX, u32::MAX)));
    });
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert_eq!((lease.renew, lease.expires, world.client.poll_timeout()), (None, None, None));
}

const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2600, 0x77, 0, 0x100, 0, 0, 0, 0);

/// An association with a prefix (RFC 8415 §21.21 and §21.22), which has a bit too many.
fn delegation(valid_s: u32) -> Vec<u8> {
    let mut inner = Options::default();
    let times = [valid_s.to_be_bytes(), valid_s.to_be_bytes()].concat();
    let mut prefix = PREFIX.octets();
    prefix[15] = 1;
    inner.push(option::PREFIX, [&times[..], &[56], &prefix].concat());
    [&ID.to_be_bytes()[..], &[0; 8], &inner.to_bytes()].concat()
}

const BOTH: Wanted = Wanted { address: true, prefix: true };

/// What a client that wants a prefix has, when it was granted both.
fn delegated() -> World {
    let mut world = World::new(BOTH);
    world.sent();
    for kind in [Kind::Advertise, Kind::Reply] {
        world.answer(kind, |options| {
            options.push(option::ASSOCIATION, association((60, 120)));
            options.push(option::DELEGATION, delegation(100));
        });
        if kind == Kind::Advertise {
            world.wait();
            let (kind, options) = world.sent();
            let asked = options.association(option::DELEGATION, ID).expect("it is asked for");
            assert_eq!((kind, asked.granted[0].address, asked.granted[0].length), (3, PREFIX, 56));
        }
    }
    world
}

#[test]
fn a_prefix_is_asked_for_beside_an_address_and_renewed_with_it() {
    let mut world = delegated();
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert_eq!(lease.prefixes, [DelegatedPrefix { prefix: PREFIX, length: 56 }]);
    assert_eq!(
        (lease.plain(), lease.renew),
        (vec![(ADDRESS, 128)], Some(world.now + Duration::from_secs(30)))
    );
    world.wait();
    let (kind, options) = world.sent();
    assert_eq!(
        (kind, options.has(option::ASSOCIATION), options.has(option::DELEGATION)),
        (5, true, true)
    );
    // The server has it no longer.
    world.answer(Kind::Reply, |options| {
        options.push(option::ASSOCIATION, association((60, 120)));
        options.push(option::DELEGATION, delegation(0));
    });
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert!(lease.prefixes.is_empty());
    // It is asked for all the same, and that there was none is no reason to begin anew.
    world.wait();
    assert!(world.sent().1.has(option::DELEGATION));
    world.answer(Kind::Reply, |options| {
        options.push(option::ASSOCIATION, association((60, 120)));
        options.push(option::DELEGATION, status(3));
    });
    assert!(matches!(world.client.poll_event(), Some(Event::Leased(_))));
}

#[test]
fn a_cable_that_comes_back_has_a_prefix_rebound_and_an_address_confirmed() {
    let mut world = delegated();
    world.client.poll_event();
    world.client.handle_carrier(world.now);
    let (kind, options) = world.sent();
    assert_eq!((kind, options.has(option::SERVER)), (6, false));
    // A server that forgot it is asked anew.
    world.answer(Kind::Reply, |options| {
        options.push(option::ASSOCIATION, association((60, 120)));
        options.push(option::DELEGATION, status(3));
    });
    assert_eq!(world.sent().0, 3);
}

#[test]
fn of_two_servers_the_one_with_a_prefix_is_chosen() {
    let mut world = World::new(BOTH);
    world.sent();
    world.answer(Kind::Advertise, |options| {
        options.push(option::PREFERENCE, [255]);
        options.push(option::ASSOCIATION, association((60, 120)));
        options.push(option::DELEGATION, status(6));
    });
    assert_eq!(world.client.poll_transmit(), None, "it lacks something");
    world.answer(Kind::Advertise, |options| {
        options.push(option::ASSOCIATION, association((60, 120)));
        options.push(option::DELEGATION, delegation(100));
    });
    world.wait();
    assert!(
        world
            .sent()
            .1
            .association(option::DELEGATION, ID)
            .is_some_and(|one| one.granted.len() == 1)
    );
}

#[test]
fn where_no_prefix_is_delegated_configuration_is_asked_for() {
    // Nobody answers: after a while, and once.
    let mut world = World::new(Wanted::PREFIX);
    let kinds: Vec<u8> = (0..9)
        .map(|_| {
            let kind = world.sent().0;
            world.wait();
            kind
        })
        .collect();
    assert_eq!(kinds, [1, 1, 1, 11, 11, 11, 1, 1, 1]);
    // A server has none, and says what it has.
    world.answer(Kind::Advertise, |options| options.push(option::DELEGATION, status(6)));
    world.wait();
    world.client.handle_message(world.now, &[]);
    assert_eq!(world.sent().0, 11);
    world.answer(Kind::Reply, |options| options.push(option::NAME_SERVERS, DNS.octets()));
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no answer") };
    assert_eq!((lease.dns, lease.renew), (vec![DNS], Some(world.now + ASK_AGAIN)));
    world.wait();
    assert_eq!(world.sent().0, 1, "there may be one by now");
}
