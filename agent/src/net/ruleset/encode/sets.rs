//! Sets that rules fill: flows of each guest, and IPv6 sources of one.
//! Source: Linux `include/uapi/linux/netfilter/nf_tables.h`, `net/netfilter/nft_dynset.c`.

use std::time::Duration;

use netlink_packet_netfilter::nftables::{
    Expressions, SetAttribute, SetDescription, SetFlags, SetMessage,
};

use super::{REGISTER, Statement, TABLE, nested, number, other, text};

/// The set that counts the flows of each source; its number within a batch, and its room, which is
/// more than there can be machines.
pub const FLOWS: &str = "flows";
const FLOWS_ID: u32 = 1;
const FLOWS_SIZE: u32 = 1 << 16;
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

pub(super) fn counts_flows(statement: &Statement) -> bool {
    matches!(statement, Statement::FlowsOver(..))
}

pub(super) fn flows_set() -> SetMessage {
    SetMessage {
        attributes: vec![
            SetAttribute::Table(TABLE.to_owned()),
            SetAttribute::Name(FLOWS.to_owned()),
            SetAttribute::Flags(SetFlags::Eval),
            SetAttribute::KeyType(KEY_IPV4),
            SetAttribute::KeyLen(4),
            SetAttribute::Id(FLOWS_ID),
            SetAttribute::Description(vec![SetDescription::Size(FLOWS_SIZE)]),
        ],
    }
}

/// Looks the key up, adds it when it is new, and matches when its count is too large.
pub(super) fn flows_over(most: u32) -> Expressions {
    let count = nested(2, &[number(1, most), number(2, MORE_THAN)]);
    let expression = nested(7, &[text(1, "connlimit"), count]);
    let add = number(3, ADD);
    let key = number(4, REGISTER);
    other("dynset", vec![text(1, FLOWS), number(2, FLOWS_ID), add, key, expression])
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
