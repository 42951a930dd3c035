//! The node service.

#![forbid(unsafe_code)]

fn main() {
    // Init has the volumes opened by this program, too, before it mounts them.
    if std::env::args().nth(1).as_deref() == Some(agent::init::unlock::WORD) {
        return agent::seal::unlock::main();
    }
    agent::service::main();
}
