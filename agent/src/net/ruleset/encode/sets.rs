//! Sets that rules fill: flows of each guest and how fast they begin, and IPv6 sources of one.
//! Source: Linux `include/uapi/linux/netfilter/nf_tables.h`, `net/netfilter/nft_dynset.c`.

use std::time::Duration;

use netlink_packet_netfilter::nftables::{
    Expressions, SetAttribute, SetDescription, SetFlags, SetMessage,
};

use super::{LIMIT_OVER, REGISTER, Statement, TABLE, nested, number, other, rate, text};
use crate::net::ruleset::{Chain, FLOW_RATE, FlowRate, GuestBytes};

/// The set that counts the flows of each source; its number within a batch, and its room, which is
/// more than there can be machines.
pub const FLOWS: &str = "flows";
const FLOWS_ID: u32 = 1;
const FLOWS_SIZE: u32 = 1 << 16;
/// The sets that measure how fast flows of each guest begin, those that it begins and those that others
/// begin; and for how long one is known that begins none. Its measure is empty long before.
pub const BEGUN: [&str; 2] = ["begun", "begun_inward"];
const BEGUN_IDS: [u32; 2] = [3, 4];
const OUTWARD: usize = 0;
const INWARD: usize = 1;
const BEGUN_KEPT: Duration = Duration::from_secs(60);
const _: () = assert!(BEGUN_KEPT.as_secs() * FLOW_RATE.per_second > FLOW_RATE.burst as u64);
/// `NFT_LIMIT_PKTS`.
const LIMIT_PACKETS: u32 = 0;
/// nft's number for IPv4 addresses as keys, `NFT_CONNLIMIT_F_INV`.
const KEY_IPV4: u32 = 7;
const MORE_THAN: u32 = 1;
/// How the names of the sets of guests' IPv6 sources begin, before the tap's name; their number within
/// a batch.
pub const SOURCES: &str = "sources_";
const SOURCES_ID: u32 = 2;
/// IPv6 sources that one guest may use at a time, and how long one counts after its last packet. A
/// source is an entry in the node's table of neighbours, of which `net/ipv6/neigh/default/gc_thresh3` in
/// `rootfs/sysctl.txt` says how many there may be: as many as 512 guests can have. Stations change
/// their temporary addresses once a day (RFC 8981 §3.8).
pub const SOURCES_KEPT: (u32, Duration) = (256, Duration::from_secs(300));
/// nft's number for IPv6 addresses as keys, and what a rule does with a set: `enum nft_dynset_ops`.
const KEY_IPV6: u32 = 8;
const ADD: u32 = 0;
const UPDATE: u32 = 1;

/// Returns the sets of flows that the rules of chains need.
pub(super) fn wanted(chains: &[Chain]) -> Vec<SetMessage> {
    let rules = chains.iter().flat_map(|chain| &chain.rules);
    let statements: Vec<&Statement> = rules.flat_map(|rule| &rule.statements).collect();
    let is_faster = |wanted: usize| {
        statements.iter().any(|statement| {
            matches!(statement, Statement::FlowsFaster(guest, _) if which(*guest) == wanted)
        })
    };
    let counts = statements.iter().any(|statement| matches!(statement, Statement::FlowsOver(..)));
    let mut sets = Vec::new();
    sets.extend(counts.then(|| flows_set(FLOWS, FLOWS_ID, SetFlags::Eval)));
    for wanted in [OUTWARD, INWARD] {
        if is_faster(wanted) {
            let flags = SetFlags::Eval | SetFlags::Timeout;
            let mut set = flows_set(BEGUN[wanted], BEGUN_IDS[wanted], flags);
            set.attributes.push(SetAttribute::Timeout(BEGUN_KEPT.as_secs() * 1000));
            sets.push(set);
        }
    }
    sets
}

fn flows_set(name: &str, id: u32, flags: SetFlags) -> SetMessage {
    let mut set = named(name);
    set.attributes.extend([
        SetAttribute::Flags(flags),
        SetAttribute::KeyType(KEY_IPV4),
        SetAttribute::KeyLen(4),
        SetAttribute::Id(id),
        SetAttribute::Description(vec![SetDescription::Size(FLOWS_SIZE)]),
    ]);
    set
}

/// Looks the key up, adds it when it is new, and matches when its count is too large.
pub(super) fn flows_over(most: u32) -> Expressions {
    let count = nested(2, &[number(1, most), number(2, MORE_THAN)]);
    let expression = nested(7, &[text(1, "connlimit"), count]);
    let add = number(3, ADD);
    let key = number(4, REGISTER);
    other("dynset", vec![text(1, FLOWS), number(2, FLOWS_ID), add, key, expression])
}

/// Looks the key up, adds it when it is new, and matches when it comes too often.
pub(super) fn flows_faster(guest: GuestBytes, flows: FlowRate) -> Expressions {
    let which = which(guest);
    let limit = nested(2, &rate(flows.per_second, flows.burst, [LIMIT_PACKETS, LIMIT_OVER]));
    let expression = nested(7, &[text(1, "limit"), limit]);
    let (set, update) = ([text(1, BEGUN[which]), number(2, BEGUN_IDS[which])], number(3, UPDATE));
    let attributes = set.into_iter().chain([update, number(4, REGISTER), expression]);
    other("dynset", attributes.collect())
}

/// Which of [`BEGUN`] a flow belongs to.
fn which(guest: GuestBytes) -> usize {
    match guest {
        GuestBytes::Source => OUTWARD,
        GuestBytes::Destination4 | GuestBytes::Destination6 => INWARD,
    }
}

/// The name of the set of a chain.
pub(super) fn sources(chain: &str) -> String {
    format!("{SOURCES}{chain}")
}

pub(super) fn named(set: &str) -> SetMessage {
    let name = SetAttribute::Name(set.to_owned());
    SetMessage { attributes: vec![SetAttribute::Table(TABLE.to_owned()), name] }
}

pub(super) fn sources_set(chain: &str) -> SetMessage {
    let (size, kept) = SOURCES_KEPT;
    let mut set = named(&sources(chain));
    set.attributes.extend([
        SetAttribute::Flags(SetFlags::Eval | SetFlags::Timeout),
        SetAttribute::KeyType(KEY_IPV6),
        SetAttribute::KeyLen(16),
        SetAttribute::Id(SOURCES_ID),
        SetAttribute::Description(vec![SetDescription::Size(size)]),
        // In milliseconds.
        SetAttribute::Timeout(kept.as_secs() * 1000),
    ]);
    set
}

/// Adds the key, or renews its time, and matches; does not match when there is no room.
pub(super) fn note_source6(chain: &str) -> Expressions {
    let name = text(1, &sources(chain));
    let (id, update, key) = (number(2, SOURCES_ID), number(3, UPDATE), number(4, REGISTER));
    other("dynset", vec![name, id, update, key])
}
