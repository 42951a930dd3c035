//! Machines: what leases allow, what runs, and the way from one to the other.
//!
//! `plan` decides and is pure; `store` remembers, and `used` what outlasts it; `keeper` is the one task that owns both and
//! carries actions out through `execute`. `authority` checks what renters and authorities signed.

pub mod attach;
mod bounds;
pub mod closed;
pub mod content;
pub mod cpus;
pub mod damage;
pub mod deadline;
pub mod devices;
pub mod disk;
pub mod disk_copy;
pub mod disk_keys;
pub mod execute;
pub mod firmware;
pub mod init;
pub mod keeper;
pub mod last_console;
pub mod memory;
pub mod metrics;
pub mod pages;
pub mod placement;
pub mod plan;
pub mod plug;
pub mod quarantine;
pub mod recovery;
pub mod routed;
pub mod sandbox;
pub mod seed;
pub mod store;
pub mod used;
pub mod vmm;
