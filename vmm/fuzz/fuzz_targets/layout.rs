//! The guest's address map, around what an IOMMU reports.
#![no_main]

#[path = "../layout_case.rs"]
mod case;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| case::run(bytes));
