//! The node's network: uplinks, and networks for machines.
//!
//! [`Uplinks`] makes bonds and VLANs, configures interfaces (DHCPv4, DHCPv6, SLAAC, static),
//! prefers those whose gateway answers, and publishes [`NetworkStatus`]. [`MachineNetworks`] gives each machine a tap of its own, with address,
//! packet filter and DHCP server. [`Resolver`] asks the uplinks' name servers.
//! It opens no connection on anybody's behalf; what needs one uses tokio's sockets.
//!
//! Cores (`dhcp`, `dhcp6`, `conflict`, `layout`, `ruleset`, `address`, `links`) own no socket and no clock; shells
//! (`uplinks`, `machines`) own one netlink connection each.

pub mod address;
mod arp;
pub mod conflict;
pub mod dhcp;
pub mod dhcp6;
mod discovery;
mod kernel;
pub mod layout;
pub mod links;
pub mod machines;
pub mod nft;
pub mod rdnss;
pub mod resolve;
pub mod ruleset;
pub mod status;
pub mod trial;
pub mod uplinks;

pub use self::{
    address::{HardwareAddress, Ipv4Prefix},
    machines::{
        MachineAddress, MachineNet, MachineNetError, MachineNetworks, MachineNetworksConfig,
    },
    resolve::{ResolveError, Resolver},
    status::{
        AssignedAddress, Carrier, DocumentServer, InterfaceStatus, LeaseStatus, NamedDocument,
        NetworkStatus, Reach, Value, ValueSource,
    },
    uplinks::{UplinkError, Uplinks},
};
