//! An image of the format vhdx: whatever it says, walking through its disk ends or fails, within
//! the bounds on pieces.

#![no_main]

#[path = "../import_walk.rs"]
mod import_walk;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    import_walk::walk(gateway::import::Format::Vhdx, data);
});
