//! Peer-to-peer protocol: identity, membership, broadcast, routing, sealed messages, tunnels.
//!
//! The cores (`identity`, `wire`, `session`, `membership`, `broadcast`, `routes`, `sealed`,
//! `tunnel`) own no socket, clock, thread or lock: time and seeds are arguments, inputs are
//! `handle_*`, outputs `poll_*`. Only `shell` names tokio and quinn; its [`Overlay`] is what the
//! agent and the gateway use. What requests, broadcasts and streams carry is theirs to say.

#![forbid(unsafe_code)]

pub mod broadcast;
pub mod claim;
pub mod escrow;
pub mod identity;
pub mod membership;
pub mod random;
pub mod routes;
pub mod sealed;
pub mod session;
mod shell;
pub mod tunnel;
pub mod wire;

pub use ed25519_dalek::SigningKey;
pub use shell::{
    Broadcast, BroadcastError, Connected, InboundRequest, InboundStream, Inbox, Member,
    MemberEvent, Overlay, OverlayConfig, OverlayError, OverlayStream, Place, Places, PlacesError,
    Reach, RequestError, Traffic,
};
pub use wire::Role;
