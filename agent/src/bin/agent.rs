//! The node service.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        // Init has the volumes opened and checked by this program, too, before it mounts them.
        Some(agent::init::unlock::WORD) => agent::seal::unlock::main(),
        // The service has its store looked at.
        Some(agent::machines::damage::WORD) => return agent::machines::damage::main(),
        _ => agent::service::main(),
    }
    ExitCode::SUCCESS
}
