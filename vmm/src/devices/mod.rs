//! Device models: each is a register machine that knows no base address, lock or neighbour.

pub mod power;
pub mod pvpanic;
pub mod serial;
pub mod virtio;
