//! The node service.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use agent::service::Start;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        // The service has its store looked at.
        Some(agent::machines::damage::WORD) => agent::machines::damage::main(),
        // Init has the volumes opened and checked by this process, too, before it mounts them.
        Some(agent::init::unlock::WORD) => agent::service::main(Start::AtTheVolumes),
        _ => agent::service::main(Start::AtTheService),
    }
}
