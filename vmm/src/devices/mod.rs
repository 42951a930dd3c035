//! Device models: each is a register machine that knows no neighbour. Those of ports know their base addresses;
//! `nvme` and `virtio` have threads of their own.

mod backing;
pub mod cmos;
pub mod flash;
pub mod fw_cfg;
pub mod ioapic;
pub mod master;
pub mod nvme;
pub mod pit;
pub mod power;
pub mod pvpanic;
pub mod serial;
pub mod throttle;
pub mod virtio;

/// Why a device model cannot be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum DeviceError {
    #[error(transparent)]
    Nvme(#[from] nvme::NvmeError),
    #[error(transparent)]
    Virtio(#[from] virtio::VirtioError),
}
