use super::*;

const MAC: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 1]);
const SECOND: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 2]);
const OTHER: HardwareAddress = HardwareAddress([2, 0, 0, 0, 0, 9]);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

/// A guard of one address, and a clock that only moves when told.
struct Bench {
    guard: Guard,
    start: Instant,
    now: Instant,
}

fn claims(addresses: &[(Ipv4Addr, Claim)]) -> Claims {
    Claims { hardware: MAC, own: vec![SECOND], addresses: addresses.iter().copied().collect() }
}

impl Bench {
    fn new(claim: Claim) -> Self {
        let start = Instant::now();
        Self { guard: Guard::new(claims(&[(ADDRESS, claim)]), start), start, now: start }
    }

    /// A guard whose address was announced.
    fn established(claim: Claim) -> Self {
        let mut bench = Self::new(claim);
        while bench.wait() {}
        bench.sent();
        bench
    }

    /// Lets time pass until the guard wants to act.
    fn wait(&mut self) -> bool {
        let Some(due) = self.guard.poll_timeout() else { return false };
        self.now = self.now.max(due);
        self.guard.handle_timeout(self.now);
        true
    }

    /// What was sent since the last question: whether it claims the address.
    fn sent(&mut self) -> Vec<bool> {
        let frames = std::iter::from_fn(|| self.guard.poll_transmit());
        frames.map(|frame| arp::sender(&frame[14..]) == Some((MAC, ADDRESS))).collect()
    }

    fn found(&mut self) -> Vec<Finding> {
        let found = std::iter::from_fn(|| self.guard.poll_finding());
        found
            .map(|(address, finding)| {
                assert_eq!(address, ADDRESS);
                finding
            })
            .collect()
    }

    fn hear(&mut self, from: HardwareAddress) {
        let packet = arp::announcement(from, ADDRESS);
        self.guard.handle_packet(self.now, &packet[14..]);
    }
}

#[test]
fn an_address_that_nobody_else_has_is_asked_for_and_announced_while_it_is_used() {
    let mut bench = Bench::new(Claim::Given);
    let mut at = vec![(0, bench.sent())];
    while bench.wait() {
        at.push((bench.now.duration_since(bench.start).as_secs(), bench.sent()));
    }
    assert_eq!(at, [(0, vec![false]), (1, vec![false]), (2, vec![true]), (4, vec![true])]);
    assert_eq!(bench.found(), []);
}

#[test]
fn a_given_address_that_somebody_answers_for_is_his_and_is_not_announced() {
    let mut bench = Bench::new(Claim::Given);
    bench.sent();
    bench.hear(OTHER);
    assert_eq!((bench.found(), bench.sent()), (vec![Finding::Lost(OTHER)], vec![]));
}

#[test]
fn an_announced_address_is_defended_once_and_goes_when_the_other_stays() {
    let mut bench = Bench::established(Claim::Given);
    bench.hear(OTHER);
    assert_eq!((bench.found(), bench.sent()), (vec![], vec![true]));
    bench.wait();
    assert_eq!(bench.sent(), [false], "asked again");
    bench.hear(OTHER);
    assert_eq!((bench.found(), bench.sent()), (vec![Finding::Lost(OTHER)], vec![]));
}

#[test]
fn an_announced_address_stays_when_the_other_yields() {
    let mut bench = Bench::established(Claim::Given);
    bench.hear(OTHER);
    while bench.wait() {}
    bench.now += DEFEND_INTERVAL;
    bench.sent();
    bench.hear(OTHER);
    assert_eq!((bench.found(), bench.sent()), (vec![], vec![true]));
}

#[test]
fn a_kept_address_stays_and_the_other_host_is_told_until_it_is_gone() {
    let mut bench = Bench::new(Claim::Kept);
    for _ in 0..5 {
        bench.hear(OTHER);
        bench.wait();
    }
    assert_eq!(bench.found(), [Finding::Shared(OTHER)]);
    assert!(!bench.sent().contains(&true), "announced, and it is another host's");
    while bench.wait() {}
    assert_eq!((bench.found(), bench.sent()), (vec![Finding::Alone], vec![false, true, true]));
}

#[test]
fn a_kept_address_is_defended_at_most_every_ten_seconds() {
    let mut bench = Bench::established(Claim::Kept);
    let mut defences = 0;
    for _ in 0..40 {
        bench.hear(OTHER);
        defences += bench.sent().len();
        bench.now += Duration::from_secs(1);
    }
    assert_eq!((defences, bench.found()), (4, vec![Finding::Shared(OTHER)]));
}

#[test]
fn the_nodes_own_interfaces_and_questions_of_others_are_no_conflict() {
    let mut bench = Bench::new(Claim::Given);
    bench.hear(MAC);
    bench.hear(SECOND);
    let probe = arp::probe(OTHER, ADDRESS);
    bench.guard.handle_packet(bench.now, &probe[14..]);
    let elsewhere = arp::announcement(OTHER, Ipv4Addr::new(192, 0, 2, 8));
    bench.guard.handle_packet(bench.now, &elsewhere[14..]);
    assert_eq!(bench.found(), []);
}

#[test]
fn only_what_is_new_is_asked_for_and_everything_on_a_new_cable_or_in_another_name() {
    let mut bench = Bench::established(Claim::Kept);
    bench.guard.handle_claims(bench.now, claims(&[(ADDRESS, Claim::Kept)]));
    assert!(bench.sent().is_empty());
    bench.guard.handle_carrier(bench.now);
    assert_eq!(bench.sent(), [false]);
    while bench.wait() {}
    bench.sent();
    let other = Claims { hardware: SECOND, ..claims(&[(ADDRESS, Claim::Kept)]) };
    bench.guard.handle_claims(bench.now, other);
    assert_eq!(bench.sent(), [false]);
    bench.guard.handle_claims(bench.now, claims(&[]));
    assert_eq!((bench.guard.watched().count(), bench.guard.poll_timeout()), (0, None));
}

#[test]
fn more_addresses_than_can_be_watched_are_not() {
    let many = (0..100).map(|last| (Ipv4Addr::new(192, 0, 2, last), Claim::Kept));
    let many: Vec<_> = many.collect();
    let guard = Guard::new(claims(&many), Instant::now());
    assert_eq!(guard.watched().count(), MAX_ADDRESSES);
}
