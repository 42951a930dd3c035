//! What a bridged machine's tap says of it: its alias, at most 255 bytes. There is room in it for the
//! [`ROOM`] addresses that were used last; the rest is elsewhere ([`super::rest`]).
//!
//! `holdfast MACHINE bridged IPV4/END IPV6,…`, where `END` is in seconds since the host's start, 0
//! for never, and IPv6 addresses are in base64. `-` stands for nothing.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use rustix::time::{ClockId, clock_gettime};
use types::ids::MachineId;

use super::bindings::{Bindings, Leased};

/// First and third word.
const OURS: &str = "holdfast";
const BRIDGED: &str = "bridged";
const NOTHING: &str = "-";
/// IPv6 addresses that fit.
pub(super) const ROOM: usize = 7;

/// What is known of a guest's addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// Its IPv4 address, and for how many seconds it is its own; for ever when `None`.
    pub(super) ipv4: Option<(Ipv4Addr, Option<u64>)>,
    /// Its IPv6 addresses; what it used longest ago comes first.
    pub(super) ipv6: Vec<Ipv6Addr>,
}

impl Known {
    pub(super) fn of(bindings: &Bindings, now: Instant) -> Self {
        let left = |end: Instant| end.saturating_duration_since(now).as_secs();
        let ipv4 = bindings.leased().map(|leased| (leased.address, leased.until.map(left)));
        Self { ipv4, ipv6: bindings.asked_for().to_vec() }
    }

    pub(super) fn leased(&self, now: Instant) -> Option<Leased> {
        let (address, left) = self.ipv4?;
        Some(Leased { address, until: left.map(|left| now + Duration::from_secs(left)) })
    }
}

/// Returns the seconds since the host's start, which only grow and are the same for every process.
pub(super) fn uptime() -> u64 {
    u64::try_from(clock_gettime(ClockId::Monotonic).tv_sec).unwrap_or(0)
}

/// Writes an alias at a time since the host's start, with the last addresses.
pub(super) fn write(machine: MachineId, known: &Known, uptime: u64) -> String {
    let ipv4 = known.ipv4.map(|(address, left)| {
        format!("{address}/{}", left.map_or(0, |left| uptime.saturating_add(left).max(1)))
    });
    let last = &known.ipv6[known.ipv6.len().saturating_sub(ROOM)..];
    let ipv6: Vec<String> =
        last.iter().map(|address| URL_SAFE_NO_PAD.encode(address.octets())).collect();
    let ipv6 = Some(ipv6.join(",")).filter(|text| !text.is_empty());
    let or_nothing = |text: Option<String>| text.unwrap_or_else(|| NOTHING.to_owned());
    format!("{OURS} {machine} {BRIDGED} {} {}", or_nothing(ipv4), or_nothing(ipv6))
}

/// Reads an alias; `None` when it is not one of ours. A lease that ended is not known any more.
pub(super) fn parse(alias: &str, uptime: u64) -> Option<(MachineId, Known)> {
    let words: Vec<&str> = alias.split(' ').collect();
    let [OURS, machine, BRIDGED, ipv4, ipv6] = words[..] else { return None };
    let ipv4 = match ipv4 {
        NOTHING => None,
        text => {
            let (address, end) = text.split_once('/')?;
            let (address, end): (Ipv4Addr, u64) = (address.parse().ok()?, end.parse().ok()?);
            let left = (end > 0).then(|| end.saturating_sub(uptime));
            (left != Some(0)).then_some((address, left))
        }
    };
    let ipv6 = match ipv6 {
        NOTHING => Vec::new(),
        text => text.split(',').map(address).collect::<Option<Vec<_>>>()?,
    };
    (ipv6.len() <= ROOM).then_some((machine.parse().ok()?, Known { ipv4, ipv6 }))
}

fn address(text: &str) -> Option<Ipv6Addr> {
    let octets: [u8; 16] = URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()?;
    Some(octets.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `IFALIASZ` without its end.
    const LONGEST: usize = 255;

    #[test]
    fn what_is_known_comes_back_and_the_longest_fits() {
        let machine = MachineId::from_bytes([0xab; 16]);
        let known = Known {
            ipv4: Some((Ipv4Addr::new(203, 100, 113, 255), Some(86_400))),
            ipv6: (0..7).map(|n| Ipv6Addr::new(0x2001, 0xdb8, n, n, 0xffff, n, n, 1)).collect(),
        };
        let ipv6 = [&[Ipv6Addr::LOCALHOST; 25], &known.ipv6[..]].concat();
        let text = write(machine, &Known { ipv6, ..known.clone() }, u64::from(u32::MAX));
        assert!(text.len() <= LONGEST, "{} bytes", text.len());
        assert_eq!(parse(&text, u64::from(u32::MAX)), Some((machine, known.clone())));
        let later = parse(&text, u64::from(u32::MAX) + 86_400).expect("still an alias");
        assert_eq!(later.1, Known { ipv4: None, ..known });
        let (ever, none) =
            (Known { ipv4: Some(([192, 0, 2, 7].into(), None)), ipv6: vec![] }, Known::default());
        for known in [ever, none] {
            assert_eq!(parse(&write(machine, &known, 9), 9), Some((machine, known)));
        }
    }

    #[test]
    fn other_aliases_are_not_ours() {
        let machine = "ab".repeat(16);
        for alias in [
            "".to_owned(),
            format!("holdfast {machine} 10.77.0.2"),
            format!("holdfast {machine} bridged - "),
            format!("holdfast {machine} bridged 192.0.2.7 -"),
            format!("holdfast {machine} bridged - AAAA"),
        ] {
            assert_eq!(parse(&alias, 0), None, "{alias:?}");
        }
    }
}
