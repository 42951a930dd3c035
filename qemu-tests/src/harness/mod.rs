//! What the tests and the demo stand on: the emulated host, its console, the programs of gateway
//! and renter, and guests made from unmodified Debian packages.

pub mod agent;
pub mod debian;
pub mod dmi;
pub mod guest;
pub mod host;
pub mod kernels;
pub mod lan;
pub mod lspci;
pub mod outside;
pub mod pace;
pub mod packages;
pub mod programs;
pub mod qmp;
pub mod recording;
pub mod renamed;
pub mod repository;
pub mod saboteur;
pub mod scene;
pub mod serial;
pub mod slot;
pub mod time;
pub mod tools;
pub mod tpm;
pub mod uml;
pub mod volume;
