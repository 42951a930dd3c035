//! Boots the real image in QEMU and checks its promises. `harness` is shared by the tests, one file
//! per promise, and by the demo; `bed` is a host for the VMM alone.

#![forbid(unsafe_code)]

pub mod bed;
pub mod harness;
