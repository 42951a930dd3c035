//! Boots the real image in QEMU and checks its promises. `harness` is shared by the tests, one file
//! per promise, and by the demo.

#![forbid(unsafe_code)]

pub mod harness;
