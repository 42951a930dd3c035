//! What must be true of a configuration that its types do not say. Nothing is accepted here that would keep a
//! node from serving later: by then the document is on its disk.

use std::{collections::BTreeSet, net::IpAddr};

use super::{DELEGATED, Inbound, MachineNetwork, Neighbours, NetworkMode, NodeSpec, parse_prefix};
use crate::{
    ids::PublicKey,
    install::MAX_ESCROW,
    uplinks::{self, Ipv4Source, Ipv6Source},
};

/// What is wrong.
pub(super) struct Fault {
    /// The key, as `network.uplinks[1].mtu`.
    pub(super) key: String,
    /// What would be right.
    pub(super) right: String,
}

fn wrong(key: impl Into<String>, right: impl Into<String>) -> Result<(), Fault> {
    Err(Fault { key: key.into(), right: right.into() })
}

/// Checks a configuration.
pub(super) fn check(spec: &NodeSpec) -> Result<(), Fault> {
    check_authority(spec)?;
    check_keys(spec)?;
    check_machines(spec)?;
    check_network(spec)?;
    check_bridge(spec)?;
    check_texts(spec)
}

/// Texts that are something else than what people take them for.
fn check_texts(spec: &NodeSpec) -> Result<(), Fault> {
    let (time, updates) = (&spec.time, spec.updates.as_ref());
    // Neither names nor addresses have these, and URLs do.
    let is_host = |host: &String| !host.is_empty() && !host.contains(['/', ' ', '@']);
    for (list, hosts) in [("time.ntp", &time.ntp), ("time.nts", &time.nts)] {
        if let Some(at) = hosts.iter().position(|host| !is_host(host)) {
            let right = "it must be a server's name or address, as \"time.example\", and no URL";
            return wrong(format!("{list}[{at}]"), right);
        }
    }
    if time.nts_roots.as_ref().is_some_and(|roots| !roots.contains("-----BEGIN CERTIFICATE-----")) {
        let right = "it must be the certificates themselves, in PEM, between three quotes, and no file's name";
        return wrong("time.nts_roots", right);
    }
    if updates.is_some_and(|updates| !updates.root.trim_start().starts_with('{')) {
        let right = "it must be what is in the repository's root.json, between three single quotes, and not the file's name";
        return wrong("updates.root", right);
    }
    Ok(())
}

fn check_authority(spec: &NodeSpec) -> Result<(), Fault> {
    let authority = &spec.authority;
    let keys = authority.keys.iter().collect::<BTreeSet<_>>().len();
    if keys == 0 {
        return wrong("authority.keys", "at least one key is needed");
    }
    if !usize::try_from(authority.threshold).is_ok_and(|n| (1..=keys).contains(&n)) {
        let right = format!("it must be 1 to {keys}, the number of different authority.keys");
        return wrong("authority.threshold", right);
    }
    Ok(())
}

/// Half of all numbers of 32 bytes name no key, so that one wrong digit is noticed as often.
fn check_keys(spec: &NodeSpec) -> Result<(), Fault> {
    let escrow = spec.install.as_ref().map_or(&[][..], |install| &install.escrow);
    if escrow.len() > MAX_ESCROW {
        let right = format!("it names {} keys; at most {MAX_ESCROW} are right", escrow.len());
        return wrong("install.escrow", right);
    }
    let lists = [
        ("authority.keys", &spec.authority.keys[..]),
        ("operators", &spec.operators),
        ("install.escrow", escrow),
    ];
    for (list, keys) in lists {
        if let Some(at) = keys.iter().position(|key| key.verifier().is_none()) {
            return wrong(
                format!("{list}[{at}]"),
                "it is no Ed25519 public key; compare it with the 64 digits that `holdfast keygen` prints",
            );
        }
    }
    let seeds = &spec.overlay.seeds;
    match seeds.iter().position(|seed| PublicKey::from(seed.node).verifier().is_none()) {
        None => Ok(()),
        Some(at) => wrong(
            format!("overlay.seeds[{at}].node"),
            "it is no node's key; compare it with the 64 digits that the seed itself shows",
        ),
    }
}

