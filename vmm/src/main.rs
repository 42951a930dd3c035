//! One machine: reads its specification from descriptor 3, jails itself, runs the guest, and exits
//! with what became of it (`types::vm::exit`).

#![deny(unsafe_code)]

use std::{error::Error, process::exit};

use types::vm::exit as status;
use vmm::{machine, sandbox, spec};

fn main() {
    match run() {
        Ok(ending) => {
            eprintln!("holdfast-vmm: {}", ending.reason);
            exit(ending.status());
        }
        Err(error) => {
            eprintln!("holdfast-vmm: {}", chain(&*error));
            exit(status::REFUSED);
        }
    }
}

fn run() -> Result<machine::Ending, Box<dyn Error>> {
    let spec = spec::receive()?;
    let cover = sandbox::enter(spec.uid, &spec::descriptors(&spec))?;
    if cover != sandbox::LandlockCover::Full {
        eprintln!("holdfast-vmm: Landlock cover is {cover:?}");
    }
    machine::isolate(spec.core_scheduling)?;
    let machine = machine::build(&spec)?;
    Ok(machine::run(machine)?)
}

/// An error and everything behind it, on one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}
