//! agent

pub mod net;
pub mod time;
