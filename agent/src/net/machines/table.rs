//! How many flows the kernel's table of them holds, which the node and all guests share.
//! Source: Linux `Documentation/networking/nf_conntrack-sysctl.rst`.

use std::io;

use super::MachineNetError;
use crate::net::{kernel, ruleset::IN_TABLE_PER_GUEST};

/// Least and largest table: that of the kernel on a machine with more than 4 GiB, and eight times as many.
const LEAST: u64 = 262_144;
const MOST: u64 = 2_097_152;
/// Flows per MiB of memory: one takes about half a KiB, so a full table takes 1/256 of the memory.
const PER_MIB: u64 = 8;
// The smallest has room for seven guests that do the worst, and for the node.
const _: () = assert!(LEAST / IN_TABLE_PER_GUEST > 7);

/// Settings below `net`: how many there may be, and among how many places they are spread.
const MAX: &str = "netfilter/nf_conntrack_max";
const BUCKETS: &str = "netfilter/nf_conntrack_buckets";

/// Returns how many flows a node with so much memory has room for.
fn room(memory_mib: u64) -> u64 {
    memory_mib.saturating_mul(PER_MIB).clamp(LEAST, MOST)
}

/// Makes the table as large as the node's memory allows.
///
/// Both settings are the host's: in another network namespace than its first they cannot be written, and
/// stay as they are.
pub(super) fn make_room(memory_mib: u64) -> Result<(), MachineNetError> {
    let wanted = room(memory_mib).to_string();
    // The places first, as the kernel does by itself: a flow is found as fast as in a small table.
    for setting in [BUCKETS, MAX] {
        let known = std::fs::read_to_string(format!("/proc/sys/net/{setting}"));
        if known.is_ok_and(|known| known.trim() == wanted) {
            continue;
        }
        match kernel::set(setting, &wanted) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            // Not all of it in one piece may be free; then flows are found more slowly.
            Err(error) if setting == BUCKETS => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(setting, error, "the table of flows is not spread wider");
            }
            result => result.map_err(|source| {
                let setting = setting.to_owned();
                MachineNetError::Setting { setting, source }
            })?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{init::settings, net::ruleset::ENDED_S};

    #[test]
    fn the_table_grows_with_the_memory_between_its_bounds() {
        let found = [0, 4 << 10, 64 << 10, 128 << 10, 1 << 20, u64::MAX].map(room);
        assert_eq!(found, [LEAST, LEAST, 524_288, 1_048_576, MOST, MOST]);
    }

    #[test]
    fn a_flow_that_ended_is_forgotten_when_the_rules_think_so() {
        let setting = "net/netfilter/nf_conntrack_tcp_timeout_time_wait";
        let found = settings::all().find(|found| found.path == setting).expect("a setting");
        assert_eq!(found.value, ENDED_S.to_string());
    }
}
