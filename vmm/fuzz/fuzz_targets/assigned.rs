//! A whole passed-through device, hostile on both sides.
#![no_main]

#[path = "../assigned_case.rs"]
mod case;
#[path = "../threads.rs"]
mod threads;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| threads::alone(|| case::run(bytes)));
