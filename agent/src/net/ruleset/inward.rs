//! What may come to guests from outside: nothing, unless the provider says that those whose addresses
//! are routed to the node are open. A guest's flows are counted whoever begins them, so that who floods
//! one guest takes nothing from others.

use types::config::Inbound;

use super::{
    Address, Chain, Exit, FLOW_RATE, FLOWS_PER_GUEST, Flow, GuestBytes, Policy, Rule, Shared,
    Statement, Verdict,
};

/// Name of the chain.
pub(super) const INWARD: &str = "inward";

/// Returns the chain for packets that go to guests and belong to no flow yet; `None` when guests are
/// closed.
pub(super) fn chain(shared: &Shared) -> Option<Chain> {
    if shared.inbound == Inbound::Closed {
        return None;
    }
    let mut rules = Vec::new();
    if shared.exit == Exit::Routed {
        let to = [Statement::Ipv4, Statement::Address(Address::Destination, shared.subnet)];
        rules.extend(open(&to, GuestBytes::Destination4));
    }
    if let Some(net) = shared.ipv6.filter(|net| net.exit() == Exit::Routed) {
        let to = Statement::Address6(Address::Destination, net.prefix(), net.length());
        rules.extend(open(&[Statement::Ipv6, to], GuestBytes::Destination6));
    }
    (!rules.is_empty()).then(|| Chain {
        name: INWARD.to_owned(),
        hook: None,
        policy: Policy::Accept,
        rules,
    })
}

/// Lets flows begin to guests of one family, as many as each may have, and as fast.
fn open(to: &[Statement], guest: GuestBytes) -> [Rule; 4] {
    let new = [to, &[Statement::Flow(Flow::New)]].concat();
    let rule = |more: &[Statement]| Rule { statements: [&new, more].concat() };
    [
        // The mark finds a machine's flows when it is deleted.
        rule(&[Statement::MarkFlow(guest)]),
        rule(&[
            Statement::FlowsFaster(guest, FLOW_RATE),
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ]),
        rule(&[
            Statement::FlowsOver(guest, FLOWS_PER_GUEST),
            Statement::Counter,
            Statement::Verdict(Verdict::Drop),
        ]),
        rule(&[Statement::Verdict(Verdict::Accept)]),
    ]
}
