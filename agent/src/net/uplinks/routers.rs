//! The routers of one uplink that advertised themselves, and which of them is passed over. Pure.
//!
//! A node that forwards passes over no silent router by itself: reachability counts for hosts only (Linux
//! `net/ipv6/route.c`, where RFC 4861 §6.3.6 and RFC 4191 §3.2 are followed), and a router's route stands
//! until its lifetime ends, mostly half an hour. So the route of a silent one is taken away while another
//! router answers. When it answers again it is asked to advertise itself, which makes its route anew.

use std::{
    collections::BTreeMap,
    net::Ipv6Addr,
    time::{Duration, Instant},
};

use super::{addressing::Standing, watch::Watch};
use crate::net::{Reach, kernel::Neighbour};

/// Most routers of one uplink that are watched. A link has a few.
const MAX: usize = 16;
/// Longest lifetime that a router may advertise (RFC 4861 §6.2.1, `AdvDefaultLifetime`): so long one that
/// was passed over may come back.
const LONGEST: Duration = Duration::from_secs(9000);
/// So many times one that answers again is asked to advertise itself (RFC 4861 §10,
/// `MAX_RTR_SOLICITATIONS`); what answers no more often is a router no longer.
const MAX_ASKED: u32 = 3;

/// What is known of the routers of one uplink.
#[derive(Debug, Default)]
pub(super) struct Routers(BTreeMap<Ipv6Addr, Known>);

#[derive(Debug)]
struct Known {
    watch: Watch,
    way: Way,
}

/// Whether there is a route through a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    There,
    /// It was taken away. Until when the router is watched all the same, and how often it was asked to
    /// advertise itself since it answers.
    PassedOver {
        until: Instant,
        asked: u32,
    },
}

impl Routers {
    /// Takes the routers through which there are routes now.
    pub(super) fn handle_routes(&mut self, now: Instant, present: &[Ipv6Addr]) {
        self.0.retain(|router, known| match known.way {
            // It went by itself: its lifetime ended, or it said that it is a default router no longer.
            Way::There => present.contains(router),
            Way::PassedOver { until, asked } => {
                present.contains(router) || now < until && asked < MAX_ASKED
            }
        });
        for router in present {
            let has_room = self.0.len() < MAX;
            match self.0.get_mut(router) {
                Some(known) if known.way == Way::There => {}
                Some(known) => {
                    known.way = Way::There;
                    // It spoke.
                    if known.watch.standing() == Standing::Silent {
                        known.watch = Watch::default();
                    }
                }
                None if has_room => {
                    let known = Known { watch: Watch::default(), way: Way::There };
                    self.0.insert(*router, known);
                }
                None => {}
            }
        }
    }

    /// Takes what a look at a router found.
    pub(super) fn handle_look(&mut self, router: Ipv6Addr, found: Neighbour) {
        if let Some(known) = self.0.get_mut(&router) {
            known.watch.handle_look(found);
        }
    }

    /// The cable carries no signal.
    pub(super) fn handle_no_carrier(&mut self) {
        self.0.values_mut().for_each(|known| known.watch.handle_no_carrier());
    }

    /// The route through a router was taken away.
    pub(super) fn handle_passed_over(&mut self, now: Instant, router: Ipv6Addr) {
        if let Some(known) = self.0.get_mut(&router) {
            known.way = Way::PassedOver { until: now + LONGEST, asked: 0 };
        }
    }

    /// Returns the routers that are watched.
    pub(super) fn watched(&self) -> Vec<Ipv6Addr> {
        self.0.keys().copied().collect()
    }

    /// Returns whether there is a route through a router that answers.
    pub(super) fn leads_on(&self) -> bool {
        let mut ways = self.0.values().filter(|known| known.way == Way::There);
        ways.any(|known| known.watch.reach() == Reach::Answers)
    }

