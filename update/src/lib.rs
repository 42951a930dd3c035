//! Updates: the appliance's disk and its slots, the TUF client that decides which releases a node
//! may run, and the tool that makes them.
//!
//! The core ([`client`], [`metadata`], [`verify`], [`target`], [`pattern`], [`json`]) owns no file,
//! socket, clock or thread. [`shell`] has a folder, a fetcher and the loop between them, which
//! `holdfast-update` uses.
//!
//! # For whoever runs updates
//!
//! A program with its own sources (mirrors, peers, a USB stick) drives the core itself:
//!
//! 1. [`client::Client::new`] with the root that the program was built with, the store's
//!    `root.json`, and the time: the latest of the clock, the build and what the node has seen.
//! 2. While [`client::Client::next`] returns a request, do it and answer it. Any peer may answer a
//!    fetch; nothing that it says is believed.
//! 3. [`client::Client::look_up`], and again the requests; [`client::Outcome::Found`] is the target.
//! 4. [`target::Target::check`] goes along while bytes arrive. They count once
//!    [`target::Check::finish`] agreed.
//!
//! 5. [`channel::Channel::decide`] on the channel's document says which release this node runs, and
//!    [`channel::Manifest`] which targets that is.
//!
//! [`shell::Session`] is these steps over a folder and URLs.

#![forbid(unsafe_code)]

pub mod channel;
pub mod client;
pub mod delta;
pub mod disk;
pub mod efi;
pub mod json;
pub mod metadata;
pub mod pattern;
pub mod release;
pub mod secure_boot;
pub mod shell;
pub mod slots;
pub mod target;
pub mod verify;
