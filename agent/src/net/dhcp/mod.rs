//! DHCPv4 as state machines: a client for uplinks, a server for one guest.
//!
//! Neither owns a socket or a clock. [`frame`] puts what the client sends before it has an address
//! into IPv4 and UDP.
//! Source: RFC 2131, RFC 2132, RFC 3442.

mod acknowledged;
pub mod client;
pub mod frame;
mod lease;
mod message;
pub mod server;

pub use self::acknowledged::{Asked, Given, Identity, acknowledged, asked};

/// UDP port of servers.
pub const SERVER_PORT: u16 = 67;
/// UDP port of clients.
pub const CLIENT_PORT: u16 = 68;
/// Largest DHCP message that is read or sent, in bytes: what fits into an Ethernet frame.
pub const MAX_MESSAGE: usize = 1472;
