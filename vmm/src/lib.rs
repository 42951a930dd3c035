//! `holdfast-vmm`: one unprivileged, jailed process per machine. It runs a guest on KVM with PCIe,
//! virtio and passed-through devices, and leaves to others which machine runs when.

#![deny(unsafe_code)]

pub mod acpi;
pub mod api;
pub mod boot;
pub mod console;
pub mod counters;
pub mod devices;
pub mod dump;
pub mod events;
pub mod holes;
pub mod irq;
pub mod layout;
pub mod machine;
pub mod pci;
pub mod sandbox;
pub mod smbios;
pub mod spec;
#[allow(unsafe_code, reason = "the only system calls of this crate")]
pub mod sys;
pub mod vcpu;
pub mod vfio;
