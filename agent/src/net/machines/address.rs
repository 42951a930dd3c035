//! Names and addresses of machines' networks. Pure.
//!
//! What a tap is for is written into its alias, so that a restarted agent finds it:
//! `holdfast MACHINE ADDRESS`.

use std::net::Ipv4Addr;

use types::ids::MachineId;

use crate::net::{HardwareAddress, Ipv4Prefix, ruleset::TAP_PREFIX};

/// First word of the alias.
const ALIAS: &str = "holdfast";
/// Hexadecimal digits of the machine id in a tap's name: with the prefix at most `IFNAMSIZ - 1`.
const NAME_DIGITS: usize = 12;
const _: () = assert!(TAP_PREFIX.len() + NAME_DIGITS < 16);

/// Returns the name of the machine's tap. Different machines may, with luck beyond measure, share
/// one; the alias tells them apart.
pub(super) fn interface(machine: MachineId) -> String {
    let digits = machine.to_string();
    format!("{TAP_PREFIX}{}", &digits[..NAME_DIGITS])
}

/// Returns the guest's hardware address: locally administered, from the machine id.
pub(super) fn hardware(machine: MachineId) -> HardwareAddress {
    let [a, b, c, d, e, ..] = *machine.as_bytes();
    HardwareAddress([0x02, a, b, c, d, e])
}

/// Returns the tap's alias.
pub(super) fn alias(machine: MachineId, address: Ipv4Addr) -> String {
    format!("{ALIAS} {machine} {address}")
}

/// Reads an alias; `None` when it is not one of ours.
pub(super) fn parse_alias(alias: &str) -> Option<(MachineId, Ipv4Addr)> {
    let mut words = alias.split(' ');
    if words.next()? != ALIAS {
        return None;
    }
    let parsed = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    words.next().is_none().then_some(parsed)
}

/// Returns the address that the node has on every tap: the first of the subnet.
///
/// `None` when the subnet has no room for a gateway and a guest.
pub(super) fn gateway(subnet: Ipv4Prefix) -> Option<Ipv4Addr> {
    let first = subnet.network().to_bits().checked_add(1)?;
    (subnet.length() <= 30).then_some(Ipv4Addr::from_bits(first))
}

/// Returns a free address for the machine, the same one as before when nobody took it. Those up to number
/// `last` of the subnet go first, when that is given: only they have a network of IPv6.
pub(super) fn allocate(
    subnet: Ipv4Prefix,
    last: Option<u32>,
    machine: MachineId,
    taken: impl Fn(Ipv4Addr) -> bool,
) -> Option<Ipv4Addr> {
    let first = gateway(subnet)?.to_bits() + 1;
    let count = subnet.broadcast().to_bits() - first;
    // Guests' numbers begin with 2.
    let preferred = last.map_or(count, |last| last.saturating_sub(1).clamp(1, count));
    let [a, b, c, d, ..] = *machine.as_bytes();
    let number = u32::from_be_bytes([a, b, c, d]);
    let find = |count: u32| {
        let start = number % count;
        let mut all = (0..count).map(|step| {
            let offset = (u64::from(start) + u64::from(step)) % u64::from(count);
            Ipv4Addr::from_bits(first + u32::try_from(offset).unwrap_or(0))
        });
        all.find(|address| !taken(*address))
    };
    find(preferred).or_else(|| find(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(first: u8) -> MachineId {
        let mut bytes = [7; 16];
        bytes[0] = first;
        MachineId::from_bytes(bytes)
    }

    fn subnet(text: &str) -> Ipv4Prefix {
        text.parse().expect("a prefix")
    }

    #[test]
    fn names_fit_and_aliases_come_back() {
        let machine = machine(0xab);
        assert_eq!(interface(machine), "hfab0707070707");
        assert_eq!(hardware(machine).to_string(), "02:ab:07:07:07:07");
        let address = Ipv4Addr::new(10, 77, 0, 9);
        assert_eq!(parse_alias(&alias(machine, address)), Some((machine, address)));
        assert_eq!(parse_alias("holdfast x 10.77.0.9"), None);
        assert_eq!(parse_alias("uplink"), None);
    }

    #[test]
    fn a_small_subnet_is_used_to_the_last_address_and_no_further() {
        let subnet = subnet("10.77.0.8/29");
        let mut taken = Vec::new();
        for number in 0..5 {
            taken.push(
                allocate(subnet, None, machine(number), |a| taken.contains(&a)).expect("room"),
            );
        }
        taken.sort();
        let all: Vec<_> = (10..15).map(|last| Ipv4Addr::new(10, 77, 0, last)).collect();
        assert_eq!(taken, all);
        assert_eq!(allocate(subnet, None, machine(9), |a| taken.contains(&a)), None);
        assert_eq!(gateway(subnet), Some(Ipv4Addr::new(10, 77, 0, 9)));
    }

    #[test]
    fn a_subnet_without_room_is_refused() {
        assert_eq!(gateway(subnet("10.77.0.0/31")), None);
        assert_eq!(allocate(subnet("10.77.0.0/32"), None, machine(1), |_| false), None);
    }

    #[test]
    fn the_whole_of_ipv4_does_not_overflow() {
        assert!(allocate(subnet("0.0.0.0/0"), None, machine(0xff), |_| false).is_some());
        assert_eq!(gateway(subnet("255.255.255.255/32")), None);
    }
}
