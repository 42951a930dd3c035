//! Nouns and units that the crates of Holdfast exchange: names of nodes and machines, PCI
//! addresses, machine shapes, the node's configuration, the document that starts a VMM, and the
//! requests that travel between gateway and node.
//!
//! This crate decides nothing and touches nothing: it parses, prints and refuses.

#![forbid(unsafe_code)]

pub mod base64_bytes;
pub mod config;
pub mod console;
pub mod devices;
pub mod disk_key;
pub mod evidence;
pub mod forward;
pub mod gpu;
pub mod hex;
pub mod ids;
pub mod install;
pub mod json;
pub mod logs;
pub mod node;
pub mod operations;
pub mod query;
pub mod secure_boot;
pub mod status;
pub mod topology;
pub mod units;
pub mod updates;
pub mod uplinks;
pub mod vm;
pub mod volumes;
mod written;
