//! PCI Express as the guest sees it: configuration space, the bus, ports, endpoints' capability, MSI-X
//! tables, and the placing of BARs. Devices behind the bus are in `devices` and `vfio`.

pub mod allocate;
pub mod apertures;
pub mod bus;
pub mod chipset;
pub mod config;
pub mod express;
pub mod function;
pub mod msix;
pub mod port;