fn check_machines(spec: &NodeSpec) -> Result<(), Fault> {
    let machines = &spec.machines;
    let room = |(address, length): (IpAddr, u8)| address.is_ipv4() && length <= 30;
    if !parse_prefix(&machines.subnet).is_some_and(room) {
        return wrong(
            "machines.subnet",
            "it must be an IPv4 network of /30 or wider, as \"10.77.0.0/16\"",
        );
    }
    for (at, set) in machines.linked.iter().flatten().enumerate() {
        if set.iter().collect::<BTreeSet<_>>().len() < 2 {
            let right =
                "it must name two different GPUs at least, as [\"0000:41:00.0\", \"0000:61:00.0\"]";
            return wrong(format!("machines.linked[{at}]"), right);
        }
    }
    if machines.net_mbit.is_some_and(|mbit| !(1..=400_000).contains(&mbit)) {
        return wrong("machines.net_mbit", "it must be 1 to 400000");
    }
    let routed = |(address, length): (IpAddr, u8)| address.is_ipv6() && (48..=63).contains(&length);
    let prefix = machines.ipv6.as_deref().filter(|text| *text != "off");
    let fixed = prefix.filter(|text| *text != DELEGATED);
    if let Some(text) = fixed.filter(|text| !parse_prefix(text).is_some_and(routed)) {
        let one = |(address, length): (IpAddr, u8)| address.is_ipv6() && length >= 64;
        return match parse_prefix(text).is_some_and(one) {
            true => wrong(
                "machines.ipv6",
                "a /64 is one network, and each machine needs one of its own; ask the provider for a /56 (254 machines) or at least a /60 (15 machines), routed to the node, or leave it out: machines then have private IPv6 behind the node's address",
            ),
            false => wrong(
                "machines.ipv6",
                "it must be \"off\", \"delegated\" or an IPv6 prefix of 48 to 63 bits, as \"2001:db8:100::/48\"",
            ),
        };
    }
    let known = machines.network == MachineNetwork::Routed || prefix.is_some();
    if machines.inbound == Inbound::Open && !known && machines.network != MachineNetwork::Bridged {
        return wrong(
            "machines.inbound",
            "nobody outside knows machines' addresses; set machines.network = \"routed\", or machines.ipv6 to a prefix that is routed to the node",
        );
    }
    Ok(())
}

fn check_network(spec: &NodeSpec) -> Result<(), Fault> {
    let network = &spec.network;
    if !(30..=86_400).contains(&network.trial_s) {
        return wrong("network.trial_s", "it must be 30 to 86400");
    }
    let short = [
        ("interface", network.interface.is_some()),
        ("mode", network.mode != NetworkMode::Auto),
        ("addresses", !network.addresses.is_empty()),
        ("gateways", !network.gateways.is_empty()),
    ];
    let given = short.into_iter().find(|(_, given)| *given);
    if let Some((key, _)) = given.filter(|_| !network.uplinks.is_empty()) {
        return wrong(
            format!("network.{key}"),
            "interface, mode, addresses and gateways are the short form of one uplink; with [[network.uplinks]], say it there",
        );
    }
    uplinks::check(&network.uplinks)
        .or_else(|(key, fault)| wrong(format!("network.uplinks{key}"), fault.to_string()))?;
    check_static(spec)
}

/// The short form's addresses.
fn check_static(spec: &NodeSpec) -> Result<(), Fault> {
    let network = &spec.network;
    if network.mode == NetworkMode::Static && network.addresses.is_empty() {
        return wrong(
            "network.addresses",
            "mode is \"static\", which needs one, as addresses = [\"192.0.2.5/24\"]",
        );
    }
    let lists =
        [("addresses", network.addresses.is_empty()), ("gateways", network.gateways.is_empty())];
    if network.mode == NetworkMode::Auto
        && let Some((key, _)) = lists.iter().find(|(_, empty)| !empty)
    {
        return wrong(format!("network.{key}"), "mode is \"auto\"; set mode = \"static\"");
    }
    let mut families = BTreeSet::new();
    for (at, text) in network.addresses.iter().enumerate() {
        let Some((address, _)) = parse_prefix(text) else {
            let right = "it must be an address with a prefix length, as \"192.0.2.5/24\"";
            return wrong(format!("network.addresses[{at}]"), right);
        };
        families.insert(address.is_ipv4());
    }
    match network.gateways.iter().position(|hop| !families.contains(&hop.is_ipv4())) {
        None => Ok(()),
        Some(at) => wrong(
            format!("network.gateways[{at}]"),
            "a gateway needs an address of its family among network.addresses",
        ),
    }
}

/// What must be true of machines that are bridged, and of those that are not.
fn check_bridge(spec: &NodeSpec) -> Result<(), Fault> {
    let machines = &spec.machines;
    if machines.network != MachineNetwork::Bridged {
        let given = [
            ("machines.uplink", machines.uplink.is_some()),
            ("machines.neighbours", machines.neighbours != Neighbours::Apart),
        ];
        return given.into_iter().find(|(_, given)| *given).map_or(Ok(()), |(key, _)| {
            wrong(
                key,
                "it is of bridged machines; set machines.network = \"bridged\", or leave it out",
            )
        });
    }
    let named = machines.uplink.as_ref();
    let uplink = spec.network.uplinks.iter().find(|uplink| Some(&uplink.name) == named);
    let Some(uplink) = uplink else {
        return wrong(
            "machines.uplink",
            "machines.network is \"bridged\"; set machines.uplink to the name of one of [[network.uplinks]]",
        );
    };
    if uplink.ipv4() != Ipv4Source::Off || uplink.ipv6() != Ipv6Source::Off {
        return wrong(
            "machines.uplink",
            "the node has addresses on that uplink; set ipv4 = \"off\" and ipv6 = \"off\" there, and give the node another uplink or VLAN",
        );
    }
    let given = [
        ("machines.ipv6", machines.ipv6.is_some()),
        ("machines.inbound", machines.inbound == Inbound::Open),
    ];
    given.into_iter().find(|(_, given)| *given).map_or(Ok(()), |(key, _)| {
        wrong(
            key,
            "it says nothing of bridged machines, whose addresses are the provider's network's and who are reached as it allows; leave it out",
        )
    })
}
