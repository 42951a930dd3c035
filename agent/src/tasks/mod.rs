//! Tasks that run beside the machines: the overlay's inbox, offers, and their framing; and long work in the
//! background.

pub(crate) mod background;
pub mod frames;
pub mod network;
pub mod overlay;
