//! PID 1: mounts, watchdog, supervision, machines' processes, the way down.
//!
//! It decides nothing about leases, devices or networks and takes no input from any network: the
//! kernel's signals and events, and the agent's requests (`crate::spawn`), are all it hears.
//! It is one thread and one `poll`, and waits for no other process without a deadline.
//!
//! Cores (`supervise`, `ends`, `shutdown`, `logs`, the table in `mounts`) own no clock and no descriptor;
//! `boot` and `serve` are the shell around them.

pub mod agent;
pub mod boot;
pub mod ends;
pub mod kmsg;
pub mod logs;
pub mod machines;
pub mod memory;
pub mod mounts;
pub(crate) mod own_disks;
pub mod partitions;
pub mod power;
pub mod reap;
pub mod screen;
pub mod serial;
pub mod serve;
pub mod settings;
pub mod shutdown;
mod silent;
pub mod supervise;
pub mod trial;
pub mod unlock;
pub mod watchdog;
