//! Machines' IPv6 networks when a server on an uplink says from which prefix they are: it may do so after machines
//! were started, and say something else later. Machines keep running, and are told of their new networks.

use std::{fs, io, net::IpAddr, path::Path};

use types::config::parse_prefix;

use super::{
    MachineNetError,
    ipv6::{Ipv6Net, Supply},
    task::{self, Task, Voices},
};

/// Networks of a guest that are remembered as not to be used any more: hosts keep their addresses for two hours.
const MAX_RETIRED: usize = 4;

impl Task {
    /// Follows what the uplinks say of the prefix. Until they say something, what they said to an earlier agent
    /// counts.
    pub(super) async fn follow_delegation(&mut self) {
        let Some(Supply::Delegated(file)) = self.config.ipv6.clone() else { return };
        let said = self.uplinks.borrow().delegated.iter().find_map(Ipv6Net::delegated);
        self.was_delegated |= said.is_some();
        if !self.was_delegated || said == self.net {
            return;
        }
        self.net = said;
        self.tell_net();
        if let Err(error) = keep(&file, said) {
            let (file, error) = (file.display(), &error as &dyn std::error::Error);
            tracing::error!(%file, error, "a restarted agent will not know machines' prefix");
        }
        if let Err(error) = self.filter().await {
            tracing::error!(error = &error as &dyn std::error::Error, "packet filter not updated");
        }
        let machines: Vec<_> = self.guests.keys().copied().collect();
        for machine in machines {
            if let Err(error) = self.renumber(machine).await {
                let error = &error as &dyn std::error::Error;
                tracing::error!(%machine, error, "a machine has no new IPv6 network");
            }
        }
        self.publish_guests();
    }

    /// Gives a guest the network of the present prefix instead of the one it has.
    async fn renumber(&mut self, machine: types::ids::MachineId) -> Result<(), MachineNetError> {
        let Some(guest) = self.guests.get(&machine) else { return Ok(()) };
        let (before, index, mut retired) =
            (guest.address.clone(), guest.index, guest.retired.clone());
        let address = self.address(machine, before.ipv4, before.mtu);
        if address.ipv6 == before.ipv6 {
            return Ok(());
        }
        self.tell_lack(&address);
        retired.extend(before.ipv6);
        retired.retain(|network| Some(*network) != address.ipv6);
        retired.drain(..retired.len().saturating_sub(MAX_RETIRED));
        let Voices { server, router } = self.connect(&address, index, &retired).await?;
        if let Some(guest) = self.guests.get_mut(&machine) {
            (guest.address, guest.retired) = (address, retired);
            (guest.server, guest.router) = (Some(server), router);
        }
        if let Some(network) = before.ipv6 {
            self.kernel.delete_route(&task::way6(network, index)).await?;
            task::forget6(network).await?;
        }
        Ok(())
    }

    pub(super) fn tell_net(&self) {
        if let Some(net) = self.net {
            let guests = net.last() - 1;
            tracing::info!(guests, prefix = %net.prefix(), length = net.length(), "IPv6 of machines");
        }
    }
}

/// Returns the prefix that counts when an agent starts.
pub(super) fn at_start(supply: Option<&Supply>) -> Option<Ipv6Net> {
    match supply? {
        Supply::Fixed(net) => Some(*net),
        Supply::Delegated(file) => match parse_prefix(fs::read_to_string(file).ok()?.trim())? {
            (IpAddr::V6(prefix), length) => Ipv6Net::routed(prefix, length),
            (IpAddr::V4(_), _) => None,
        },
    }
}

/// Keeps a prefix for the next agent. Fails as files do; then what was kept before is kept.
fn keep(file: &Path, net: Option<Ipv6Net>) -> io::Result<()> {
    let Some(net) = net else {
        return match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    };
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = file.with_extension("new");
    fs::write(&new, format!("{}/{}\n", net.prefix(), net.length()))?;
    fs::rename(new, file)
}
