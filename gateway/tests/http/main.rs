//! A real gateway on the loopback interface, a node that speaks the real overlay, and clients.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod content;
mod curl;
mod document;
mod fetches;
mod hardware;
mod harness;
mod hostile;
mod machines;
mod nodes;
mod proves;
mod requests;
mod streams;
mod terminal;
mod ways;
