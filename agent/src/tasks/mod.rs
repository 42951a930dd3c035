//! Tasks that run beside the machines: the overlay's inbox, offers, and their framing.

pub mod frames;
pub mod network;
pub mod overlay;
