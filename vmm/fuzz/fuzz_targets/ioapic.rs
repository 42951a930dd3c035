//! Registers, pins and ends of interrupts of the I/O APIC.
#![no_main]

#[path = "../ioapic_case.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| cases::ioapic(bytes));