    /// Returns whether a router is silent and has a route.
    pub(super) fn is_silent(&self, router: Ipv6Addr) -> bool {
        let known = self.0.get(&router).filter(|known| known.way == Way::There);
        known.is_some_and(|known| known.watch.standing() == Standing::Silent)
    }

    /// Returns whether routers are to be asked to advertise themselves now: one that was passed over
    /// answers again.
    pub(super) fn poll_solicitation(&mut self) -> bool {
        let mut is_due = false;
        for known in self.0.values_mut() {
            if let Way::PassedOver { asked, .. } = &mut known.way
                && known.watch.reach() == Reach::Answers
            {
                *asked += 1;
                is_due = true;
            }
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use Neighbour::{Answers, Silent};

    use super::*;

    const ONE: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const OTHER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);

    fn look(routers: &mut Routers, found: [Neighbour; 2], times: usize) {
        for _ in 0..times {
            routers.handle_look(ONE, found[0]);
            routers.handle_look(OTHER, found[1]);
        }
    }

    /// Two routers, of which one was passed over.
    fn passed_over(now: Instant) -> Routers {
        let mut routers = Routers::default();
        routers.handle_routes(now, &[ONE, OTHER]);
        assert!(!routers.leads_on(), "nobody has answered yet");
        look(&mut routers, [Answers, Answers], 1);
        look(&mut routers, [Silent, Answers], 2);
        assert!(!routers.is_silent(ONE), "it may have been the network");
        look(&mut routers, [Silent, Answers], 1);
        assert!(routers.is_silent(ONE) && !routers.is_silent(OTHER) && routers.leads_on());
        routers.handle_passed_over(now, ONE);
        routers.handle_routes(now, &[OTHER]);
        assert_eq!(routers.watched(), [ONE, OTHER]);
        assert!(!routers.is_silent(ONE), "it has no route");
        routers
    }

    #[test]
    fn one_that_answers_again_is_asked_to_advertise_itself() {
        let now = Instant::now();
        let mut routers = passed_over(now);
        assert!(!routers.poll_solicitation());
        look(&mut routers, [Answers, Answers], 2);
        assert!(!routers.poll_solicitation());
        look(&mut routers, [Answers, Silent], 1);
        assert!(routers.poll_solicitation());
        routers.handle_routes(now, &[ONE, OTHER]);
        assert!(!routers.poll_solicitation(), "it is back");
        look(&mut routers, [Answers, Silent], 3);
        assert!(routers.is_silent(OTHER) && routers.leads_on());
    }

    #[test]
    fn one_that_is_no_router_any_more_is_forgotten() {
        let now = Instant::now();
        let mut routers = passed_over(now);
        look(&mut routers, [Answers, Answers], 3);
        assert!((0..MAX_ASKED).all(|_| routers.poll_solicitation()));
        routers.handle_routes(now, &[OTHER]);
        assert_eq!(routers.watched(), [OTHER]);
        routers.handle_routes(now, &[]);
        assert!(routers.watched().is_empty(), "it went by itself");
        let mut routers = passed_over(now);
        routers.handle_routes(now + LONGEST, &[OTHER]);
        assert_eq!(routers.watched(), [OTHER]);
    }

    #[test]
    fn one_that_advertises_itself_has_a_fresh_start() {
        let now = Instant::now();
        let mut routers = passed_over(now);
        routers.handle_routes(now, &[ONE, OTHER]);
        assert!(!routers.is_silent(ONE));
        look(&mut routers, [Silent, Answers], 3);
        assert!(routers.is_silent(ONE));
        routers.handle_no_carrier();
        assert!(routers.is_silent(OTHER) && !routers.leads_on());
    }

    #[test]
    fn a_link_full_of_routers_costs_no_more_than_a_few() {
        let many: Vec<Ipv6Addr> = (1..100).map(Ipv6Addr::from_bits).collect();
        let mut routers = Routers::default();
        routers.handle_routes(Instant::now(), &many);
        assert_eq!(routers.watched().len(), MAX);
    }
}
