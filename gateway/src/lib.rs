//! The client end: an HTTP API before the overlay, and the `holdfast` command line.
//!
//! `api` answers HTTP: it routes, checks the renter's signature and forwards; `directory` knows
//! the nodes and what they offer; `attest` asks them to prove what they run; `store` remembers what was acknowledged; `content` keeps
//! kernels and disk images; `import` makes raw disks of other formats for the command; `limits` and `turns` keep clients apart; `service` holds them together and speaks to the overlay; `whole` and `sparse` write files; `cli` is the
//! `holdfast` command. A gateway has no authority: nodes verify every lease and request again.

#![forbid(unsafe_code)]

pub mod api;
pub mod attest;
pub mod cli;
pub mod config;
pub mod content;
pub mod directory;
pub mod import;
pub mod keyfile;
pub mod limits;
pub mod prefix;
pub mod service;
mod sparse;
pub mod store;
pub mod streams;
pub mod turns;
pub mod whole;
