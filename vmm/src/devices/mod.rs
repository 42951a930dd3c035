//! Device models: each is a register machine that knows no base address, lock or neighbour.

pub mod cmos;
pub mod flash;
pub mod fw_cfg;
pub mod power;
pub mod serial;
pub mod virtio;
