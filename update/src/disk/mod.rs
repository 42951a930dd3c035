//! The appliance's disk: its partitions, the volumes in them, and how they are written to a new one.
//!
//! Everything here works on whatever reads, writes and seeks, so that the builder of disk images and
//! the installer on a node write the same bytes.

mod bounded;
pub mod esp;
pub mod gpt;
pub mod layout;
pub mod medium;
mod slice;
pub mod table;
pub mod template;

pub use bounded::{Bounded, LOOKING};
pub use slice::Slice;
