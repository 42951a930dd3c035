//! agent

pub mod net;
pub mod time;

#[allow(unsafe_code, reason = "the only ioctls and raw sockets in this crate")]
pub(crate) mod sys;
