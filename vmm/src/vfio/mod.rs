//! PCI devices of the host, handed to the guest.
//!
//! Devices come as open descriptors of iommufd and of VFIO's character devices, or of VFIO's container and
//! groups; no path is opened here, and whether a device may be given away at all (its group, interrupt
//! remapping) is decided by whoever opened them. `config` decides what of the configuration space a guest sees and may
//! change, `bars` which parts of the BARs it reaches directly, `places` where, `irq` how interrupts get to it,
//! `dma` what of its memory the device reaches, `reset` that no tenant's state is left in it,
//! `neighbours` whom a reset would hit besides, and `alarms` what the host says of it. `bind` takes devices from the
//! kernel.
//! `assign` ties them to one `PciFunction` per device. The system calls are in `sys::vfio`, behind
//! the trait in `device`.
//! Source: linux/vfio.h, linux/iommufd.h, Documentation/driver-api/vfio.rst.

pub mod alarms;
pub mod assign;
pub mod bars;
mod bind;
pub mod capabilities;
pub mod config;
pub mod device;
pub mod dma;
#[cfg(test)]
mod fake;
pub mod irq;
mod link;
pub mod neighbours;
pub mod places;
pub mod plug;
pub mod quirks;
pub mod reset;
pub mod rom;
