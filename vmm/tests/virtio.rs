//! virtio devices behind their PCI function, driven as a driver does, and as no driver should.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "common/virtio.rs"]
mod driver;
#[path = "common/syncs.rs"]
mod syncs;

#[path = "virtio/block.rs"]
mod block;
#[path = "virtio/control.rs"]
mod control;
#[path = "virtio/entropy.rs"]
mod entropy;
#[path = "virtio/function.rs"]
mod function;
#[path = "virtio/sealed.rs"]
mod sealed;
