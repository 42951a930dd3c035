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
        let mut options = Options::default();
        options.push(option::CLIENT, self.client.duid.clone());
        options.push(option::SERVER, [9, 9]);
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
        let mut world = Self::new(Wanted::Address);
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
    let mut bytes = Association::request(ID, &[ADDRESS]);
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
    let mut world = World::new(Wanted::Address);
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
    assert_eq!((lease.plain(), lease.dns), (vec![ADDRESS], vec![DNS]));
    assert_eq!(lease.renew, Some(world.now + Duration::from_secs(30)));
    assert_eq!(lease.rebind, Some(world.now + Duration::from_secs(48)));
    assert_eq!(lease.expires, Some(world.now + Duration::from_secs(120)));
}

#[test]
fn a_server_that_commits_rapidly_needs_no_request() {
    let mut world = World::new(Wanted::Address);
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
    let mut world = World::new(Wanted::Address);
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
    assert_eq!((world.client.poll_event(), world.sent().0), (Some(Event::Lost), 1));
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
    let mut world = World::new(Wanted::Configuration);
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
    let mut world = World::new(Wanted::Address);
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
    let mut world = World::new(Wanted::Address);
    world.sent();
    world.answer(Kind::Reply, |options| {
        options.push(option::RAPID_COMMIT, []);
        options.push(option::ASSOCIATION, association((u32::MAX, u32::MAX)));
    });
    let Some(Event::Leased(lease)) = world.client.poll_event() else { panic!("no lease") };
    assert_eq!((lease.renew, lease.expires, world.client.poll_timeout()), (None, None, None));
}
