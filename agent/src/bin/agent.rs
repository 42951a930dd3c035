//! The node service.

#![forbid(unsafe_code)]

fn main() {
    agent::service::main();
}
