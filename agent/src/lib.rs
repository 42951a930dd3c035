//! The appliance's two programs. `init` is PID 1; `agent` is the node service that decides what
//! the node does and asks init for processes. The VMM is a program of its own and never linked.

#![deny(unsafe_code)]

pub mod assign;
pub mod attest;
pub mod claim;
pub mod config;
pub mod console;
pub mod control;
pub mod dashboard;
pub mod efivars;
pub mod enrol;
pub mod events;
pub mod evidence;
pub mod floors;
pub mod gpu;
pub mod init;
pub mod install;
pub mod inventory;
pub mod local;
pub mod logs;
pub mod machines;
pub mod net;
pub mod seal;
pub mod service;
pub mod spawn;
pub mod tasks;
#[cfg(test)]
mod testing;
pub mod time;
pub mod twice;
pub mod updates;

#[allow(unsafe_code, reason = "the only system calls in this crate that no crate wraps safely")]
pub(crate) mod sys;
