//! System calls: the only module tree of this crate with unsafe code. Each function is small and
//! safe to call; what it needs to stay sound it holds itself.

pub mod clock;
pub mod io;
pub mod iommu;
pub mod kvm;
pub mod memory;
pub mod populate;
pub mod sandbox;
pub mod schedule;
pub mod signal;
pub mod vcpu;
pub mod vfio;
